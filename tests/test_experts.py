"""The SwiGLU expert layer: results, gradients, what it keeps, and its mistakes."""

import math
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from expert_layers import CASES, INNER, check_layer, leaves, make, parameters, step
from gradients import Case, close_rows, inputs
from torch.utils.checkpoint import checkpoint

from fp4comm import experts, products, transport

LAYER = Case("layer", num_experts=5, hidden=96)
UNEVEN = Case("uneven", num_experts=5)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layer_on_threads(case, num_ranks):
    transport.run_local(num_ranks, lambda t: check_layer(t, case), timeout_s=60)


@pytest.mark.parametrize("wire", ["mxfp4", "fp8", "bf16"])
def test_every_cache_gives_the_same_bits(wire):
    case = Case("caches", wire=wire)

    def on_rank(t):
        first, *others = (step(t, case, cache) for cache in experts.CACHES)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

    transport.run_local(2, on_rank, timeout_s=60)


@pytest.mark.parametrize("arrive", ["fp8", "bf16", "packed"])
def test_how_rows_would_arrive_does_not_matter(arrive):
    one = transport.open("local")
    for got, want in zip(step(one, LAYER, arrive=arrive), step(one, LAYER), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtype_of_the_weights(dtype):
    """And are those of the same values in float32, rounded."""
    one, found = transport.open("local"), []
    for computed in (dtype, torch.float32):
        (x, weights, *own), idx, dy = leaves(LAYER, one)
        own = [part.detach().to(dtype).to(computed).requires_grad_() for part in own]
        experts.swiglu(make(one, LAYER), x, idx, weights, *own).backward(dy)
        assert [part.grad.dtype for part in own] == [computed] * 2
        found.append([x.grad, weights.grad, *(part.grad.to(dtype) for part in own)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


# What is kept for backward


def kept_bytes(cache, topk, wire="mxfp4", num_tokens=64, hidden=256, wants=True):
    """Bytes of each tensor that the layer keeps, but for its weights; and rows of experts."""
    case = Case("kept", (num_tokens,), hidden, 4, topk, wire)
    (x, weights, *own), _, _ = leaves(case, transport.open("local"))
    idx = torch.arange(num_tokens * topk).view(num_tokens, topk) % 4
    for leaf in (x, weights, *own):
        leaf.requires_grad_(wants)
    kept, ours = [], {id(part) for part in own}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer = make(transport.open("local"), case, expert_alignment=1)
        y = experts.swiglu(layer, x, idx, weights, *own, cache=cache)
    assert y.requires_grad == wants
    return sorted(t.nbytes for t in kept if id(t) not in ours), idx.numel()


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_the_cache_of_the_input_is_a_fraction_of_fp8_and_bf16_rows(topk):
    """At most 0.53 and 0.27 with one expert a token, and less with more: tokens are kept once."""
    hidden = 256
    packed, num_rows = kept_bytes("packed", topk)
    bf16, _ = kept_bytes("bf16", topk)
    both = [n for n in packed if n in bf16]  # what silu sees, and small tables
    in_wire_rows = sum(packed) - sum(both)
    in_bf16 = sum(bf16) - sum(n for n in bf16 if n in packed)
    assert in_bf16 == num_rows * 2 * hidden
    assert in_wire_rows <= 0.27 * in_bf16 / topk
    assert in_wire_rows <= 0.53 * num_rows * (hidden + hidden // 128 * 4) / topk


def test_recompute_keeps_the_wire_rows_alone():
    packed, num_rows = kept_bytes("packed", 2)
    recompute, _ = kept_bytes("recompute", 2)
    left_out = num_rows * 2 * 96 * 2  # gate and up in BF16
    assert sorted([*recompute, left_out]) == packed


@pytest.mark.parametrize("cache", experts.CACHES)
def test_without_gradients_nothing_is_kept(cache):
    kept, _ = kept_bytes(cache, 2, wants=False)
    assert kept == []


# As part of a step of training


@pytest.mark.parametrize("wants", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_only_one_of_the_inputs_may_want_a_gradient(wants):
    def on_rank(t):
        made, idx, dy = leaves(LAYER, t)
        for leaf, wanted in zip(made, wants, strict=True):
            leaf.requires_grad_(bool(wanted))
        x, weights, *own = made
        experts.swiglu(make(t, LAYER), x, idx, weights, *own).backward(dy)
        for leaf, wanted, want in zip(made, wants, step(t, LAYER)[1:], strict=True):
            assert (leaf.grad is not None) == wanted
            assert not wanted or torch.equal(leaf.grad, want)

    transport.run_local(2, on_rank, timeout_s=60)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_the_same_bits(reentrant):
    case = Case("checkpoint", routing="all to expert 0")  # rank 1 has no rows

    def on_rank(t):
        made, idx, dy = leaves(case, t)
        layer = make(t, case, timeout_s=20)

        def run(x, weights, gate_up, down):
            return experts.swiglu(layer, x, idx, weights, gate_up, down)

        checkpoint(run, *made, use_reentrant=reentrant).backward(dy)
        layer.dispatch(made[0].detach().float().bfloat16(), idx)  # compares earlier exchanges
        for leaf, want in zip(made, step(t, case)[1:], strict=True):
            assert torch.equal(leaf.grad, want)

    transport.run_local(2, on_rank, timeout_s=60)


def test_compiled_code_has_the_gradients_of_eager_code():
    layer, found = make(transport.open("local"), LAYER), []

    def run(x, idx, weights, gate_up, down):
        return experts.swiglu(layer, x * 2, idx, weights.softmax(-1), gate_up, down).float() * 3

    for function in (run, torch.compile(run, backend="aot_eager")):
        (x, weights, *own), idx, dy = leaves(LAYER, transport.open("local"))
        function(x, idx, weights, *own).backward(dy.float())
        found.append([x.grad, weights.grad, *(part.grad for part in own)])
    torch._dynamo.reset()
    for eager, compiled in zip(*found, strict=True):
        assert eager.abs().sum() > 0
        close_rows(compiled.flatten(1), eager.float().flatten(1))


def test_autocast_changes_the_input_alone():
    """x in float32 is cast; the products are those of the layer, and gradients keep x's dtype."""
    (x, weights, *own), idx, dy = leaves(LAYER, transport.open("local"))
    wide = x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts.swiglu(make(transport.open("local"), LAYER), wide, idx, weights, *own)
        y.backward(dy)
    want = step(transport.open("local"), LAYER)
    assert torch.equal(y, want[0])
    assert torch.equal(wide.grad, want[1].float())
    assert torch.equal(own[0].grad, want[3])


def test_double_backward_is_refused():
    (x, weights, *own), idx, _ = leaves(LAYER, transport.open("local"))
    y = experts.swiglu(make(transport.open("local"), LAYER), x, idx, weights, *own)
    [first] = torch.autograd.grad(y.sum(), own[0], create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once, got a second"):
        first.sum().backward()


# Mistakes

MISTAKES = {
    "gate_up of other experts": (
        {"gate_up": lambda w: w[:1]},
        ValueError,
        r"gate_up: expected shape \[2, 192, 96\] \(2 experts here, hidden 96, inner 96\), got \[1,",
    ),
    "down of another inner": (
        {"down": lambda w: w[..., :64]},
        ValueError,
        r"gate_up: expected shape \[2, 128, 96\] \(2 experts here, hidden 96, inner 64\), got \[2,",
    ),
    "down transposed": (
        {"down": lambda w: w[:, :64]},
        ValueError,
        r"down: expected shape \[2, 96, 96\] .*, got \[2, 64, 96\]",
    ),
    "inner 40": (
        {"gate_up": lambda w: w[:, :80], "down": lambda w: w[..., :40]},
        ValueError,
        "down: expected inner to be a multiple of 32, got 40",
    ),
    "integers": (
        {"down": lambda w: w.detach().int()},
        TypeError,
        "down: expected float32, bfloat16, float16, float64, got int32",
    ),
    "no tensor": (
        {"gate_up": lambda w: None},
        TypeError,
        "gate_up: expected a torch tensor, got NoneType",
    ),
    "gate_up of NumPy": (
        {"gate_up": lambda w: w.detach().numpy()},
        TypeError,
        "gate_up: expected a torch tensor, got ndarray",
    ),
    "down of NumPy": (
        {"down": lambda w: w.detach().numpy()},
        TypeError,
        "down: expected a torch tensor, got ndarray",
    ),
    "one number": ({"down": lambda w: w.sum()}, ValueError, "down: expected 3 dimensions, got 0"),
    "on another device": (
        {"down": lambda w: w.detach().to("meta")},
        ValueError,
        "down: expected on cpu as x, got meta",
    ),
    "unknown cache": (
        {"cache": lambda w: "fp8"},
        ValueError,
        "cache: expected one of packed, bf16, recompute, got 'fp8'",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_is_the_same_error_on_all(name):
    change, error, text = MISTAKES[name]

    def on_rank(t):
        (x, weights, gate_up, down), idx, _ = leaves(LAYER, t)
        kwargs = {"gate_up": gate_up, "down": down, "cache": "packed"}
        layer = make(t, LAYER, timeout_s=20)
        wrong = {key: make_wrong(kwargs[key]) for key, make_wrong in change.items()}
        with pytest.raises(error, match=f"rank 1 of 2: {text}"):
            experts.swiglu(layer, x, idx, weights, **(kwargs | (wrong if t.rank else {})))
        experts.swiglu(layer, x, idx, weights, **kwargs)  # nothing is broken

    transport.run_local(2, on_rank, timeout_s=60)


@pytest.mark.parametrize("part", ["x", "experts"])
def test_a_rank_that_trains_something_else_is_an_error_on_all(part):
    def on_rank(t):
        made, idx, _ = leaves(LAYER, t)
        for leaf in made[:1] if part == "x" else made:
            leaf.requires_grad_(t.rank == 0)
        if part == "experts":  # the dispatches are alike
            made[0].requires_grad_(False)
            made[1].requires_grad_(False)
        x, weights, *own = made
        with pytest.raises((ValueError, RuntimeError), match="gradient"):
            experts.swiglu(make(t, LAYER, timeout_s=20), x, idx, weights, *own)

    transport.run_local(2, on_rank, timeout_s=60)


def test_a_failure_in_the_experts_backward_stops_the_peers():
    forward_is_over = threading.Barrier(2)

    def on_rank(t):
        made, idx, dy = leaves(LAYER, t)
        x, weights, *own = made

        def unpack(tensor):
            if t.rank == 1 and tensor.dim() == 3:
                raise MemoryError("nothing left")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = experts.swiglu(make(t, LAYER, timeout_s=20), x, idx, weights, *own)
        forward_is_over.wait(30)
        text = "nothing left" if t.rank else "stopped by rank 1: experts backward: MemoryError"
        with pytest.raises(Exception, match=text):
            y.backward(dy)

    transport.run_local(2, on_rank, timeout_s=60)


def test_a_failure_of_the_products_stops_the_peers(monkeypatch):
    """As when one rank, to which most tokens came, is out of memory."""
    dispatched = threading.Barrier(2)

    class Fails(products.Float32Products):
        def rows_times_weights(self, rows, weights, layout):
            dispatched.wait(30)
            if rows.packed.hidden == INNER and len(weights) == 2:  # the rank with fewer experts
                raise MemoryError("nothing left")
            return super().rows_times_weights(rows, weights, layout)

    monkeypatch.setattr(products, "of", lambda *_: Fails())

    def on_rank(t):
        (x, weights, *own), idx, _ = leaves(UNEVEN, t)
        text = "nothing left" if t.rank else "stopped by rank 1: experts: MemoryError: nothing"
        with pytest.raises((MemoryError, RuntimeError), match=text):
            experts.swiglu(make(t, UNEVEN, timeout_s=20), x, idx, weights, *own)

    transport.run_local(2, on_rank, timeout_s=60)


# Weights in FP8


def test_block_codes_scale_128_by_128_to_the_smallest_power_of_two_that_does_not_clip():
    weights = torch.randn(2, 256, 640, generator=torch.Generator().manual_seed(3))
    weights *= torch.exp2(torch.arange(640).div(128).floor() * 3 - 20)
    weights[0, :128, :128] = 0
    weights[1, 0, 0], weights[1, 0, 128], weights[1, 0, 256] = 448 * 2.0**-9, -449 * 2.0**-9, 3e38
    codes, scales = products.block_codes(weights)
    assert scales.shape == (2, 2, 8)  # 5 blocks, rounded up to a multiple of 4
    assert (scales[..., 5:] == 0).all()
    for e in range(2):
        for i in range(2):
            for j in range(5):
                block = weights[e, 128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                amax = block.abs().max().item()
                scale = scales[e, i, j].item()
                assert math.frexp(scale)[0] == 0.5
                assert amax <= 448 * scale
                assert amax > 224 * scale or amax == 0
    of_each = scales[..., :5].repeat_interleave(128, 1).repeat_interleave(128, 2)
    want = (weights / of_each).numpy().astype(ml_dtypes.float8_e4m3fn)  # exact but for the rounding
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), want.view(np.uint8))


def test_block_codes_of_transposed_weights_are_those_transposed():
    _, down = parameters(Case("blocks", hidden=256), inner=128)
    codes, scales = products.block_codes(down)
    back, back_scales = products.block_codes(down.transpose(1, 2))
    assert back.is_contiguous()
    same = back.transpose(1, 2).contiguous().view(torch.uint8), codes.view(torch.uint8)
    assert torch.equal(*same)
    assert torch.equal(back_scales[:, 0, :2], scales[:, :2, 0])


def test_products_are_in_float32_where_there_is_no_hopper():
    assert isinstance(products.of(torch.device("cpu"), (256, 128), 128), products.Float32Products)


def test_tokens_without_experts_get_zero():
    x, idx, weights, _ = inputs(Case("zeros", routing="none"), 0)
    own = parameters(Case("zeros"))
    y = experts.swiglu(make(transport.open("local"), Case("zeros")), x, idx, weights, *own)
    assert (y.view(torch.int16) == 0).all()
