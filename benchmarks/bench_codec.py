"""The codec's operations against a copy of the same bytes and against the peers, on this machine.

    python benchmarks/bench_codec.py [--tokens 4096] [--hidden 7168] [--threads 1] [--op NAME]
                                     [--json FILE]

Each operation and the copy it is measured by run in turn in one process, so that a drift of the
machine meets both; medians.  `share` is the time of a NumPy copy over the operation's time: for
quantize_rows a copy of its input, for all others a copy of what they write.  Times include the
allocation of the outputs, as callers see them.  Every operation's result is compared with the
reference on its first rows (#wrong), before it is timed.  The peer is torchao's `to_mx` in its
fastest scale mode, eager and under torch.compile.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file

from fp4comm import WireFormat, machine, quantize, reference, routing
from fp4comm.bench.rows import verdict
from fp4comm.codec import cpu
from fp4comm.files import write_json
from fp4comm.formats import fp8_row_bytes
from fp4comm.options import json_option
from fp4comm.packed import PackedRows
from fp4comm.running import run_command

WIRES = [WireFormat(name) for name in ("bf16", "fp8", "mxfp8", "mxfp4")]
CHECKED_ROWS = 48

Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation: how to run it, the copy that it is measured by, how to check its result."""

    op: str
    wire: WireFormat
    run: Callable[[], Any]
    copied: tuple[int, int]  # rows and bytes a row of the copy
    num_wrong: Callable[[Any], int]


def median_times(functions: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each function, called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return times


def bits(tensor: torch.Tensor) -> np.ndarray:
    """BF16 bit patterns."""
    return tensor.view(torch.int16).numpy().view(np.uint16)


def wrong_rows(got: Arrays, want: Arrays) -> int:
    """Rows in which any part differs, as bytes."""
    wrong = np.zeros(len(want[0]), bool)
    for g, w in zip(got, want, strict=True):
        as_bytes = [
            np.ascontiguousarray(a).reshape(len(w), -1).view(np.uint8) for a in (g[: len(w)], w)
        ]
        wrong |= (as_bytes[0] != as_bytes[1]).any(axis=1)
    return int(wrong.sum())


# How each operation's result is checked


def wrong_packed(x: Any, wire: WireFormat, rows: Any, got: Any) -> int:
    """Check the wire rows that the first rows of x became."""
    want = reference.quantize_rows(x, wire)
    return wrong_rows([part[rows].numpy() for part in got], want)


def wrong_fp8(packed: PackedRows, source: np.ndarray, got: Any) -> int:
    """Check the first FP8 rows."""
    codes, scales = got
    want = reference.to_fp8_rows(*arrays(packed), packed.format, packed.hidden, source)
    return wrong_rows((codes.view(torch.uint8).numpy(), scales.numpy()), want)


def wrong_bf16(packed: PackedRows, source: np.ndarray, got: Any) -> int:
    """Check the first BF16 rows."""
    want = reference.to_bf16_rows(*arrays(packed), packed.format, packed.hidden, source)
    return wrong_rows((bits(got),), (want,))


def wrong_floats(packed: PackedRows, got: Any) -> int:
    """Check the first float32 rows."""
    payload, scales = (part[:CHECKED_ROWS] for part in arrays(packed))
    want = reference.dequantize(payload, scales, packed.format, packed.hidden)
    return wrong_rows((got.numpy(),), (want,))


def wrong_columns(packed: PackedRows, layout: routing.ExpertLayout, got: Any) -> int:
    """Check the first 128 columns."""
    wire, few = packed.format, 128
    want = reference.to_fp8_columns(
        packed.payload.numpy()[:, : wire.payload_bytes(few)],
        packed.scales.numpy()[:, : wire.scale_bytes(few)],
        wire,
        few,
        layout.row_source.numpy(),
        np.array(layout.num_rows_list),
        layout.expert_offsets_array,
    )
    codes, scales = got
    return wrong_rows((codes[:few].view(torch.uint8).numpy(),), want[:1]) + wrong_rows(
        (scales[:, :few].numpy(),), want[1:]
    )


def wrong_reduced(
    out: torch.Tensor, layout: routing.ExpertLayout, wire: WireFormat, got: Any
) -> int:
    """Check the first sums of expert outputs."""
    assert layout.weights is not None
    few = slice(0, CHECKED_ROWS)
    slots, weights = layout.slot_rows[few].numpy(), layout.weights[few].numpy()
    want = reference.weighted_reduce(bits(out), slots, weights, wire)
    return wrong_rows([part.numpy() for part in got], want)


def wrong_dots(
    packed: PackedRows, out: torch.Tensor, layout: routing.ExpertLayout, made: torch.Tensor
) -> int:
    """Count the wrong products among the first rows."""
    rows = *arrays(packed), packed.format, packed.hidden
    own = out[:CHECKED_ROWS].view(torch.uint16).numpy()
    want = reference.row_dots(*rows, own, layout.row_source[:CHECKED_ROWS].numpy())
    return wrong_rows([made[:CHECKED_ROWS, None].numpy()], [want[:, None]])


def wrong_summed(packed: PackedRows, plan: routing.RoutePlan, got: Any) -> int:
    """Check the first tokens."""
    offsets, places = plan.place_offsets[: CHECKED_ROWS + 1].numpy(), plan.places.numpy()
    want = reference.final_reduce(*arrays(packed), packed.format, packed.hidden, offsets, places)
    return wrong_rows((bits(got),), (want,))


def wrong_relayed(packed: PackedRows, plan: routing.RoutePlan, got: Any) -> int:
    """Check the first sums that a relay packs."""
    offsets, places = plan.place_offsets[: CHECKED_ROWS + 1].numpy(), plan.places.numpy()
    want = reference.relay_reduce(*arrays(packed), packed.format, packed.hidden, offsets, places)
    return wrong_rows([part.numpy() for part in got], want)


def arrays(packed: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Payload and scales."""
    return packed.payload.numpy(), packed.scales.numpy()


# The operations


def plan_of(num_tokens: int) -> routing.RoutePlan:
    """Plan top-8 of 256 experts on 8 ranks."""
    idx = torch.rand(num_tokens, 256, generator=torch.Generator().manual_seed(1)).topk(8).indices
    return routing.plan(idx, None, routing.Placement(256, 8))


def layout_of(num_rows: int) -> routing.ExpertLayout:
    """Lay out wire rows that each have two of the 8 experts of this rank."""
    generator = torch.Generator().manual_seed(2)
    idx = torch.rand(num_rows, 8, generator=generator).topk(2).indices
    weights = torch.rand(num_rows, 2, generator=generator)
    plan = routing.plan(idx, weights, routing.Placement(8, 1))
    return routing.expert_layout(plan.route, 2, plan.expert_counts.sum(0), 128)


def quantize_cases(x: torch.Tensor) -> Iterator[Case]:
    """quantize_rows from BF16, also scattered to the wire rows of 8 ranks, and from FP8."""
    num_tokens, hidden = x.shape
    packed = quantize(x, "fp8")
    scales = 0.5 + torch.rand(packed.scales.shape)
    pair = packed.payload.view(torch.float8_e4m3fn), scales
    plan, few = plan_of(num_tokens), slice(0, CHECKED_ROWS)
    first_places = plan.places[plan.place_offsets[few].long()].long()
    own, own_pair = bits(x[few]), (packed.payload[few].numpy(), scales[few].numpy())
    bf16_row, fp8_row = (num_tokens, 2 * hidden), (num_tokens, hidden)
    name = "quantize_rows"
    for wire in WIRES:
        run = functools.partial(cpu.quantize_rows, x, wire)
        yield Case(name, wire, run, bf16_row, functools.partial(wrong_packed, own, wire, few))
        run = functools.partial(cpu.quantize_rows, x, wire, plan)
        check = functools.partial(wrong_packed, own, wire, first_places)
        yield Case(f"{name} scattered", wire, run, bf16_row, check)
        run = functools.partial(cpu.quantize_rows, pair, wire)
        check = functools.partial(wrong_packed, own_pair, wire, few)
        yield Case(f"{name} from FP8", wire, run, fp8_row, check)


def arrival_cases(x: torch.Tensor) -> Iterator[Case]:
    """The conversions of wire rows."""
    num_rows, hidden = x.shape
    layout = layout_of(num_rows)
    expanded, source = layout.num_expert_rows, layout.row_source.numpy()[:CHECKED_ROWS]
    fp8_bytes, in_order = fp8_row_bytes(hidden), np.arange(CHECKED_ROWS)
    for wire in WIRES:
        packed = quantize(x, wire)
        parts = packed.payload, packed.scales, wire, hidden
        run = functools.partial(cpu.to_fp8_rows, *parts)
        check = functools.partial(wrong_fp8, packed, in_order)
        yield Case("to_fp8_rows", wire, run, (num_rows, fp8_bytes), check)
        run = functools.partial(cpu.to_fp8_rows, *parts, layout, "column")
        check = functools.partial(wrong_fp8, packed, source)
        name = "to_fp8_rows expert-major, M-major scales"
        yield Case(name, wire, run, (expanded, fp8_bytes), check)
        bf16_run = functools.partial(cpu.to_bf16_rows, *parts, layout)
        check = functools.partial(wrong_bf16, packed, source)
        yield Case("to_bf16_rows expert-major", wire, bf16_run, (expanded, 2 * hidden), check)
        columns_run = functools.partial(cpu.to_fp8_columns, *parts, layout)
        check = functools.partial(wrong_columns, packed, layout)
        yield Case("to_fp8_columns", wire, columns_run, (expanded, hidden), check)
        floats_run = functools.partial(cpu.dequantize, *parts)
        check = functools.partial(wrong_floats, packed)
        yield Case("dequantize", wire, floats_run, (num_rows, 4 * hidden), check)


def combine_cases(x: torch.Tensor) -> Iterator[Case]:
    """The reduces of combine, and the gradient of its weights."""
    num_rows, hidden = x.shape
    layout, plan = layout_of(num_rows), plan_of(num_rows // 4)
    relay = routing.RelayPlan(plan.num_tokens, plan.place_offsets, plan.places, plan.places)
    generator = torch.Generator().manual_seed(3)
    out = torch.randn(layout.num_expert_rows, hidden, generator=generator).bfloat16()
    sums = torch.randn(plan.num_rows, hidden, generator=generator).bfloat16()
    for wire in WIRES:
        run = functools.partial(cpu.weighted_reduce, out, layout, wire, weighted=True)
        check = functools.partial(wrong_reduced, out, layout, wire)
        yield Case("weighted_reduce", wire, run, (num_rows, wire.row_bytes(hidden)), check)
        packed = quantize(x, wire)
        parts = packed.payload, packed.scales, wire, hidden
        dot_run = functools.partial(cpu.row_dots, *parts, out, layout)
        check = functools.partial(wrong_dots, packed, out, layout)
        yield Case("row_dots", wire, dot_run, (layout.num_expert_rows, 2 * hidden), check)
        packed = quantize(sums, wire)
        parts = packed.payload, packed.scales, wire, hidden
        sum_run = functools.partial(cpu.final_reduce, *parts, plan)
        check = functools.partial(wrong_summed, packed, plan)
        yield Case("final_reduce", wire, sum_run, (plan.num_tokens, 2 * hidden), check)
        relay_run = functools.partial(cpu.relay_reduce, *parts, relay)
        check = functools.partial(wrong_relayed, packed, plan)
        yield Case(
            "relay_reduce", wire, relay_run, (plan.num_tokens, wire.row_bytes(hidden)), check
        )


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Check a case, then time it and its copy in turn."""
    num_wrong = case.num_wrong(case.run())
    num_bytes = case.copied[0] * case.copied[1]
    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    copy = functools.partial(np.copyto, target, source)
    case.run()
    copy()
    times, copies = median_times([case.run, copy], repeats)
    return {
        "op": case.op,
        "wire": case.wire.name,
        "copied_bytes": num_bytes,
        "median_ms": 1e3 * statistics.median(times),
        "copy_ms": 1e3 * statistics.median(copies),
        "gbs": num_bytes / statistics.median(times) / 1e9,
        "share": statistics.median(copies) / statistics.median(times),
        "wrong": num_wrong,
    }


def torchao_rows(x: torch.Tensor, repeats: int) -> list[dict[str, Any]]:
    """Time torchao's to_mx beside ours: the fastest scale mode, eager and under torch.compile."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        click.echo("# torchao is not installed: no peers")
        return []
    ours = functools.partial(cpu.quantize_rows, x, WireFormat("mxfp4"))
    rows = []
    for kind, function in (("eager", to_mx), ("torch.compile", torch.compile(to_mx))):
        timed = []
        for mode in ScaleCalculationMode:
            run = functools.partial(function, x, torch.float4_e2m1fn_x2, 32, mode)
            try:
                run()
            except Exception as error:  # a mode that this release or machine cannot run
                click.echo(f"# torchao {mode.name} {kind}: {type(error).__name__}", err=True)
                continue
            theirs, own = (statistics.median(t) for t in median_times([run, ours], repeats))
            timed.append((theirs, own, mode.name))
        if timed:
            theirs, own, name = min(timed)
            rows.append(
                {
                    "op": f"torchao to_mx ({kind}, fastest mode: {name})",
                    "wire": "mxfp4",
                    "median_ms": 1e3 * theirs,
                    "ours_ms": 1e3 * own,
                    "ours_times_faster": theirs / own,
                }
            )
    return rows


def plan_row(repeats: int) -> dict[str, Any]:
    """Time planning 32768 tokens, top-8 of 256 experts, 64 ranks."""
    generator = torch.Generator().manual_seed(4)
    idx = torch.rand(32768, 256, generator=generator).topk(8).indices
    weights = torch.rand(32768, 8, generator=generator)
    placement = routing.Placement(256, 64)
    run = functools.partial(routing.plan, idx, weights, placement)
    run()
    times = median_times([run], max(repeats, 11))[0]
    return {
        "op": "plan, 32768 tokens x top-8, 256 experts, 64 ranks",
        "median_ms": 1e3 * statistics.median(times),
    }


def thread_row(x: torch.Tensor, op: str, run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Time one thread and two in turn."""

    def on(threads: int) -> None:
        torch.set_num_threads(threads)
        run()

    on(2)
    on(1)
    one, two = median_times([lambda: on(1), lambda: on(2)], repeats)
    return {
        "op": op,
        "one_thread_ms": 1e3 * statistics.median(one),
        "two_threads_ms": 1e3 * statistics.median(two),
        "speedup": statistics.median(one) / statistics.median(two),
    }


def activations(tokens: int, hidden: int, data: str | None) -> torch.Tensor:
    """Make N(0, 1) rows, or tile the real ones of a layer to the shape."""
    if data is None:
        return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = load_file(data)["x"]
    wide = x.repeat(1, -(-hidden // x.shape[1]))[:, :hidden]
    return wide.repeat(-(-tokens // len(wide)), 1)[:tokens].contiguous()


@click.command()
@click.option("--tokens", default=4096, show_default=True, help="rows")
@click.option("--hidden", default=7168, show_default=True)
@click.option("--threads", default=1, show_default=True, help="threads a kernel")
@click.option("--repeats", default=11, show_default=True)
@click.option("--op", default="", help="only operations whose name contains this")
@click.option("--data", type=click.Path(exists=True), help="a layer of tests/data for the rows")
@click.option("--peers/--no-peers", default=True, show_default=True, help="torchao")
@json_option
def main(
    tokens: int,
    hidden: int,
    threads: int,
    repeats: int,
    op: str,
    data: str | None,
    peers: bool,
    json_file: Path | None,
) -> int:
    """Measure the codec of this machine's CPU."""
    torch.set_num_threads(threads)
    x = activations(tokens, hidden, data)
    name = Path(data).name if data else "N(0,1)"
    click.echo(f"# {tokens} x {hidden}, x ~ {name}, {threads} thread(s) a kernel;")
    click.echo("# share = time of a copy / time; medians, in turn; #wrong rows of the checked ones")
    click.echo(f"{'op':42} {'wire':6} {'ms':>9} {'GB/s':>7} {'share':>6} {'#wrong':>6}")
    rows = []
    for family in (quantize_cases, arrival_cases, combine_cases):
        for case in family(x):
            if op in case.op:
                rows.append(measure(case, repeats))
                r = rows[-1]
                click.echo(
                    f"{r['op']:42} {r['wire']:6} {r['median_ms']:9.3f} {r['gbs']:7.2f}"
                    f" {r['share']:6.2f} {r['wrong']:6}"
                )
    if not op:
        rows += extra_rows(x, repeats, peers)
    num_wrong = sum(r.get("wrong", 0) for r in rows)
    if json_file is not None:
        arguments = {"tokens": tokens, "hidden": hidden, "threads": threads, "x": name}
        content = {"arguments": arguments, **machine.about(), "rows": rows}
        write_json(json_file, content)
    click.echo(f"# {verdict(num_wrong)}")
    return int(num_wrong > 0)


def extra_rows(x: torch.Tensor, repeats: int, peers: bool) -> list[dict[str, Any]]:
    """Measure plan, threads and peers."""
    rows = [plan_row(repeats)]
    click.echo(f"{rows[0]['op']:49} {rows[0]['median_ms']:9.3f}")
    for row in torchao_rows(x, 3) if peers else []:
        rows.append(row)
        click.echo(f"{row['op']:49} {row['median_ms']:9.3f}   {row['ours_times_faster']:.0f}x ours")
    if machine.machine()["usable_cores"] > 1:
        packed = quantize(x, "mxfp4")
        parts = packed.payload, packed.scales, packed.format, packed.hidden
        for op, run in (
            ("quantize_rows", lambda: cpu.quantize_rows(x, WireFormat("mxfp4"))),
            ("to_fp8_rows", lambda: cpu.to_fp8_rows(*parts)),
        ):
            row = thread_row(x, f"{op} mxfp4: two threads against one", run, repeats)
            rows.append(row)
            click.echo(f"{row['op']:49} {row['two_threads_ms']:9.3f}   {row['speedup']:.2f}x")
    return rows


if __name__ == "__main__":
    run_command(main)
