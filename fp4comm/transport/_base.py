"""What all transports share: checked arguments, calls in order, the state after a failure."""

from __future__ import annotations

import contextlib
import functools
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from fp4comm import check
from fp4comm.transport._arguments import (
    Rows,
    as_rows,
    as_splits,
    check_cuda_rows,
    check_row_counts,
    check_stream,
    common_device,
)
from fp4comm.transport._call import Call, CallShape
from fp4comm.transport._staging import exchange_staged

# Errors that keep their type when a peer is told of them; every other one arrives as RuntimeError.
TOLD_ERRORS: dict[str, type[Exception]] = {
    "ConnectionError": ConnectionError,
    "RuntimeError": RuntimeError,
    "TimeoutError": TimeoutError,
    "ValueError": ValueError,
}
MAX_TOLD_BYTES = 2000
ENDED = "ended"  # instead of an error's kind: the rank's process ends without one
MAX_TIMEOUT_S = 1e8  # what operating systems take; three years


class Work:
    """An exchange that was started with ``async_op=True``.

    Rows on the host have come when ``exchange`` returns.
    """

    def __init__(self, device: torch.device | None = None, events: Sequence[Any] = ()):
        """Note the CUDA events on ``device`` after which the rows are there."""
        self._device = device
        self._events = events

    def wait(self) -> None:
        """Make the current stream of the rows' device wait until they have come.

        The host does not wait.  May be called again, and under another stream; several exchanges
        may be waited for in any order.

        Raises:
            TimeoutError, ConnectionError, RuntimeError: the exchange has failed meanwhile.
        """
        for event in self._events:
            event.wait(torch.cuda.current_stream(self._device))


class BaseTransport:
    """Checks arguments and keeps the state after a failure; the subclass moves the bytes.

    A subclass provides ``_move`` (do one call of the host, or raise), ``_tell_peers`` (make peers
    that wait, or come to wait later, raise) and ``_release`` (give back what ``open`` took, without
    waiting).  One that opens an engine for rows on a GPU provides ``heard`` too.
    """

    name = "base"
    device: torch.device | None = None

    def __init__(self, rank: int, num_ranks: int, timeout_s: float):
        """Start with no call made and nothing failed."""
        check.seconds("timeout_s", timeout_s)
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.phase: str | None = None
        self.label = ""
        self._engine: Any = None  # moves rows on a GPU; None: they are staged
        self.cuda_missing: str | None = None  # why there is none, though there should be
        self.history = 0
        self._num_calls = 0
        self._failing = threading.Lock()
        self.has_failed = False
        self._broken: str | None = None  # the first failure
        self._found: BaseException | None = None  # it, if a watching thread found it, until raised
        self._stop: Exception | None = None  # it, if a peer told us of it
        self._closed = False

    def where(self, phase: str) -> str:
        """Return the start of every error text of this rank."""
        return f"rank {self.rank} of {self.num_ranks}: {phase}"

    def limit_s(self) -> float:
        """Return the seconds that a call which starts now may take."""
        return min(float(self.timeout_s), MAX_TIMEOUT_S)

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
        stream: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        """Move rows of all streams between all ranks; see `Transport`."""
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
        device = common_device(sends, recvs, self.device)
        check_stream(stream, device)
        if device is None:
            out = [as_rows(rows, f"sends[{i}]", writable=False) for i, rows in enumerate(sends)]
            into = [as_rows(rows, f"recvs[{i}]", writable=True) for i, rows in enumerate(recvs)]
            check_row_counts(out, to, into, came)
            self._note_label()
            self._run("exchange", out, to, into, came)
            return Work() if async_op else None
        for i, (send, recv) in enumerate(zip(sends, recvs, strict=True)):
            check_cuda_rows(send, f"sends[{i}]")
            check_cuda_rows(recv, f"recvs[{i}]")
        check_row_counts(sends, to, recvs, came)
        self._refuse_capture(stream)
        if self.cuda_missing is not None:
            raise RuntimeError(self.cuda_missing)
        if stream is None:
            stream = torch.cuda.current_stream(device)
        self._note_label()
        if self._engine is None:
            return self._exchange_staged(sends, to, recvs, came, stream, async_op)
        return self._exchange_on_device(sends, to, recvs, came, stream, async_op)

    def _note_label(self) -> None:
        self.history = zlib.crc32(self.label.encode(), self.history)

    def _exchange_staged(
        self, sends: Any, to: list[int], recvs: Any, came: list[int], stream: Any, async_op: bool
    ) -> Work | None:
        on_host = functools.partial(self._run, "exchange")
        try:
            done = exchange_staged(on_host, sends, to, recvs, came, self.rank, stream)
        except BaseException as error:
            self._fail_and_raise(error)
        return Work(stream.device, [done]) if async_op else None

    def _exchange_on_device(
        self, sends: Any, to: list[int], recvs: Any, came: list[int], stream: Any, async_op: bool
    ) -> Work | None:
        if stream.device != self._engine.device:
            raise ValueError(
                f"sends[0]: expected a tensor on {self._engine.device}, which this transport was"
                f" opened on, got one on {stream.device}"
            )
        self._num_calls += 1
        try:
            return self._engine.exchange(sends, to, recvs, came, stream, async_op)
        except BaseException as error:
            self._fail_and_raise(error)

    def abort(self, text: str) -> None:
        """Tell the peers that this rank failed; they raise ``stopped by rank r: text``."""
        if not self._closed:
            self._fail(RuntimeError(text))

    def close(self) -> None:
        """Give back what ``open`` took.  May be called twice; waits for nobody."""
        if not self._closed:
            self._closed = True
            self._end_engine()
            self._release()

    def __enter__(self) -> Any:
        """Return itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        """Close; if an error leaves the block, tell the peers first, who would wait for it."""
        if error is not None and not isinstance(error, (SystemExit, GeneratorExit)):
            self.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, SystemExit):
            self._end_engine()
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
        where = self.where(self.phase or kind)
        call = Call(self.rank, where, self.limit_s(), shape, sends, recvs)
        try:
            self._move(call)
        except BaseException as error:
            self._fail_and_raise(error)

    def _refuse_capture(self, stream: Any) -> None:
        current = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with current:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "exchange: cannot be captured in a CUDA graph, since the host counts its rows"
                    " and watches over them; end the capture before it"
                )

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError(f'transport "{self.name}": closed')
        if self._broken is not None:
            self.raise_failure()

    def raise_failure(self) -> NoReturn:
        """Raise what a watching thread found, with its own type, and later that it is broken."""
        self._raise_found()
        state = "closed" if self._broken is None else f"broken: {self._broken}"
        raise RuntimeError(f'transport "{self.name}": {state}')

    def _raise_found(self) -> None:
        if self._found is not None:
            found, self._found = self._found, None
            raise found

    def _fail_and_raise(self, error: BaseException) -> NoReturn:
        """Fail and raise ``error``; or what has failed before it, of which it is a consequence."""
        self._fail(error)
        if isinstance(error, Exception):
            self._raise_found()
        raise error

    def fail(self, error: BaseException) -> None:
        """Break and tell the peers, for a watching thread: the next call raises ``error``."""
        self._fail(error, raised=False)

    def _fail(self, error: BaseException, *, raised: bool = True) -> None:
        """Break after the first failure and tell the peers, unless they told us."""
        with self._failing:
            if self.has_failed:
                return
            self.has_failed = True
            was_told, self._stop = error is self._stop, None
            self._found = None if raised else error
            kind = type(error).__name__
            self._broken = str(error) if isinstance(error, Exception) else kind
        with contextlib.suppress(Exception):  # the first failure is the one to report
            if not was_told:
                self._tell_peers(kind if kind in TOLD_ERRORS else "RuntimeError", self._broken)
        if not _is_capturing():  # else it ends when the transport is closed
            self._end_engine()
        with contextlib.suppress(Exception):
            self._abandon()

    def _end_engine(self) -> None:
        if self._engine is not None:
            self._engine.end(abort=self._broken is not None)

    def _stopped_by(self, peer: int, kind: str, text: str) -> Exception:
        """Make the error for a failure that ``peer`` told us of."""
        self._stop = TOLD_ERRORS[kind](f"stopped by rank {peer}: {text}")
        return self._stop

    def heard(self, where: str, peers: list[int]) -> Exception | None:
        """Return the error for what a peer told, or if one of ``peers`` is gone; waits for nothing.

        Called while an engine for rows on a GPU is opened, and from its watching thread.
        """
        raise NotImplementedError

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


def _is_capturing() -> bool:
    """Say whether this thread captures a CUDA graph, which freeing NCCL's memory would end."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def encode_told(kind: str, text: str) -> bytes:
    """Pack what a failing rank tells its peers, within ``MAX_TOLD_BYTES``."""
    return f"{kind}:{text}".encode(errors="replace")[:MAX_TOLD_BYTES]


def decode_told(data: bytes) -> tuple[str, str]:
    """Unpack what `encode_told` packed: the error's kind and its text."""
    kind, _, text = data.decode(errors="replace").partition(":")
    return kind, text
