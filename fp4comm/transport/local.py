"""Ranks that are threads of one process: rows are copied once, out of the sender's buffer."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fp4comm.transport._base import BaseTransport
from fp4comm.transport._call import Call, CallShape, splits_disagreement

Result = TypeVar("Result")

AFTER_FAILURE_S = 5.0  # how long run_local waits for the other ranks once one has failed


@dataclass
class Posted:
    """The latest call of one rank, for its peers to see."""

    shape: CallShape
    call: Call | None  # None once its rows were read
    readers: set[int]  # ranks that have not read their rows yet


@dataclass(frozen=True)
class Stop:
    """The first failure in a world."""

    rank: int
    kind: str
    text: str


class World:
    """What the ranks of one process share; read and written under ``changed``."""

    def __init__(self, num_ranks: int):
        """Start with ``num_ranks`` ranks that have made no call."""
        self.num_ranks = num_ranks
        self.changed = threading.Condition()
        self.posted: list[Posted | None] = [None] * num_ranks
        self.closed = [False] * num_ranks
        self.stop: Stop | None = None


class LocalTransport(BaseTransport):
    """One rank of a `World`; each rank belongs to one thread."""

    name = "local"

    def __init__(self, world: World, rank: int, timeout_s: float):
        """Be rank ``rank`` of ``world``."""
        super().__init__(rank, world.num_ranks, timeout_s)
        self._world = world

    def _move(self, call: Call) -> None:
        mine = Posted(call.shape, call, set(call.targets))
        with self._world.changed:
            self._raise_if_stopped()
            self._world.posted[self.rank] = mine
            self._world.changed.notify_all()
        call.copy_own_rows()
        for peer in call.sources:
            self._copy_from(peer, call)
        for peer in call.targets:
            self._await_reader(peer, mine, call)
        with self._world.changed:
            mine.call = None

    def _copy_from(self, peer: int, call: Call) -> None:
        theirs = self._wait(call, peer, lambda: self._posted_by(peer, call))
        self._check_agreement(peer, theirs, call)
        source = theirs.call
        assert source is not None  # it waits for us, its reader
        for stream in call.streams:
            np.copyto(call.recv_rows(stream, peer), source.send_rows(stream, self.rank))
        with self._world.changed:
            self._raise_if_stopped()  # a stopped sender may have changed the rows meanwhile
            theirs.readers.discard(self.rank)
            self._world.changed.notify_all()

    def _await_reader(self, peer: int, mine: Posted, call: Call) -> None:
        """Wait until ``peer`` has read its rows; raise if it is past this call and has not."""

        def has_read() -> bool:
            return peer not in mine.readers

        theirs = self._wait(call, peer, lambda: has_read() or self._posted_by(peer, call))
        if theirs is not True:
            self._check_agreement(peer, theirs, call)
            self._wait(call, peer, has_read)

    def _posted_by(self, peer: int, call: Call) -> Posted | None:
        """Return what ``peer`` posted, if it makes this call or has gone past it."""
        self._raise_if_stopped()
        theirs = self._world.posted[peer]
        return theirs if theirs is not None and theirs.shape.number >= call.shape.number else None

    def _check_agreement(self, peer: int, theirs: Posted, call: Call) -> None:
        if theirs.shape.number == call.shape.number:
            text = call.shape.disagreement(self.rank, peer, theirs.shape)
        else:  # it went past this call, so it had no rows for us nor wanted any
            text = splits_disagreement(
                self.rank, peer, call.shape.send_splits[peer], 0
            ) or splits_disagreement(peer, self.rank, 0, call.shape.recv_splits[peer])
        if text is not None:
            raise ValueError(f"{call.where}: {text}")

    def _wait(self, call: Call, peer: int, done: Callable[[], Any]) -> Any:
        """Wait for ``peer`` until ``done()`` is true and return it; done comes before stopped."""
        with self._world.changed:
            while True:
                if result := done():
                    return result
                self._raise_if_stopped()
                if self._world.closed[peer]:
                    raise call.lost(peer, "it closed its transport")
                if call.remaining_s() <= 0:
                    raise call.late(peer)
                self._world.changed.wait(call.remaining_s())

    def _raise_if_stopped(self) -> None:
        stop = self._world.stop
        if stop is not None:
            raise self._stopped_by(stop.rank, stop.kind, stop.text)

    def _tell_peers(self, kind: str, text: str) -> None:
        with self._world.changed:
            if self._world.stop is None:
                self._world.stop = Stop(self.rank, kind, text)
            self._world.changed.notify_all()

    def _release(self) -> None:
        with self._world.changed:
            self._world.closed[self.rank] = True
            self._world.changed.notify_all()


def run_local(
    num_ranks: int, fn: Callable[[LocalTransport], Result], timeout_s: float = 300.0
) -> list[Result]:
    """Run ``fn(transport)`` on ``num_ranks`` threads, one a rank, and return their results by rank.

    When a rank raises, the others are stopped at their next (or present) call and the error of the
    rank that failed first is raised here.  A rank that does not come back within a few seconds
    after that is left behind: Python cannot stop a thread.

    Args:
        num_ranks: at least 1; may exceed the number of cores.
        fn: takes the transport of its rank.
        timeout_s: seconds that a call of ``transport`` waits for a late rank.

    Raises:
        ValueError: if ``num_ranks < 1``.
        BaseException: what the first failing rank raised.

    Example: ``run_local(2, lambda t: t.rank)`` returns ``[0, 1]``.
    """
    num_ranks = operator.index(num_ranks)
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    world = World(num_ranks)
    transports = [LocalTransport(world, rank, timeout_s) for rank in range(num_ranks)]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def on_rank(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:
            errors[transport.rank] = error
            transport.abort(f"{type(error).__name__}: {error}")
        finally:
            transport.close()

    threads = [
        threading.Thread(target=on_rank, args=(t,), name=f"rank {t.rank}", daemon=True)
        for t in transports
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, errors)
    except BaseException as error:  # KeyboardInterrupt comes to this thread only
        transports[0].abort(type(error).__name__)
        raise
    if errors:
        first = world.stop.rank if world.stop is not None else -1
        raise errors.get(first, next(iter(errors.values())))
    return [results[rank] for rank in range(num_ranks)]


def _join(threads: list[threading.Thread], errors: dict[int, BaseException]) -> None:
    """Wait for the threads; once one has failed, only ``AFTER_FAILURE_S`` longer."""
    give_up = float("inf")
    for thread in threads:
        while thread.is_alive() and time.monotonic() < give_up:
            thread.join(0.05)
            if errors and give_up == float("inf"):
                give_up = time.monotonic() + AFTER_FAILURE_S
