"""Transports move ragged byte rows between ranks and know no formats.

``open`` makes one by name: ``"local"`` (one rank; `run_local` makes several, on threads),
``"mpi"``, ``"torch"`` (torch.distributed) or ``"nccl"``.  What each promises stands in `Transport`.
Rows on a GPU travel by NCCL in "nccl", and in "torch" if the group has it; the others stage them
through pinned host memory.  Importing this package imports none of the libraries that transports
need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fp4comm.transport._base import Work
from fp4comm.transport.local import LocalTransport, World, run_local

__all__ = [
    "NAMES",
    "Lent",
    "StoppingPeers",
    "Transport",
    "Work",
    "available",
    "open",
    "run_local",
]

NAMES = ("local", "mpi", "nccl", "torch")


class Transport(Protocol):
    """One rank of a group of ranks that exchange byte rows.

    All ranks make the same calls in the same order.  Rows of one peer keep their order and arrive
    by ascending source rank; splits may be 0, and then neither side sends anything.  Errors start
    with ``rank r of n: phase:``, the phase being ``phase`` or, if None, ``counts`` or ``exchange``.

    Arguments are checked before anything is sent; a ValueError or TypeError from that leaves the
    transport as it was.  After any other failure in a call it is broken, as are those of the peers:
    they raise ``stopped by rank r: text``, and the next use raises RuntimeError at once.

    Rows on a GPU: work is queued behind a stream of the caller, and by NCCL the host does not wait.
    What fails then is found by a thread of the transport, which lets the stream go on; the next
    call, or `Work.wait`, raises it.  What the rows hold after a failure means nothing.  Where the
    program uses other NCCL communicators too, all ranks start their work in the same order.
    """

    name: str
    rank: int
    num_ranks: int
    timeout_s: float  # seconds that a call waits for a late peer; may be set before a call
    phase: str | None  # what the caller is doing, for error texts; may be set before a call
    label: str  # what an exchange is for, the same on all ranks; may be set before a call
    device: torch.device | None  # the CUDA device that all rows must be on; None: any, and the host
    cuda_missing: str | None  # why rows on a GPU cannot travel, or None
    history: int  # hash of the exchanges' labels so far, in order; NCCL does not compare them

    def exchange_counts(self, counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Send row d of ``counts`` to rank d, and return what came, row s from rank s.

        Args:
            counts: ``[num_ranks, k]`` integers on the host, ``k > 0`` the same on all ranks.

        Returns:
            ``[num_ranks, k]`` int64.

        Raises:
            ValueError: if the shape is another one, here or on a peer.
            TimeoutError: naming the peer, if one does not come within ``timeout_s``.
            ConnectionError: naming the peer, if one is gone.
            RuntimeError: if a peer called ``abort``, or the transport is broken or closed.

        Example: of 2 ranks with ``[[1], [2]]`` and ``[[3], [4]]``, rank 0 gets ``[[1], [3]]`` and
        rank 1 ``[[2], [4]]``.
        """
        ...

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
        """Move the rows of all streams between all ranks, all of them under way together.

        Rows for rank d are ``sends[i][offset : offset + send_splits[d]]`` with offset the sum of
        the splits before d; rows from rank s arrive likewise in ``recvs[i]``.  Nothing beyond the
        rows received is touched.  Rows on the host have come when this returns, and ``sends`` may
        be reused.  With rows on a GPU, the CUDA stream waits for that instead: work queued on it
        from then on finds them; an engine of the host keeps the host waiting as well.

        Args:
            sends: one array a stream, ``[sum(send_splits), row_bytes]`` uint8, C-contiguous: NumPy
                arrays or CPU torch tensors, or tensors on one CUDA device.  ``row_bytes`` may
                differ by stream and be 0.
            send_splits: ``[num_ranks]`` rows for each rank, for every stream.
            recvs: one array a stream, at least ``[sum(recv_splits), row_bytes]``, not overlapping
                ``sends``, where those are.
            recv_splits: ``[num_ranks]`` rows from each rank; must agree with the peers'
                send_splits.
            stream: torch.cuda.Stream that work on a GPU is ordered after, and that waits for it;
                None is the current one of the rows' device.
            async_op: do not make the stream wait, but return a `Work` that does.  It holds the
                arrays until then; dropped instead, it still leaves them whole until NCCL is done.
                Rows on the host are exchanged at once.

        Returns:
            a `Work` with ``async_op``, else None.

        Raises:
            ValueError: naming the argument that breaks a rule above; or naming a pair of ranks and
                both counts, if their splits disagree and that is noticed.
            TypeError: naming an argument that is no array of uint8, not on ``device``, or no
                torch.cuda.Stream.
            TimeoutError, ConnectionError, RuntimeError: as ``exchange_counts``.
        """
        ...

    def abort(self, text: str) -> None:
        """Tell the peers that this rank failed.

        Those that wait, or come to wait, raise RuntimeError ``stopped by rank r: text``.  The
        transport is broken then.  Does nothing after another failure or ``close``.
        """
        ...

    def close(self) -> None:
        """Give back what ``open`` took.  Waits for no peer, and may be called twice."""
        ...

    def __enter__(self) -> Transport:
        """Return itself."""
        ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Close; if an exception leaves the block, ``abort`` with its text first."""
        ...


def open(  # shadows the built-in, which this module does not use
    name: str, *, comm: Any = None, group: Any = None, timeout_s: float = 300.0
) -> Transport:
    """Make the transport ``name``.  Collective over the ranks of ``comm`` or ``group``.

    Args:
        name: one of ``NAMES``.  "nccl" is for rows on a GPU alone, and each rank uses the CUDA
            device that is current here.
        comm: mpi4py intracommunicator, for "mpi" and for what "nccl" needs of the host; None is
            COMM_WORLD.  It is duplicated.
        group: torch.distributed ProcessGroup, for "torch"; None is WORLD.  Ranks are those within
            the group.  With backend "gloo" rows on a GPU are staged; with "nccl" all rows must be
            on the CUDA device that is current here; with "cpu:gloo,cuda:nccl" both are as they
            should be.  The group's own communicators are not used.
        timeout_s: seconds that a call waits for a late peer.

    Raises:
        ValueError: if the name is unknown, or an argument belongs to another transport.
        RuntimeError: if a library is missing or not started, saying what to do; for NCCL on all
            ranks alike, naming the first that lacks something.
        TimeoutError: if not all ranks come within ``timeout_s``.
    """
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    if comm is not None and name not in ("mpi", "nccl"):
        raise ValueError(f'comm: belongs to transports "mpi" and "nccl", used with "{name}"')
    if group is not None and name != "torch":
        raise ValueError(f'group: belongs to transport "torch", used with "{name}"')
    if name == "mpi":
        from fp4comm.transport.mpi import MpiTransport

        return MpiTransport(comm, timeout_s)
    if name == "torch":
        from fp4comm.transport.torch_pg import TorchTransport

        return TorchTransport(group, timeout_s)
    if name == "nccl":
        from fp4comm.transport.nccl import NcclTransport

        return NcclTransport(comm, timeout_s)
    return LocalTransport(World(1), 0, timeout_s)


# Two classes, since a generator of contextlib takes twice their time, and a dispatch enters ten.


class Lent:
    """A context, for one use, in which the transport has a phase, a time limit and a label."""

    def __init__(self, transport: Transport, phase: str, timeout_s: float, label: str = "") -> None:
        """Note what to lend."""
        self._transport = transport
        self._lent = phase, timeout_s, label

    def __enter__(self) -> None:
        """Lend it."""
        t = self._transport
        self._before = t.phase, t.timeout_s, t.label
        t.phase, t.timeout_s, t.label = self._lent

    def __exit__(self, *_: object) -> None:
        """Take it back."""
        t = self._transport
        t.phase, t.timeout_s, t.label = self._before


class StoppingPeers:
    """A context in which a failure of this rank is told to the others, who cannot know of it."""

    def __init__(self, transport: Transport, operation: str) -> None:
        """Note what it fails in."""
        self._transport = transport
        self._operation = operation

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        """Tell them."""
        if kind is not None:
            self._transport.abort(f"{self._operation}: {kind.__name__}: {error}")


def available() -> dict[str, str | None]:
    """Return for each transport None if it can be used here, else what is missing.

    For "mpi" this imports mpi4py, which starts MPI in this process; for "nccl" it imports CuPy
    where there is a GPU.
    """
    from fp4comm.transport import mpi, nccl, torch_pg

    return {
        "local": None,
        "mpi": _missing(mpi.import_mpi),
        "nccl": _missing(nccl.import_libraries),
        "torch": _missing(torch_pg.import_distributed),
    }


def _missing(import_library: Callable[[], Any]) -> str | None:
    try:
        import_library()
    except RuntimeError as error:
        return str(error)
    return None
