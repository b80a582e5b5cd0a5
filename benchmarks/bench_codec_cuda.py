"""The CUDA codec's operations against a device copy of the same bytes and the peers, on one GPU.

    python benchmarks/bench_codec_cuda.py [--shape 4096x7168 ...] [--op NAME] [--data FILE ...]
                                          [--json FILE]

Each operation and a copy of as many bytes (distinct bytes read once plus bytes written, half of
them the copy's source) run in turn, timed by events on the GPU; before each a pass that reads 512
MiB empties the L2 of what could help.  Medians.  `share` is the copy's time over the operation's.
Outputs come from torch's allocator within the timed part; plans and layouts lie on the GPU.
Every operation's result is compared with the reference on its first and last rows (#wrong) before
it is timed.  Peers under torch.compile: torchao's `to_mx`, and MXFP4 -> BF16 -> FP8 rows by
torchao's `to_dtype` or a look-up, as one function or as two with the BF16 rows between them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_codec
import click
import numpy as np
import torch

from fp4comm import WireFormat, launch, machine, reference, routing
from fp4comm.bench.rows import verdict
from fp4comm.codec import cuda
from fp4comm.files import write_json
from fp4comm.formats import fp8_row_bytes
from fp4comm.launch import UserError
from fp4comm.options import json_option
from fp4comm.running import run_command

WIRES = [WireFormat(name) for name in ("mxfp4", "mxfp8", "fp8", "bf16")]
SHAPES = ("4096x7168", "24576x2048", "32768x7168", "128x7168")
CHECKED_ROWS = 24  # at either end
L2_BYTES = 512 << 20  # that are read to empty it

Parts = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation: how to run it, the bytes it must move, how to check its result."""

    op: str
    wire: WireFormat
    run: Callable[[], Any]
    num_bytes: int
    num_wrong: Callable[[Any], int]


def ends(num_rows: int) -> torch.Tensor:
    """First and last rows."""
    few = min(CHECKED_ROWS, num_rows)
    rows = torch.cat([torch.arange(few), torch.arange(num_rows - few, num_rows)])
    return rows.unique().cuda()


def host(tensor: torch.Tensor) -> np.ndarray:
    """NumPy array; 16- and 8-bit floats as their bits."""
    views = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return tensor.cpu().contiguous().view(views.get(tensor.dtype, tensor.dtype)).numpy()


def wrong_rows(got: Parts, want: Any) -> int:
    """Rows in which any part differs, as bytes."""
    return bench_codec.wrong_rows([host(part) for part in got], want)


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors."""
    return sum(t.nbytes for t in tensors if t is not None)


# How each operation's result is checked


def wrong_packed(
    x: torch.Tensor | Parts, wire: WireFormat, places: torch.Tensor | None, got: Parts
) -> int:
    """Check the wire rows that the end rows of x became."""
    codes = x[0] if isinstance(x, tuple) else x
    rows = ends(len(codes))
    own: Any = tuple(host(part[rows]) for part in x) if isinstance(x, tuple) else host(x[rows])
    to = rows if places is None else places[rows]
    return wrong_rows(tuple(part[to] for part in got), reference.quantize_rows(own, wire))


def wrong_arrived(
    convert: Callable[..., Any], parts: Any, source: torch.Tensor | None, got: Any
) -> int:
    """Check end rows of an arrival: convert is the reference's."""
    payload, scales, wire, hidden = parts
    got = got if isinstance(got, tuple) else (got,)
    rows = ends(len(got[0]))
    from_rows = rows if source is None else source[rows].long()
    live = from_rows >= 0
    own = from_rows[live]
    want = convert(host(payload[own]), host(scales[own]), wire, hidden)
    want = want if isinstance(want, tuple) else (want,)
    return wrong_rows(tuple(part[rows[live]] for part in got), want)


def wrong_columns(parts: Any, layout: routing.ExpertLayout, got: Parts) -> int:
    """Check the first 128 columns and all their scales."""
    payload, scales, wire, _ = parts
    few = 128
    want = reference.to_fp8_columns(
        host(payload[:, : wire.payload_bytes(few)]),
        host(scales[:, : wire.scale_bytes(few)]),
        wire,
        few,
        layout.row_source.numpy(),
        np.array(layout.num_rows_list),
        layout.expert_offsets_array,
    )
    codes, fp8_scales = got
    return wrong_rows((codes[:few],), want[:1]) + wrong_rows((fp8_scales[:, :few],), want[1:])


def wrong_reduced(out: torch.Tensor, layout: Any, wire: WireFormat, got: Parts) -> int:
    """Check end rows of the sums of expert outputs."""
    rows = ends(len(layout.slot_rows))
    slots, weights = layout.slot_rows[rows], layout.weights[rows]
    used, own = slots[slots >= 0].unique(return_inverse=True)
    own_slots = torch.full_like(slots, -1)
    own_slots[slots >= 0] = own.int()
    want = reference.weighted_reduce(host(out[used.long()]), host(own_slots), host(weights), wire)
    return wrong_rows(tuple(part[rows] for part in got), want)


def wrong_summed(operation: Any, parts: Any, plan: Any, got: Any) -> int:
    """Check end tokens of a sum of wire rows, which is an operation of the reference."""
    payload, scales, wire, hidden = parts
    tokens = ends(plan.num_tokens)
    offsets, places = plan.place_offsets.cpu(), plan.places.cpu()
    own = [places[offsets[t] : offsets[t + 1]] for t in tokens.tolist()]
    rows = torch.cat(own).long().cuda()
    own_offsets = np.cumsum([0, *(len(p) for p in own)])
    args = host(payload[rows]), host(scales[rows]), wire, hidden
    want = operation(*args, own_offsets, np.arange(len(rows)))
    if isinstance(want, tuple):
        return wrong_rows(tuple(part[tokens] for part in got), want)
    return wrong_rows((got[tokens],), (want,))


# The operations


def to_gpu(tables: Any) -> Any:
    """A plan or a layout with its tensors on the GPU."""
    fields = {field.name: getattr(tables, field.name) for field in dataclasses.fields(tables)}
    tensors = {name: part.cuda() for name, part in fields.items() if torch.is_tensor(part)}
    return dataclasses.replace(tables, **tensors)


def quantize_cases(x: torch.Tensor) -> Iterator[Case]:
    """quantize_rows from BF16, also scattered to the wire rows of 8 ranks, and from FP8."""
    num_tokens, hidden = x.shape
    plan = to_gpu(bench_codec.plan_of(num_tokens))
    first_places = plan.places[plan.place_offsets[:-1].long()].long()
    table = num_bytes(plan.places, plan.place_offsets)
    codes, bytes_8 = cuda.quantize_rows(x, WireFormat("fp8"))
    codes = codes.view(torch.float8_e4m3fn)
    power_of_two = (bytes_8.int() << 23).view(torch.float32)
    any_scale = power_of_two * (1 + torch.rand_like(power_of_two))
    for wire in WIRES:
        row = wire.row_bytes(hidden)
        run = functools.partial(cuda.quantize_rows, x, wire)
        check = functools.partial(wrong_packed, x, wire, None)
        yield Case("quantize_rows", wire, run, x.nbytes + num_tokens * row, check)
        run = functools.partial(cuda.quantize_rows, x, wire, plan)
        check = functools.partial(wrong_packed, x, wire, first_places)
        moved = x.nbytes + table + plan.num_rows * row
        yield Case("quantize_rows scattered", wire, run, moved, check)
        for name, scales in (("FP8", any_scale), ("FP8, scales 2^n", power_of_two)):
            pair = codes, scales
            run = functools.partial(cuda.quantize_rows, pair, wire)
            check = functools.partial(wrong_packed, pair, wire, None)
            moved = num_bytes(*pair) + num_tokens * row
            yield Case(f"quantize_rows from {name}", wire, run, moved, check)


def arrival_cases(x: torch.Tensor) -> Iterator[Case]:
    """The conversions of wire rows."""
    num_rows, hidden = x.shape
    host_layout = bench_codec.layout_of(num_rows)
    layout = to_gpu(host_layout)
    source = layout.row_source
    num_out = layout.num_expert_rows
    fp8_row = fp8_row_bytes(hidden)
    for wire in WIRES:
        parts = (*cuda.quantize_rows(x, wire), wire, hidden)
        read = num_bytes(*parts[:2])
        run = functools.partial(cuda.to_fp8_rows, *parts)
        check = functools.partial(wrong_arrived, reference.to_fp8_rows, parts, None)
        yield Case("to_fp8_rows", wire, run, read + num_rows * fp8_row, check)
        run = functools.partial(cuda.to_fp8_rows, *parts, layout, "column")
        check = functools.partial(wrong_arrived, reference.to_fp8_rows, parts, source)
        name = "to_fp8_rows expert-major, M-major scales"
        moved = read + layout.slot_rows.nbytes + num_out * fp8_row
        yield Case(name, wire, run, moved, check)
        columns_run = functools.partial(cuda.to_fp8_columns, *parts, layout)
        check = functools.partial(wrong_columns, parts, host_layout)
        num_tiles = len(layout.tiles) // 2
        moved = read + source.nbytes + num_out * hidden + 4 * num_tiles * hidden
        yield Case("to_fp8_columns", wire, columns_run, moved, check)
        bf16_run = functools.partial(cuda.to_bf16_rows, *parts, layout)
        check = functools.partial(wrong_arrived, reference.to_bf16_rows, parts, source)
        moved = read + layout.slot_rows.nbytes + num_out * 2 * hidden
        yield Case("to_bf16_rows expert-major", wire, bf16_run, moved, check)
        floats_run = functools.partial(cuda.dequantize, *parts)
        check = functools.partial(wrong_arrived, reference.dequantize, parts, None)
        yield Case("dequantize", wire, floats_run, read + num_rows * 4 * hidden, check)


def combine_cases(x: torch.Tensor) -> Iterator[Case]:
    """The reduces of combine."""
    num_rows, hidden = x.shape
    layout = to_gpu(bench_codec.layout_of(num_rows))
    plan = to_gpu(bench_codec.plan_of(max(1, num_rows // 4)))
    out = torch.randn(layout.num_expert_rows, hidden, device=x.device).bfloat16()
    sums = torch.randn(plan.num_rows, hidden, device=x.device).bfloat16()
    live = int((layout.slot_rows >= 0).sum())
    for wire in WIRES:
        run = functools.partial(cuda.weighted_reduce, out, layout, wire, weighted=True)
        check = functools.partial(wrong_reduced, out, layout, wire)
        tables = num_bytes(layout.slot_rows, layout.weights)
        moved = tables + live * 2 * hidden + num_rows * wire.row_bytes(hidden)
        yield Case("weighted_reduce", wire, run, moved, check)
        parts = (*cuda.quantize_rows(sums, wire), wire, hidden)
        sum_run = functools.partial(cuda.final_reduce, *parts, plan)
        check = functools.partial(wrong_summed, reference.final_reduce, parts, plan)
        read = num_bytes(plan.place_offsets, plan.places, *parts[:2])
        moved = read + plan.num_tokens * 2 * hidden
        yield Case("final_reduce", wire, sum_run, moved, check)
        relay_run = functools.partial(cuda.relay_reduce, *parts, plan)
        check = functools.partial(wrong_summed, reference.relay_reduce, parts, plan)
        moved = read + plan.num_tokens * wire.row_bytes(hidden)
        yield Case("relay_reduce", wire, relay_run, moved, check)


# Measuring


def median_times(functions: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of each function, called in turn with an L2 that holds none of its data."""
    flush = torch.ones(L2_BYTES // 4, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)] for _ in functions]
    torch.cuda._sleep(20_000_000)  # the host gets ahead: no launch is waited for
    for i in range(repeats):
        for function, own in zip(functions, events, strict=True):
            flush.sum()
            own[2 * i].record()
            function()
            own[2 * i + 1].record()
    torch.cuda.synchronize()
    return [
        statistics.median(own[2 * i].elapsed_time(own[2 * i + 1]) for i in range(repeats))
        for own in events
    ]


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Check a case, then time it and its copy in turn."""
    with np.errstate(all="ignore"):
        num_wrong = case.num_wrong(case.run())
    source = torch.ones(case.num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    time_ms, copy_ms = median_times([case.run, copy], repeats)
    return {
        "op": case.op,
        "wire": case.wire.name,
        "bytes": case.num_bytes,
        "median_ms": time_ms,
        "copy_ms": copy_ms,
        "gbs": case.num_bytes / time_ms / 1e6,
        "share": copy_ms / time_ms,
        "wrong": num_wrong,
    }


# Peers


def peer_rows(x: torch.Tensor, repeats: int) -> Iterator[dict[str, Any]]:
    """Time torchao's to_mx, and MXFP4 -> BF16 -> FP8, under torch.compile, beside ours."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    except ImportError as error:
        click.echo(f"# no torchao: {error}", err=True)
        return
    mode = ScaleCalculationMode.RCEIL
    torch.compiler.reset()  # static shapes: they give the peers their fastest code
    theirs = functools.partial(
        torch.compile(to_mx, dynamic=False), x, torch.float4_e2m1fn_x2, 32, mode
    )
    ours = functools.partial(cuda.quantize_rows, x, WireFormat("mxfp4", "ceil"))
    yield peer_row("torchao to_mx (RCEIL, torch.compile)", theirs, ours, repeats)
    payload, scales = ours()
    hidden = x.shape[1]
    if hidden % 128 != 0:
        return

    def torchao_to_bf16(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        e8m0, e2m1 = scales.view(torch.float8_e8m0fnu), torch.float4_e2m1fn_x2
        return to_dtype(payload, e8m0, e2m1, 32, torch.bfloat16)

    own = functools.partial(cuda.to_fp8_rows, payload, scales, WireFormat("mxfp4"), hidden)
    compiled = functools.partial(torch.compile, dynamic=False)
    for kind, to_bf16 in (("torchao to_dtype", torchao_to_bf16), ("look-up", look_up_bf16)):
        first, second = compiled(to_bf16), compiled(fp8_rows)
        chains = {
            "one function": compiled(lambda p, s, to_bf16=to_bf16: fp8_rows(to_bf16(p, s))),
            "two": lambda p, s, first=first, second=second: second(first(p, s)),
        }
        for how, chain in chains.items():
            name = f"MXFP4 -> BF16 -> FP8 rows ({kind}, compiled as {how})"
            yield peer_row(name, functools.partial(chain, payload, scales), own, repeats)


def look_up_bf16(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 to BF16 by a table of 16 values."""
    values = torch.tensor(
        [0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=payload.device
    )
    codes = torch.stack([payload & 15, payload >> 4], dim=-1).flatten(1).long()
    factor = (scales.int() << 23).view(torch.float32).repeat_interleave(32, dim=1)
    return (values[codes] * factor).bfloat16()


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize BF16 to FP8 with a scale per 128."""
    groups = x.float().view(len(x), -1, 128)
    fp8_scales = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    fp8 = (groups / fp8_scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return fp8.view(x.shape), fp8_scales.squeeze(-1)


def peer_row(
    op: str, theirs: Callable[[], Any], ours: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Time a peer and ours in turn."""
    for _ in range(3):
        theirs()
    their_ms, own_ms = median_times([theirs, ours], repeats)
    return {"op": op, "wire": "mxfp4", "median_ms": their_ms, "ours_ms": own_ms,
            "ours_times_faster": their_ms / own_ms}  # fmt: skip


@click.command()
@click.option("--shape", "shapes", multiple=True, default=SHAPES, show_default=True)
@click.option("--repeats", default=41, show_default=True)
@click.option("--op", default="", help="only operations whose name contains this")
@click.option("--wire", default="", help="only this wire format")
@click.option(
    "--data", "files", multiple=True, type=click.Path(exists=True), help="layers of tests/data"
)
@click.option("--peers/--no-peers", default=True, show_default=True)
@json_option
def main(
    shapes: tuple[str, ...],
    repeats: int,
    op: str,
    wire: str,
    files: tuple[str, ...],
    peers: bool,
    json_file: Path | None,
) -> int:
    """Measure the CUDA codec of this machine's GPU."""
    try:
        launch.use_device("cuda", 0)
    except RuntimeError as error:
        raise UserError(error) from error
    rows: list[dict[str, Any]] = []
    click.echo(f"# {torch.cuda.get_device_name()}; share = time of a copy of the bytes / time")
    for shape in shapes:
        tokens, hidden = (int(n) for n in shape.split("x"))
        for data in (None, *files):
            x = bench_codec.activations(tokens, hidden, data).cuda()
            label = {"shape": shape, "x": Path(data).stem if data else "N(0,1)"}
            click.echo(f"# {shape}, x ~ {label['x']}")
            click.echo(f"{'op':42} {'wire':6} {'ms':>9} {'GB/s':>7} {'share':>6} {'#wrong':>6}")
            for family in (quantize_cases, arrival_cases, combine_cases):
                for case in family(x):
                    if op in case.op and wire in ("", case.wire.name):
                        rows.append({**label, **measure(case, repeats)})
                        r = rows[-1]
                        click.echo(
                            f"{r['op']:42} {r['wire']:6} {r['median_ms']:9.4f} {r['gbs']:7.0f}"
                            f" {r['share']:6.3f} {r['wrong']:6}"
                        )
            for row in peer_rows(x, repeats) if peers and data is None else ():
                rows.append({**label, **row})
                click.echo(
                    f"{row['op']:66} {row['median_ms']:9.4f}   {row['ours_times_faster']:.1f}x ours"
                )
        if json_file is not None:
            content = {"gpu": torch.cuda.get_device_name(), **machine.about(), "rows": rows}
            write_json(json_file, content)
    num_wrong = sum(r.get("wrong", 0) for r in rows)
    click.echo(f"# {verdict(num_wrong)}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    run_command(main)
