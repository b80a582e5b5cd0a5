"""What a benchmark is to measure, and how."""

from __future__ import annotations

import dataclasses

from fp4comm import check, hops
from fp4comm.bench.rows import ALSO, check_counts
from fp4comm.bench.wires import Wires
from fp4comm.topology import DEVICES


@dataclasses.dataclass(frozen=True)
class Settings(Wires):
    """What to measure.

    Args:
        alignment: ``expert_alignment``.
        warmup: untimed calls first, at least 1: the first one compiles.
        iterations: timed calls.
        check_all: check the contents of all rows, not of a sample.
        timeout_s: as `AllToAll` takes it.
        device: ``"cpu"``, or ``"cuda"``: the device that is current on each rank.
        plain: also measure the plain all-to-all of BF16 rows.
        routes: as `AllToAll` takes them, in turn.
        ranks_per_node: likewise; for the bytes across nodes too.
        also: operations besides dispatch and combine: ``"round_trip"``, ``"overlap"``.
    """

    alignment: int = 128
    warmup: int = 5
    iterations: int = 20
    check_all: bool = False
    timeout_s: float = 300.0
    device: str = "cpu"
    plain: bool = False
    routes: tuple[str, ...] = ("flat",)
    ranks_per_node: int | None = None
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if not self.routes:
            raise ValueError("route: expected at least one route, got none")
        for route in self.routes:
            check.one_of("route", route, hops.ROUTES)
        for op in self.also:
            check.one_of("also", op, ALSO)
        check.positive_int("alignment", self.alignment)
        check.one_of("device", self.device, DEVICES)
        check_counts(self.warmup, self.iterations)
