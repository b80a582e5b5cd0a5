"""Gradients of dispatch and combine: right on every transport, and never silently missing."""

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from gradients import (
    CASES,
    Case,
    apply_experts,
    check_gradients,
    close_rows,
    equal_rows,
    expert_matrices,
    gradients,
    inputs,
    local_experts,
    make,
    model,
    round_trip,
)
from rounds import Foreign
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fp4comm import AllToAll, Precision, quantize, transport
from fp4comm.codec import cpu

EXACT = Precision(dispatch="bf16", combine_grad="bf16")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients_on_threads(case, num_ranks):
    transport.run_local(num_ranks, lambda t: check_gradients(t, case), timeout_s=60)


def one_rank(**kwargs):
    defaults = {"num_experts": 4, "hidden": 32, "arrive": "bf16", "expert_alignment": 1}
    return AllToAll(transport.open("local"), **(defaults | {"precision": EXACT} | kwargs))


def ones(num_tokens=1):
    return torch.ones(num_tokens, 32).bfloat16().requires_grad_()


def scaled_experts(d):
    """Expert e multiplies by e + 1."""
    factors = torch.arange(len(d.num_rows_list)) + 1.0
    return d.rows * factors.repeat_interleave(d.expert_offsets.diff())[:, None].bfloat16()


# The cases of reports about other projects


def test_grd_01_by_hand():
    """GRD-03 too: the weights get their gradient."""
    a2a, x, weights = one_rank(), ones(), torch.tensor([[0.25, 0.75]], requires_grad=True)
    d = a2a.dispatch(x, torch.tensor([[0, 2]]), weights)
    y = a2a.combine(scaled_experts(d), d.handle)
    assert y.tolist() == [[2.5] * 32]
    y.backward(torch.ones_like(y))
    assert weights.grad.tolist() == [[32.0, 96.0]]
    assert x.grad.tolist() == [[2.5] * 32]


@pytest.mark.parametrize("combine_grad", ["fp8", "mxfp4"])
@pytest.mark.parametrize("wire", ["mxfp4", "fp8"])
def test_grd_05_quantization_is_passed_straight_through(wire, combine_grad):
    a2a, x = one_rank(precision=Precision(wire, combine_grad=combine_grad)), ones()
    d = a2a.dispatch(x, torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]]))
    a2a.combine(d.rows, d.handle).sum().backward()
    assert x.grad.tolist() == [[1.0] * 32]


def test_grd_06_scales_ids_and_counts_get_no_gradient():
    a2a, idx = one_rank(), torch.tensor([[0, 2]])
    d = a2a.dispatch(ones(), idx, torch.ones(1, 2, requires_grad=True))
    edges = [edge for edge, _ in d.rows.grad_fn.next_functions if edge is not None]
    assert len(edges) == 2  # x and topk_weights
    assert not any(t.requires_grad for t in (d.num_rows, d.expert_offsets, d.packed.payload))
    codes, scales = torch.ones(1, 32).to(torch.float8_e4m3fn), torch.ones(1, 1, requires_grad=True)
    with pytest.raises(RuntimeError, match="x: expected no gradient .*an FP8 pair is not diff"):
        a2a.dispatch((codes, scales), idx)
    weights = torch.ones(1, 2, requires_grad=True)  # may be learned all the same
    d = a2a.dispatch((codes, scales.detach()), idx, weights)
    assert not d.rows.requires_grad
    a2a.combine(scaled_experts(d), d.handle).sum().backward()
    assert weights.grad.tolist() == [[32.0, 96.0]]


@pytest.mark.parametrize("through", ["x", "weights", "expert_out"])
def test_grd_07_double_backward_is_refused(through):
    """Also where dy is constant, and the second derivative is by what the first one multiplies."""
    a2a, leaves = one_rank(), {"x": ones(), "weights": torch.ones(1, 1, requires_grad=True)}
    d = a2a.dispatch(leaves["x"], torch.tensor([[1]]), leaves["weights"])
    leaves["expert_out"] = torch.full_like(d.rows, 2.0, requires_grad=True)
    out = d.rows if through != "expert_out" else leaves["expert_out"]
    y = a2a.combine(out, d.handle)
    loss = y.sum() if through == "expert_out" else y.pow(2).sum()
    [first] = torch.autograd.grad(loss, leaves[through], create_graph=True)
    assert first.abs().sum() > 0
    with pytest.raises(RuntimeError, match="expected to be differentiated once, got a second"):
        first.sum().backward()
    a2a.dispatch(ones(), torch.tensor([[1]]))  # nothing is broken


@pytest.mark.parametrize("arrive", ["fp8", "packed"])
def test_grd_08_arrivals_that_are_not_differentiable_refuse(arrive):
    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive=arrive)
        idx, weights = torch.tensor([[0, 2]]), torch.ones(1, 2)
        text = f'rank 0 of 2: {{}}: expected no gradient .*arrive="{arrive}" is for functions'
        with pytest.raises(RuntimeError, match=text.format("x")):
            a2a.dispatch(ones(), idx, weights)
        with pytest.raises(RuntimeError, match=text.format("topk_weights")):
            a2a.dispatch(ones().detach(), idx, weights.clone().requires_grad_())
        with torch.no_grad():
            d = a2a.dispatch(ones(), idx, weights)
        # Experts behind a function of the caller's own may be trained.
        out = torch.ones(len(d.row_weights), 32).bfloat16().requires_grad_()
        a2a.combine(out, d.handle).sum().backward()
        assert torch.equal(out.grad[:, 0].float(), d.row_weights)

    transport.run_local(2, on_rank, timeout_s=30)


def test_grd_08_quantize_refuses():
    with pytest.raises(RuntimeError, match="x: expected no gradient .*quantize is not differ"):
        quantize(ones())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_grd_09_compiled_code_has_the_gradients_of_eager_code(backend):
    case = Case("compiled", tokens=(11,))
    layer = make(transport.open("local"), case)
    x, idx, weights, dy = inputs(case, 0)

    def step(x, weights, matrices):
        weights = weights.softmax(-1)
        return round_trip(layer, case, x * 2, idx, weights, matrices).float() * 3

    found = []
    for function in (step, torch.compile(step, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in (x, weights, expert_matrices(case))]
        y = function(*leaves)
        y.backward(dy.float())
        found.append((y, *(leaf.grad for leaf in leaves)))
    torch._dynamo.reset()
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().sum() > 0
        close_rows(compiled.flatten(1), eager.detach().float().flatten(1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_grd_11_grd_23_expanded_gradients_and_losses_that_differ_between_ranks(num_ranks):
    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive="bf16", precision=EXACT)
        x = ones(4)
        d = a2a.dispatch(x, torch.arange(4)[:, None])
        ((t.rank + 1) * a2a.combine(d.rows, d.handle).sum()).backward()
        assert (x.grad == t.rank + 1).all()

    transport.run_local(num_ranks, on_rank, timeout_s=30)


@pytest.mark.parametrize("weighted", [True, False])
def test_grd_12_a_rank_whose_experts_skip_empty_rows_takes_part(weighted):
    """All tokens go to rank 0; rank 1 makes its output from nothing, without a graph."""

    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive="bf16", precision=EXACT, timeout_s=20)
        x, weights = ones(3), torch.full((3, 1), 0.5, requires_grad=True)
        d = a2a.dispatch(x, torch.zeros(3, 1, dtype=torch.int64), weights)
        out = 3 * d.rows if any(d.num_rows_list) else torch.empty(d.rows.shape).bfloat16()
        y = a2a.combine(out, d.handle, weighted=weighted)
        assert y.requires_grad
        y.sum().backward()
        assert (x.grad == (1.5 if weighted else 3)).all()
        assert (weights.grad == (96 if weighted else 0)).all()  # not used, then

    transport.run_local(2, on_rank, timeout_s=30)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case("checkpoint"),
        Case("checkpoint, experts weigh", weighted=False),
        Case("checkpoint, rank 1 gets nothing", routing="all to expert 0", weighted=False),
    ],
    ids=lambda case: case.id,
)
def test_grd_14_a_checkpoint_recomputes_the_same_rows_by_the_same_collectives(case, reentrant):
    def on_rank(t):
        matrices = expert_matrices(case)[local_experts(case, t)]
        x, idx, weights, dy = inputs(case, t.rank)
        x.requires_grad_()
        weights.requires_grad_()
        layer, seen = make(t, case, timeout_s=20), []

        def run(x, weights):
            d = layer.dispatch(x, idx, weights)
            seen.append((d.num_rows_list, d.rows.detach().clone()))
            if not any(d.num_rows_list):  # then nothing is kept here, which would be recomputed
                return layer.combine(d.rows, d.handle, weighted=case.weighted)
            out = apply_experts(d, matrices)
            if not case.weighted:
                out = out * d.row_weights[:, None]
            return layer.combine(out.bfloat16(), d.handle, weighted=case.weighted)

        checkpoint(run, x, weights, use_reentrant=reentrant).backward(dy)
        if any(seen[0][0]):  # else the recomputation ends within dispatch
            kept, recomputed = seen
            assert kept[0] == recomputed[0]
            assert torch.equal(kept[1].view(torch.int16), recomputed[1].view(torch.int16))
        layer.dispatch(x.detach(), idx)  # compares the order of all exchanges
        return x.grad, weights.grad

    checkpointed = transport.run_local(2, on_rank, timeout_s=30)
    plain = transport.run_local(2, lambda t: gradients(t, case), timeout_s=30)
    for got, want in zip(checkpointed, plain, strict=True):
        for a, b in zip(got, want[:2], strict=True):
            assert torch.equal(a, b)


def test_grd_16_no_grad_keeps_no_graph_and_no_memory():
    a2a, x, kept = one_rank(), ones(4), []
    weights = torch.ones(4, 1, requires_grad=True)

    def call():
        d = a2a.dispatch(x, torch.arange(4)[:, None], weights)
        y = a2a.combine(d.rows, d.handle)
        assert not any(t.requires_grad for t in (d.rows, d.row_weights, y))
        kept.append(weakref.ref(d.handle))

    def num_tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with torch.no_grad():
        call()
        before = num_tensors()
        for _ in range(200):
            call()
        assert num_tensors() == before
    assert not any(ref() for ref in kept)


def test_a_step_leaves_nothing_behind_without_the_garbage_collector():
    """No cycle of handle and graph: the memory of a step is free when its names are gone."""
    gc.collect()
    gc.disable()
    try:
        a2a, x, weights = one_rank(), ones(4), torch.ones(4, 1, requires_grad=True)
        d = a2a.dispatch(x, torch.arange(4)[:, None], weights)
        y = a2a.combine(d.rows, d.handle)
        gone = [weakref.ref(t) for t in (d.rows, d.handle, d.handle.layout, y)]
        y.sum().backward()
        del d, y
        assert not any(ref() for ref in gone)
    finally:
        gc.enable()


def test_grd_18_autocast_casts_x_and_gives_its_gradient_back_in_float32():
    a2a, x = one_rank(), torch.ones(2, 32, requires_grad=True)
    weights = torch.full((2, 1), 0.5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        d = a2a.dispatch(x, torch.tensor([[0], [1]]), weights)
        y = a2a.combine(torch.nn.functional.linear(d.rows, torch.eye(32)), d.handle)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, weights.grad.dtype) == (torch.float32, torch.float32)
    assert (x.grad == 0.5).all()
    assert (weights.grad == 32).all()


def test_grd_20_y_is_bfloat16_whatever_the_weights_are():
    for dtype in (torch.float32, torch.float64, torch.float16):
        a2a, weights = one_rank(), torch.ones(1, 1, dtype=dtype, requires_grad=True)
        d = a2a.dispatch(ones(), torch.tensor([[0]]), weights)
        y = a2a.combine(d.rows, d.handle)
        assert y.dtype == d.rows.dtype == torch.bfloat16
        assert d.row_weights.dtype == torch.float32
        y.sum().backward()
        assert weights.grad.dtype == dtype


def test_grd_22_memory_that_nobody_wrote_is_not_in_a_gradient(monkeypatch):
    """Buffers are full of NaN, padding rows of expert_out too, and two steps are equal."""
    plain = cpu.empty

    def poisoned(shape, dtype):
        buffer = plain(shape, dtype)
        buffer.view(torch.uint8).fill_(0xFF)
        return buffer

    monkeypatch.setattr(cpu, "empty", poisoned)
    case = Case("poison")

    def on_rank(t):
        layer, steps = make(t, case, expert_alignment=64), []
        matrices = expert_matrices(case)[local_experts(case, t)].requires_grad_()
        x, idx, weights, dy = inputs(case, t.rank)
        leaves = [x.requires_grad_(), weights.requires_grad_(), matrices]
        for _ in range(2):
            d = layer.dispatch(x, idx, weights)
            padding = (d.handle.layout.row_source < 0)[:, None]
            out = apply_experts(d, matrices).bfloat16().masked_fill(padding, float("nan"))
            y = layer.combine(out, d.handle)
            steps.append(torch.autograd.grad(y, leaves, dy))
        for first, second in zip(*steps, strict=True):
            assert first.isfinite().all()
            assert torch.equal(first, second)

    transport.run_local(2, on_rank, timeout_s=30)


def test_grd_24_strides_of_x_dy_and_expert_outputs_do_not_matter():
    a2a, idx = one_rank(precision=Precision()), torch.tensor([[0, 1], [2, 3], [3, -1]])
    g = torch.Generator().manual_seed(5)
    wide = torch.randn(3, 64, generator=g).bfloat16()
    dy, scores = torch.randn(32, 3, generator=g).bfloat16().t(), torch.rand(2, 3, generator=g).t()
    found = []
    for change in (lambda t: t, torch.Tensor.contiguous):
        leaves = [change(wide[:, ::2]).detach(), change(scores).detach()]
        d = a2a.dispatch(leaves[0].requires_grad_(), idx, leaves[1].requires_grad_())
        out = change(scaled_experts(d).t().contiguous().t())
        found.append(torch.autograd.grad(a2a.combine(out, d.handle), leaves, change(dy)))
    for strided, contiguous in zip(*found, strict=True):
        assert torch.equal(strided, contiguous)


# What else a step of training does


def test_shp_14_an_expert_twice_in_a_token_counts_twice():
    a2a, x, weights = one_rank(), ones(), torch.tensor([[0.25, 0.5]], requires_grad=True)
    d = a2a.dispatch(x, torch.tensor([[3, 3]]), weights)
    a2a.combine(d.rows, d.handle).sum().backward()
    assert (x.grad == 0.75).all()
    assert weights.grad.tolist() == [[32.0, 32.0]]


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_only_x_or_only_the_weights_may_want_a_gradient(wants):
    case = Case("one of two")

    def on_rank(t):
        matrices = expert_matrices(case)[local_experts(case, t)]
        x, idx, weights, dy = inputs(case, t.rank)
        x.requires_grad_(wants[0])
        weights.requires_grad_(wants[1])
        d = (layer := make(t, case)).dispatch(x, idx, weights)
        assert (d.rows.requires_grad, d.row_weights.requires_grad) == wants
        layer.combine(apply_experts(d, matrices).bfloat16(), d.handle).backward(dy)
        for leaf, wanted, want in zip((x, weights), wants, model(case, 2)[0][t.rank], strict=True):
            assert (leaf.grad is not None) == wanted
            if wanted:
                close_rows(leaf.grad, want)

    transport.run_local(2, on_rank, timeout_s=30)


def test_experts_alone_may_be_trained_with_weights_that_are_kept_unweighted():
    """Neither x nor weights want one: combine keeps nothing, and the matrices get theirs."""
    case = Case("experts alone")

    def on_rank(t):
        matrices = expert_matrices(case)[local_experts(case, t)].requires_grad_()
        x, idx, weights, dy = inputs(case, t.rank)
        round_trip(make(t, case), case, x, idx, weights, matrices).backward(dy)
        want = model(case, 2)[1][local_experts(case, t)]
        close_rows(matrices.grad.flatten(1), want.flatten(1))

    transport.run_local(2, on_rank, timeout_s=30)


def test_what_combine_keeps():
    """expert_out where its weights want a gradient, else nothing."""
    a2a = one_rank()
    for weights, weighted, keeps in (
        (torch.ones(4, 1, requires_grad=True), True, True),
        (torch.ones(4, 1, requires_grad=True), False, False),
        (torch.ones(4, 1), True, False),
    ):
        d = a2a.dispatch(ones(4), torch.arange(4)[:, None], weights)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, k=kept: k.append(t), lambda t: t):
            a2a.combine(d.rows, d.handle, weighted=weighted)
        assert len(kept) == keeps


def test_a_second_dispatch_with_a_handle_has_gradients_and_the_old_weights_detached():
    case = Case("again")

    def on_rank(t):
        matrices = expert_matrices(case)[local_experts(case, t)]
        x, idx, weights, dy = inputs(case, t.rank)
        x2 = x.clone().requires_grad_()
        weights.requires_grad_()
        layer = make(t, case)
        d = layer.dispatch(x.requires_grad_(), idx, weights)
        again = layer.dispatch(x2, handle=d.handle)
        assert not again.row_weights.requires_grad
        layer.combine(apply_experts(again, matrices).bfloat16(), again.handle).backward(dy)
        close_rows(x2.grad, model(case, 2)[0][t.rank][0])
        assert x.grad is None
        assert weights.grad is None
        with torch.no_grad():
            assert layer.dispatch(x2, handle=d.handle).handle._row_weights is None

    transport.run_local(2, on_rank, timeout_s=30)


@pytest.mark.parametrize("async_op", [False, True])
def test_several_dispatches_in_flight(async_op):
    """Two layers at once, waited for in another order; each gets its own gradients."""
    cases = Case("in flight a"), Case("in flight b", seed=1)

    def on_rank(t):
        layers, made = [make(t, case) for case in cases], []
        for case, layer in zip(cases, layers, strict=True):
            x, idx, weights, dy = inputs(case, t.rank)
            leaves = x.requires_grad_(), weights.requires_grad_()
            made.append((leaves, dy, layer.dispatch(x, idx, weights, async_op=async_op)))
        matrices = [expert_matrices(case)[local_experts(case, t)] for case in cases]
        ys = [None, None]
        for i in (1, 0):
            d = made[i][2].wait() if async_op else made[i][2]
            out = apply_experts(d, matrices[i]).bfloat16()
            ys[i] = layers[i].combine(out, d.handle, async_op=async_op)
        ys = [y.wait() for y in ys] if async_op else ys
        torch.autograd.backward(ys, [dy for _, dy, _ in made])
        for case, (leaves, *_) in zip(cases, made, strict=True):
            for leaf, want in zip(leaves, model(case, 2)[0][t.rank], strict=True):
                close_rows(leaf.grad, want)

    transport.run_local(2, on_rank, timeout_s=30)


def test_gradients_of_several_backward_passes_add_up():
    case = Case("accumulated", integers=True, hidden=32)

    def on_rank(t):
        matrices = expert_matrices(case)[local_experts(case, t)].requires_grad_()
        x, idx, weights, dy = inputs(case, t.rank)
        x.requires_grad_()
        weights.requires_grad_()
        layer = make(t, case)
        for _ in range(2):
            y = round_trip(layer, case, x, idx, weights, matrices)
            y.backward(dy, retain_graph=True)
        y.backward(dy)
        for leaf, want in zip((x, weights), model(case, 2)[0][t.rank], strict=True):
            equal_rows(leaf.grad, 3 * want)

    transport.run_local(2, on_rank, timeout_s=30)


def test_rows_and_row_weights_may_be_changed_in_place():
    a2a, x, weights = one_rank(), ones(), torch.tensor([[0.5]], requires_grad=True)
    d = a2a.dispatch(x, torch.tensor([[1]]), weights)
    rows = d.rows.mul_(3)
    d.row_weights.zero_()  # the handle has its own
    y = a2a.combine(rows, d.handle)
    y.sum().backward()
    assert (y == 1.5).all()
    assert (x.grad == 1.5).all()
    assert weights.grad.item() == 96


CHANGES = {
    "x.mul_": lambda x, weights: x.mul_(2),
    "x.zero_": lambda x, weights: x.data.zero_(),
    "topk_weights.mul_": lambda x, weights: weights.mul_(2),
    "x.detach_": lambda x, weights: x.detach_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inputs_may_be_changed_before_the_rows_have_come(name):
    """Gradients go where the inputs came from when they were sent."""
    case = Case("changed")

    def on_rank(t):
        layer, (x, idx, weights, dy) = make(t, case), inputs(case, t.rank)
        found = []
        for change in (lambda x, weights: None, CHANGES[name]):
            leaves = [leaf.clone().requires_grad_() for leaf in (x, weights)]
            sent = [leaf * 1 for leaf in leaves]
            pending = layer.dispatch(sent[0], idx, sent[1], async_op=True)
            change(*sent)
            d = pending.wait()
            y = layer.combine(d.rows * 2, d.handle)
            found.append(torch.autograd.grad(y, leaves, dy))
        for wanted, got in zip(*found, strict=True):
            assert wanted.abs().sum() > 0
            assert torch.equal(got, wanted)

    transport.run_local(2, on_rank, timeout_s=30)


def test_two_batches_in_one_buffer_have_gradients_of_their_own():
    a2a, leaf, idx = one_rank(), torch.ones(2, 1, 32).bfloat16().requires_grad_(), [[1]]
    buffer, pending = torch.empty(2, 1, 32, dtype=torch.bfloat16), []
    for i in range(2):
        buffer[i] = leaf[i] * (i + 1)
        pending.append(a2a.dispatch(buffer[i], torch.tensor(idx), async_op=True))
    ys = []
    for one in pending:
        d = one.wait()
        ys.append(a2a.combine(d.rows, d.handle))
    sum(ys).sum().backward()
    assert (leaf.grad[0] == 1).all()
    assert (leaf.grad[1] == 2).all()


def test_a_view_whose_graph_is_lost_is_an_error_on_all():
    """Nothing was sent: the object stays usable."""

    def on_rank(t):
        layer, idx = AllToAll(t, num_experts=2, hidden=32, arrive="bf16"), torch.tensor([[0]])
        base = torch.ones(2, 32).bfloat16().requires_grad_() * 1
        x, _ = base.chunk(2)
        if t.rank == 1:
            base.mul_(2)
        with refused("rank 1 of 2: x: Output 0 of "):
            layer.dispatch(x, idx)
        layer.dispatch(ones(), idx)

    transport.run_local(2, on_rank, timeout_s=30)


def test_a_leaf_that_an_optimizer_steps_before_the_rows_have_come_has_its_gradient():
    a2a, x = one_rank(), ones()
    pending = a2a.dispatch(x, torch.tensor([[1]]), async_op=True)
    with torch.no_grad():
        x.zero_()
    d = pending.wait()
    a2a.combine(d.rows * 3, d.handle).sum().backward()
    assert (d.rows == 1).all()
    assert (x.grad == 3).all()


def test_expert_outputs_may_be_changed_before_the_sums_have_come():
    a2a, x = one_rank(), ones()
    d = a2a.dispatch(x, torch.tensor([[1]]))
    out = d.rows * 2
    pending = a2a.combine(out, d.handle, async_op=True)
    out.mul_(3)
    y = pending.wait()
    y.sum().backward()
    assert (y == 2).all()
    assert (x.grad == 2).all()


def test_expert_outputs_of_another_library_are_kept_as_they_were():
    a2a, weights = one_rank(), torch.tensor([[0.5]], requires_grad=True)
    d = a2a.dispatch(ones().detach(), torch.tensor([[1]]), weights)
    out = torch.full((1, 32), 2.0).bfloat16()
    y = a2a.combine(Foreign(out), d.handle)
    out.zero_()
    y.sum().backward()
    assert weights.grad.item() == 64


def test_negative_views_of_gradients_and_expert_outputs_are_right():
    a2a, x, weights = one_rank(), ones(), torch.tensor([[0.5]], requires_grad=True)
    d = a2a.dispatch(x, torch.tensor([[1]]), weights)
    y = a2a.combine(torch._neg_view(d.rows * 2), d.handle)
    y.backward(torch._neg_view(torch.ones_like(y)))
    assert (y == -1).all()
    assert (x.grad == 1).all()
    assert weights.grad.item() == 64


def test_row_weights_that_were_changed_later_do_not_change_the_gradient():
    a2a, out = one_rank(), ones()
    d = a2a.dispatch(ones().detach(), torch.tensor([[1]]), torch.tensor([[0.5]]))
    y = a2a.combine(out, d.handle)
    d.row_weights.zero_()
    y.sum().backward()
    assert (out.grad == 0.5).all()


def test_a_nan_in_dy_is_a_nan_in_the_gradient():
    """And no other token's: never a zero."""
    a2a, x = one_rank(precision=Precision(combine_grad="fp8")), ones(3)
    weights = torch.ones(3, 1, requires_grad=True)
    d = a2a.dispatch(x, torch.tensor([[0], [1], [0]]), weights)
    dy = torch.ones(3, 32).bfloat16()
    dy[1, 7] = float("nan")
    a2a.combine(d.rows, d.handle).backward(dy)
    assert x.grad.isnan().all(dim=1).tolist() == [False, True, False]
    assert weights.grad.isnan().view(-1).tolist() == [False, True, False]
    assert (x.grad[::2] == 1).all()


def test_timings_name_the_parts_of_the_backward_pass():
    a2a = one_rank()
    a2a.timings = {}
    d = a2a.dispatch(ones(), torch.tensor([[0]]))
    a2a.combine(d.rows, d.handle).sum().backward()
    parts = {"combine backward quantize", "combine backward exchange", "combine backward arrive"}
    parts |= {"dispatch backward reduce", "dispatch backward exchange"}
    assert parts <= a2a.timings.keys()


# Mistakes: one error on all ranks


@contextlib.contextmanager
def refused(*texts):
    with pytest.raises((ValueError, RuntimeError, TimeoutError)) as caught:
        yield
    assert all(text in str(caught.value) for text in texts), caught.value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x", "expected of x and topk_weights as on rank 0, got of topk_weights"),
        ("weights", "expected of x and topk_weights as on rank 0, got of x"),
        ("no_grad", "expected of x and topk_weights as on rank 0, got none"),
    ],
)
def test_a_rank_whose_inputs_want_no_gradient_is_an_error_on_all(name, text):
    case = Case("differs")

    def on_rank(t):
        x, idx, weights, _ = inputs(case, t.rank)
        differs = name if t.rank == 2 else None
        x.requires_grad_(differs != "x")
        weights.requires_grad_(differs != "weights")
        layer = make(t, case)
        full = "rank 2 of 3: gradients wanted (requires_grad): " + text
        with torch.set_grad_enabled(differs != "no_grad"), refused(full):
            layer.dispatch(x, idx, weights)
        layer.dispatch(x.detach(), idx, weights.detach())  # nothing is broken

    transport.run_local(3, on_rank, timeout_s=30)


def different(t, name):
    """Call, or go back, in another way on the last rank."""
    case, is_last = Case("differs"), t.rank == t.num_ranks - 1
    x, idx, weights, dy = inputs(case, t.rank)
    x.requires_grad_()
    one, two = make(t, case, timeout_s=5), make(t, case, timeout_s=5)
    d, other = one.dispatch(x, idx), two.dispatch(x, idx)
    if name == "expert outputs without a gradient":
        with refused("with gradient", "all ranks must make the same calls"):
            one.combine(d.rows.detach() if is_last else d.rows, d.handle)
    elif name == "dispatch again without a gradient":
        with refused("with gradient", "all ranks must make the same calls"):
            one.dispatch(x.detach() if is_last else x, handle=d.handle)
    elif name == "backward in another order":
        ys = one.combine(d.rows, d.handle), two.combine(other.rows, other.handle)
        with refused("backward of weighted combine 2 of dispatch 1 of", "all ranks must make"):
            for y in reversed(ys) if is_last else ys:
                y.backward(dy)
    elif name == "backward of two combines of one dispatch in another order":
        ys = [one.combine(d.rows, d.handle, weighted=False) for _ in range(2)]
        with refused("backward of unweighted combine", "of dispatch 1 of", "all ranks must make"):
            for y in reversed(ys) if is_last else ys:
                torch.autograd.grad(y.sum(), x, retain_graph=True)
    elif name == "backward of a second dispatch in another order":
        again = one.dispatch(x, handle=d.handle)
        with refused("backward of dispatch 2 like dispatch 1 of", "all ranks must make"):
            for made in (again, d) if is_last else (d, again):
                made.rows.sum().backward()
    else:
        y = one.combine(d.rows, d.handle)
        with refused("backward of weighted combine", "all ranks must make the same calls"):
            two.combine(other.rows, other.handle) if is_last else y.backward(dy)


@pytest.mark.parametrize(
    "name",
    [
        "expert outputs without a gradient",
        "dispatch again without a gradient",
        "backward in another order",
        "backward of two combines of one dispatch in another order",
        "backward of a second dispatch in another order",
        "combine instead of backward",
    ],
)
def test_ranks_that_do_different_things_are_told(name):
    transport.run_local(2, lambda t: different(t, name), timeout_s=30)


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_a_failure_inside_a_backward_stops_the_peers(part):
    """Rank 1 cannot get back what was kept, as when it is out of memory."""
    case, forward_is_over = Case("fails"), threading.Barrier(3)

    def on_rank(t):
        x, idx, weights, dy = inputs(case, t.rank)
        layer = make(t, case, timeout_s=20)

        def unpack(tensor):
            raise MemoryError("nothing left")

        failing = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)
        here = {name: failing if t.rank == 1 and name == part else contextlib.nullcontext()
                for name in ("dispatch", "combine")}  # fmt: skip
        with here["dispatch"]:
            d = layer.dispatch(x.requires_grad_(), idx, weights.requires_grad_())
        with here["combine"]:
            y = layer.combine(d.rows, d.handle)
        forward_is_over.wait(30)
        with pytest.raises(Exception, match="nothing left") as caught:
            y.backward(dy)
        text = f"stopped by rank 1: {part} backward: MemoryError: nothing left"
        assert (t.rank == 1) == isinstance(caught.value, MemoryError)
        assert t.rank == 1 or text in str(caught.value)
        with refused("broken"):
            layer.dispatch(x, idx)

    transport.run_local(3, on_rank, timeout_s=30)


def test_a_handle_of_another_transport_is_refused():
    a2a, other = one_rank(), one_rank()
    d = other.dispatch(ones(), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="handle: made on another transport"):
        a2a.combine(d.rows, d.handle)


@pytest.mark.parametrize(("word", "used"), [("num_experts", 8), ("expert_alignment", 16)])
def test_a_handle_of_other_experts_is_refused(word, used):
    t = transport.open("local")
    kwargs = {"num_experts": 4, "hidden": 32, "arrive": "bf16", "expert_alignment": 128}
    d = AllToAll(t, **kwargs).dispatch(ones().detach(), torch.tensor([[0]]))
    with refused(f"handle: made for {word} {kwargs[word]}, used with {word} {used}"):
        AllToAll(t, **(kwargs | {word: used})).dispatch(ones().detach(), handle=d.handle)


@pytest.mark.parametrize("name", ["x", "topk_weights", "expert_out"])
def test_forward_mode_is_refused(name):
    a2a, idx = one_rank(), torch.tensor([[0]])
    x, weights = ones().detach(), torch.ones(1, 1)
    d = a2a.dispatch(x, idx, weights)
    with forward_ad.dual_level(), refused(f"{name}: expected a tensor without tangent"):
        dual = {"x": x, "topk_weights": weights, "expert_out": d.rows}
        dual[name] = forward_ad.make_dual(dual[name], torch.ones_like(dual[name]))
        a2a.dispatch(dual["x"], idx, dual["topk_weights"])
        a2a.combine(dual["expert_out"], d.handle)


def test_what_inference_mode_made_is_refused_before_its_peers_wait():
    """On one of two ranks: the other is told."""

    def on_rank(t):
        layer, idx = AllToAll(t, num_experts=2, hidden=32, arrive="bf16"), torch.tensor([[0]])
        with torch.inference_mode(t.rank == 1):
            handle = layer.dispatch(ones().detach(), idx).handle
        with refused("handle: expected one made outside of torch.inference_mode()"):
            layer.dispatch(ones(), handle=handle)

    transport.run_local(2, on_rank, timeout_s=30)


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "strided"])
def test_expert_outputs_of_inference_mode_are_refused_where_weights_want_a_gradient(step):
    a2a, weights = one_rank(), torch.tensor([[0.5]], requires_grad=True)
    d = a2a.dispatch(ones().detach(), torch.tensor([[1]]), weights)
    with torch.inference_mode():
        out = torch.ones(1, 32 * step).bfloat16()[:, ::step]
    with refused("expert_out: expected one made outside of torch.inference_mode()"):
        a2a.combine(out, d.handle)


def test_gradients_do_not_depend_on_the_number_of_threads():
    case = Case("threads", tokens=(300,), hidden=128)
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(gradients(transport.open("local"), case)[:2])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one.float().numpy(), two.float().numpy())
