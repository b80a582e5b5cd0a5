"""One collective call of one rank: its rows, what peers must agree on, its limit, its errors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp4comm.transport._arguments import Rows

SAME_ORDER = "(all ranks must make the same calls in the same order)"


@dataclass(frozen=True)
class CallShape:
    """What two ranks must agree on in one collective call."""

    number: int  # of the call on this transport, from 1
    kind: str  # "counts" or "exchange"
    label: str  # what the caller says that it is for
    send_splits: list[int]
    recv_splits: list[int]
    row_bytes: list[int]  # of each stream

    def disagreement(self, rank: int, peer: int, theirs: CallShape) -> str | None:
        """Say how ``theirs``, the same call on ``peer``, does not fit this one on ``rank``."""
        if theirs.kind != self.kind:
            return (
                f"rank {peer} is in {_function(theirs.kind)}, rank {rank} in {_function(self.kind)}"
                f" {SAME_ORDER}"
            )
        if theirs.label != self.label:
            return (
                f"rank {peer} is in {theirs.label or 'an unnamed call'}, rank {rank} in"
                f" {self.label or 'an unnamed call'} {SAME_ORDER}"
            )
        if theirs.row_bytes != self.row_bytes:
            return (
                f"rank {peer} has streams of {theirs.row_bytes} bytes a row,"
                f" rank {rank} of {self.row_bytes}"
            )
        return splits_disagreement(
            rank, peer, self.send_splits[peer], theirs.recv_splits[rank]
        ) or splits_disagreement(peer, rank, theirs.send_splits[rank], self.recv_splits[peer])


def _function(kind: str) -> str:
    return "exchange_counts" if kind == "counts" else "exchange"


def splits_disagreement(source: int, target: int, sent: int, expected: int) -> str | None:
    """Say that ``sent`` rows are not the ``expected`` ones, naming the pair; None if they are."""
    if sent == expected:
        return None
    return (
        f"splits disagree: rank {source} sends {sent} rows to rank {target},"
        f" which expects {expected}"
    )


class Call:
    """One collective call on one rank, its arguments checked."""

    def __init__(
        self,
        rank: int,
        where: str,
        timeout_s: float,
        shape: CallShape,
        sends: Sequence[Rows],
        recvs: Sequence[Rows],
    ):
        """Note the buffers, where errors say that it was, and the time at which it is late."""
        self.rank = rank
        self.shape = shape
        self.sends = sends
        self.recvs = recvs
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + self.timeout_s
        self.where = where
        self._send_offsets = [0, *itertools.accumulate(shape.send_splits)]
        self._recv_offsets = [0, *itertools.accumulate(shape.recv_splits)]
        # Streams of 0 bytes a row have nothing to move.
        self.streams = [s for s, row_bytes in enumerate(shape.row_bytes) if row_bytes > 0]
        self.sources = self._others(shape.recv_splits)
        self.targets = self._others(shape.send_splits)

    def _others(self, splits: list[int]) -> list[int]:
        return [peer for peer, rows in enumerate(splits) if rows > 0 and peer != self.rank]

    def send_rows(self, stream: int, peer: int) -> Rows:
        """Rows of ``stream`` that go to ``peer``: a view of the caller's buffer."""
        return self.sends[stream][self._send_offsets[peer] : self._send_offsets[peer + 1]]

    def recv_rows(self, stream: int, peer: int) -> Rows:
        """Where rows of ``stream`` from ``peer`` go: a view of the caller's buffer."""
        return self.recvs[stream][self._recv_offsets[peer] : self._recv_offsets[peer + 1]]

    def copy_own_rows(self) -> None:
        """Copy the rows that this rank sends to itself."""
        for stream in self.streams:
            np.copyto(self.recv_rows(stream, self.rank), self.send_rows(stream, self.rank))

    def remaining_s(self) -> float:
        """Seconds left of ``timeout_s``; 0 or less when the call is late."""
        return self.deadline - time.monotonic()

    def late(self, peer: int) -> TimeoutError:
        """Make the error for a peer that did not come in time."""
        return late(self.where, [peer], self.timeout_s)

    def lost(self, peer: int, reason: object) -> ConnectionError:
        """Make the error for a peer that is gone."""
        return lost(self.where, peer, reason)


def late(where: str, peers: Sequence[int], timeout_s: float) -> TimeoutError:
    """Make the error for a call in which one of ``peers``, its attribute, did not come in time."""
    names = "rank" if len(peers) == 1 else "one of ranks"
    names += " " + ", ".join(map(str, peers))
    error = TimeoutError(f"{where}: no answer from {names} within {timeout_s} s")
    vars(error)["peers"] = list(peers)
    return error


def lost(where: str, peer: int, reason: object) -> ConnectionError:
    """Make the error for a peer that is gone, and its attribute ``peers``."""
    error = ConnectionError(f"{where}: lost rank {peer}: {reason}")
    vars(error)["peers"] = [peer]
    return error
