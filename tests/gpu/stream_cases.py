"""What dispatch and combine promise about streams, memory and CUDA graphs, on any transport.

Each case takes the transport, runs on all ranks together and leaves it usable, unless its name is
in `BREAKING`.  Used on threads by test_streams.py and with NCCL by rank_program.py.
"""

import contextlib
import dataclasses
import gc

import torch
from on_device import DEVICE, busy, on_host, side_stream, synchronize, to
from rounds import (
    Foreign,
    Round,
    bf16_bits,
    compare_dispatched,
    expected,
    expert_out,
    in_order_of_arrival,
    inputs,
    route_of,
    same_rows,
)

from fp4comm import AllToAll

ON_GPU = DEVICE.type == "cuda"
BUSY_MS = 50  # longer than the host takes to launch everything behind it
CASE = Round("streams", tokens=(96, 64), hidden=2048, topk=4, num_experts=16)
MANY_ROUNDS, FIRST_ROUNDS = 200, 20


class Bench:
    """An AllToAll of `CASE` on this rank, its inputs on the device, and what has to come."""

    def __init__(self, t):
        self.transport = t
        self.a2a = AllToAll(
            t,
            num_experts=16,
            hidden=2048,
            expert_alignment=CASE.alignment,
            timeout_s=60,
            **route_of(CASE),
        )
        want, sums = (of_all[t.rank] for of_all in self._expected(t))
        self.want = in_order_of_arrival(want, CASE, t.rank)
        self.sums = sums
        self.x, self.idx, self.weights = to(DEVICE, inputs(CASE, t.rank))
        self.out = to(DEVICE, expert_out(CASE, t.rank, len(self.want.row_weights)))

    @staticmethod
    def _expected(t):
        arrived, sums = expected(CASE, t.num_ranks)
        return arrived, sums[True]

    @property
    def args(self):
        return self.x, self.idx, self.weights

    def check(self, d, y=None):
        """Compare with the reference; reads on the current stream."""
        compare_dispatched(on_host(d), self.want, CASE)
        if y is not None:
            same_rows((bf16_bits(y.cpu()),), (self.sums,))

    def round(self):
        d = self.a2a.dispatch(*self.args)
        return d, self.a2a.combine(self.out, d.handle)

    def warm_up(self):
        self.check(*self.round())


def copies(*tensors):
    return [t.clone() for t in tensors]


def take_memory_and_overwrite_it(*likes):
    """Take the blocks that were just given back, on the current stream and on another one."""
    sizes = [*(like.nbytes for like in likes), *(512 << power for power in range(13))]
    for context in (contextlib.nullcontext(), side_stream()):
        with context:
            blocks = [
                torch.empty(n, dtype=torch.uint8, device=DEVICE) for n in sizes for _ in "abc"
            ]
            for block in blocks:
                block.fill_(99)
            del blocks


def case_str_01_inputs_written_late(t):
    """x, indices and weights are written by work that is still queued when dispatch is called."""
    bench = Bench(t)
    bench.warm_up()
    x, idx, weights = (torch.zeros_like(part) for part in bench.args)
    busy(BUSY_MS)
    for late, part in zip((x, idx, weights), bench.args, strict=True):
        late.copy_(part)
    d = bench.a2a.dispatch(x, idx, weights)
    out = torch.zeros_like(bench.out)
    busy(BUSY_MS)
    out.copy_(bench.out)
    bench.check(d, bench.a2a.combine(out, d.handle))

    idx = bench.idx.clone()
    busy(BUSY_MS)
    idx[0, :] = -1
    d = bench.a2a.dispatch(bench.x, idx, bench.weights)
    y = bench.a2a.combine(torch.ones_like(d.rows, dtype=torch.bfloat16), d.handle)
    assert (y[0] == 0).all(), "token 0 was sent"


def case_outputs_read_at_once(t):
    """What comes back can be used on the stream without waiting, and inputs be overwritten."""
    bench = Bench(t)
    for _ in range(5):
        x, idx, weights, out = copies(*bench.args, bench.out)
        busy(2)
        d = bench.a2a.dispatch(x, idx, weights)
        for part in (x, idx, weights):
            part.fill_(1)
        rows = d.rows.clone()
        y = bench.a2a.combine(out, d.handle)
        out.fill_(float("nan"))
        doubled = y + y
        bench.check(dataclasses.replace(d, rows=rows), y)
        assert torch.equal((doubled / 2).isnan(), y.isnan())


def case_str_10_another_stream_behind_a_busy_kernel(t):
    """Inputs made on a stream, and everything done there, without the default stream waiting."""
    bench = Bench(t)
    bench.warm_up()
    synchronize()
    for _ in range(5):
        with side_stream():
            busy(10)
            x, idx, weights, out = copies(*bench.args, bench.out)
            d = bench.a2a.dispatch(x, idx, weights)
            bench.check(d, bench.a2a.combine(out, d.handle))


def case_str_03_inputs_dropped_while_under_way(t):
    """Memory of inputs, and of what is sent, is not reused before it was read."""
    bench = Bench(t)
    bench.warm_up()
    for _ in range(5):
        busy(10)
        pending = bench.a2a.dispatch(*copies(*bench.args), async_op=True)
        take_memory_and_overwrite_it(*bench.args)
        d = pending.wait()
        busy(10)
        pending = bench.a2a.combine(bench.out.clone(), d.handle, async_op=True)
        take_memory_and_overwrite_it(bench.out, bench.x)
        bench.check(d, pending.wait())


def case_wait_on_another_stream(t):
    """`wait` orders the stream that is current then; what it used meanwhile is not reused early."""
    bench = Bench(t)
    bench.warm_up()
    synchronize()
    for _ in range(5):
        pending, another = bench.a2a.dispatch(*bench.args, async_op=True), side_stream()
        with another:
            busy(10)
            d = pending.wait()
        del pending
        take_memory_and_overwrite_it()
        with another:
            out = bench.out.clone()
            pending = bench.a2a.combine(out, d.handle, async_op=True)
            y = pending.wait()
        take_memory_and_overwrite_it()
        with another:
            bench.check(d, y)
        synchronize()


def case_dropped_without_wait(t):
    """What nobody waits for does no harm to later calls."""
    bench = Bench(t)
    for _ in range(3):
        d = bench.a2a.dispatch(*bench.args, async_op=True).wait()
        bench.a2a.combine(bench.out.clone(), d.handle, async_op=True)
        bench.a2a.dispatch(bench.x.clone(), handle=d.handle, async_op=True)
        take_memory_and_overwrite_it(bench.x, bench.out)
        bench.check(*bench.round())


def case_str_18_two_at_once(t):
    """A and B, then wait for B and for A; combines likewise."""
    bench, x = Bench(t), None
    for _ in range(5):
        x = torch.ones_like(bench.x)
        a = bench.a2a.dispatch(*bench.args, async_op=True)
        b = bench.a2a.dispatch(x, bench.idx, bench.weights, async_op=True)
        ones, d = b.wait(), a.wait()
        assert a.wait() is d
        first = bench.a2a.combine(bench.out, d.handle, async_op=True)
        second = bench.a2a.combine(torch.ones_like(bench.out), ones.handle, async_op=True)
        summed, y = second.wait(), first.wait()
        bench.check(d, y)
        live = ones.row_weights != 0
        assert (ones.rows.float()[live] * ones.scales.repeat_interleave(128, 1)[live] == 1).all()
        assert ((summed == 0) | (summed > 0)).all()


def reserved():
    return torch.cuda.memory_reserved() if ON_GPU else 0


def case_str_05_memory_does_not_grow(t):
    bench = Bench(t)
    after = {}
    for number in range(MANY_ROUNDS):
        d = bench.a2a.dispatch(*copies(*bench.args), async_op=True).wait()
        y = bench.a2a.combine(bench.out.clone(), d.handle, async_op=True).wait()
        synchronize()  # else how much is in use at a time depends on how late the GPU is
        if number in (FIRST_ROUNDS - 1, MANY_ROUNDS - 1):
            after[number] = reserved()
    bench.check(d, y)
    assert len(set(after.values())) == 1, after


def case_str_07_peak_of_an_asynchronous_round(t):
    """At most one payload above that of a synchronous one."""
    bench = Bench(t)
    bench.warm_up()
    payload_bytes = bench.want.payload.shape[1]
    hops = bench.a2a.dispatch(*bench.args).handle._way.hops
    payload = max(int(rows.sum()) for hop in hops for rows in hop) * payload_bytes

    def peak(**options):
        synchronize()
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        d = bench.a2a.dispatch(*bench.args, **options)
        d = d.wait() if options else d
        y = bench.a2a.combine(bench.out, d.handle, **options)
        bench.check(d, y.wait() if options else y)
        return torch.cuda.max_memory_allocated() - before if ON_GPU else 0

    synchronous, asynchronous = peak(), peak(async_op=True)
    assert asynchronous <= synchronous + payload + 65536, (asynchronous, synchronous)


def case_com_31_rounds_without_synchronization(t):
    """Many rounds, one rank late at times: the same bytes as alone."""
    bench = Bench(t)
    results = []
    for number in range(60):
        if number % 8 == t.rank:
            busy(3)
        d, y = bench.round()
        results.append((d, y))
        if len(results) == 10:
            for result in results:
                bench.check(*result)
            results.clear()


def case_com_40_repeats_are_equal(t):
    bench = Bench(t)
    for _ in range(40):
        bench.check(*bench.round())


def case_ins_18_arrays_of_other_libraries(t):
    """BF16 through DLPack, made on a stream that is still busy; and CuPy's arrays."""
    bench = Bench(t)
    with side_stream():
        busy(10)
        x, idx, weights = copies(*bench.args)
        bench.check(bench.a2a.dispatch(Foreign(x), Foreign(idx), Foreign(weights)))
        if ON_GPU:
            import cupy

            stream = torch.cuda.current_stream().cuda_stream
            with cupy.cuda.ExternalStream(stream):
                arrays = [cupy.from_dlpack(part) for part in (idx, weights)]
                bench.check(bench.a2a.dispatch(x, *arrays))


# CUDA graphs


def captured(call):
    """Call within a capture, which ends in an orderly way.

    Returns:
        the graph; what the call returned, or None; and the text of its error, or None.
    """
    gc.collect()  # a graph that is collected within a capture breaks it
    graph, result, told = torch.cuda.CUDAGraph(), None, None
    with torch.cuda.graph(graph):
        torch.zeros(1, device=DEVICE)  # so that the graph is not empty
        try:
            result = call()
        except RuntimeError as error:
            told = str(error)
    return graph, result, told


def case_str_14_capture_names_the_host_read(t):
    """Dispatch reads counts on the host: refused in a capture, on all ranks, and usable after."""
    bench = Bench(t)
    bench.warm_up()
    synchronize()
    if not ON_GPU:
        return
    for _ in range(2):
        _, _, text = captured(lambda: bench.a2a.dispatch(*bench.args))
        assert "captur" in text, text
        assert "host" in text, text
        bench.check(*bench.round())


def case_str_17_capture_of_combine(t):
    """Captured with its side stream joined back, or refused; either way the capture closes."""
    bench = Bench(t)
    d, _ = bench.round()
    synchronize()
    if not ON_GPU:
        return
    graph, y, text = captured(lambda: bench.a2a.combine(bench.out, d.handle))
    if text is not None:
        assert "captur" in text, text
        return
    y.zero_()
    graph.replay()
    bench.check(d, y)


BREAKING = ("str_17_capture_of_combine",)  # refusals there stop the peers
# These look at, or capture, what the whole process does: not for ranks that are threads of one.
OF_A_PROCESS = (
    "str_05_memory_does_not_grow",
    "str_07_peak_of_an_asynchronous_round",
    "str_14_capture_names_the_host_read",
    "str_17_capture_of_combine",
)
CASES = [name.removeprefix("case_") for name in globals() if name.startswith("case_")]


def run(t, name):
    globals()[f"case_{name}"](t)
