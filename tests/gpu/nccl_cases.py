"""What a transport promises for rows on GPUs, for one rank under mpirun.

``mpirun -n N python tests/gpu/nccl_cases.py [--torch] [CASE...]``: transport "nccl", and "mpi",
which stages; with ``--torch`` groups of torch.distributed that have NCCL, and one that has not.
Prints ``ok WHERE CASE`` with its seconds once all ranks have passed it; the first failure ends the
job with a code that is not 0.  ``--exit CASE`` runs one of `EXITS`, after which the processes end
in a bad way: the job must end by itself, in seconds.
"""

import contextlib
import functools
import gc
import inspect
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mpi"))

import transport_cases as cases
from on_device import busy
from transport_cases import Round, exchange_and_check, ones_counts, raises, say, splits_for

from fp4comm import transport

OPEN_S = 30.0  # time limit of what is to go well
LATE_S = 3.0  # and of what is not
FILL = 0x99


# ---- ranks


def variable(names, default):
    return int(next((os.environ[name] for name in names if name in os.environ), default))


WORLD_RANK = variable(["OMPI_COMM_WORLD_RANK", "PMI_RANK"], 0)
WORLD_SIZE = variable(["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"], 1)


class MpiRanks:
    """Ranks of COMM_WORLD."""

    names = ("nccl",)
    stages = "mpi"

    def __init__(self):
        from mpi4py import MPI

        self._mpi = MPI

    def open(self, name, **options):
        return transport.open(name, **({"timeout_s": OPEN_S} | options))

    def barrier(self):
        self._mpi.COMM_WORLD.Barrier()

    def forget(self, t):
        """Let the job end with code 0, though a call failed: that was the case."""
        t._unfinished = False

    def end_job(self):
        self._mpi.COMM_WORLD.Abort(1)

    def close(self):
        """MPI ends at exit."""


class TorchRanks:
    """Ranks of torch.distributed: a group with NCCL alone, and one with gloo as well."""

    names = ("nccl", "cpu:gloo,cuda:nccl")
    stages = "gloo"

    def __init__(self):
        port = 20000 + os.getppid() % 20000  # all ranks are children of one mpirun
        self._store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, WORLD_RANK == 0)
        options = {"store": self._store, "rank": WORLD_RANK, "world_size": WORLD_SIZE}
        dist.init_process_group("nccl", **options)
        self._groups = {"nccl": dist.group.WORLD}
        for backends in ("cpu:gloo,cuda:nccl", "gloo"):
            self._groups[backends] = dist.new_group(backend=backends)

    def open(self, name, **options):
        options = {"timeout_s": OPEN_S, "group": self._groups[name]} | options
        return transport.open("torch", **options)

    def barrier(self):
        dist.barrier(self._groups["gloo"])

    def forget(self, t):
        """A failed transport leaves the process as it was."""

    def end_job(self):
        os._exit(1)

    def close(self):
        dist.destroy_process_group()


# ---- helpers


def random_splits(t, rng, most=40):
    return rng.integers(0, most, (t.num_ranks, t.num_ranks))


def on_device(t, splits, name=""):
    return Round(t, splits, name, device())


def device():
    return torch.device("cuda", torch.cuda.current_device())


def other_rows(t):
    """Splits with 3 rows for each pair of ranks."""
    return np.full((t.num_ranks, t.num_ranks), 3)


def check_stream_is_free(within_s):
    start = time.monotonic()
    torch.cuda.synchronize()
    took_s = time.monotonic() - start
    assert took_s < within_s, f"the stream was stuck for {took_s:.1f} s"


def check_broken(t):
    with raises(RuntimeError, f'transport "{t.name}": broken: '):
        ones_counts(t)
    rounds = on_device(t, other_rows(t))
    with raises(RuntimeError, f'transport "{t.name}": broken: '):
        rounds.exchange()


# ---- bytes


def case_splits(t):
    """Ragged, empty, one-sided and random splits; streams of 0 bytes; rows behind stay."""
    for name, splits in splits_for(t.num_ranks):
        exchange_and_check(t, splits, name, device())
    if t.num_ranks > 1:
        splits = other_rows(t)
        splits[0], splits[:, 1] = 0, 0
        exchange_and_check(t, splits, "a row and a column of zeros", device())
        own = np.diag(np.arange(1, t.num_ranks + 1))
        exchange_and_check(t, own, "own rows alone", device())


def case_large(t):
    rng = np.random.default_rng(t.num_ranks)
    exchange_and_check(t, rng.integers(3000, 9000, (t.num_ranks, t.num_ranks)), "large", device())


def case_no_streams(t):
    assert t.exchange([], [0] * t.num_ranks, [], [0] * t.num_ranks) is None
    empty = torch.empty((0, 16), dtype=torch.uint8, device=device())
    assert t.exchange([empty], [0] * t.num_ranks, [empty], [0] * t.num_ranks) is None


def case_rounds(t):
    """300 ragged rounds, counts first, checked in blocks, so that the host runs ahead."""
    rng = np.random.default_rng(5)
    for block in range(20):
        rounds = []
        for number in range(15):
            splits = random_splits(t, rng, 9) * rng.integers(0, 2)
            splits[:, number % t.num_ranks] = 0
            counts = t.exchange_counts(splits[t.rank][:, None])
            np.testing.assert_array_equal(counts[:, 0], splits[:, t.rank])
            rounds.append(on_device(t, splits, f"round {block} {number}"))
            rounds[-1].exchange()
        for each in rounds:
            each.check()


def case_other_thread(t):
    """A call from another thread, as autograd makes them."""
    import threading

    each = on_device(t, other_rows(t))
    thread = threading.Thread(target=each.exchange)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    each.check()


def case_arguments(t):
    """A wrong argument names itself, and leaves the transport usable."""
    ones = [1] * t.num_ranks
    good = torch.zeros((t.num_ranks, 4), dtype=torch.uint8, device=device())
    wide = torch.zeros((t.num_ranks, 8), dtype=torch.uint8, device=device())

    def refused(error, text, send, recv, **options):
        with raises(error, text):
            t.exchange([send], ones, [recv], ones, **options)

    refused(ValueError, "recvs[0]: expected C-contiguous", good, wide[:, ::2])
    refused(ValueError, "recvs[0]: expected 4 bytes a row", good, wide)
    refused(ValueError, "sends[0]: expected shape", good[0], good)
    refused(TypeError, "sends[0]: expected a strided tensor of uint8", good.char(), good)
    host = good.cpu()
    if t.device is not None:
        text = f"expected a tensor on {t.device}, the transport's, got "
        refused(TypeError, f"sends[0]: {text}a tensor on cpu", host, good)
        refused(TypeError, f"recvs[0]: {text}ndarray", good, host.numpy())
        refused(TypeError, f"sends[0]: {text}", host, host)
    else:
        refused(ValueError, f"recvs[0]: expected a tensor on {device()} as sends[0]", good, host)
        refused(ValueError, "recvs[0]: expected rows on the host as sends[0]", host, good)
    for handle in (0, 1, 2, torch.cuda.current_stream().cuda_stream):  # STR-11
        refused(TypeError, "stream: expected a torch.cuda.Stream", good, good, stream=handle)
    if torch.cuda.device_count() > 1:
        there = torch.device("cuda", (device().index + 1) % torch.cuda.device_count())
        refused(ValueError, "stream: expected one on", good, good, stream=torch.cuda.Stream(there))
        if t._engine is not None:
            far = good.to(there)
            refused((TypeError, ValueError), "sends[0]: expected", far, far)
    exchange_and_check(t, other_rows(t), "after mistakes", device())


def case_host_rows(t):
    """Rows on the host travel too where the transport takes them, between those on the GPU."""
    for _ in range(5):
        exchange_and_check(t, other_rows(t), "host")
        exchange_and_check(t, other_rows(t), "device", device())


# ---- streams and memory


def case_busy(t):
    """STR-08: rows that a stream, not the default one, writes behind a busy kernel."""
    rng = np.random.default_rng(8)
    side = torch.cuda.Stream()
    for number in range(10):
        splits = random_splits(t, rng)
        want = on_device(t, splits, f"busy {number}")
        late = on_device(t, splits, f"busy {number}")
        for rows in late.sends:
            rows.zero_()
        torch.cuda.synchronize()
        is_explicit = number % 2 == 1
        with torch.cuda.stream(side):
            busy(20)
            for rows, written in zip(late.sends, want.sends, strict=True):
                rows.copy_(written)
            if not is_explicit:
                late.exchange()
        if is_explicit:
            late.exchange(stream=side)
        with torch.cuda.stream(side):
            late.check()


def case_host_does_not_wait(t):
    """The call returns while the stream is still busy."""
    ones_counts(t)
    each = on_device(t, other_rows(t))
    busy(300)
    before = torch.cuda.Event()
    before.record()
    start = time.perf_counter()
    each.exchange()
    took_ms = 1000 * (time.perf_counter() - start)
    assert not before.query(), f"the host waited {took_ms:.0f} ms"
    each.check()


def case_async_out_of_order(t):
    """STR-18: several are under way, waited for in any order, twice, and under other streams."""
    rng = np.random.default_rng(9)
    side = torch.cuda.Stream()
    for _ in range(5):
        busy(5)
        rounds = [on_device(t, random_splits(t, rng), f"async {i}") for i in range(4)]
        works = [each.exchange(async_op=True) for each in rounds]
        for i in (2, 0, 1, 0):
            works[i].wait()
            rounds[i].check()
        with torch.cuda.stream(side):
            works[3].wait()
            rounds[3].check()
        works[3].wait()
        rounds[3].check()


def take_memory(rows):
    """Take the blocks that ``rows`` gave back, and overwrite them."""
    blocks = [torch.empty(n, dtype=torch.uint8, device=device()) for n in rows for _ in range(3)]
    for block in blocks:
        block.fill_(FILL)


def case_inputs_deleted(t):
    """STR-03: the caller's arrays go while they are read; Work, or its end, keeps their memory."""
    rng = np.random.default_rng(3)
    side = torch.cuda.Stream()
    for number in range(9):
        splits = rng.integers(200, 2000, (t.num_ranks, t.num_ranks))
        each = on_device(t, splits, f"deleted {number}")
        sizes = [rows.nbytes for rows in each.sends if rows.nbytes]
        torch.cuda.synchronize()
        if t.rank == number % t.num_ranks:
            time.sleep(0.02)  # the peers' rows wait for this rank
        busy(20)
        work = each.exchange(async_op=True)
        each.sends = None
        if number % 3 == 0:  # held by the work
            take_memory(sizes)
            work.wait()
        elif number % 3 == 1:  # which is dropped
            del work
            take_memory(sizes)
            torch.cuda.synchronize()
        else:  # waited for by another stream than the one whose memory it is
            with torch.cuda.stream(side):
                work.wait()
            take_memory(sizes)
            torch.cuda.synchronize()
        each.check()


def case_memory_is_constant(t):
    """STR-05: rounds of one shape take no more memory, nor streams of their own."""
    gc.collect()
    taken = {}
    splits = np.full((t.num_ranks, t.num_ranks), 300)
    for number in range(1, 201):
        each = on_device(t, splits)
        each.exchange(async_op=True).wait()
        del each
        torch.cuda.synchronize()  # else how much is in use at a time depends on how late the GPU is
        if number in (20, 200):
            taken[number] = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert taken[20] == taken[200], taken


def case_capture(t):
    """STR-14, STR-16: refused by name under capture, which goes on, watched or not."""
    each, late = on_device(t, other_rows(t)), on_device(t, other_rows(t))
    gc.collect()  # a graph that is collected within a capture breaks it
    value, graph = torch.zeros(4, device=device()), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    ones_counts(t)
    if t.rank == 0:
        work = late.exchange(async_op=True)  # under way while the capture lasts
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        value += 1
        with raises(RuntimeError, "exchange: cannot be captured in a CUDA graph"):
            each.exchange()
        time.sleep(0.5)
        value += 1
        graph.capture_end()
    if t.rank > 0:
        work = late.exchange(async_op=True)
    work.wait()
    late.check()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert value.tolist() == [4.0] * 4
    each.exchange()
    each.check()


MOVING = [
    case_splits,
    case_large,
    case_no_streams,
    case_rounds,
    case_other_thread,
    case_arguments,
    case_busy,
    case_host_does_not_wait,
    case_async_out_of_order,
    case_inputs_deleted,
    case_memory_is_constant,
    case_capture,
]
STAGED = [
    case_splits,
    case_large,
    case_no_streams,
    case_arguments,
    case_host_rows,
    case_busy,
    case_async_out_of_order,
    case_inputs_deleted,
]


# ---- failures; each on a transport of its own, which it leaves broken


def start_and_expect(t, error, *texts, within_s, how):
    """Start an exchange that fails, and check that the stream goes on and the error comes."""
    each = on_device(t, other_rows(t))
    start = time.monotonic()
    with raises(error, *texts, within_s=within_s + 1):
        work = each.exchange(async_op=how == "async")
        check_stream_is_free(within_s)
        time.sleep(max(0.0, start + 0.5 - time.monotonic()))  # if another failure freed it
        if work is not None:
            work.wait()
        ones_counts(t)
    check_broken(t)


def case_abort(t, how):
    """The last rank aborts, while the others' rows are under way."""
    ones_counts(t)
    last = t.num_ranks - 1
    if t.rank == last:
        time.sleep(0.5)
        t.abort("expert 7 gave NaN")
        check_broken(t)
        return
    text = f"stopped by rank {last}: expert 7 gave NaN"
    start_and_expect(t, RuntimeError, text, within_s=6, how=how)


def case_abort_own(t):
    """A rank aborts with rows of its own under way: its stream goes on too."""
    ones_counts(t)
    if t.rank == 0:
        each = on_device(t, other_rows(t))
        each.exchange()
        time.sleep(0.3)
        t.abort("enough")
        check_stream_is_free(6)
        check_broken(t)
        return
    time.sleep(1.0)
    with raises(RuntimeError, "stopped by rank 0: enough", within_s=6):
        ones_counts(t)


def case_late(t, how):
    """The last rank does not come: TimeoutError after the limit, here at once and there at last."""
    ones_counts(t)
    last = t.num_ranks - 1
    if t.rank == last:
        time.sleep(LATE_S + 1)
        with raises(TimeoutError, "stopped by rank ", "no answer from "):
            ones_counts(t)
        check_broken(t)
        return
    t.timeout_s = LATE_S
    t.phase = "dispatch"
    texts = "dispatch: no answer from ", f"{last}", f"within {LATE_S} s"
    start_and_expect(t, TimeoutError, *texts, within_s=LATE_S + 4, how=how)


def case_late_by_a_kernel(t):
    """The limit passes with the kernel of NCCL still queued behind another one, on one rank."""
    ones_counts(t)
    t.timeout_s = 1.0
    each = on_device(t, other_rows(t))
    with raises(TimeoutError, "no answer from ", within_s=15):
        if t.rank == 0:
            busy(4000)
        each.exchange()
        time.sleep(2)
        check_stream_is_free(12)
        ones_counts(t)
    check_broken(t)


def case_disagree(t):
    """COM-07: rank 0 has 1 row for rank 1, which expects 3: an error within the limit."""
    ones_counts(t)
    t.timeout_s = LATE_S
    to, came = [0] * t.num_ranks, [0] * t.num_ranks
    if t.rank == 0:
        to[1] = 1
    if t.rank == 1:
        came[0] = 3
    send = torch.zeros((sum(to), 8), dtype=torch.uint8, device=device())
    recv = torch.full((5, 8), cases.POISON, dtype=torch.uint8, device=device())
    with raises((TimeoutError, RuntimeError), "rank ", within_s=LATE_S + 6):
        t.exchange([send], to, [recv], came)
        check_stream_is_free(LATE_S + 4)
        if t.rank != 1:
            time.sleep(LATE_S + 1)
        ones_counts(t)
    assert (recv[3:] == cases.POISON).all()
    check_broken(t)


def case_close_under_way(t):
    """Closed with rows under way that nobody takes: close ends, and the stream is free."""
    ones_counts(t)
    if t.rank > 0:
        time.sleep(4)
        return
    each = on_device(t, other_rows(t))
    work = each.exchange(async_op=True)
    start = time.monotonic()
    t.close()
    assert time.monotonic() - start < 8, time.monotonic() - start
    check_stream_is_free(6)
    with raises(RuntimeError, "closed"):
        work.wait()


FAILING = [
    functools.partial(case_abort, how="sync"),
    functools.partial(case_abort, how="async"),
    case_abort_own,
    functools.partial(case_late, how="sync"),
    functools.partial(case_late, how="async"),
    case_late_by_a_kernel,
    case_disagree,
    case_close_under_way,
]


# ---- ends of the process, one a run; the job must end by itself, in seconds


def exit_uncaught(t):
    """Rank 0 raises while the others' rows are under way."""
    ones_counts(t)
    each = on_device(t, other_rows(t))
    if t.rank == 0:
        time.sleep(0.5)
        raise ZeroDivisionError("rank 0 made a mistake")
    each.exchange()
    with raises((RuntimeError, ConnectionError), within_s=8):
        torch.cuda.synchronize()
        ones_counts(t)


def exit_unclosed(t):
    """Nobody closes, after rows that came."""
    exchange_and_check(t, other_rows(t), "unclosed", device())


def exit_under_way(t):
    """Rank 0 leaves with rows under way that nobody takes; the others leave at once."""
    ones_counts(t)
    if t.rank == 0:
        on_device(t, other_rows(t)).exchange(async_op=True)


def exit_left(t):
    """Rank 0 leaves in order, though the others wait for it."""
    ones_counts(t)
    if t.rank == 0:
        sys.exit(3)
    t.timeout_s = 5.0
    on_device(t, other_rows(t)).exchange()
    with raises((RuntimeError, ConnectionError, TimeoutError), within_s=12):
        torch.cuda.synchronize()
        ones_counts(t)


EXITS = [exit_uncaught, exit_unclosed, exit_under_way, exit_left]


# ---- script


def name_of(case):
    options = getattr(case, "keywords", {})
    function = getattr(case, "func", case)
    words = [function.__name__.partition("_")[2], *options.values()]
    return "=".join(words)


class Program:
    """Runs the chosen cases on all ranks and says what passed."""

    def __init__(self, ranks, chosen):
        self.ranks = ranks
        self._chosen = chosen

    def run(self, where, case, t=None):
        name = name_of(case)
        if self._chosen and name not in self._chosen:
            return
        start = time.monotonic()
        try:
            case(t)
        except BaseException:
            say(f"FAILED {where} {name} on rank {WORLD_RANK}:\n{traceback.format_exc()}")
            raise
        self.ranks.barrier()
        if WORLD_RANK == 0:
            say(f"ok {where} {name} {time.monotonic() - start:.2f} s")

    def moving(self, name, moving):
        start = time.monotonic()
        t = self.ranks.open(name)
        if WORLD_RANK == 0:
            say(f"# {name}: opened in {time.monotonic() - start:.2f} s, device {t.device}")
        for case in moving:
            self.run(name, case, t)
        t.close()

    def failing(self, name):
        for case in FAILING:
            if self._chosen and name_of(case) not in self._chosen:
                continue
            t = self.ranks.open(name)
            self.run(name, case, t)
            t.close()
            self.ranks.forget(t)

    def reopened(self, name):
        """COM-22, COM-34: new transports work after failures and closings, two at once too."""

        def case_reopened(_):
            for number in range(3):
                with self.ranks.open(name) as t:
                    exchange_and_check(t, other_rows(t), f"reopened {number}", device())
            a, b = self.ranks.open(name), self.ranks.open(name)
            for t in (a, b, b, a):
                exchange_and_check(t, other_rows(t), "two at once", device())
            a.close()
            exchange_and_check(b, other_rows(b), "the other closed", device())
            b.close()

        self.run(name, case_reopened)

    def subgroup(self):
        """COM-27: ranks are those of the group, in its order."""
        members = [3, 1]
        options = {}
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            options["sort_ranks"] = False
        group = dist.new_group(members, backend="nccl", **options)

        def case_subgroup(_):
            if WORLD_RANK in members:
                order = members if options else sorted(members)
                with self.ranks.open("nccl", group=group) as t:
                    assert t.rank == order.index(WORLD_RANK)
                    assert t.num_ranks == 2
                    exchange_and_check(t, np.arange(4).reshape(2, 2), "subgroup", device())

        self.run("nccl", case_subgroup)

    def callers_group(self):
        """The caller's own NCCL group works after all that."""

        def case_callers_group(_):
            total = torch.ones(1, device=device())
            dist.all_reduce(total)
            assert total.item() == WORLD_SIZE

        self.run("nccl", case_callers_group)

    def all(self):
        for name in self.ranks.names:
            self.moving(name, MOVING if name == "nccl" else [*STAGED, case_capture])
        self.moving(self.ranks.stages, STAGED)
        if WORLD_SIZE > 1:
            self.failing("nccl")
        self.reopened("nccl")
        if isinstance(self.ranks, TorchRanks):
            if WORLD_SIZE >= 4:
                self.subgroup()
            self.callers_group()


def choose_device():
    if not torch.cuda.is_available():
        sys.exit(transport.available()["nccl"])
    places = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
    torch.cuda.set_device(variable(places, WORLD_RANK) % torch.cuda.device_count())


def main():
    arguments = sys.argv[1:]
    is_torch, is_exit = "--torch" in arguments, "--exit" in arguments
    chosen = [argument for argument in arguments if not argument.startswith("--")]
    choose_device()
    ranks = TorchRanks() if is_torch else MpiRanks()
    if is_exit:
        exits = {name_of(case): case for case in EXITS}
        t = ranks.open("nccl")
        exits[chosen[0]](t)
        say(f"rank {t.rank} leaves")
        return
    start = time.monotonic()
    try:
        Program(ranks, chosen).all()
    except BaseException as error:
        say(f"rank {WORLD_RANK}: {type(error).__name__}: {error}")
        sys.stderr.flush()
        ranks.end_job()
    ranks.barrier()
    if WORLD_RANK == 0:
        say(f"all passed in {time.monotonic() - start:.1f} s")
    with contextlib.suppress(RuntimeError):
        ranks.close()


if __name__ == "__main__":
    main()
