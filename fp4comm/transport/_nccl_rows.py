"""A NCCL communicator of CuPy that moves rows on one GPU, and the thread that watches over it.

All streams of an exchange go in one group of sends and receives, and the host waits for nothing.
The thread sees whether a peer does not come in time or tells of its failure; it aborts the
communicator then, so that the caller's stream goes on, and leaves the error for the next call.

- NCCL connects a pair of ranks when they first exchange, and the host then waits for the peer.
  `NcclRows` does that with all peers when it is opened, within the time limit, so that an exchange
  never waits, and no memory is taken later.
- Aborting and destroying free the memory that kernels use, and so wait for those that are queued.
  The watching thread does both, and `NcclRows.end` waits for it only so long.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4comm.transport._base import BaseTransport, Work
from fp4comm.transport._call import late

WATCH_S = 0.05  # between looks at what is under way
HEAR_S = 0.2  # between questions whether a peer failed, once an exchange takes that long
IDLE_S = 1.0  # without an exchange, until the watching thread sleeps
DRAIN_S = 2.0  # how long an exchange may still take when the transport is closed
END_S = 5.0  # how long to wait for the communicator's end
LOCK_S = 1.0  # how long to wait for a call of another thread
DEVICE_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice
CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

Streams = list[tuple[int, int, int]]  # of each: address of sends, address of recvs, bytes a row


@dataclass(eq=False)
class Flight:
    """One exchange under way."""

    done: torch.cuda.Event
    phase: str
    to: list[int]
    came: list[int]
    timeout_s: float
    started: float
    is_queued: bool = False  # before that ``done`` says nothing
    failed: bool = False

    def is_over(self) -> bool:
        """Say whether the rows are there, or NCCL gave up.

        Raises:
            RuntimeError: the GPU failed.
        """
        return self.is_queued and self.done.query()

    def is_under_way(self) -> bool:
        """Say whether it is not over; what a GPU had to do that failed never is."""
        try:
            return not self.is_over()
        except RuntimeError:
            return True

    def fail_unless_over(self) -> bool:
        """Note that the transport has failed; say whether this was under way then."""
        self.failed = self.failed or self.is_under_way()
        return self.failed

    def peers(self, rank: int) -> list[int]:
        """Return the ranks without which it cannot end."""
        pairs = enumerate(zip(self.to, self.came, strict=True))
        return [peer for peer, rows in pairs if any(rows) and peer != rank]


class NcclWork(Work):
    """An exchange by NCCL that no stream of the caller waits for yet."""

    def __init__(
        self,
        engine: NcclRows,
        flight: Flight | None,
        started_on: torch.cuda.Stream,
        events: Sequence[torch.cuda.Event],
        rows: Sequence[torch.Tensor],
    ):
        """Hold ``rows``, which NCCL reads and writes, until a stream waits for ``events``."""
        super().__init__(engine.device, events)
        self._engine = engine
        self._flight = flight
        self._started_on = started_on
        self._rows = rows

    def wait(self) -> None:
        """Make the current stream wait; see `Work`."""
        flight, transport = self._flight, self._engine.transport
        if flight is not None and (
            flight.failed or (transport.has_failed and flight.fail_unless_over())
        ):
            transport.raise_failure()
        super().wait()
        if torch.cuda.current_stream(self._device) == self._started_on:
            self._rows = ()  # what takes their memory comes after the rows on that stream
        self._let_go()

    def __del__(self) -> None:
        """Leave the rows to NCCL's stream if nothing waited for them."""
        with contextlib.suppress(Exception):
            self._let_go()

    def _let_go(self) -> None:
        for rows in self._rows:
            rows.record_stream(self._engine.stream)
        self._rows = ()


class NcclRows:
    """A communicator on one GPU with its one stream, and the thread that watches over it."""

    def __init__(self, transport: BaseTransport, nccl: Any, communicator_id: bytes):
        """Start the thread, which connects to all ranks of ``transport``; see `connect`."""
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream: torch.cuda.Stream  # made by the thread
        self.transport = transport
        self._nccl = nccl
        self._uint8 = int(nccl.NCCL_UINT8)
        self._memcpy: Any = None  # of CuPy
        self._id = communicator_id
        rank, num_ranks = transport.rank, transport.num_ranks
        self._pairs = [
            ((rank + i) % num_ranks, (rank - i) % num_ranks) for i in range(1, num_ranks)
        ]
        self._communicator: Any = None
        self._using = threading.Lock()  # the communicator, for what must not be ended meanwhile
        self._flights: list[Flight] = []  # exchanges append; the watching thread drops what is over
        self._wake = threading.Condition()
        self._sleeps = False
        self._awake_until = 0.0
        self._ending: str | None = None  # "abort" or "destroy"
        self._last_words: Exception | None = None  # why the process ends
        self._error: BaseException | None = None  # from connecting
        self._connected = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="fp4comm nccl", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def connect(self) -> None:
        """Wait until all ranks are connected; else end, and fail the transport.

        Raises:
            TimeoutError: they are not within the transport's time limit.
            RuntimeError: NCCL failed here, or a peer told of that.
        """
        try:
            self._wait_for_connection()
        except BaseException as error:
            self.transport.fail(error)
            self.end(abort=True)
            raise

    def _wait_for_connection(self) -> None:
        limit_s, where = self.transport.limit_s(), self.transport.where("open")
        deadline = time.monotonic() + limit_s
        peers = [target for target, _ in self._pairs]
        while not self._connected.wait(WATCH_S):
            heard = self.transport.heard(where, peers)
            if heard is not None:
                raise heard
            if time.monotonic() > deadline:
                raise TimeoutError(f"{where}: not all ranks came within {limit_s} s")
        if self._error is not None:
            raise RuntimeError(f"{where}: NCCL: {self._error}") from self._error

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        to: list[int],
        recvs: Sequence[torch.Tensor],
        came: list[int],
        stream: torch.cuda.Stream,
        async_op: bool,
    ) -> Work | None:
        """Queue one exchange, after what ``stream`` holds; own rows are copied on ``stream``."""
        pairs = zip(sends, recvs, strict=True)
        streams = [(s.data_ptr(), r.data_ptr(), s.shape[1]) for s, r in pairs if s.shape[1]]
        sent_at, comes_at = [0, *itertools.accumulate(to)], [0, *itertools.accumulate(came)]
        rank = self.transport.rank
        flight = None
        if streams and (sent_at[-1] > to[rank] or comes_at[-1] > came[rank]):
            flight = self._start(streams, to, sent_at, came, comes_at, stream)
        if to[rank]:
            for sent, comes, row_bytes in streams:
                into, out = comes + comes_at[rank] * row_bytes, sent + sent_at[rank] * row_bytes
                num_bytes = to[rank] * row_bytes
                self._memcpy(into, out, num_bytes, DEVICE_TO_DEVICE, stream.cuda_stream)
        if async_op:
            events = [stream.record_event()] + ([] if flight is None else [flight.done])
            return NcclWork(self, flight, stream, events, [*sends, *recvs])
        if flight is not None:
            flight.done.wait(stream)
        return None

    def _start(
        self,
        streams: Streams,
        to: list[int],
        sent_at: list[int],
        came: list[int],
        comes_at: list[int],
        stream: torch.cuda.Stream,
    ) -> Flight:
        transport = self.transport
        done = torch.cuda.Event()
        phase = transport.phase or "exchange"
        flight = Flight(done, phase, to, came, transport.limit_s(), time.monotonic())
        with self._using:
            if self._ending is not None:
                transport.raise_failure()
            self._flights.append(flight)  # watched from here on: queueing may wait for the GPU
            if self._sleeps:
                with self._wake:
                    self._wake.notify()
            self.stream.wait_stream(stream)
            try:
                self._post(streams, to, sent_at, came, comes_at)
            except self._nccl.NcclError as error:
                raise ConnectionError(f"{transport.where(phase)}: NCCL: {error}") from error
            done.record(self.stream)
            flight.is_queued = True
        return flight

    def _post(
        self,
        streams: Streams,
        to: list[int],
        sent_at: list[int],
        came: list[int],
        comes_at: list[int],
    ) -> None:
        """Queue a group of sends and receives on the communicator's stream."""
        send, recv, uint8 = self._communicator.send, self._communicator.recv, self._uint8
        queue = self.stream.cuda_stream
        self._nccl.groupStart()
        try:
            for target, source in self._pairs:
                if to[target]:
                    first, num_rows = sent_at[target], to[target]
                    for sent, _, row_bytes in streams:
                        send(sent + first * row_bytes, num_rows * row_bytes, uint8, target, queue)
                if came[source]:
                    first, num_rows = comes_at[source], came[source]
                    for _, comes, row_bytes in streams:
                        recv(comes + first * row_bytes, num_rows * row_bytes, uint8, source, queue)
        except BaseException:
            with contextlib.suppress(Exception):
                self._nccl.groupEnd()
            raise
        self._nccl.groupEnd()

    def is_watching(self) -> bool:
        """Say whether this runs in the watching thread."""
        return threading.current_thread() is self._thread

    def end(self, *, abort: bool) -> None:
        """End the communicator, at once with ``abort``, else when what is under way is done.

        The watching thread does it; this waits for that ``END_S`` at most.
        """
        if self._ended.is_set():
            return
        with self._wake:
            self._ending = "abort" if abort or self._ending == "abort" else "destroy"
            self._wake.notify()
        if self._connected.is_set() and not self.is_watching():
            self._ended.wait(END_S)

    def _at_exit(self) -> None:
        """End before the libraries do, and tell the peers of an uncaught exception.

        It leaves a trace in ``sys``.  The watching thread tells, since that may take for ever.
        """
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None:
            with self._wake:
                self._last_words = RuntimeError(f"{type(uncaught).__name__}: {uncaught}")
                self._wake.notify()
            self._ended.wait(END_S)
        self.end(abort=False)

    # The watching thread

    def _live(self) -> None:
        try:
            torch.cuda.set_device(self.device)
            _allow_others_to_capture()
            self._connect()
        except BaseException as error:
            self._error = error
            self._ending = "abort"
        self._connected.set()
        try:
            self._watch()
        finally:
            self._end_communicator()

    def _connect(self) -> None:
        """Make stream and communicator, and let each pair of ranks exchange a byte."""
        self._memcpy = importlib.import_module("cupy").cuda.runtime.memcpyAsync
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        torch.cuda.empty_cache()  # NCCL takes memory of its own
        rank, num_ranks = self.transport.rank, self.transport.num_ranks
        self._communicator = self._nccl.NcclCommunicator(num_ranks, self._id, rank)
        sent, came = torch.empty((2, num_ranks), dtype=torch.uint8, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream())
        one_each, places = [1] * num_ranks, list(range(num_ranks))
        self._post([(sent.data_ptr(), came.data_ptr(), 1)], one_each, places, one_each, places)
        self.stream.synchronize()

    def _watch(self) -> None:
        ask_at = 0.0
        while self._ending is None:
            self._sleep()
            now = time.monotonic()
            error = self._last_words or self._look(now, may_ask=now >= ask_at)
            if now >= ask_at:
                ask_at = now + HEAR_S
            if error is not None:
                self.transport.fail(error)

    def _sleep(self) -> None:
        """Sleep for a moment; when there were no exchanges for a while, until the next one."""
        with self._wake:
            if self._ending is not None or self._last_words is not None:
                return
            if self._flights or time.monotonic() < self._awake_until:
                self._wake.wait(WATCH_S)
                return
            self._sleeps = True
            if not self._flights:  # looked at again: only a sleeper is woken
                self._wake.wait()
            self._sleeps = False

    def _look(self, now: float, *, may_ask: bool) -> Exception | None:
        """Return why what is under way must fail, if it must."""
        if not self._flights:
            return None
        self._awake_until = now + IDLE_S
        oldest = self._flights[0]
        where, peers = self.transport.where(oldest.phase), oldest.peers(self.transport.rank)
        try:
            self._drop_what_is_over()
            if oldest not in self._flights[:1]:
                return None
            self._communicator.check_async_error()
        except self._nccl.NcclError as error:
            return ConnectionError(f"{where}: NCCL: {error}")
        except Exception as error:  # the GPU's
            return RuntimeError(f"{where}: {str(error).strip().splitlines()[0]}")
        if may_ask and now > oldest.started + HEAR_S:
            heard = self.transport.heard(where, peers)
            if heard is not None:
                return heard
        if now > oldest.started + oldest.timeout_s:
            return late(where, peers, oldest.timeout_s)
        return None

    def _drop_what_is_over(self) -> None:
        """Drop the first flights; they end in the order in which they began."""
        low, high = 0, len(self._flights)
        while low < high:
            middle = (low + high) // 2
            if self._flights[middle].is_over():
                low = middle + 1
            else:
                high = middle
        del self._flights[:low]

    def _end_communicator(self) -> None:
        until = time.monotonic() + DRAIN_S
        while self._ending == "destroy" and any(flight.is_under_way() for flight in self._flights):
            if time.monotonic() > until:
                self._ending = "abort"
            time.sleep(WATCH_S / 10)
        # An exchange that still waits to be queued returns once the communicator is aborted.
        held = self._using.acquire(timeout=LOCK_S)
        try:
            if self._communicator is None:
                return
            if self._ending == "abort":
                for flight in self._flights:
                    flight.fail_unless_over()
                self._communicator.abort()
            else:
                self._communicator.destroy()
        finally:
            if held:
                self._using.release()
            self._ended.set()
            atexit.unregister(self._at_exit)


def _allow_others_to_capture() -> None:
    """Keep this thread's looks at events from ending a CUDA graph capture of another thread."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
