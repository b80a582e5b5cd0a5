"""PackedRows: rows in a wire format, as they travel and as they are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fp4comm import check, codec
from fp4comm.formats import WireFormat
from fp4comm.routing import ExpertLayout

SCALE_LAYOUTS = ("row", "column")


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows in a wire format: codes and scales, no weights.

    Attributes:
        payload: ``[n, payload_bytes]`` uint8 element codes; two E2M1 codes a byte, the even element
            in the low nibble.
        scales: ``[n, scale_bytes]`` uint8, one E8M0 byte a block: 2**(byte - 127), 0xFF is NaN.
            No columns for bf16.
        format: the `WireFormat`.
        hidden: elements in a row.

    Raises:
        ValueError: shapes do not fit format and hidden, or the devices differ.
        TypeError: payload or scales are not uint8 tensors.

    Source: OCP MX v1.0.
    """

    payload: torch.Tensor
    scales: torch.Tensor
    format: WireFormat
    hidden: int

    def __post_init__(self) -> None:
        """Check that the parts fit."""
        wire = WireFormat.of(self.format, "format")
        object.__setattr__(self, "format", wire)
        check.hidden(self.hidden)
        widths = {
            "payload": wire.payload_bytes(self.hidden),
            "scales": wire.scale_bytes(self.hidden),
        }
        for name, width in widths.items():
            part = getattr(self, name)
            if not isinstance(part, torch.Tensor) or part.dtype != torch.uint8:
                got = part.dtype if isinstance(part, torch.Tensor) else type(part).__name__
                raise TypeError(f"{name}: expected a uint8 tensor, got {got}")
            num_rows = self.payload.shape[0] if self.payload.dim() else 0
            if part.shape != (num_rows, width):
                raise ValueError(
                    f"{name}: expected shape [{num_rows}, {width}] ({wire.name}, hidden"
                    f" {self.hidden}), got {list(part.shape)}"
                )
            if not part.is_contiguous():
                object.__setattr__(self, name, part.contiguous())
        if self.payload.device != self.scales.device:
            raise ValueError(
                f"scales: expected on {self.payload.device} as payload, got {self.scales.device}"
            )

    def __len__(self) -> int:
        """Count the rows."""
        return self.payload.shape[0]

    def to_bf16(self, layout: ExpertLayout | None = None) -> torch.Tensor:
        """Dequantize to bfloat16, ties to even; a NaN is 0x7FC0.

        Args:
            layout: `Handle.layout`: gives expert-major rows ``[M, hidden]``, zero in padding; None:
                the rows in order, ``[n, hidden]``.

        Raises:
            ValueError: a layout made for another number of rows, or on another device.
        """
        return self._codec().to_bf16_rows(*self._placed(layout))

    def to_float32(self) -> torch.Tensor:
        """Dequantize to ``[n, hidden]`` float32: code times scale; a NaN is 0x7FC00000."""
        return self._codec().dequantize(self.payload, self.scales, self.format, self.hidden)

    def to_fp8_rows(
        self, layout: ExpertLayout | None = None, scale_layout: str = "row"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert to E4M3 rows with one float32 power-of-two scale per 128, without a BF16 step.

        The FP8 scale is 2**(S - 127) with S the largest scale byte of the group less the headroom
        of the element (6 for E2M1), at least 1.  E2M1 is exact while the exponents of a group
        differ by at most 14; beyond, codes are rounded to nearest even into E4M3 subnormals.

        Args:
            layout: `Handle.layout`: gives expert-major rows, zero padding with scale 1; None: the
                rows in order.
            scale_layout: ``"row"``, or ``"column"``: M-major strides ``(1, M)``, as Hopper GEMMs
                read it.

        Returns:
            ``[M, hidden]`` float8_e4m3fn and ``[M, ceil(hidden / 128)]`` float32.

        Raises:
            ValueError: unknown scale layout, or a layout made for another number of rows or device.
        """
        check.one_of("scale_layout", scale_layout, SCALE_LAYOUTS)
        return self._codec().to_fp8_rows(*self._placed(layout), scale_layout)

    def to_fp8_columns(
        self, layout: ExpertLayout | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert to E4M3 columns, the operand of the weight gradient, by the same rule.

        Args:
            layout: as for `to_fp8_rows`.

        Returns:
            ``[hidden, M]`` float8_e4m3fn, 0 in padding, and ``[tiles, hidden]`` float32: one scale
            for 128 expert rows of a column; tiles restart at each expert, ``ceil(n_e / 128)`` each.

        Raises:
            ValueError: a layout made for another number of rows, or on another device.
        """
        return self._codec().to_fp8_columns(*self._placed(layout))

    def expand(self, layout: ExpertLayout) -> PackedRows:
        """Copy the rows to expert-major order, still packed; padding rows are zero bytes.

        Raises:
            ValueError: a layout made for another number of rows, or on another device.
        """
        check.layout(layout, len(self), self.payload.device)
        source, padding = layout.row_source.clamp(min=0), layout.row_source.unsqueeze(1) < 0

        def expanded(part: torch.Tensor) -> torch.Tensor:
            return part.index_select(0, source).masked_fill_(padding, 0)

        return dataclasses.replace(
            self, payload=expanded(self.payload), scales=expanded(self.scales)
        )

    def _codec(self) -> Any:
        return codec.of(self.payload.device)

    def _placed(self, layout: ExpertLayout | None) -> tuple[Any, ...]:
        """Arguments of a conversion; the layout is checked."""
        if layout is not None:
            check.layout(layout, len(self), self.payload.device)
        return self.payload, self.scales, self.format, self.hidden, layout


def quantize(
    x: Any, wire: WireFormat | str = "mxfp4", *, scale_rule: str | None = None
) -> PackedRows:
    """Quantize rows to a wire format.

    Args:
        x: ``[n, hidden]`` bfloat16 or float32, or a pair of float8_e4m3fn codes ``[n, hidden]`` and
            float32 scales ``[n, ceil(hidden / 128)]``; hidden a multiple of 32; any strides; not
            differentiated through.
        wire: a name (``"bf16"``, ``"fp8"``, ``"mxfp8"``, ``"mxfp4"``) or a `WireFormat`.
        scale_rule: ``"floor"``, ``"ceil"`` or ``"even"``; None takes the format's own.

    Returns:
        `PackedRows` on x's device.  A block of zeros has scale byte 0; a block with a NaN or an Inf
        has 0xFF and decodes to NaN.

    Raises:
        TypeError: x is of another dtype.
        ValueError: shape, format or rule do not fit.

    Source: OCP MX v1.0, 6.3, for "floor"; NVIDIA's RCEIL for "ceil"; arXiv 2603.08713 for "even".

    Example:
        >>> import torch
        >>> packed = quantize(torch.tensor([[1.0] * 31 + [6.0]]), "mxfp4")
        >>> packed.scales.tolist(), hex(packed.payload[0, 15])
        ([[127]], '0x72')
    """
    wire = WireFormat.of(wire)
    if scale_rule is not None:
        wire = dataclasses.replace(wire, scale_rule=scale_rule)
    tensors = x if isinstance(x, (tuple, list)) else (x,)
    check.no_gradient("x", *tensors, reason="quantize is not differentiable")
    rows = check.rows_or_pair("x", x, (torch.bfloat16, torch.float32))
    codes = check.codes(rows)
    payload, scales = codec.of(codes.device).quantize_rows(rows, wire)
    return PackedRows(payload, scales, wire, codes.shape[1])
