"""Ranks that are MPI processes: one Issend a peer and stream, received as the messages arrive.

Rows of a large message travel as counts of a row datatype, so that it may pass 2 and 4 GiB, where
counts of bytes end.  A message is matched first (Improbe) and received only if its size is the
expected one: Open MPI 5.0.11 writes past the end of a posted receive when the message is larger and
comes through its single-copy path.  Sends are synchronous, so that the sender of a message which is
refused hears of it in the same call.  The tag carries the number of the call, so that a message
which nobody expected cannot be taken for one of a later call.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from fp4comm.check import MAX_INT32
from fp4comm.transport._arguments import Rows
from fp4comm.transport._base import (
    ENDED,
    MAX_TOLD_BYTES,
    BaseTransport,
    decode_told,
    encode_told,
)
from fp4comm.transport._call import SAME_ORDER, Call, CallShape, splits_disagreement

# How many ranks a launcher started; srun's comes last, since it may start mpirun or torchrun.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
TOLD_TAG = 0  # a peer tells of its failure, or that its process ends
TAG_LABELS = 512  # a tag is the call's number and one of these: 1 for counts, else by label
NUM_SPINS = 2000  # polls in vain that only yield the core; ranks may share it
SLEEP_S = 50e-6  # between polls after that
ABORT_CODE = 2  # of the job, as of a command's error
GRACE_S = 0.5  # for receipts of a peer that has ended


def import_mpi(name: str = "mpi") -> Any:
    """Return ``mpi4py.MPI``, or raise RuntimeError saying what transport ``name`` lacks.

    Importing mpi4py loads and starts an MPI library, which can fail with any exception.
    """
    try:
        from mpi4py import MPI
    except Exception as error:
        raise RuntimeError(
            f'transport "{name}" needs mpi4py and an MPI library ({type(error).__name__}: {error});'
            " pip install 'fp4comm[mpi]'"
        ) from error
    return MPI


@dataclass
class Message:
    """A matched message that is not received yet."""

    message: Any  # mpi4py Message
    source: int
    tag: int
    num_bytes: int


@dataclass
class Flight:
    """What one call still waits for."""

    call: Call
    tag: int
    missing: dict[int, list[int]]  # source -> streams whose message has not come, in order
    requests: list[Any] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)  # of each request
    row_types: list[Any] = field(default_factory=list)  # to be freed


class MpiTransport(BaseTransport):
    """One rank of an MPI communicator, of which it holds a duplicate."""

    name = "mpi"

    def __init__(self, comm: Any, timeout_s: float):
        """Duplicate ``comm`` (None: COMM_WORLD).  Collective over it."""
        self._mpi = import_mpi(self.name)
        comm = self._checked_comm(comm)
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout_s)
        self._status = self._mpi.Status()  # of the message that was matched last
        self._early: list[Message] = []  # of calls that peers have begun before us
        self._kept: list[Any] = []  # requests and buffers that MPI may still use
        self._unfinished = False  # a call failed with messages under way
        largest_tag = min(self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB), 2**30)
        self._num_tags = largest_tag // TAG_LABELS - 1
        self._ended_peers: dict[int, float] = {}  # when heard of
        atexit.register(self._at_exit)
        self._comm = self._duplicate(comm)

    def _checked_comm(self, comm: Any) -> Any:
        mpi = self._mpi
        if not mpi.Is_initialized() or mpi.Is_finalized():
            raise RuntimeError(
                f'transport "{self.name}": MPI is not running: not initialized, or finalized'
            )
        by = next((name for name in SIZE_VARIABLES if name in os.environ), "")
        launched = os.environ.get(by, "1")
        if launched.isdecimal() and int(launched) > 1 and mpi.COMM_WORLD.Get_size() == 1:
            raise RuntimeError(
                f'transport "{self.name}": this process was started as one of {launched} ({by}),'
                " but its MPI sees itself alone: the launcher belongs to another MPI than the one"
                f" that mpi4py loads ({mpi.Get_library_version().splitlines()[0]}); use the mpirun"
                " of that MPI, or srun --mpi=pmix if it was built with PMIx; under torchrun use"
                ' transport "torch"'
            )
        if comm is None:
            return mpi.COMM_WORLD
        if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
            raise TypeError(f"comm: expected an mpi4py intracommunicator, got {comm!r}")
        return comm

    def _duplicate(self, comm: Any) -> Any:
        duplicate, request = comm.Idup()
        deadline = time.monotonic() + self.timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                self._kept.append(request)
                self._unfinished = True
                raise TimeoutError(
                    f"{self.where('open')}: not all ranks came within {float(self.timeout_s)} s"
                )
            time.sleep(SLEEP_S)
        duplicate.Set_errhandler(self._mpi.ERRORS_RETURN)
        return duplicate

    def _move(self, call: Call) -> None:
        number = call.shape.number % self._num_tags
        flight = Flight(
            call,
            tag=TAG_LABELS * number + _tag_of_label(call.shape),
            missing={peer: list(call.streams) for peer in call.sources if call.streams},
        )
        try:
            self._send(flight)
            call.copy_own_rows()
            early, self._early = self._early, []
            for message in early:
                self._take(flight, message)
            self._receive(flight)
        except BaseException:
            self._kept.append(flight)
            self._unfinished = True
            raise
        finally:
            for row_type in flight.row_types:
                row_type.Free()  # MPI keeps it for messages under way

    def _send(self, flight: Flight) -> None:
        call = flight.call
        for peer in call.targets:
            for stream in call.streams:
                spec = self._buffer(flight, call.send_rows(stream, peer))
                flight.requests.append(self._comm.Issend(spec, peer, flight.tag))
                flight.peers.append(peer)

    def _buffer(self, flight: Flight, rows: Rows) -> list[Any]:
        """Describe rows as mpi4py takes them."""
        if rows.nbytes <= MAX_INT32:
            return [rows, rows.nbytes, self._mpi.BYTE]
        flight.row_types.append(self._mpi.BYTE.Create_contiguous(rows.shape[1]).Commit())
        return [rows, len(rows), flight.row_types[-1]]

    def _receive(self, flight: Flight) -> None:
        """Take messages until all have come and all requests are done."""
        num_idle = 0
        while True:
            message = self._next_message()
            if message is not None:
                self._take(flight, message)
                num_idle = 0
                continue
            if not flight.missing and self._mpi.Request.Testall(flight.requests):
                return
            num_idle += 1
            self._raise_found()
            if self._ended_peers:
                self._raise_if_lost(flight)
            if num_idle > NUM_SPINS:
                if flight.call.remaining_s() <= 0:
                    raise flight.call.late(self._late_peer(flight))
                time.sleep(SLEEP_S)
            else:
                os.sched_yield()

    def _next_message(self, tag: int | None = None) -> Message | None:
        mpi, status = self._mpi, self._status
        tag = mpi.ANY_TAG if tag is None else tag
        message = self._comm.Improbe(mpi.ANY_SOURCE, tag, status)
        if message is None:
            return None
        num_bytes = status.Get_elements(mpi.BYTE)
        return Message(message, status.Get_source(), status.Get_tag(), num_bytes)

    def _take(self, flight: Flight, message: Message) -> None:
        """Receive a message of this call, keep one of a later call, raise at any other."""
        if message.tag == TOLD_TAG:
            self._hear(message)
            return
        if message.tag != flight.tag:
            self._keep_for_later(flight, message)
            return
        call, source = flight.call, message.source
        if source not in flight.missing:
            self._raise_unexpected(flight, message)
        stream = flight.missing[source][0]
        rows = call.recv_rows(stream, source)
        if message.num_bytes != rows.nbytes:
            self._raise_wrong_size(call, message, stream)
        del flight.missing[source][0]
        if not flight.missing[source]:
            del flight.missing[source]
        flight.requests.append(message.message.Irecv(self._buffer(flight, rows)))
        flight.peers.append(source)

    def _keep_for_later(self, flight: Flight, message: Message) -> None:
        number, their_number = flight.tag // TAG_LABELS, message.tag // TAG_LABELS
        ahead = (their_number - number) % self._num_tags
        if 0 < ahead < self._num_tags // 2:
            self._early.append(message)
            return
        where, rank, source = flight.call.where, self.rank, message.source
        is_counts = message.tag % TAG_LABELS == 1  # which all ranks take part in
        if ahead == 0 or is_counts:
            theirs = "exchange_counts" if is_counts else "another exchange"
            kind, label = flight.call.shape.kind, flight.call.shape.label
            mine = "exchange_counts" if kind == "counts" else label or "exchange"
            raise ValueError(
                f"{where}: rank {source} is in {theirs}, rank {rank} in {mine} {SAME_ORDER}"
            )
        raise ValueError(
            f"{where}: splits disagreed in an earlier call: rank {source} sent"
            f" {message.num_bytes} bytes to rank {rank}, which expected none"
        )

    def _raise_unexpected(self, flight: Flight, message: Message) -> None:
        call, source = flight.call, message.source
        expected = call.shape.recv_splits[source]
        if expected:
            text = f"rank {source} sends more than the {len(call.streams)} streams expected of it"
        else:
            row_bytes = next((b for b in call.shape.row_bytes if b), 1)
            rows = message.num_bytes // row_bytes
            text = splits_disagreement(source, self.rank, rows, expected) or ""
        raise ValueError(f"{call.where}: {text}")

    def _raise_wrong_size(self, call: Call, message: Message, stream: int) -> None:
        source, row_bytes = message.source, call.shape.row_bytes[stream]
        rows, rest = divmod(message.num_bytes, row_bytes)
        expected = call.shape.recv_splits[source]
        text = splits_disagreement(source, self.rank, rows, expected)
        if rest or text is None:
            text = (
                f"rank {source} sends {message.num_bytes} bytes of stream {stream} to rank"
                f" {self.rank}, which expects {expected} rows of {row_bytes} bytes"
            )
        raise ValueError(f"{call.where}: {text}")

    def _late_peer(self, flight: Flight) -> int:
        if flight.missing:
            return min(flight.missing)
        pairs = zip(flight.requests, flight.peers, strict=True)
        return next((peer for request, peer in pairs if not request.Test()), self.rank)

    def _hear(self, message: Message) -> None:
        """Note that a peer ends; raise what a failing one tells."""
        data = bytearray(min(message.num_bytes, MAX_TOLD_BYTES))
        message.message.Recv([data, self._mpi.BYTE])
        kind, text = decode_told(bytes(data))
        if kind != ENDED:
            raise self._stopped_by(message.source, kind, text)
        self._ended_peers[message.source] = time.monotonic()

    def _raise_if_lost(self, flight: Flight) -> None:
        """Raise if a peer that has ended is still waited for.

        What it sent comes before the news of its end; that it has received may be known later.
        """
        waiting = set(flight.missing)
        for request, peer in zip(flight.requests, flight.peers, strict=True):
            heard = self._ended_peers.get(peer)
            if heard is not None and time.monotonic() > heard + GRACE_S and not request.Test():
                waiting.add(peer)
        for peer in sorted(waiting & self._ended_peers.keys()):
            raise flight.call.lost(peer, "it has ended")

    def _leave(self) -> None:
        """Leave the communicator open: `_at_exit` tells the peers over it."""

    def _say_ended(self) -> None:
        """Tell the peers, none of which need listen, that this process ends.

        Not when a transport is closed: its communicator's number may be used again, and a message
        that nobody took would be found there.
        """
        with contextlib.suppress(Exception):
            self._tell_peers(ENDED, "")

    def _tell_peers(self, kind: str, text: str) -> None:
        data = encode_told(kind, text)
        for peer in range(self.num_ranks):
            if peer != self.rank:
                request = self._comm.Isend([data, self._mpi.BYTE], peer, TOLD_TAG)
                self._kept.append((request, data))

    def _release(self) -> None:
        # After a failure peers may still send to this communicator, and so its number must not be
        # given to another one.
        if self._broken is None and not self._mpi.Is_finalized():
            self._comm.Free()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """End the whole job if a peer may wait for this rank for ever.

        That is so after a call that failed half-way, and when an uncaught exception ends this
        process (which leaves a trace in ``sys``); MPI_Finalize would wait for the peers.
        """
        uncaught = getattr(sys, "last_value", None) is not None
        stuck = self._unfinished or (uncaught and self.num_ranks > 1)
        if stuck and not self._mpi.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(ABORT_CODE)
        if self._broken is None and not self._closed and not self._mpi.Is_finalized():
            self._say_ended()


def _tag_of_label(shape: CallShape) -> int:
    if shape.kind == "counts":
        return 1
    return 2 + zlib.crc32(shape.label.encode()) % (TAG_LABELS - 2)
