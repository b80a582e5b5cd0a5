"""Gradients of CUDA tensors: those of the CPU byte for byte, on any stream, in autograd's threads.

Ranks that are threads share a GPU, and so autograd's one thread for it: there each goes back in a
thread of its own.  Ranks with NCCL: test_nccl_ranks.py.
"""

import gc
import itertools
import time
import weakref

import on_device
import pytest
import torch
from compiled import kernels_are_compiled  # noqa: F401
from gradients import CASES, Case, check_gradients, close_rows, inputs, make, model, round_trip
from gradients import expert_matrices as matrices_of
from on_device import to
from torch.utils.checkpoint import checkpoint

from fp4comm import Precision, transport

DEVICE = on_device.DEVICE
WIRES = ("bf16", "fp8", "mxfp8", "mxfp4")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_are_those_of_the_model(case, num_ranks):
    def on_rank(t):
        with torch.autograd.set_multithreading_enabled(False):
            check_gradients(t, case, DEVICE)

    model(case, num_ranks)  # once, and not on every thread
    transport.run_local(num_ranks, on_rank, timeout_s=60)


def scaled(d):
    """Experts of which a product of two BF16 is all that is rounded."""
    factors = torch.linspace(0.5, 2, len(d.num_rows_list), device=d.rows.device)
    counts = d.expert_offsets.diff()
    return d.rows * factors.repeat_interleave(counts, output_size=len(d.rows))[:, None].bfloat16()


def bytes_of(tensor):
    return tensor.detach().contiguous().cpu().view(torch.uint8)


def exact_gradients(t, case, device, dispatch_grad="bf16"):
    """y and the gradients of x, weights and expert_out, of experts that add nothing up."""
    precision = Precision(case.wire, "bf16", dispatch_grad, case.combine_grad)
    layer = make(t, case, precision=precision)
    x, idx, weights, dy = (part.to(device) for part in inputs(case, t.rank))
    d = layer.dispatch(x.requires_grad_(), idx, weights.requires_grad_())
    out = scaled(d)
    out.retain_grad()
    y = layer.combine(out, d.handle, weighted=case.weighted)
    y.backward(dy)
    return [bytes_of(tensor) for tensor in (y, x.grad, weights.grad, out.grad)]


@pytest.mark.parametrize("hidden", [96, 2880, 7168])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("dispatch_grad", "combine_grad"), [*itertools.product(WIRES, WIRES)])
def test_the_bytes_are_those_of_the_cpu(dispatch_grad, combine_grad, weighted, hidden):
    case = Case("bytes", (33, 0, 20), hidden, 7, 4, "mxfp4", combine_grad, weighted=weighted)

    def on_rank(t):
        with torch.autograd.set_multithreading_enabled(False):
            for device in ("cpu", DEVICE):
                found.setdefault((t.rank, device), exact_gradients(t, case, device, dispatch_grad))

    found = {}
    transport.run_local(2, on_rank, timeout_s=60)
    for rank in range(2):
        for got, want in zip(found[rank, DEVICE], found[rank, "cpu"], strict=True):
            assert torch.equal(got, want)


LARGE = Case("large", tokens=(512,), hidden=2880, num_experts=8, topk=4, combine_grad="fp8")


@pytest.fixture(scope="module")
def of_the_cpu():
    """Bytes of the large case."""
    return exact_gradients(transport.open("local"), LARGE, "cpu")


def same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_backward_runs_on_the_stream_of_its_forward_behind_busy_kernels(of_the_cpu):
    """In autograd's own thread; nothing of the backward pass may overtake what fills x."""
    same(exact_gradients(transport.open("local"), LARGE, DEVICE), of_the_cpu)
    for _ in range(3):
        with on_device.side_stream():
            on_device.busy(50)
            found = exact_gradients(transport.open("local"), LARGE, DEVICE)
        same(found, of_the_cpu)


def test_dispatch_waited_for_on_another_stream_and_gone_back_on_a_third(of_the_cpu):
    """Tables of the plan live until the backward pass has read them, whatever reuses memory."""
    layer = make(transport.open("local"), LARGE)
    x, idx, weights, dy = (part.to(DEVICE) for part in inputs(LARGE, 0))
    x.requires_grad_()
    weights.requires_grad_()
    for _ in range(5):
        x.grad = weights.grad = None
        pending = layer.dispatch(x, idx, weights, async_op=True)
        with on_device.side_stream():
            d = pending.wait()
            waiting = layer.combine(scaled(d), d.handle, async_op=True)
        del pending, d
        with on_device.side_stream():
            on_device.busy(50)
            y = waiting.wait()
            del waiting
            y.backward(dy)
        y = y.detach()  # the graph is gone before the GPU has come to it
        garbage = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
            for size in (1 << 9, 1 << 12, 1 << 14, 1 << 16, 1 << 20)
            for _ in range(20)
        ]
        on_device.synchronize()
        same([bytes_of(part) for part in (y, x.grad, weights.grad)], of_the_cpu[:3])
        del garbage, y


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_the_same_bytes(of_the_cpu, reentrant):
    layer = make(transport.open("local"), LARGE)
    x, idx, weights, dy = (part.to(DEVICE) for part in inputs(LARGE, 0))

    def run(x, weights):
        d = layer.dispatch(x, idx, weights)
        return layer.combine(scaled(d), d.handle)

    leaves = x.requires_grad_(), weights.requires_grad_()
    y = checkpoint(run, *leaves, use_reentrant=reentrant)
    y.backward(dy)
    same([bytes_of(part) for part in (y, x.grad, weights.grad)], of_the_cpu[:3])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_grd_09_compiled_code_has_the_gradients_of_eager_code(backend):
    if backend == "inductor" and DEVICE.type == "cuda":
        pytest.importorskip("triton")
    case = Case("compiled", tokens=(64,), hidden=256)
    layer = make(transport.open("local"), case)
    x, idx, weights, dy = (part.to(DEVICE) for part in inputs(case, 0))

    def step(x, weights, matrices):
        return round_trip(layer, case, x * 2, idx, weights.softmax(-1), matrices).float() * 3

    found = []
    for function in (step, torch.compile(step, backend=backend)):
        leaves = [t.detach().clone() for t in (x, weights, to(DEVICE, matrices_of(case)))]
        function(*(leaf.requires_grad_() for leaf in leaves)).backward(dy.float())
        found.append([leaf.grad for leaf in leaves])
    torch._dynamo.reset()
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().sum() > 0
        close_rows(compiled.flatten(1), eager.float().flatten(1).cpu())


def test_grd_16_no_grad_keeps_no_memory():
    layer, kept = make(transport.open("local"), LARGE), []
    x, idx, weights, _ = (part.to(DEVICE) for part in inputs(LARGE, 0))
    x.requires_grad_()

    def call():
        d = layer.dispatch(x, idx, weights)
        assert not layer.combine(scaled(d), d.handle).requires_grad
        kept.append(weakref.ref(d.handle))

    def allocated():
        on_device.synchronize()
        gc.collect()  # what earlier tests left
        torch.cuda.empty_cache()  # takes back what other streams were done with, too
        return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0

    with torch.no_grad():
        call()
        before = allocated()
        for _ in range(200):
            call()
        assert allocated() <= before  # less: what earlier tests left was freed meanwhile
    assert not any(ref() for ref in kept)


def test_a_step_frees_what_it_took():
    layer = make(transport.open("local"), LARGE)
    x, idx, weights, dy = (part.to(DEVICE) for part in inputs(LARGE, 0))
    leaves = x.requires_grad_(), weights.requires_grad_()
    allocated = torch.cuda.memory_allocated if DEVICE.type == "cuda" else lambda: 0

    def step():
        d = layer.dispatch(x, idx, weights)
        y = layer.combine(scaled(d), d.handle)
        torch.autograd.grad(y, leaves, dy)

    step()
    on_device.synchronize()
    gc.collect()  # what earlier tests left; in the rounds a cycle would show
    before = allocated()
    for _ in range(5):
        step()
        on_device.synchronize()
        until = time.monotonic() + 10  # autograd's thread lets go of results a little later
        while allocated() > before and time.monotonic() < until:
            time.sleep(0.001)
        assert allocated() <= before
