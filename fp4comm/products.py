"""Products of expert rows and expert weights, expert by expert: in FP8 on Hopper, else in float32.

An operand is a set of rows in a wire format, and a layout if those are still wire rows.  Three
products make an expert layer and its backward:

    rows_times_weights      rows [M, in],  weights [E, out, in]  ->  [M, out]
    weight_gradients        grad [M, out], rows [M, in]          ->  [E, out, in]

the third being the first with transposed weights.  FP8 products take E4M3 with power-of-two scales:
of rows one per 128 elements, of weights one per 128 x 128, and for weight gradients one per 128
rows of a column, see `PackedRows.to_fp8_columns`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from fp4comm.formats import E4M3, FP8_BLOCK, TILE_ROWS, WireFormat
from fp4comm.packed import PackedRows
from fp4comm.routing import ExpertLayout

HOPPER = 9  # major compute capability: the one whose cuBLAS has these block scales
MIN_CUDA = (12, 9)  # of that cuBLAS


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """Rows in a wire format; with a layout wire rows, which it expands to expert rows."""

    packed: PackedRows
    layout: ExpertLayout | None = None

    @staticmethod
    def of(rows: torch.Tensor) -> Operand:
        """Take expert rows ``[M, width]``, which become bfloat16."""
        payload = rows.to(torch.bfloat16).resolve_neg().contiguous().view(torch.uint8)
        scales = payload.new_empty((len(payload), 0))
        return Operand(PackedRows(payload, scales, WireFormat("bf16"), rows.shape[1]))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What it consists of."""
        return self.packed.payload, self.packed.scales

    def replaced(self, payload: torch.Tensor, scales: torch.Tensor) -> Operand:
        """Make it of other tensors."""
        packed = dataclasses.replace(self.packed, payload=payload, scales=scales)
        return dataclasses.replace(self, packed=packed)


class Products(Protocol):
    """One way to multiply; ``layout`` says which rows are an expert's."""

    def rows_times_weights(
        self, rows: Operand, weights: torch.Tensor, layout: ExpertLayout
    ) -> torch.Tensor:
        """Multiply each expert's rows by its weights, ``[M, in]`` and ``[E, out, in]``.

        Returns:
            ``[M, out]`` bfloat16 or float32, 0 in padding.
        """
        ...

    def weight_gradients(
        self, grad: Operand, rows: Operand, layout: ExpertLayout
    ) -> Iterator[torch.Tensor | None]:
        """Multiply the transpose of each expert's ``[M, out]`` by its ``[M, in]``.

        Returns:
            ``[out, in]`` float32 of each expert; None for one without rows.
        """
        ...


def of(device: torch.device, widths: tuple[int, ...], expert_alignment: int) -> Products:
    """Choose: FP8 where the device has it and all widths and segments are multiples of 128."""
    fits = all(width % FP8_BLOCK == 0 for width in widths) and expert_alignment % TILE_ROWS == 0
    return Fp8Products() if fits and _has_fp8(device) else Float32Products()


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda" or not hasattr(F, "scaled_mm") or torch.version.cuda is None:
        return False
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return version >= MIN_CUDA and torch.cuda.get_device_capability(device)[0] == HOPPER


class Float32Products:
    """Products in float32 of what the rows stand for."""

    def rows_times_weights(
        self, rows: Operand, weights: torch.Tensor, layout: ExpertLayout
    ) -> torch.Tensor:
        """See `Products`."""
        values = _values(rows)
        out = values.new_zeros((layout.num_expert_rows, weights.shape[1]))
        for expert, live in _live_rows(layout):
            torch.mm(values[live], weights[expert].float().t(), out=out[live])
        return out

    def weight_gradients(
        self, grad: Operand, rows: Operand, layout: ExpertLayout
    ) -> Iterator[torch.Tensor | None]:
        """See `Products`."""
        grads, values = _values(grad), _values(rows)
        segments = dict(_live_rows(layout))
        for expert in range(len(layout.num_rows_list)):
            live = segments.get(expert)
            yield None if live is None else grads[live].t() @ values[live]


class Fp8Products:
    """Products of E4M3 by `torch.nn.functional.scaled_mm`, summed in float32."""

    def rows_times_weights(
        self, rows: Operand, weights: torch.Tensor, layout: ExpertLayout
    ) -> torch.Tensor:
        """See `Products`; bfloat16.

        Padding is multiplied with an expert's rows: it is zero, and the results fit together.
        """
        codes, scales = rows.packed.to_fp8_rows(rows.layout, "column")
        weight_codes, weight_scales = block_codes(weights)
        sizes = np.diff(layout.expert_offsets_array).tolist()
        parts = zip(
            codes.split(sizes),
            weight_codes.transpose(1, 2).unbind(),
            _segments(scales, layout, sizes),
            weight_scales.transpose(1, 2).unbind(),
            strict=True,
        )
        found = [
            F.scaled_mm(
                of_rows,
                of_weights,
                row_scales,
                F.ScalingType.BlockWise1x128,
                scales_of_weights,
                F.ScalingType.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )
            for of_rows, of_weights, row_scales, scales_of_weights in parts
            if len(of_rows)
        ]
        nothing = torch.empty((0, weights.shape[1]), dtype=torch.bfloat16, device=codes.device)
        return torch.cat(found or [nothing])

    def weight_gradients(
        self, grad: Operand, rows: Operand, layout: ExpertLayout
    ) -> Iterator[torch.Tensor | None]:
        """See `Products`."""
        grads, grad_scales = grad.packed.to_fp8_columns(grad.layout)
        values, scales = rows.packed.to_fp8_columns(rows.layout)
        segments = dict(_live_rows(layout, TILE_ROWS))
        grad_tiles, row_tiles = _first_tiles(grad, layout), _first_tiles(rows, layout)
        for expert in range(len(layout.num_rows_list)):
            live = segments.get(expert)
            if live is None:
                yield None
                continue
            num_tiles = (live.stop - live.start) // TILE_ROWS
            yield F.scaled_mm(
                grads[:, live],
                values[:, live].t(),
                grad_scales.narrow(0, grad_tiles[expert], num_tiles).t(),
                F.ScalingType.BlockWise1x128,
                scales.narrow(0, row_tiles[expert], num_tiles).t(),
                F.ScalingType.BlockWise1x128,
                output_dtype=torch.float32,
            )


def block_codes(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights to E4M3 with one power-of-two scale for 128 x 128, which never clips.

    Args:
        weights: ``[E, out, in]``, any float, any strides; widths multiples of 128.

    Returns:
        ``[E, out, in]`` float8_e4m3fn, and ``[E, out / 128, in / 128 rounded up to 4]`` float32, as
        scaled_mm wants them.
    """
    tiled = weights.float().unflatten(1, (-1, FP8_BLOCK)).unflatten(3, (-1, FP8_BLOCK))
    amax = tiled.abs().amax(dim=(2, 4), keepdim=True)
    mantissa, exponent = torch.frexp(amax / E4M3.largest)  # mantissa in [0.5, 1), or amax is 0
    exponent = torch.where(mantissa <= 0.5, exponent - 1, exponent).clamp(min=-126)
    scales = torch.ldexp(torch.ones_like(amax), exponent)
    codes = (tiled / scales).to(torch.float8_e4m3fn).flatten(3, 4).flatten(1, 2).contiguous()
    scales = scales.view(scales.shape[0], scales.shape[1], scales.shape[3])
    return codes, F.pad(scales, (0, -scales.shape[2] % 4))


def _values(operand: Operand) -> torch.Tensor:
    """Expert rows in float32."""
    return operand.packed.to_bf16(operand.layout).float()  # exact: no wire has more bits


def _live_rows(layout: ExpertLayout, multiple: int = 1) -> Iterator[tuple[int, slice]]:
    """Each expert with rows, and those; rounded up to a multiple, of which its segment is one."""
    for expert, num_rows in enumerate(layout.num_rows_list):
        if num_rows:
            start = int(layout.expert_offsets_array[expert])
            yield expert, slice(start, start - (-num_rows // multiple) * multiple)


def _first_tiles(operand: Operand, layout: ExpertLayout) -> list[int]:
    """First tile of each expert in FP8 columns: those of a layout restart at each expert."""
    if operand.layout is None:
        return (layout.expert_offsets_array // TILE_ROWS).tolist()
    tiles = -(-np.array(layout.num_rows_list, np.int64) // TILE_ROWS)
    return (np.cumsum(tiles) - tiles).tolist()


def _segments(
    scales: torch.Tensor, layout: ExpertLayout, sizes: list[int]
) -> Iterator[torch.Tensor]:
    """Copy scales, so that those of each segment have strides ``(1, rows)``: all in one pass."""
    num_rows, groups = scales.shape
    offsets = layout.expert_offsets
    counts = offsets.diff()
    of_row = counts.repeat_interleave(counts, output_size=num_rows)
    first = offsets[:-1].repeat_interleave(counts, output_size=num_rows)
    places = first * (groups - 1) + torch.arange(num_rows, device=scales.device)
    group = torch.arange(groups, device=scales.device)[:, None]
    packed = torch.empty(num_rows * groups, device=scales.device)
    packed.scatter_(0, torch.addcmul(places, group, of_row).flatten(), scales.t().flatten())
    parts = packed.split([groups * size for size in sizes])
    return (part.view(groups, -1).t() for part in parts)
