"""Ranks that are MPI processes whose rows are on GPUs: NCCL moves rows, MPI counts and failures.

`open_engine` is for transport "torch" too, beside its gloo group.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from fp4comm.transport import _nccl_ranks
from fp4comm.transport._base import BaseTransport
from fp4comm.transport._call import Call, lost
from fp4comm.transport._nccl_rows import NcclRows
from fp4comm.transport.mpi import GRACE_S, TOLD_TAG, MpiTransport, import_mpi

LOCK_S = 1.0  # how long to wait for a call of MPI by another thread


def import_libraries() -> None:
    """Raise RuntimeError saying what ``open("nccl")`` lacks in this process, if anything."""
    lacks = _nccl_ranks.missing()
    if lacks is not None:
        raise RuntimeError(f'transport "nccl" {lacks}')
    import_mpi("nccl")


def open_engine(transport: BaseTransport) -> NcclRows:
    """Connect all ranks of ``transport`` on torch's current device.  Collective.

    Raises:
        RefusedError: on all ranks alike, naming a rank that lacks something; ``transport`` is as
            it was.
        TimeoutError, ConnectionError, RuntimeError: NCCL could not connect them; ``transport`` has
            failed.
    """
    transport.phase = "open"
    try:
        _nccl_ranks.check_ranks(transport, _nccl_ranks.Presence.here())
        nccl = _nccl_ranks.import_nccl()
        communicator_id = _nccl_ranks.share_id(transport, nccl)
        engine = NcclRows(transport, nccl, communicator_id)
        engine.connect()
    except _nccl_ranks.RefusedError:
        raise
    except BaseException as error:
        transport.abort(f"open: {type(error).__name__}: {error}")  # unless it has failed
        raise
    finally:
        transport.phase = None
    return engine


class NcclTransport(MpiTransport):
    """One rank of an MPI communicator whose rows are on a GPU and travel by NCCL."""

    name = "nccl"

    def __init__(self, comm: Any, timeout_s: float):
        """Duplicate ``comm`` (None: COMM_WORLD) and connect its ranks.  Collective over it."""
        self._calling_mpi = threading.Lock()
        self._untold: tuple[str, str] | None = None  # what the watching thread could not tell
        super().__init__(comm, timeout_s)
        try:
            self._engine = open_engine(self)
        except BaseException:
            self.close()
            raise
        self.device = self._engine.device

    def _may_call_mpi(self) -> bool:
        if self._engine is None or not self._engine.is_watching():
            return True
        return self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE

    def _check_usable(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            self._tell_peers(*untold)
        super()._check_usable()

    def _move(self, call: Call) -> None:
        with self._calling_mpi:
            super()._move(call)

    def fail(self, error: BaseException) -> None:
        """Fail, and end the job at exit: a peer may never come to MPI's end."""
        self._unfinished = True
        super().fail(error)

    def _tell_peers(self, kind: str, text: str) -> None:
        if not self._may_call_mpi():
            self._untold = kind, text
            return
        if self._calling_mpi.acquire(timeout=LOCK_S):
            try:
                super()._tell_peers(kind, text)
            finally:
                self._calling_mpi.release()

    def heard(self, where: str, peers: list[int]) -> Exception | None:
        """Take messages of failing and ending ranks, unless a call of MPI does that now."""
        if not self._may_call_mpi() or not self._calling_mpi.acquire(blocking=False):
            return None
        try:
            while (message := self._next_message(TOLD_TAG)) is not None:
                self._hear(message)
        except Exception as error:
            return error
        finally:
            self._calling_mpi.release()
        ended = [
            p for p in peers if self._ended_peers.get(p, math.inf) < time.monotonic() - GRACE_S
        ]
        return lost(where, ended[0], "it has ended") if ended else None
