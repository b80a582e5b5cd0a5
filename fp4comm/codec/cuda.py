"""The CUDA codec: each function allocates its outputs and launches a kernel of ``cuda/``.

Launches go to torch's current stream of the tensors' device, and nothing waits for them.  Tensors
are contiguous and on one device; callers have checked them.  The functions are those of `cpu.py`
and mean the same; shapes and meaning of a kernel's arguments stand in its file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fp4comm import cuda_kernels
from fp4comm.formats import FORMATS, FP8_BLOCK, TILE_ROWS, WireFormat
from fp4comm.routing import ExpertLayout, RelayPlan, RoutePlan, tile_table, upload

INPUTS = {
    torch.bfloat16: "INPUT_BF16",
    torch.float32: "INPUT_F32",
    torch.float8_e4m3fn: "INPUT_E4M3",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a kernel spreads its work over threads.

    Attributes:
        piece: elements of a row that a thread takes at a time.
        unroll: rows of a thread.
        threads: of a thread block, about.
        max_lanes: threads along one row.
        ahead: rows that a reduce loads before it adds the first.
        max_registers: of a thread; 0 leaves them to the compiler.
        block_rows: rows of a thread block with one warp along them; 0 leaves that to `threads`.
        many: the shape for many rows, if that is another one.
    """

    piece: int
    unroll: int = 1
    threads: int = 128
    max_lanes: int = 512
    ahead: int = 4
    max_registers: int = 0
    block_rows: int = 0
    many: Shape | None = None

    def options(self) -> cuda_kernels.Options:
        """What the kernel's compiler must know of it."""
        limit = (f"--maxrregcount={self.max_registers}",) if self.max_registers else ()
        names = {"PIECE": self.piece, "UNROLL": self.unroll, "AHEAD": self.ahead}
        return *limit, *(f"-D{name}={value}" for name, value in names.items())


BLOCK_ROWS = 32  # of thread blocks in which scales by column wait; cuda/to_fp8_rows.cu
SHAPES = {  # by kernel and options; of those that fit the one with the most options counts
    ("quantize_rows",): Shape(32, max_lanes=256),
    ("quantize_rows", "-DWIRE=WIRE_BF16"): Shape(8),
    ("quantize_rows", "-DINPUT=INPUT_E4M3"): Shape(32, unroll=2, max_lanes=256),
    ("quantize_rows", "-DINPUT=INPUT_E4M3", "-DWIRE=WIRE_BF16"): Shape(16),
    ("quantize_rows", "-DINPUT=INPUT_E4M3", "-DWIRE=WIRE_MXFP4"): Shape(
        32, unroll=2, max_lanes=32, many=Shape(32, unroll=3, max_lanes=256, max_registers=56)
    ),
    ("to_fp8_rows",): Shape(32, max_lanes=256),
    ("to_fp8_rows", "-DCOLUMN_SCALES=1", "-DWIRE=WIRE_MXFP4"): Shape(32, unroll=2, max_lanes=64),
    ("to_fp8_rows", "-DCOLUMN_SCALES=1", "-DWIRE=WIRE_BF16"): Shape(
        16, unroll=2, block_rows=BLOCK_ROWS
    ),
    ("to_bf16_rows",): Shape(16, max_lanes=256),
    ("dequantize",): Shape(8, max_lanes=256),
    ("weighted_reduce",): Shape(16, max_lanes=64, ahead=2),
    ("weighted_reduce", "-DWIRE=WIRE_MXFP4"): Shape(
        32, threads=64, max_lanes=32, ahead=2, max_registers=80
    ),
    ("final_reduce",): Shape(16, max_lanes=128, ahead=2),
    ("final_reduce", "-DWIRE=WIRE_MXFP4"): Shape(
        32,
        max_lanes=32,
        ahead=2,
        max_registers=64,
        many=Shape(32, unroll=4, max_lanes=32, ahead=3),
    ),
    ("relay_reduce",): Shape(16, max_lanes=128, ahead=2),
    ("relay_reduce", "-DWIRE=WIRE_MXFP4"): Shape(32, max_lanes=32, ahead=1),
}
MANY = 40_000_000  # elements from which on `Shape.many` is the faster one

SCALE_ROWS, SCALE_GROUPS = 64, 8  # of a thread block that writes scales by column; likewise
PADDING_BLOCKS = 16  # thread blocks an expert that zero its padding; cuda/rows.cuh
COLUMN_LANES = 8  # threads along the columns, as the kernel is told
COLUMN_SHAPES = {  # columns and rows of a thread, thread blocks a multiprocessor, there
    "bf16": (8, 8, 8),
    "fp8": (32, 4, 5),
    "mxfp8": (32, 4, 5),
    "mxfp4": (32, 4, 5),
}
DOT_WARPS = 4  # of a thread block of row_dots; a row each
CHUNKS = object()  # stands for the number that `_launch_rows` knows


def quantize_rows(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    wire: WireFormat,
    plan: RoutePlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row once and write it to each of its wire rows.  See `cpu.quantize_rows`."""
    codes, x_scales = x if isinstance(x, tuple) else (x, None)
    num_tokens, hidden = codes.shape
    device = codes.device
    places = (None, None) if plan is None else (plan.place_offsets, plan.places)
    num_rows = num_tokens if plan is None else plan.places.shape[0]
    payload, scales = empty_rows(num_rows, wire, hidden, device)
    _launch_rows(
        "quantize_rows",
        wire_options(wire, INPUT=INPUTS[codes.dtype], SCATTER=0 if plan is None else 1),
        (num_tokens, hidden),
        (codes, x_scales, *places, payload, scales),
        "qiii",
        num_tokens,
        hidden,
        CHUNKS,
        wire.scale_round,
    )
    return payload, scales


def empty_rows(
    num_rows: int, wire: WireFormat, hidden: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate wire rows: payload and scales."""
    return (
        torch.empty((num_rows, wire.payload_bytes(hidden)), dtype=torch.uint8, device=device),
        torch.empty((num_rows, wire.scale_bytes(hidden)), dtype=torch.uint8, device=device),
    )


def rows_like(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Allocate rows as wide as these uint8 ones."""
    return rows.new_empty((num_rows, rows.shape[1]))


def to_fp8_rows(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert wire rows to FP8 rows.  See `cpu.to_fp8_rows`."""
    device, num_rows = payload.device, payload.shape[0]
    num_out = num_rows if layout is None else layout.num_expert_rows
    groups = -(-hidden // FP8_BLOCK)
    out = torch.empty((num_out, hidden), dtype=torch.uint8, device=device)
    by_column = scale_layout == "column"
    shape = (groups, num_out) if by_column else (num_out, groups)
    out_scales = torch.empty(shape, dtype=torch.float32, device=device)
    row_stride, group_stride = (1, num_out) if by_column else (groups, 1)
    slot_rows, padding, num_slots, num_experts = _slots(layout)
    sources = None if layout is None else layout.row_source
    others = num_experts * PADDING_BLOCKS
    if by_column and wire.name != "bf16":
        others += -(-num_out // SCALE_ROWS) * -(-groups // SCALE_GROUPS)
    _launch_rows(
        "to_fp8_rows",
        wire_options(wire, COLUMN_SCALES=int(by_column)),
        (num_rows, hidden, others),
        (payload, scales, slot_rows, sources, *padding, out, out_scales),
        "qiiiiqq",
        num_rows,
        num_slots,
        num_experts,
        hidden,
        CHUNKS,
        row_stride,
        group_stride,
    )
    codes = out.view(torch.float8_e4m3fn)
    return codes, out_scales.t() if by_column else out_scales


def to_bf16_rows(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert wire rows to bfloat16 rows.  See `cpu.to_bf16_rows`."""
    device, num_rows = payload.device, payload.shape[0]
    num_out = num_rows if layout is None else layout.num_expert_rows
    out = torch.empty((num_out, hidden), dtype=torch.bfloat16, device=device)
    slot_rows, padding, num_slots, num_experts = _slots(layout)
    _launch_rows(
        "to_bf16_rows",
        wire_options(wire, WEIGHTED=0 if row_weights is None else 1),
        (num_rows, hidden, num_experts * PADDING_BLOCKS),
        (payload, scales, slot_rows, *padding, row_weights, out),
        "qiiii",
        num_rows,
        num_slots,
        num_experts,
        hidden,
        CHUNKS,
    )
    return out


def dequantize(
    payload: torch.Tensor, scales: torch.Tensor, wire: WireFormat, hidden: int
) -> torch.Tensor:
    """Convert wire rows to ``[n, hidden]`` float32."""
    device, num_rows = payload.device, payload.shape[0]
    out = torch.empty((num_rows, hidden), dtype=torch.float32, device=device)
    _launch_rows(
        "dequantize",
        wire_options(wire),
        (num_rows, hidden),
        (payload, scales, out),
        "qii",
        num_rows,
        hidden,
        CHUNKS,
    )
    return out


def to_fp8_columns(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert wire rows to FP8 columns.  See `cpu.to_fp8_columns`."""
    device, num_rows = payload.device, payload.shape[0]
    if layout is None:
        num_out, sources = num_rows, None
        live = np.array([num_rows])
        [tiles] = upload(device, tile_table(live, np.array([0, num_rows])))
    else:
        num_out, sources, tiles = layout.num_expert_rows, layout.row_source, layout.tiles
    num_tiles = len(tiles) // 2
    out = torch.empty((hidden, num_out), dtype=torch.uint8, device=device)
    out_scales = torch.empty((num_tiles, hidden), dtype=torch.float32, device=device)
    piece, rows, _ = COLUMN_SHAPES[wire.name]
    column_blocks = -(-hidden // (COLUMN_LANES * piece))
    cuda_kernels.launch(
        "to_fp8_columns",
        _column_options(wire),
        num_tiles * column_blocks,
        (COLUMN_LANES * TILE_ROWS // rows, 1),
        (payload, scales, sources, tiles, tiles[num_tiles + 1 :], out, out_scales),
        "qiI",
        num_out,
        hidden,
        num_tiles,
    )
    return out.view(torch.float8_e4m3fn), out_scales


def row_dots(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    expert_out: torch.Tensor,
    layout: ExpertLayout,
) -> torch.Tensor:
    """Multiply each expert row by its wire row.  See `cpu.row_dots`."""
    num_rows, device = layout.num_expert_rows, payload.device
    out = torch.empty(num_rows, dtype=torch.float32, device=device)
    cuda_kernels.launch(
        "row_dots",
        wire_options(wire),
        -(-num_rows // DOT_WARPS),
        (32 * DOT_WARPS, 1),
        (payload, scales, expert_out, layout.row_source, out),
        "qi",
        num_rows,
        hidden,
    )
    return out


def weighted_reduce(
    expert_out: torch.Tensor,
    layout: ExpertLayout,
    wire: WireFormat,
    *,
    weighted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the expert outputs of each wire row and pack the sums.  See `cpu.weighted_reduce`."""
    hidden, device = expert_out.shape[1], expert_out.device
    num_rows, num_slots = layout.slot_rows.shape
    payload, scales = empty_rows(num_rows, wire, hidden, device)
    weights = layout.weights if weighted else None
    _launch_rows(
        "weighted_reduce",
        wire_options(wire),
        (num_rows, hidden),
        (expert_out, layout.slot_rows, weights, payload, scales),
        "qiiii",
        num_rows,
        num_slots,
        hidden,
        CHUNKS,
        wire.scale_round,
    )
    return payload, scales


def final_reduce(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    plan: RoutePlan,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum each token's wire rows by ascending rank.  See `cpu.final_reduce`."""
    if out is None:
        shape = plan.num_tokens, hidden
        out = torch.empty(shape, dtype=torch.bfloat16, device=payload.device)
    _launch_rows(
        "final_reduce",
        wire_options(wire),
        (plan.num_tokens, hidden),
        (payload, scales, plan.place_offsets, plan.places, out),
        "qii",
        plan.num_tokens,
        hidden,
        CHUNKS,
    )
    return out


def relay_reduce(
    payload: torch.Tensor, scales: torch.Tensor, wire: WireFormat, hidden: int, plan: RelayPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum each token's wire rows to a wire row.  See `cpu.relay_reduce`."""
    out, out_scales = empty_rows(plan.num_tokens, wire, hidden, payload.device)
    _launch_rows(
        "relay_reduce",
        wire_options(wire),
        (plan.num_tokens, hidden),
        (payload, scales, plan.place_offsets, plan.places, out, out_scales),
        "qiii",
        plan.num_tokens,
        hidden,
        CHUNKS,
        wire.scale_round,
    )
    return out, out_scales


@functools.cache
def wire_options(wire: WireFormat, **more: str | int) -> cuda_kernels.Options:
    """Options of a kernel's compiler: the wire format, and what else the kernel wants to know."""
    names = {"WIRE": f"WIRE_{wire.name.upper()}", "CLIPS": int(wire.scale_rule == "floor"), **more}
    return tuple(f"-D{name}={value}" for name, value in names.items())


@functools.cache
def _shape(
    name: str, options: cuda_kernels.Options, is_many: bool
) -> tuple[Shape, cuda_kernels.Options]:
    """The shape of a kernel compiled with these options, for many rows, and all its options."""
    fits = [key for key in SHAPES if key[0] == name and set(key[1:]) <= set(options)]
    shape = SHAPES[max(fits, key=len)]
    if is_many and shape.many is not None:
        shape = shape.many
    return shape, (*options, *shape.options())


def variants() -> list[tuple[str, cuda_kernels.Options]]:
    """Every kernel with every set of options that it is launched with."""
    found: dict[tuple[str, cuda_kernels.Options], None] = {}

    def add(name: str, wire: WireFormat, **more: str | int) -> None:
        options = wire_options(wire, **more)
        for is_many in (False, True):
            found[name, _shape(name, options, is_many)[1]] = None

    for wire_format in FORMATS.values():
        for rule in wire_format.scale_rules or (None,):
            wire = WireFormat(wire_format.name, rule)
            for scatter in (0, 1):
                for x in INPUTS.values():
                    add("quantize_rows", wire, INPUT=x, SCATTER=scatter)
            for by_column in (0, 1):
                add("to_fp8_rows", wire, COLUMN_SCALES=by_column)
            for weighted in (0, 1):
                add("to_bf16_rows", wire, WEIGHTED=weighted)
            for name in ("dequantize", "weighted_reduce", "final_reduce", "relay_reduce"):
                add(name, wire)
            found["to_fp8_columns", _column_options(wire)] = None
            found["row_dots", wire_options(wire)] = None
    return list(found)


def _column_options(wire: WireFormat) -> cuda_kernels.Options:
    piece, rows, min_blocks = COLUMN_SHAPES[wire.name]
    return wire_options(wire, LANES=COLUMN_LANES, PIECE=piece, ROWS=rows, MIN_BLOCKS=min_blocks)


def _launch_rows(
    name: str,
    options: cuda_kernels.Options,
    work: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    fields: str,
    *numbers: Any,
) -> None:
    """Launch a kernel that works on rows in pieces.

    Args:
        name: of the kernel.
        options: of its compiler, without those of its `Shape`.
        work: rows, hidden, and how many thread blocks the kernel has for other than rows.
        tensors, fields, numbers: as `cuda_kernels.launch` takes them.

    Example: 7168 elements in pieces of 32 are 224 pieces: a thread block has 7 warps, one row.
    """
    num_rows, hidden, *others = work
    if num_rows == 0:
        return
    shape, options = _shape(name, options, num_rows * hidden >= MANY)
    num_pieces = hidden // shape.piece
    if shape.block_rows:
        lanes, rows = 32, shape.block_rows // shape.unroll
    else:
        chunks = -(-num_pieces // shape.max_lanes)
        lanes = -(-num_pieces // (32 * chunks)) * 32  # whole warps a row
        rows = max(1, shape.threads // lanes)
    chunks = -(-num_pieces // lanes)
    grid = -(-num_rows // (rows * shape.unroll)) * chunks + sum(others)
    values = [chunks if number is CHUNKS else number for number in numbers]
    cuda_kernels.launch(name, options, grid, (lanes, rows), tensors, fields, *values)


def _slots(
    layout: ExpertLayout | None,
) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, torch.Tensor | None], int, int]:
    """Slots, first padding row of each expert, the row behind its last; slots, experts."""
    if layout is None:
        return None, (None, None), 1, 0
    first, last = layout.padding
    return layout.slot_rows, (first, last), layout.slot_rows.shape[1], len(layout.num_rows_list)
