"""The CPU codec: each function allocates its outputs and runs a kernel on ranges of rows.

Tensors are contiguous and on the CPU; callers have checked them.  Kernels: `cpu_kernels.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from fp4comm.codec import cpu_kernels as kernels
from fp4comm.codec import threads
from fp4comm.formats import FP8_BLOCK, TILE_ROWS, WireFormat
from fp4comm.routing import ExpertLayout, RelayPlan, RoutePlan, tile_table

KINDS = {
    "bfloat16": kernels.BFLOAT16_ROWS,
    "e4m3": kernels.E4M3_ROWS,
    "e2m1": kernels.E2M1_ROWS,
}


def quantize_rows(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    wire: WireFormat,
    plan: RoutePlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row once and write it to each of its wire rows.

    Args:
        x: ``[T, hidden]`` bfloat16 or float32, or E4M3 codes ``[T, hidden]`` with float32 scales
            ``[T, ceil(hidden / 128)]``.
        wire: format and scale rule.
        plan: which wire rows token t has; None: row t alone.

    Returns:
        payload ``[n, payload_bytes]`` and scales ``[n, scale_bytes]``, uint8.
    """
    codes, *x_scales = x if isinstance(x, tuple) else (x,)
    num_tokens, hidden = codes.shape
    if plan is None:
        place_offsets, places = _range(num_tokens + 1), _range(num_tokens)
    else:
        place_offsets, places = plan.place_offsets.numpy(), plan.places.numpy()
    payload, scales = empty_rows(len(places), wire, hidden, codes.device)
    kernel, dtype = {
        torch.bfloat16: (kernels.quantize_bf16_rows, torch.int16),
        torch.float32: (kernels.quantize_f32_rows, torch.float32),
        torch.float8_e4m3fn: (kernels.quantize_fp8_rows, torch.uint8),
    }[codes.dtype]
    threads.run(
        kernel,
        num_tokens,
        hidden * codes.element_size() + wire.row_bytes(hidden),
        codes.view(dtype).numpy(),
        *(s.numpy() for s in x_scales),
        _kind(wire),
        wire.format.block,
        wire.scale_round,
        place_offsets,
        places,
        payload.numpy(),
        scales.numpy(),
    )
    return payload, scales


def empty_rows(
    num_rows: int, wire: WireFormat, hidden: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate wire rows: payload and scales."""
    del device  # the host is one
    return (
        empty((num_rows, wire.payload_bytes(hidden)), np.uint8),
        empty((num_rows, wire.scale_bytes(hidden)), np.uint8),
    )


def rows_like(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Allocate rows as wide as these uint8 ones."""
    return empty((num_rows, rows.shape[1]), np.uint8)


def empty(shape: tuple[int, int], dtype: type[np.generic]) -> torch.Tensor:
    """Allocate by NumPy, which asks for huge pages.

    First touch of 58 MB: 6 ms against 33 ms by torch.empty.
    """
    rows = torch.from_numpy(np.empty(shape, dtype))
    return rows if rows.numel() else rows.new_empty(shape)  # NumPy's would have strides of 0


def to_fp8_rows(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
    scale_layout: str = "row",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert wire rows to FP8 rows, expert-major with zero padding where a layout is given.

    Returns:
        ``[M, hidden]`` float8_e4m3fn and ``[M, ceil(hidden / 128)]`` float32; with scale_layout
        "column" the strides of the latter are ``(1, M)``.
    """
    num_rows = payload.shape[0] if layout is None else layout.num_expert_rows
    groups = -(-hidden // FP8_BLOCK)
    out = empty((num_rows, hidden), np.uint8)
    if scale_layout == "column":
        out_scales = empty((groups, num_rows), np.float32).t()
    else:
        out_scales = empty((num_rows, groups), np.float32)
    threads.run(
        kernels.to_fp8_rows,
        payload.shape[0],
        wire.row_bytes(hidden) + hidden,
        _kind(wire),
        wire.format.block,
        wire.format.element.headroom,
        payload.numpy(),
        scales.numpy(),
        _slot_rows(layout, payload.shape[0]),
        out.numpy(),
        out_scales.numpy(),
    )
    if layout is not None:
        _fill_padding(layout, out.numpy(), out_scales.numpy())
    return out.view(torch.float8_e4m3fn), out_scales


def to_bf16_rows(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
    row_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert wire rows to ``[M, hidden]`` bfloat16, expert-major where a layout is given.

    Args:
        payload: ``[n, payload_bytes]`` uint8.
        scales: ``[n, scale_bytes]`` uint8.
        wire: their format.
        hidden: elements in a row.
        layout: where each wire row goes; None: row r to row r.
        row_weights: ``[M]`` float32 that each row is multiplied by in float32; with a layout.
    """
    num_rows = payload.shape[0] if layout is None else layout.num_expert_rows
    out = empty((num_rows, hidden), np.uint16)
    threads.run(
        kernels.to_bf16_rows,
        payload.shape[0],
        wire.row_bytes(hidden) + 2 * hidden,
        *_stored(payload, scales, wire),
        _slot_rows(layout, payload.shape[0]),
        np.empty(0, np.float32) if row_weights is None else row_weights.numpy(),
        out.numpy(),
    )
    if layout is not None:
        _fill_padding(layout, out.numpy(), np.empty((num_rows, 0), np.float32))
    return out.view(torch.bfloat16)


def dequantize(
    payload: torch.Tensor, scales: torch.Tensor, wire: WireFormat, hidden: int
) -> torch.Tensor:
    """Convert wire rows to ``[n, hidden]`` float32."""
    out = empty((payload.shape[0], hidden), np.float32)
    threads.run(
        kernels.dequantize,
        payload.shape[0],
        wire.row_bytes(hidden) + 4 * hidden,
        *_stored(payload, scales, wire),
        out.numpy(),
    )
    return out


def to_fp8_columns(
    payload: torch.Tensor,
    scales: torch.Tensor,
    wire: WireFormat,
    hidden: int,
    layout: ExpertLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert wire rows to FP8 columns: one scale for 128 expert rows of a column.

    Tiles restart at each expert: ``ceil(n_e / 128)`` each.

    Returns:
        ``[hidden, M]`` float8_e4m3fn, 0 in padding, and ``[num_tiles, hidden]`` float32.
    """
    if layout is None:
        num_rows, row_source = payload.shape[0], _range(payload.shape[0])
        tiles = tile_table(np.array([num_rows]), np.array([0, num_rows]))
    else:
        num_rows, row_source = layout.num_expert_rows, layout.row_source.numpy()
        tiles = layout.tiles.numpy()
    num_tiles = len(tiles) // 2
    out = empty((hidden, num_rows), np.uint8)
    out_scales = empty((num_tiles, hidden), np.float32)
    threads.run(
        kernels.to_fp8_columns,
        num_tiles,
        TILE_ROWS * (wire.row_bytes(hidden) + hidden),
        _kind(wire),
        wire.format.block,
        wire.format.element.headroom,
        payload.numpy(),
        scales.numpy(),
        tiles[: num_tiles + 1],
        tiles[num_tiles + 1 :],
        row_source,
        out.numpy(),
        out_scales.numpy(),
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
    """Multiply each expert row by its wire row: the gradient of the row's weight.

    Args:
        payload: ``[n, payload_bytes]`` uint8.
        scales: ``[n, scale_bytes]`` uint8.
        wire: their format.
        hidden: elements in a row.
        expert_out: ``[M, hidden]`` bfloat16.
        layout: which expert rows a wire row has.

    Returns:
        ``[M]`` float32 dot products, summed as `reference.row_dots` says; 0 in padding.
    """
    out = torch.zeros(layout.num_expert_rows, dtype=torch.float32)
    threads.run(
        kernels.row_dots,
        payload.shape[0],
        wire.row_bytes(hidden) + 2 * hidden,
        *_stored(payload, scales, wire),
        expert_out.view(torch.int16).numpy(),
        layout.slot_rows.numpy(),
        out.numpy(),
    )
    return out


def weighted_reduce(
    expert_out: torch.Tensor, layout: ExpertLayout, wire: WireFormat, *, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the expert outputs of each wire row in float32 by ascending slot, and pack the sums.

    Args:
        expert_out: ``[M, hidden]`` bfloat16, expert-major; padding is not read.
        layout: slots and weights of the wire rows.
        wire: combine's format.
        weighted: multiply by the slots' weights first.

    Returns:
        payload and scales of ``n`` wire rows, in the order they arrived.
    """
    hidden = expert_out.shape[1]
    slot_rows = layout.slot_rows.numpy()
    payload, scales = empty_rows(len(slot_rows), wire, hidden, expert_out.device)
    use_weights = weighted and layout.weights is not None
    weights = layout.weights if use_weights else torch.empty((0, 0))
    assert weights is not None
    threads.run(
        kernels.weighted_reduce,
        len(slot_rows),
        2 * hidden + wire.row_bytes(hidden),
        expert_out.view(torch.int16).numpy(),
        slot_rows,
        weights.numpy(),
        _kind(wire),
        wire.format.block,
        wire.scale_round,
        payload.numpy(),
        scales.numpy(),
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
    """Sum each token's wire rows in float32 by ascending rank: ``[T, hidden]`` bfloat16.

    Args:
        payload: ``[n, payload_bytes]`` uint8.
        scales: ``[n, scale_bytes]`` uint8.
        wire: their format.
        hidden: elements in a row.
        plan: which wire rows a token has.
        out: what is written and returned; None: a new one.
    """
    if out is None:
        out = empty((plan.num_tokens, hidden), np.uint16).view(torch.bfloat16)
    threads.run(
        kernels.final_reduce,
        plan.num_tokens,
        2 * hidden + wire.row_bytes(hidden),
        *_stored(payload, scales, wire),
        plan.place_offsets.numpy(),
        plan.places.numpy(),
        out.view(torch.uint16).numpy(),
    )
    return out


def relay_reduce(
    payload: torch.Tensor, scales: torch.Tensor, wire: WireFormat, hidden: int, plan: RelayPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum each token's wire rows as `final_reduce` does, to a wire row of the same format.

    Returns:
        payload and scales of ``plan.num_tokens`` wire rows.
    """
    out, out_scales = empty_rows(plan.num_tokens, wire, hidden, payload.device)
    threads.run(
        kernels.relay_reduce,
        plan.num_tokens,
        2 * wire.row_bytes(hidden),
        hidden,
        _kind(wire),
        wire.format.block,
        wire.scale_round,
        payload.numpy(),
        scales.numpy(),
        plan.place_offsets.numpy(),
        plan.places.numpy(),
        out.numpy(),
        out_scales.numpy(),
    )
    return out, out_scales


def _kind(wire: WireFormat) -> int:
    return KINDS[wire.format.element.name]


def _stored(
    payload: torch.Tensor, scales: torch.Tensor, wire: WireFormat
) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Wire rows as kernels take them: kind, elements of a block, codes, scales."""
    return _kind(wire), wire.format.block, payload.numpy(), scales.numpy()


def _range(stop: int) -> np.ndarray:
    return np.arange(stop, dtype=np.int32)


def _slot_rows(layout: ExpertLayout | None, num_rows: int) -> np.ndarray:
    return _range(num_rows)[:, None] if layout is None else layout.slot_rows.numpy()


def _fill_padding(layout: ExpertLayout, out: np.ndarray, out_scales: np.ndarray) -> None:
    offsets, live = layout.expert_offsets_array, np.array(layout.num_rows_list, np.int64)
    padding = int(offsets[-1] - live.sum())
    row_bytes = padding * out.shape[1] * out.itemsize // max(len(live), 1)
    threads.run(kernels.fill_padding, len(live), row_bytes, live, offsets, out, out_scales)
