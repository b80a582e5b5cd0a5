"""Ranks of a torch.distributed group: gloo point-to-point, one send or receive a peer and stream.

The transport builds a gloo group of its own on the store of the caller's group, so that its
messages meet no others and a failure leaves the caller's group alone.  Where the caller's group has
NCCL, rows on a GPU travel by a NCCL communicator of its own likewise.  What gloo forces (2.13):

- A receive cannot be polled, and a timeout breaks the whole group.  A thread waits without one; the
  caller watches the clock, and in a long wait a second thread watches the store, where a failing
  rank leaves its reason and every waiting rank its splits.  After a failure a timeout is provoked,
  so that the waiting thread comes back and nothing more is written into the caller's buffers.
- A message larger than its receive ends the process, a smaller one is taken as if it were whole.
  The tag carries the size, so that such a pair never meets, and the splits in the store say why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import queue
import threading
import time
import zlib
from typing import Any

import numpy as np
import torch

from fp4comm.transport._arguments import Rows
from fp4comm.transport._base import BaseTransport, decode_told, encode_told
from fp4comm.transport._call import Call, CallShape
from fp4comm.transport._nccl_ranks import RefusedError
from fp4comm.transport.nccl import open_engine

FOREVER = datetime.timedelta(days=365)
AT_ONCE = datetime.timedelta(milliseconds=1)
QUICK_S = 0.02  # a call that takes longer is watched
WATCH_S = 0.05  # between looks into the store
SHAPE_S = 0.5  # a call that takes longer publishes its splits
STORE_S = 1.0  # how long to wait for the store once something has failed
TAG_CALLS, TAG_STREAMS, TAG_SIZES = 64, 64, 2**19 - 1  # a tag has 31 bits; the last is a prime
UNUSED_TAG = 2**31 - 1


def import_distributed() -> Any:
    """Return ``torch.distributed`` with gloo, or raise RuntimeError saying what is missing."""
    import torch.distributed as dist  # not part of `import torch` in every build

    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError(
            'transport "torch" needs a PyTorch built with torch.distributed and gloo'
        )
    return dist


class Job:
    """The sends and receives of one call, waited for in order by the waiting thread."""

    def __init__(self, call: Call, works: list[tuple[int, Any]]):
        """Note the ``works``: (peer, torch Work)."""
        self.call = call
        self.works = works
        self.num_done = 0
        self.error: Exception | None = None  # of works[num_done]
        self.stop: Exception | tuple[int, str, str] | None = None  # found by the watching thread
        self.over = threading.Event()  # there is a result, or nobody wants one any more
        self.waited = threading.Event()  # the waiting thread has done with it

    def wait(self) -> None:
        """Wait for all works; runs in the waiting thread."""
        try:
            for _, work in self.works:
                work.wait(FOREVER)
                self.num_done += 1
        except Exception as error:
            self.error = error
        self.over.set()
        self.waited.set()

    @property
    def peer(self) -> int:
        """Whom the first work that is not done belongs to."""
        return self.works[min(self.num_done, len(self.works) - 1)][0]


class TorchTransport(BaseTransport):
    """One rank of a torch.distributed process group."""

    name = "torch"

    def __init__(self, group: Any, timeout_s: float):
        """Build a gloo group over the ranks of ``group`` (None: WORLD).  Collective over it."""
        dist = import_distributed()
        group, backends = _checked_group(dist, group)
        super().__init__(group.rank(), group.size(), timeout_s)
        # All ranks have opened equally many transports on this group, whatever they closed.
        opened = group.get_group_store().add(f"fp4comm/opened/{self.rank}", 1)
        self._store = dist.PrefixStore(f"fp4comm/{opened}/", group.get_group_store())
        self._gloo = self._connect(dist)
        self._store_hangs = False  # its process is there and does not answer
        self._job: Job | None = None  # the one that waits, or that failed
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=_wait_for_jobs, args=(self._jobs,), daemon=True).start()
        if "cuda:nccl" in backends:
            self._open_engine(for_host_rows_too="cpu:gloo" in backends)

    def _open_engine(self, *, for_host_rows_too: bool) -> None:
        try:
            self._engine = open_engine(self)
        except BaseException as error:
            if not (for_host_rows_too and isinstance(error, RefusedError)):
                self.close()
                raise
            self.cuda_missing = str(error)
            return
        if not for_host_rows_too:
            self.device = self._engine.device

    def _connect(self, dist: Any) -> Any:
        limit = datetime.timedelta(seconds=self.limit_s())
        try:
            return dist.ProcessGroupGloo(self._store, self.rank, self.num_ranks, limit)
        except RuntimeError as error:
            reason = _first_line(error)
            if "timeout" not in reason.lower():
                raise ConnectionError(f"{self.where('open')}: {reason}") from error
            raise TimeoutError(
                f"{self.where('open')}: not all ranks came within {limit.total_seconds()} s"
                f" ({reason})"
            ) from error

    def _move(self, call: Call) -> None:
        if len(call.shape.row_bytes) >= TAG_STREAMS:
            raise ValueError(f"sends: expected fewer than {TAG_STREAMS} streams")
        works: list[tuple[int, Any]] = []
        for peer in call.sources:
            for stream in call.streams:
                rows = call.recv_rows(stream, peer)
                works.append((peer, self._post(self._gloo.recv, call, stream, rows, peer)))
        for peer in call.targets:
            for stream in call.streams:
                rows = _writable(call.send_rows(stream, peer))
                works.append((peer, self._post(self._gloo.send, call, stream, rows, peer)))
        call.copy_own_rows()
        if works:
            self._job = Job(call, works)
            self._wait(self._job)
            self._job = None

    def _post(self, operation: Any, call: Call, stream: int, rows: Rows, peer: int) -> Any:
        try:
            tag = _tag(call.shape, stream, rows.nbytes)
            return operation([torch.from_numpy(rows)], peer, tag)
        except RuntimeError as error:
            raise self._lost(call, peer, error) from error

    def _wait(self, job: Job) -> None:
        self._jobs.put(job)
        if job.over.wait(max(0, min(QUICK_S, job.call.remaining_s()))):
            watch = None
        else:
            watch = threading.Thread(target=self._watch, args=(job,), daemon=True)
            watch.start()
        try:
            job.over.wait(max(0, job.call.remaining_s()))
        finally:
            job.over.set()
            if watch is not None:
                watch.join(STORE_S)
                self._store_hangs = watch.is_alive()
        if job.num_done == len(job.works):
            return
        if isinstance(job.stop, tuple):
            raise self._stopped_by(*job.stop)
        if job.stop is not None:
            raise job.stop
        if job.error is not None:
            raise self._lost(job.call, job.peer, job.error)
        raise job.call.late(job.peer)

    def _lost(self, call: Call, peer: int, error: Exception) -> Exception:
        """Make the error for a closed connection; what the peer told before it left says more."""
        told = self._ask_store(self._told)
        return call.lost(peer, _first_line(error)) if told is None else self._stopped_by(*told)

    def _watch(self, job: Job) -> None:
        """Look into the store until the job is over; runs in the watching thread."""
        shape = job.call.shape
        publish = time.monotonic() + min(SHAPE_S, job.call.timeout_s / 4) - QUICK_S
        published = False
        try:
            while not job.over.wait(WATCH_S):
                job.stop = self._told()
                if not published and time.monotonic() > publish:
                    self._store.set(f"call/{self.rank}", json.dumps(dataclasses.asdict(shape)))
                    published = True
                if published and job.stop is None:
                    job.stop = self._disagreement(job)
                if job.stop is not None:
                    job.over.set()
        except Exception:  # the store is gone with its process; the connections tell which one
            return

    def _told(self) -> tuple[int, str, str] | None:
        if not self._store.check(["told"]):
            return None
        rank, _, told = self._store.get("told").partition(b":")
        return int(rank), *decode_told(told)

    def _disagreement(self, job: Job) -> Exception | None:
        for peer in sorted({peer for peer, _ in job.works[job.num_done :]}):
            if self._store.check([f"call/{peer}"]):
                theirs = CallShape(**json.loads(self._store.get(f"call/{peer}")))
                if theirs.number == job.call.shape.number:
                    text = job.call.shape.disagreement(self.rank, peer, theirs)
                    if text is not None:
                        return ValueError(f"{job.call.where}: {text}")
        return None

    def heard(self, where: str, peers: list[int]) -> Exception | None:
        """Look into the store for what a peer told; who is gone without a word is not found."""
        told = self._ask_store(self._told)
        return None if told is None else self._stopped_by(*told)

    def _tell_peers(self, kind: str, text: str) -> None:
        data = f"{self.rank}:{encode_told(kind, text).decode(errors='ignore')}"
        self._ask_store(lambda: self._store.compare_set("told", "", data))  # the first one stays

    def _ask_store(self, question: Any) -> Any:
        """Return ``question()``, or None if the store does not answer in ``STORE_S``."""
        if self._store_hangs:
            return None
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except Exception:
                answers.put(None)

        try:
            threading.Thread(target=ask, daemon=True).start()
        except RuntimeError:  # the interpreter ends
            ask()
        try:
            return answers.get(timeout=STORE_S)
        except queue.Empty:
            self._store_hangs = True
            return None

    def _abandon(self) -> None:
        """Break the group, which ends all that waits in it, here and on the peers."""
        for peer in range(self.num_ranks):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    self._gloo.recv([nothing], peer, UNUSED_TAG).wait(AT_ONCE)
        if self._job is not None:
            self._job.waited.wait(STORE_S)

    def _release(self) -> None:
        self._jobs.put(None)
        self._gloo = None


def _checked_group(dist: Any, group: Any) -> tuple[Any, list[str]]:
    """Return the group, and its backends such as "cpu:gloo"."""
    if not dist.is_initialized():
        raise RuntimeError(
            'transport "torch" needs torch.distributed running; call'
            " torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed ProcessGroup, got {group!r}")
    config = dist.get_backend_config(group)
    backends = config.split(",")
    if "cpu:gloo" not in backends and "cuda:nccl" not in backends:
        raise RuntimeError(
            'transport "torch" needs a group with gloo for CPU tensors or NCCL for CUDA tensors,'
            f' got "{config}" (backend "cpu:gloo,cuda:nccl" has both)'
        )
    return group, backends


def _wait_for_jobs(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.wait()
        del job  # its buffers are the caller's again


def _tag(shape: CallShape, stream: int, num_bytes: int) -> int:
    """Return a tag that the same stream of the same call has, and hardly any other."""
    stream = TAG_STREAMS - 1 if shape.kind == "counts" else stream
    size = (num_bytes + zlib.crc32(shape.label.encode())) % TAG_SIZES
    return (shape.number % TAG_CALLS * TAG_STREAMS + stream) * TAG_SIZES + size


def _writable(rows: Rows) -> Rows:
    """Return rows that torch takes without a warning: it has no read-only tensors."""
    return rows if rows.flags.writeable else np.array(rows)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
