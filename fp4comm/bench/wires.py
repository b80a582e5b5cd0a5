"""Wire formats that the command line names: what a round trip travels in and arrives as."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

from fp4comm import check
from fp4comm.all_to_all import ARRIVALS
from fp4comm.formats import FORMATS, WireFormat

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Wires:
    """Wire formats of round trips to measure or predict.

    Args:
        wires: dispatch wire formats.
        combine: combine wire format, or ``"same"`` as dispatch.
        arrive: as `AllToAll` takes it.
    """

    wires: tuple[str, ...]
    combine: str = "bf16"
    arrive: str = "fp8"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not self.wires:
            raise ValueError("wire: expected at least one wire format, got none")
        for wire in self.wires:
            WireFormat.of(wire)
            self.combine_of(wire)
        check.one_of("arrive", self.arrive, ARRIVALS)

    def combine_of(self, wire: str) -> WireFormat:
        """Combine wire format that goes with a dispatch wire format."""
        return WireFormat.of(wire if self.combine == "same" else self.combine, "combine")


def separated(texts: Iterable[str], value: Callable[[str], Value]) -> tuple[Value, ...]:
    """Take the values of an option that may be repeated or hold several between commas; each once.

    Args:
        texts: as they were given.
        value: makes one of a text.

    Example:
        >>> separated(["bf16,fp8", "mxfp4", "fp8"], str)
        ('bf16', 'fp8', 'mxfp4')
        >>> separated(["128,0128"], int)
        (128,)
    """
    return tuple(dict.fromkeys(value(part) for text in texts for part in text.split(",")))


def wires_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Take the values of ``--wire``; all wire formats if there are none."""
    return separated(texts, str) or tuple(FORMATS)
