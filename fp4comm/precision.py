"""Precision: which wire format each pass and direction uses."""

from __future__ import annotations

import dataclasses

from fp4comm.formats import WireFormat


@dataclasses.dataclass(frozen=True)
class Precision:
    """The wire format of each pass and direction; a field takes a name or a `WireFormat`.

    Args:
        dispatch: tokens to experts.  4 bits are tolerated here.
        combine: expert outputs back.  BF16 unless opted into.
        dispatch_grad: dispatch's backward.
        combine_grad: combine's backward.

    Raises:
        ValueError: unknown format or scale rule.
        TypeError: a field is neither a name nor a `WireFormat`.

    Example:
        >>> Precision(dispatch=WireFormat("mxfp4", scale_rule="ceil")).combine.name
        'bf16'
    """

    dispatch: WireFormat | str = "mxfp4"
    combine: WireFormat | str = "bf16"
    dispatch_grad: WireFormat | str = "bf16"
    combine_grad: WireFormat | str = "fp8"

    def __post_init__(self) -> None:
        """Turn names into formats."""
        for field in dataclasses.fields(self):
            wire = WireFormat.of(getattr(self, field.name), field.name)
            object.__setattr__(self, field.name, wire)
