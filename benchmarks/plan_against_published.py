"""The presets' predictions against published figures, unfitted: the tables of topologies/README.md.

    python benchmarks/plan_against_published.py [--write]

Error is predicted over published less 1.  With --write the tables replace those there, and the plan
in the project's README what that command prints now: do so after presets or codec_shares.py have
changed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from fp4comm import topology
from fp4comm.bench.workload import Synthetic
from fp4comm.formats import WireFormat
from fp4comm.predict import loads, spread, times
from fp4comm.predict.times import Shape

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "topologies" / "README.md"
PLAN = re.compile(
    r"```\n(?P<command>fp4comm plan [^\n]*)\n```\n\n```\n(?P<printed>.*?)```", re.S
)  # of the project's README
RESULTS = Path(__file__).with_name("results")
MARKS = "<!-- tables -->\n", "<!-- end of tables -->"

# FP8-Flow-MoE (arXiv 2511.02302): BF16 exchange on H100, ms by token-copies and hidden, then EP.
# Tokens, top-k and experts are those of the models that have such shapes; the paper's may differ.
FLOW_MS = {
    (24576, 2048, 6, 64): {8: 0.537, 16: 0.785, 32: 1.276},
    (24576, 5120, 6, 160): {8: 1.224, 16: 2.213, 32: 2.934},
    (32768, 7168, 8, 256): {8: 3.005, 16: 5.003, 32: 7.327},
}
# Measured by the project: two H200 joined by NVLink, NCCL 2.28, half of the rows remote, ms.
TWO_H200_MS = {
    (128, 7168): {"bf16": 0.040, "fp8": 0.032, "mxfp4": 0.033},
    (4096, 7168): {"bf16": 0.135, "fp8": 0.078, "mxfp4": 0.051},
    (24576, 2048): {"bf16": 0.205, "fp8": 0.115, "mxfp4": 0.072},
    (32768, 7168): {"bf16": 0.856, "fp8": 0.428, "mxfp4": 0.236},
}
SMALL_MS = {8: 0.7, 64: 5.4}  # plain NCCL all-to-all with 128 tokens, by EP
FLOW_GAINS = {  # FP8-Flow-MoE: FP8 dispatch over BF16, conversions included
    (24576, 2048, 6, 64): {8: 1.01, 16: 0.91},
    (32768, 7168, 8, 256): {8: 1.18, 32: 1.63},
}
GB200_GAINS = {"mxfp8": 1.81, "mxfp4": 3.06}  # TensorRT-LLM, EP8: MXFP8, and NVFP4


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Write a Markdown table."""
    ruler = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]


def against(predicted: float, published: float) -> list[str]:
    """Write both and the error."""
    error = 100 * (predicted / published - 1)
    return [f"{published:.3f}", f"{predicted:.3f}", f"{error:+.0f} %"]


def places_of(preset: str, num_ranks: int) -> tuple[topology.Topology, topology.Places]:
    """Put ranks on as few nodes as there may be."""
    found = topology.load(preset)
    nodes = -(-num_ranks // found.ranks[0])
    return found, found.places(nodes, num_ranks // nodes)


def flow_rows() -> Iterator[list[str]]:
    """BF16 exchange of token-copies: each copy by itself, and once to each node."""
    for (copies, hidden, topk, experts), by_ep in FLOW_MS.items():
        for num_ranks, published in by_ep.items():
            found, places = places_of("hgx-h100-400g", num_ranks)
            load = loads.flat(copies, np.full(num_ranks, 1 / num_ranks), places)
            ms = times.exchange(found, places, load, 2 * hidden).us / 1e3
            row = [f"{copies}x{hidden}", str(num_ranks), *against(ms, published)]
            if places.num_nodes > 1:
                work = Synthetic(num_ranks, copies // topk, hidden, experts, topk)
                spread_ = spread.synthetic(work, places, None)
                hops = loads.two_hop(copies // topk, spread_, places)
                us = sum(times.exchange(found, places, hop, 2 * hidden).us for hop in hops)
                row += against(us / 1e3, published)[1:]
            else:
                row += ["-", "-"]
            remote = copies * 2 * hidden * (1 - min(8, num_ranks) / num_ranks)
            local = copies * 2 * hidden * (min(8, num_ranks) - 1) / num_ranks
            row += [f"{part / published / 1e6:.0f}" if part else "-" for part in (local, remote)]
            yield row


def h200_rows() -> Iterator[list[str]]:
    """Exchange between two H200."""
    found, places = places_of("hgx-h200-400g", 2)
    for (rows, hidden), by_wire in TWO_H200_MS.items():
        for wire, published in by_wire.items():
            load = loads.flat(rows, np.full(2, 0.5), places)
            num_bytes = WireFormat(wire).row_bytes(hidden)
            ms = times.exchange(found, places, load, num_bytes).us / 1e3
            yield [f"{rows}x{hidden}", wire, *against(ms, published)]


def small_rows() -> Iterator[list[str]]:
    """Plain all-to-all of a small batch."""
    for num_ranks, published in SMALL_MS.items():
        found, places = places_of("hgx-h100-400g", num_ranks)
        spread_ = spread.synthetic(Synthetic(num_ranks, 128, 7168, 256, 8), places, None)
        ms = times.plain(found, places, spread_, Shape(128, 7168, 8)).us / 1e3
        yield [str(num_ranks), *against(ms, published)]


def gain(preset: str, num_ranks: int, wire: str, work: Synthetic) -> float:
    """Dispatch in a wire format over BF16, flat."""
    found, places = places_of(preset, num_ranks)
    spread_ = spread.synthetic(work, places, None)
    shape = Shape(work.tokens, work.hidden, work.num_topk)
    bf16, other = (
        times.dispatch(found, places, spread_, shape, WireFormat(name)).us
        for name in ("bf16", wire)
    )
    return bf16 / other


def gain_rows() -> Iterator[list[str]]:
    """How much faster a dispatch becomes."""
    for (copies, hidden, topk, experts), by_ep in FLOW_GAINS.items():
        for num_ranks, published in by_ep.items():
            work = Synthetic(num_ranks, copies // topk, hidden, experts, topk)
            got = gain("hgx-h100-400g", num_ranks, "fp8", work)
            name = f"FP8-Flow-MoE, {copies}x{hidden}, EP{num_ranks}"
            yield [name, "fp8", *against(got, published)]
    for wire, published in GB200_GAINS.items():
        got = gain("gb200-nvl72", 8, wire, Synthetic(8, 4096, 7168, 256, 8))
        yield ["TensorRT-LLM, GB200, EP8", wire, *against(got, published)]


def two_hosts_rows() -> Iterator[list[str]]:
    """Whole calls between two network namespaces at 1 Gbit/s."""
    content = json.loads((RESULTS / "two_hosts_1gbit.json").read_text())
    sizes = [content["arguments"][name] for name in ("tokens", "hidden", "experts", "topk")]
    tokens, hidden, _, topk = sizes
    found, places = topology.load("cpu-1g"), topology.load("cpu-1g").places(2, 1)
    spread_ = spread.synthetic(Synthetic(2, *sizes), places, None)
    of_all = found, places, spread_, Shape(tokens, hidden, topk)
    for row in content["rows"]:
        wire = WireFormat(row["format"])
        if row["op"] == "combine":
            if row["dispatch"] != "bf16":
                continue  # the same again
            got = times.combine(*of_all, wire)
        else:
            got = times.dispatch(*of_all, wire, arrive=row["arrive"])
        name = f"{row['op']}, {row['arrive']} rows"
        yield [name, wire.name, *against(got.us / 1e3, row["time"]["median_us"] / 1e3)]


def tables() -> str:
    """All of them."""
    lines = [
        "BF16 exchange of FP8-Flow-MoE on H100, `hgx-h100-400g`, ms; the last columns are the GB/s"
        " each way that",
        "the published time means if every copy travels by itself, within the node and across:",
        "",
        *table(
            [
                *("copies", "EP", "published", "flat", "error", "two_hop", "error"),
                *("local GB/s", "network GB/s"),
            ],
            list(flow_rows()),
        ),
        "",
        "Exchange between two H200, `hgx-h200-400g`, ms (`local.reached` and `calls.exchange` are"
        " from the BF16 rows of",
        "4096 and 32768, the others are predictions):",
        "",
        *table(["rows", "wire", "measured", "predicted", "error"], list(h200_rows())),
        "",
        "Plain NCCL all-to-all of 128 tokens, `hgx-h100-400g`, ms (taken as top-8 of 256, hidden"
        " 7168):",
        "",
        *table(["EP", "published", "predicted", "error"], list(small_rows())),
        "",
        "Dispatch over that in BF16, times faster (TensorRT-LLM taken as 4096x7168, top-8 of 256):",
        "",
        *table(["what", "wire", "published", "predicted", "error"], list(gain_rows())),
        "",
        "Two network namespaces at 1 Gbit/s, `cpu-1g`, whole calls, ms"
        " (`benchmarks/results/two_hosts_1gbit.json`; its",
        "machine is also where the kernels and `network.reached` were measured):",
        "",
        *table(["what", "wire", "measured", "predicted", "error"], list(two_hosts_rows())),
    ]
    return "\n".join(lines) + "\n"


def write_plan() -> None:
    """Put what the README's plan command prints behind it."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    found = PLAN.search(text)
    assert found is not None
    command = [sys.executable, "-m", *found["command"].split()]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    readme.write_text(text[: found.start("printed")] + printed + text[found.end("printed") :])


@click.command()
@click.option("--write", is_flag=True, help="Put them into the READMEs.")
def main(write: bool) -> None:
    """Show the tables."""
    text = tables()
    if write:
        write_plan()
        first, last = (re.escape(mark) for mark in MARKS)
        whole = f"{MARKS[0]}\n{text}\n{MARKS[1]}"
        README.write_text(
            re.sub(f"{first}.*?{last}", lambda _: whole, README.read_text(), flags=re.S)
        )
    else:
        click.echo(text, nl=False)


if __name__ == "__main__":
    main()
