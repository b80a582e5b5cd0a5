"""Rows of a benchmark and the formulas behind them, all of them pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fp4comm.formats import WireFormat
from fp4comm.routing import route_slot_bytes

RELAY = "relay"  # of the two-hop route alone
PARTS = {  # of a call, as AllToAll.timings names them
    "dispatch": ("plan", "counts", "quantize", "exchange", RELAY, "arrive"),
    "combine": ("reduce", "exchange", RELAY),
}
ROUND_TRIP, OVERLAP = "round_trip", "overlap"
ALSO = (ROUND_TRIP, OVERLAP)  # operations that are measured if wanted


def check_counts(warmup: int, iterations: int) -> None:
    """Refuse to measure cold."""
    if warmup < 1:
        raise ValueError(
            f"warmup: expected at least 1 (the first call compiles kernels), got {warmup}"
        )
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")


# Formulas


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one operation in us: the first call apart, then the timed ones."""

    first_us: float
    median_us: float
    p90_us: float


def timing(samples_us: Sequence[float], warmup: int) -> Timing:
    """Summarize the samples: median and p90 of those after the warm-up; no mean.

    >>> timing([200000.0, 12.0, 5.0, 4.0, 4.0, 5.0], warmup=1)
    Timing(first_us=200000.0, median_us=5.0, p90_us=12.0)
    """
    check_counts(warmup, len(samples_us) - warmup)
    timed = sorted(samples_us[warmup:])
    p90 = timed[math.ceil(0.9 * len(timed)) - 1]  # nearest rank
    return Timing(samples_us[0], float(np.median(timed)), p90)


def bandwidth_gbs(num_bytes: float, time_us: float) -> float:
    """Bytes over time in GB/s = 10^9 B/s; 0 where no time passed."""
    return num_bytes / time_us / 1e3 if time_us > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes or rows of the busiest rank, the one that sends most to others.

    Attributes:
        sent: by that rank, to itself included: algbw is this over the time.
        sent_to_others: by that rank, to other ranks: busbw is this over the time.
        total: by all ranks, to themselves included.
        total_to_others: by all ranks, to other ranks.
    """

    sent: int
    sent_to_others: int
    total: int
    total_to_others: int


def traffic(matrix: npt.NDArray[np.int64]) -> Traffic:
    """Summarize what rank i sends to rank j.

    >>> traffic(np.array([[8, 12, 15, 14], [1, 0, 0, 9], [0, 0, 0, 0], [40, 2, 3, 5]]))
    Traffic(sent=50, sent_to_others=45, total=109, total_to_others=96)
    """
    rank = busiest(matrix)
    sent, own = int(matrix[rank].sum()), int(matrix[rank, rank])
    total, kept = int(matrix.sum()), int(np.trace(matrix))
    return Traffic(sent, sent - own, total, total - kept)


def busiest(matrix: npt.NDArray[np.int64]) -> int:
    """Rank that sends most to others; of several the one that sends most, to itself included.

    >>> busiest(np.array([[8, 12, 15, 14], [1, 0, 0, 9], [0, 0, 0, 0], [40, 2, 3, 5]]))
    3
    """
    sent = matrix.sum(axis=1)
    others = sent - np.diagonal(matrix)
    return max(range(len(matrix)), key=lambda rank: (others[rank], sent[rank]))


def across_nodes(matrix: npt.NDArray[np.int64], node_sizes: Sequence[int]) -> tuple[int, int]:
    """Most that a rank sends to other nodes, and most that one sends to others of its own node.

    >>> across_nodes(np.array([[8, 12, 15, 14], [1, 0, 0, 9], [0, 0, 0, 0], [40, 2, 3, 5]]), (2, 2))
    (42, 12)
    """
    nodes = np.repeat(np.arange(len(node_sizes)), node_sizes)
    is_inside = nodes[:, None] == nodes
    to_others = matrix * ~np.eye(len(matrix), dtype=bool)
    between, inside = ((to_others * part).sum(axis=1).max() for part in (~is_inside, is_inside))
    return int(between), int(inside)


def speedup(base_us: float, time_us: float) -> float:
    """How many times faster than the base: 8 ms against 2 ms is 4."""
    return base_us / time_us


def hidden_share(dispatch_us: float, product_us: float, together_us: float) -> float:
    """Share of a dispatch that a product beside it hides: 1 all of it, below 0 worse than in turn.

    >>> hidden_share(4.0, 5.0, 6.0)
    0.75
    """
    return (dispatch_us + product_us - together_us) / dispatch_us


def row_bytes(wire: WireFormat, hidden: int, num_topk: int = 0) -> int:
    """Bytes of a wire row with the route of num_topk slots: 3808 + 48 for mxfp4, 7168, top-8."""
    return wire.row_bytes(hidden) + num_topk * route_slot_bytes(weights=True)


def sqnr_db(signal: float, noise: float) -> float | None:
    """Signal to quantization noise in dB; None if there is no signal or no noise."""
    return 10 * math.log10(signal / noise) if signal > 0 and 0 < noise < math.inf else None


def verdict(num_wrong: int) -> str:
    """Say how many rows are wrong, and what that means.

    >>> verdict(0)
    'wrong rows: 0 OK'
    """
    return f"wrong rows: {num_wrong} {'FAILED' if num_wrong else 'OK'}"


# Rows


@dataclasses.dataclass(frozen=True)
class Beside:
    """The product that ran beside a dispatch, and what it hid.

    Attributes:
        size: rows and columns of its matrices.
        repeats: how many such products one after the other.
        hidden_share: of the time that the dispatch takes alone, as `hidden_share` gives it.
    """

    size: int
    repeats: int
    hidden_share: float


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one operation with one wire format.

    Attributes:
        op: ``"dispatch"``, ``"combine"``; ``"plain"``: an all-to-all of BF16 rows, one copy per
            expert; ``"round_trip"``: dispatch, then combine, as one call; ``"overlap"``: a dispatch
            with a matrix product beside it.
        format: wire format of the operation, of a round trip's dispatch.
        dispatch: wire format of the dispatch; that of the same run for a combine.
        tokens: of the rank that has most.
        wire_rows: rows sent.
        wire_bytes: bytes sent, in a dispatch with the route.
        bf16_bytes: what the busiest rank would have sent in bf16.
        expert_bytes: what one copy per expert instead of one per rank would have cost, all ranks.
        time: of the slowest rank in each iteration.
        parts_us: median of each part of the call, slowest rank; of an overlap the dispatch alone
            and the product alone.
        num_checked: rows whose contents were compared, on all ranks.
        num_wrong: rows that differ from the reference, on all ranks.
        sqnr_db: of the dispatched rows against x, where compared.
        route: ``"flat"`` or ``"two_hop"``, whose rows of both hops are counted.
        between_bytes: of the rank that sends most to other nodes, those.
        inside_bytes: of the rank that sends most to other ranks of its node, those.
        beside: of an overlap.
    """

    op: str
    format: str
    dispatch: str
    tokens: int
    wire_rows: Traffic
    wire_bytes: Traffic
    bf16_bytes: int
    expert_bytes: int
    time: Timing
    parts_us: dict[str, float]
    num_checked: int
    num_wrong: int
    sqnr_db: float | None = None
    route: str = "flat"
    between_bytes: int = 0
    inside_bytes: int = 0
    beside: Beside | None = None

    @property
    def algbw_gbs(self) -> float:
        """Bytes that the busiest rank sent over the time."""
        return bandwidth_gbs(self.wire_bytes.sent, self.time.median_us)

    @property
    def busbw_gbs(self) -> float:
        """Bytes that left the busiest rank over the time."""
        return bandwidth_gbs(self.wire_bytes.sent_to_others, self.time.median_us)

    def speedup_in(self, rows: Sequence[Row]) -> float | None:
        """Times faster than the row of the same operation with bf16 dispatch, if there is one."""
        return self._speedup_over(next((r for r in rows if _is_base_of(self, r)), None))

    def speedup_over_plain(self, rows: Sequence[Row]) -> float | None:
        """Times that a dispatch is faster than the plain all-to-all, if there is one."""
        peer = next((r for r in rows if r.op == "plain"), None)
        return self._speedup_over(peer) if self.op == "dispatch" else None

    def _speedup_over(self, base: Row | None) -> float | None:
        return None if base is None else speedup(base.time.median_us, self.time.median_us)


def has_bf16_base(op: str) -> bool:
    """Whether bf16 does the same work: not in an overlap, whose product is as long as its dispatch.

    The plain all-to-all has no wire format to choose.
    """
    return op in (*PARTS, ROUND_TRIP)


def _is_base_of(row: Row, other: Row) -> bool:
    of_base = row.op, "bf16", row.route
    return has_bf16_base(row.op) and (other.op, other.dispatch, other.route) == of_base


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of a run and how they came about.

    Attributes:
        workload: name of the inputs.
        num_tokens: of each rank.
        num_tokens_checked: of all ranks together, those whose rows were compared.
        compile_s: seconds that rank 0 took to compile the kernels or load them from the cache.
    """

    rows: list[Row]
    workload: str
    hidden: int
    num_experts: int
    num_topk: int
    num_tokens: list[int]
    num_tokens_checked: int
    compile_s: float

    @property
    def num_wrong(self) -> int:
        """Wrong rows of all operations."""
        return sum(row.num_wrong for row in self.rows)
