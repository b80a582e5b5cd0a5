"""Wire formats: what a row looks like in transit.  Every fact of a format is written here once.

Sources: OCP Microscaling Formats (MX) v1.0 for E2M1, E8M0, the 32-blocks and the "floor" rule
(6.3); OCP 8-bit Floating Point v1.0 for E4M3FN; NVIDIA cuBLAS (RCEIL) for "ceil"; arXiv 2603.08713
for "even".
"""

from __future__ import annotations

import dataclasses

import numpy as np

MX_BLOCK = 32  # elements under one E8M0 scale
FP8_BLOCK = 128  # elements under one scale of an FP8 row
TILE_ROWS = 128  # expert rows under one scale of an FP8 column
DOT_LANES = 256  # partial sums of a dot product of two rows; a power of two


@dataclasses.dataclass(frozen=True)
class Element:
    """A number format of one element: sign, exponent and mantissa bits."""

    name: str
    bits: int
    mantissa_bits: int
    bias: int
    emax: int  # exponent of the largest value
    largest: float
    headroom: int  # h of the arrival rule: FP8 scale exponent = largest block exponent - h


# E2M1: sign, 2 exponent bits, 1 mantissa bit, bias 1; no Inf, no NaN.  OCP MX v1.0, 5.3.3.
# As E4M3 it has room for 6 more binades: 6 * 2**6 = 384 <= 448.
E2M1 = Element("e2m1", bits=4, mantissa_bits=1, bias=1, emax=2, largest=6.0, headroom=6)
E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # code | 8 negates

# E4M3FN: sign, 4 exponent bits, 3 mantissa bits, bias 7; no Inf; 0x7F and 0xFF are NaN.
E4M3 = Element("e4m3", bits=8, mantissa_bits=3, bias=7, emax=8, largest=448.0, headroom=0)
E4M3_NAN = 0x7F  # the one NaN that is written
E4M3_MAX = 0x7E  # 448

BFLOAT16 = Element(
    "bfloat16", bits=16, mantissa_bits=7, bias=127, emax=127, largest=3.39e38, headroom=0
)
BF16_NAN = 0x7FC0  # the one NaN that is written
F32_NAN = 0x7FC00000

# E8M0: byte b is 2**(b - 127) for 0..254, 0xFF is NaN; no zero, no Inf.  OCP MX v1.0, 5.4.1.
E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_MAX = 254
E2M1_SCALE_MAX = 252  # 6 * 2**125 is the largest finite product; a larger byte could decode to Inf

# Scale rules.  With the abs-max of a block as float32 bits, its scale byte is
#   clamp(((amax_bits + SCALE_ROUND[element, rule]) >> 23) - emax, 0, largest byte)
# and 0xFF for NaN and Inf: the addend carries into the exponent from some mantissa on.
SCALE_ROUND = {
    ("e2m1", "floor"): 0,  # scaled abs-max in [4, 8): clips up to 25 %
    ("e2m1", "even"): 0x200000,  # carries from 1.75 on: [3.5, 7), clips at most 14 %
    ("e2m1", "ceil"): 0x3FFFFF,  # carries above 1.5: (3, 6], never clips
    ("e4m3", "floor"): 0,  # [256, 512): clips up to 12.5 %
    ("e4m3", "ceil"): 0x1FFFFF,  # carries above 1.75: (224, 448], never clips
}


@dataclasses.dataclass(frozen=True)
class Format:
    """One line of the table: elements, block and scale of a wire format."""

    name: str
    element: Element
    block: int  # elements under one scale; 0 = no scales
    scale_rules: tuple[str, ...] = ()  # the first is the default
    largest_scale: int = E8M0_MAX  # largest scale byte that is made

    def num_blocks(self, hidden: int) -> int:
        """Scales in a row of `hidden` elements; the last block may be short."""
        return -(-hidden // self.block) if self.block else 0

    def payload_bytes(self, hidden: int) -> int:
        """Bytes of element codes in a row."""
        return hidden * self.element.bits // 8

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of scales in a row: E8M0."""
        return self.num_blocks(hidden)

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row on the wire, without the route."""
        return self.payload_bytes(hidden) + self.scale_bytes(hidden)


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", BFLOAT16, block=0),
        Format("fp8", E4M3, FP8_BLOCK, ("ceil", "floor")),
        Format("mxfp8", E4M3, MX_BLOCK, ("ceil", "floor")),
        Format("mxfp4", E2M1, MX_BLOCK, ("even", "ceil", "floor"), largest_scale=E2M1_SCALE_MAX),
    )
}


def fp8_row_bytes(hidden: int) -> int:
    """Bytes of an FP8 row: codes, and a float32 scale for each 128 of them.

    Example:
        >>> fp8_row_bytes(160)
        168
    """
    return hidden + 4 * -(-hidden // FP8_BLOCK)


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """A wire format with its options, as `Precision` and `quantize` take it.

    Args:
        name: ``"bf16"``, ``"fp8"`` (E4M3, one E8M0 scale per 128), ``"mxfp8"`` (E4M3, one per 32)
            or ``"mxfp4"`` (E2M1, one per 32).
        scale_rule: how the abs-max of a block becomes its power-of-two scale: ``"floor"`` (OCP
            6.3), ``"ceil"`` (never clips) or, for E2M1, ``"even"``; None takes the format's default
            (``"even"`` for mxfp4, ``"ceil"`` for fp8 and mxfp8).

    Raises:
        ValueError: unknown name, or a rule that the format does not have.

    Example:
        >>> WireFormat("mxfp4").row_bytes(7168)
        3808
    """

    name: str
    scale_rule: str | None = None

    def __post_init__(self) -> None:
        """Check the name and fill in the default rule."""
        _check_name("name", self.name, "a name")
        rules = FORMATS[self.name].scale_rules
        if self.scale_rule is None and rules:
            object.__setattr__(self, "scale_rule", rules[0])
        elif self.scale_rule is not None and self.scale_rule not in rules:
            expected = f"one of {', '.join(rules)}" if rules else "None"
            raise ValueError(
                f"scale_rule: expected {expected} for {self.name}, got {self.scale_rule!r}"
            )

    @staticmethod
    def of(wire: WireFormat | str, argument: str = "wire") -> WireFormat:
        """Take a name or a WireFormat, which an error text calls ``argument``."""
        if isinstance(wire, WireFormat):
            return wire
        _check_name(argument, wire, "a name or a WireFormat")
        return WireFormat(wire)

    @property
    def format(self) -> Format:
        """The table's line."""
        return FORMATS[self.name]

    @property
    def scale_round(self) -> int:
        """The addend of the scale rule; 0 where there are no scales."""
        return SCALE_ROUND.get((self.format.element.name, self.scale_rule or ""), 0)

    def payload_bytes(self, hidden: int) -> int:
        """Bytes of element codes in a row."""
        return self.format.payload_bytes(hidden)

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of scales in a row."""
        return self.format.scale_bytes(hidden)

    def row_bytes(self, hidden: int) -> int:
        """Bytes of a row on the wire, without the route."""
        return self.format.row_bytes(hidden)


def _check_name(argument: str, name: str, expected: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected {expected}, got {type(name).__name__}")
    if name not in FORMATS:
        raise ValueError(f"{argument}: expected one of {', '.join(FORMATS)}, got {name!r}")
