"""What only MPI has: communicators, and messages above 2 and 4 GiB.  mpi_groups.py CASE..."""

import sys
import time

import numpy as np
from mpi4py import MPI
from transport_cases import (
    POISON,
    case_counts,
    case_disagree,
    exchange_and_check,
    raises,
    say,
)

from fp4comm import transport

WORLD = MPI.COMM_WORLD


def check_rows(t):
    exchange_and_check(t, np.arange(t.num_ranks**2).reshape(t.num_ranks, -1))


def case_subcommunicators():
    """COM-27, INS-20: two reordered halves at once; ranks are those of the communicator."""
    half = WORLD.Split(WORLD.rank % 2, key=-WORLD.rank)
    with transport.open("mpi", comm=half, timeout_s=20) as t:
        assert [2, 0, 3, 1].index(WORLD.rank) % 2 == t.rank
        assert t.num_ranks == 2
        check_rows(t)
    group = WORLD.Get_group().Incl([3, 1])
    if WORLD.rank in (1, 3):
        pair = WORLD.Create_group(group)
        with transport.open("mpi", comm=pair, timeout_s=20) as t:
            assert t.rank == [3, 1].index(WORLD.rank)
            check_rows(t)


def case_two_at_once():
    """Two transports on one communicator do not mix their messages."""
    a, b = transport.open("mpi"), transport.open("mpi")
    rng = np.random.default_rng(1)
    for t in (a, b, b, a) * 10:
        exchange_and_check(t, rng.integers(0, 9, (t.num_ranks, t.num_ranks)))
    a.close()
    check_rows(b)
    b.close()


def case_recreate():
    """COM-34: a new transport at each of 6 x 13 sizes, then 500 more: nothing runs out."""
    for _ in range(6):
        for power in range(13):
            with transport.open("mpi", timeout_s=20) as t:
                exchange_and_check(t, np.full((t.num_ranks, t.num_ranks), 2**power))
    for _ in range(500):
        t = transport.open("mpi", timeout_s=20)
        case_counts(t)
        t.close()


def case_recover():
    """COM-22: after an error only a new transport works."""
    t = transport.open("mpi", timeout_s=20)
    case_disagree(t)
    t.close()
    with transport.open("mpi", timeout_s=20) as t:
        check_rows(t)


def case_open_late():
    if WORLD.rank == 1:
        time.sleep(3)
        return
    with raises(TimeoutError, "rank 0 of 2: open: not all ranks came within 1.0 s"):
        transport.open("mpi", timeout_s=1)


def case_wrong_comm():
    inter = MPI.COMM_SELF.Create_intercomm(0, WORLD, 1 - WORLD.rank)
    for comm in (inter, MPI.COMM_NULL, 3):
        for name in ("mpi", "nccl"):
            with raises(TypeError, "comm: expected an mpi4py intracommunicator"):
                transport.open(name, comm=comm)


def case_no_gpu():
    """COM-30, INS-03: what NCCL lacks is one error on all ranks, which leaves MPI as it was."""
    lacks = transport.available()["nccl"]
    if lacks is None:
        return
    half = WORLD.Split(WORLD.rank % 2, key=-WORLD.rank)
    for comm in (None, half) * 30:
        num_ranks = WORLD.size if comm is None else comm.size
        with raises(RuntimeError, f"rank 0 of {num_ranks}: {lacks}"):
            transport.open("nccl", comm=comm, timeout_s=20)
    with transport.open("mpi", timeout_s=20) as t:
        check_rows(t)


def case_no_gpu_and_late():
    """NCCL is not asked for before all ranks are there."""
    if WORLD.rank == 1:
        time.sleep(3)
        return
    with raises(TimeoutError, "rank 0 of 2: open: not all ranks came within 1.0 s"):
        transport.open("nccl", timeout_s=1)


def case_big():
    """COM-12, COM-13: 2 GiB and a little, 4 GiB + 32 bytes, to one peer in one message.

    Rows are zero but for marked ones, so that the sender's memory need not exist.
    """
    t = transport.open("mpi", timeout_s=60)
    memory = np.zeros(2**32 + 64, np.uint8)
    for num_rows, row_bytes in ((599186, 3584), (599187, 3584), (2**27 + 1, 32)):
        num_bytes = num_rows * row_bytes
        rows = memory[:num_bytes].reshape(num_rows, row_bytes)
        nothing = np.empty((0, row_bytes), np.uint8)
        marked = np.linspace(0, num_rows - 1, 97).astype(int)
        marks = (np.arange(97)[:, None] + np.arange(row_bytes)) % 255 + 1
        if t.rank == 0:
            rows[marked] = marks
            t.exchange([rows], [0, num_rows], [nothing], [0, 0])
            rows[marked] = 0
            continue
        memory[num_bytes : num_bytes + 32] = POISON
        start = time.monotonic()
        t.exchange([nothing], [0, 0], [rows], [num_rows, 0])
        say(num_bytes, "bytes in", round(time.monotonic() - start, 2), "s")
        assert (memory[num_bytes : num_bytes + 32] == POISON).all()
        memory[num_bytes : num_bytes + 32] = 0
        np.testing.assert_array_equal(rows[marked], marks)
        rows[marked] = 0
        assert memory.max() == 0
    t.close()


for case in sys.argv[1:]:
    globals()[f"case_{case}"]()
    WORLD.Barrier()
    say("ok", case, "rank", WORLD.rank)
