"""What all transports share: argument checks, one collective call, the state after a failure."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Rows = npt.NDArray[np.uint8]

# Errors that keep their type when a peer is told of them; every other one arrives as RuntimeError.
TOLD_ERRORS: dict[str, type[Exception]] = {
    "ConnectionError": ConnectionError,
    "RuntimeError": RuntimeError,
    "TimeoutError": TimeoutError,
    "ValueError": ValueError,
}
MAX_TOLD_BYTES = 2000
ENDED = "ended"  # instead of an error's kind: the rank's process ends without one
SAME_ORDER = "(all ranks must make the same calls in the same order)"
MAX_TIMEOUT_S = 1e8  # what operating systems take; three years


def as_rows(value: Any, name: str, *, writable: bool) -> Rows:
    """Return ``value``, a NumPy array or a CPU torch tensor, as a NumPy array over the same memory.

    Args:
        value: ``[rows, row_bytes]`` uint8, C-contiguous.
        name: the argument as the error text calls it.
        writable: whether rows are received into it.

    Raises:
        TypeError: if it is no host array of uint8.
        ValueError: if it has other than two dimensions, strides, or is read-only but received into.
    """
    expected = f"{name}: expected a NumPy array or a CPU torch tensor of uint8"
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise TypeError(f"{expected}, got a {value.layout} tensor on {value.device}")
        if value.dtype != torch.uint8:
            raise TypeError(f"{expected}, got {value.dtype}")
        value = value.detach().numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{expected}, got {type(value).__name__}")
    if value.dtype != np.uint8:
        raise TypeError(f"{expected}, got {value.dtype}")
    if value.ndim != 2:
        raise ValueError(f"{name}: expected shape [rows, row_bytes], got {list(value.shape)}")
    if not value.flags.c_contiguous:
        raise ValueError(f"{name}: expected C-contiguous rows, got strides {value.strides}")
    if writable and not value.flags.writeable:
        raise ValueError(f"{name}: expected memory to receive into, got a read-only array")
    return value


def as_splits(value: Any, name: str, num_ranks: int) -> list[int]:
    """Return rows per peer, ``[num_ranks]``, as a list of ints; none may be negative."""
    splits = np.asarray(value)
    if splits.ndim != 1 or len(splits) != num_ranks:
        raise ValueError(
            f"{name}: expected rows for each of {num_ranks} ranks, got shape {list(splits.shape)}"
        )
    if splits.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {splits.dtype}")
    if (splits < 0).any():
        peer = int(np.argmin(splits))
        raise ValueError(f"{name}: expected no negative rows, got {splits[peer]} at [{peer}]")
    return [int(rows) for rows in splits]


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
        transport: BaseTransport,
        shape: CallShape,
        sends: Sequence[Rows],
        recvs: Sequence[Rows],
    ):
        """Note the buffers, the phase as errors name it, and the time at which it is late."""
        self.rank = transport.rank
        self.shape = shape
        self.sends = sends
        self.recvs = recvs
        self.timeout_s = min(float(transport.timeout_s), MAX_TIMEOUT_S)
        self.deadline = time.monotonic() + self.timeout_s
        self.where = transport.where(transport.phase or shape.kind)
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
        return TimeoutError(f"{self.where}: no answer from rank {peer} within {self.timeout_s} s")

    def lost(self, peer: int, reason: object) -> ConnectionError:
        """Make the error for a peer that is gone."""
        return ConnectionError(f"{self.where}: lost rank {peer}: {reason}")


class BaseTransport:
    """Checks arguments and keeps the state after a failure; the subclass moves the bytes.

    A subclass provides ``_move`` (do one call, or raise), ``_tell_peers`` (make peers that wait, or
    come to wait later, raise) and ``_release`` (give back what ``open`` took, without waiting).
    """

    name = "base"

    def __init__(self, rank: int, num_ranks: int, timeout_s: float):
        """Start with no call made and nothing failed."""
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
            raise TypeError(
                f"timeout_s: expected a number of seconds, got {type(timeout_s).__name__}"
            )
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected more than 0 seconds, got {timeout_s}")
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.phase: str | None = None
        self.label = ""
        self._num_calls = 0
        self._broken: str | None = None  # the first failure
        self._abandoned = False  # it has been dealt with
        self._closed = False

    def where(self, phase: str) -> str:
        """Return the start of every error text of this rank."""
        return f"rank {self.rank} of {self.num_ranks}: {phase}"

    def exchange_counts(self, counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Send row d of ``counts`` to rank d and return the rows received; see `Transport`."""
        self._check_usable()
        asked = np.asarray(counts)
        if asked.ndim != 2 or asked.shape[0] != self.num_ranks or asked.shape[1] == 0:
            raise ValueError(
                f"counts: expected shape [{self.num_ranks}, k] with k > 0, got {list(asked.shape)}"
            )
        if asked.dtype.kind not in "iu":
            raise TypeError(f"counts: expected integers, got {asked.dtype}")
        sent = np.ascontiguousarray(asked, np.int64)
        received = np.empty_like(sent)
        one_each = [1] * self.num_ranks
        self._run("counts", [sent.view(np.uint8)], one_each, [received.view(np.uint8)], one_each)
        return received

    def exchange(
        self,
        sends: Sequence[Any],
        send_splits: Any,
        recvs: Sequence[Any],
        recv_splits: Any,
        *,
        stream: object = None,
    ) -> None:
        """Move rows of all streams between all ranks; see `Transport`."""
        del stream  # host memory has no stream
        self._check_usable()
        to = as_splits(send_splits, "send_splits", self.num_ranks)
        came = as_splits(recv_splits, "recv_splits", self.num_ranks)
        if to[self.rank] != came[self.rank]:
            raise ValueError(
                f"recv_splits: expected {to[self.rank]} rows from this rank, as send_splits has for"
                f" it, got {came[self.rank]}"
            )
        if len(recvs) != len(sends):
            raise ValueError(f"recvs: expected {len(sends)} streams as sends, got {len(recvs)}")
        out = [as_rows(rows, f"sends[{i}]", writable=False) for i, rows in enumerate(sends)]
        into = [as_rows(rows, f"recvs[{i}]", writable=True) for i, rows in enumerate(recvs)]
        for i, (send, recv) in enumerate(zip(out, into, strict=True)):
            if len(send) != sum(to):
                raise ValueError(
                    f"sends[{i}]: expected {sum(to)} rows, the sum of send_splits, got {len(send)}"
                )
            if len(recv) < sum(came):
                raise ValueError(
                    f"recvs[{i}]: expected at least {sum(came)} rows, the sum of recv_splits,"
                    f" got {len(recv)}"
                )
            if recv.shape[1] != send.shape[1]:
                raise ValueError(
                    f"recvs[{i}]: expected {send.shape[1]} bytes a row as sends[{i}],"
                    f" got {recv.shape[1]}"
                )
        self._run("exchange", out, to, into, came)

    def abort(self, text: str) -> None:
        """Tell the peers that this rank failed; they raise ``stopped by rank r: text``."""
        if not self._closed:
            self._fail(RuntimeError(text))

    def close(self) -> None:
        """Give back what ``open`` took.  May be called twice; waits for nobody."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> Any:
        """Return itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        """Close; if an error leaves the block, tell the peers first, who would wait for it."""
        if error is not None and not isinstance(error, (SystemExit, GeneratorExit)):
            self.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, SystemExit):
            self._leave()
        else:
            self.close()

    def _run(
        self, kind: str, sends: list[Rows], to: list[int], recvs: list[Rows], came: list[int]
    ) -> None:
        self._num_calls += 1
        row_bytes = [send.shape[1] for send in sends]
        label = self.label if kind == "exchange" else ""
        shape = CallShape(self._num_calls, kind, label, to, came, row_bytes)
        call = Call(self, shape, sends, recvs)
        try:
            self._move(call)
        except BaseException as error:
            self._fail(error)
            raise

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f'transport "{self.name}": closed')
        if self._broken is not None:
            raise RuntimeError(f'transport "{self.name}": broken: {self._broken}')

    def _fail(self, error: BaseException) -> None:
        """Break after the first failure and tell the peers, unless they told us."""
        if self._abandoned:
            return
        self._abandoned = True
        kind = type(error).__name__
        with contextlib.suppress(Exception):  # the first failure is the one to report
            if self._broken is None:
                self._broken = str(error) if isinstance(error, Exception) else kind
                self._tell_peers(kind if kind in TOLD_ERRORS else "RuntimeError", self._broken)
            self._abandon()

    def _stopped_by(self, peer: int, kind: str, text: str) -> Exception:
        """Make the error for a failure that ``peer`` told us of."""
        self._broken = f"stopped by rank {peer}: {text}"
        return TOLD_ERRORS[kind](self._broken)

    def _move(self, call: Call) -> None:
        raise NotImplementedError

    def _tell_peers(self, kind: str, text: str) -> None:
        raise NotImplementedError

    def _abandon(self) -> None:
        """Stop what the failed call left under way, if that can be stopped."""

    def _release(self) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        """Let go because the process ends."""
        self.close()


def encode_told(kind: str, text: str) -> bytes:
    """Pack what a failing rank tells its peers, within ``MAX_TOLD_BYTES``."""
    return f"{kind}:{text}".encode(errors="replace")[:MAX_TOLD_BYTES]


def decode_told(data: bytes) -> tuple[str, str]:
    """Unpack what `encode_told` packed: the error's kind and its text."""
    kind, _, text = data.decode(errors="replace").partition(":")
    return kind, text
