"""Write topologies/codec/h200.toml and cpu.toml from the results of this folder.

    python benchmarks/codec_shares.py

What a kernel reaches is the bytes that it reads and writes over its time, as a share of a copy that
reads and writes as many; what a call takes besides is its time on few rows less that of its bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from fp4comm.formats import FORMATS, WireFormat
from fp4comm.quantities import entry
from fp4comm.topology import CALLS, KERNELS

RESULTS = Path(__file__).with_name("results")
FOLDER = Path(__file__).resolve().parents[1] / "topologies" / "codec"
OPERATIONS = {  # of the results, by kernel
    "quantize": "quantize_rows scattered",
    "arrive_fp8": "to_fp8_rows expert-major, M-major scales",
    "arrive_bf16": "to_bf16_rows expert-major",
    "weighted_reduce": "weighted_reduce",
    "final_reduce": "final_reduce",
}
WIRE_ROWS = 5.29  # of a token in bench_codec.py, top-8 of 256 experts on 8 ranks: uniform spread
LARGE, SMALL = "32768x7168", "128x7168"
NO_CALL = "small beside its bytes on a CPU; not measured apart"

Number = tuple[str | float, str]  # value and source


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of a result file."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


def h200() -> dict[str, Number]:
    """Numbers of an H200."""
    rows = {
        (r["shape"], r["op"], r["wire"]): r
        for r in rows_of("codec_h200.json")
        if r.get("x") == "N(0,1)"
    }
    file = "benchmarks/results/codec_h200.json"
    numbers: dict[str, Number] = {}
    calls: dict[str, list[float]] = {}
    for kernel, op in OPERATIONS.items():
        for wire in FORMATS:
            large, small = rows[LARGE, op, wire], rows[SMALL, op, wire]
            share = round(large["share"], 3)
            numbers[f"kernels.{kernel}.{wire}"] = share, f"{file}: {op}, {LARGE}"
            call_us = 1e3 * small["median_ms"] - small["bytes"] / large["gbs"] / 1e3
            calls.setdefault(kernel.split("_")[0], []).append(call_us)
    plan, layout = (r for r in rows_of("plan_h200.json") if r["num_ranks"] == 64)
    slots = 32768 * 8
    at = "benchmarks/results/plan_h200.json: 32768 tokens, top-8, 64 ranks"
    small_at = f"{file}: {SMALL}, less the time of its bytes"
    reduce = float(np.median(calls["weighted"] + calls["final"]))
    numbers |= {
        "calls.plan": (us(plan["wall_us"] - plan["busy_us"]), f"{at}, host time beside the device"),
        "calls.plan_slot": (ns(1e3 * plan["busy_us"] / slots), f"{at}, busy time"),
        "calls.counts": (us(20), "assumed: copying the counts to the host, and an MPI call"),
        "calls.quantize": (us(float(np.median(calls["quantize"]))), small_at),
        "calls.exchange": (
            us(31),
            "two H200, NCCL 2.28: 0.135 ms for 4096 rows of 7168 in BF16, half of them remote, less"
            " 0.103 ms at 285 GB/s and a message",
        ),
        "calls.layout": (us(layout["wall_us"] - layout["busy_us"]), f"{at}, beside the device"),
        "calls.layout_slot": (ns(1e3 * layout["busy_us"] / slots), f"{at}, busy time"),
        "calls.arrive": (us(float(np.median(calls["arrive"]))), small_at),
        "calls.reduce": (us(reduce), small_at),
    }
    return numbers


def cpu() -> dict[str, Number]:
    """Numbers of one core of an AMD EPYC."""
    rows = {(r["op"], r.get("wire")): r for r in rows_of("codec_cpu.json")}
    file = "benchmarks/results/codec_cpu.json"
    numbers: dict[str, Number] = {}
    for kernel, op in OPERATIONS.items():
        for wire in FORMATS:
            row = rows[op, wire]
            gbs = cpu_bytes(kernel, wire, row["copied_bytes"]) / row["median_ms"] / 1e6
            copy_gbs = 2 * row["copied_bytes"] / row["copy_ms"] / 1e6
            source = f"{file}: {op}, 4096x7168, one thread"
            numbers[f"kernels.{kernel}.{wire}"] = round(gbs / copy_gbs, 3), source
    plan = next(r for r in rows_of("codec_cpu.json") if r["op"].startswith("plan"))
    at = f"{file}: {plan['op']}"
    slot = ns(1e6 * plan["median_ms"] / (32768 * 8))
    numbers |= {
        "calls.plan": (us(100), "benchmarks/results/demo_4_ranks.json: 768 tokens in 0.7 ms"),
        "calls.plan_slot": (slot, at),
        "calls.counts": (us(100), "assumed: one exchange over sockets on an idle host"),
        "calls.exchange": (us(100), "assumed: starting an exchange over sockets"),
        "calls.layout": (us(100), "assumed, as calls.plan"),
        "calls.layout_slot": (slot, f"assumed, as calls.plan_slot: {at}"),
        **{f"calls.{name}": (us(50), NO_CALL) for name in ("quantize", "arrive", "reduce")},
    }
    return numbers


def cpu_bytes(kernel: str, wire: str, copied_bytes: int) -> float:
    """Bytes that an operation of bench_codec.py reads and writes, 4096 rows of 7168."""
    tokens, hidden = 4096, 7168
    row = WireFormat(wire).row_bytes(hidden)
    if kernel == "quantize":
        return tokens * (2 * hidden + WIRE_ROWS * row)
    if kernel == "weighted_reduce":  # two slots a row
        return tokens * (2 * 2 * hidden + row)
    if kernel == "final_reduce":
        return copied_bytes + copied_bytes / (2 * hidden) * WIRE_ROWS * row
    return tokens * row + copied_bytes


def us(value: float) -> str:
    """Write a time."""
    return f"{value:.3g} us"


def ns(value: float) -> str:
    """Write a short time."""
    return f"{value:.3g} ns"


def as_toml(title: str, numbers: dict[str, Number]) -> str:
    """Write the tables of a codec file."""
    lines = [f"# {title}", "# Written by benchmarks/codec_shares.py.", "", "[calls]"]
    lines += [entry(name, *numbers[f"calls.{name}"]) for name in CALLS]
    for kernel in KERNELS:
        lines += ["", f"[kernels.{kernel}]"]
        lines += [entry(wire, *numbers[f"kernels.{kernel}.{wire}"]) for wire in FORMATS]
    return "\n".join(lines) + "\n"


FILES = {
    "h200.toml": ("Kernels of one H200, as shares of its device copy", h200),
    "cpu.toml": ("Kernels on one core of an AMD EPYC, as shares of its NumPy copy", cpu),
}


@click.command()
def main() -> None:
    """Write the files."""
    for name, (title, numbers) in FILES.items():
        (FOLDER / name).write_text(as_toml(title, numbers()))


if __name__ == "__main__":
    main()
