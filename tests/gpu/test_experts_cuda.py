"""The SwiGLU expert layer on a GPU: products in FP8 where it is a Hopper one, and kept memory.

Ranks that are threads go back in threads of their own, see test_autograd_cuda.py.
"""

import on_device
import pytest
import torch
from compiled import kernels_are_compiled  # noqa: F401
from expert_layers import CASES, check_layer, inputs, make, model, parameters
from gradients import Case
from on_device import to

from fp4comm import experts, products, quantize, transport
from fp4comm.products import Operand

DEVICE = on_device.DEVICE
ALIGNMENT = 128
WIDE = Case("wide", tokens=(700,), hidden=640, num_experts=6, topk=2, combine_grad="fp8")
INNER = 256


def is_fp8():
    """Whether this GPU multiplies FP8 with these block scales."""
    return isinstance(products.of(DEVICE, (128,), ALIGNMENT), products.Fp8Products)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layer_in_float32(case, num_ranks):
    """Its widths are no multiples of 128."""

    def on_rank(t):
        with torch.autograd.set_multithreading_enabled(False):
            check_layer(t, case, DEVICE)

    model(case, num_ranks)  # once, and not on every thread
    transport.run_local(num_ranks, on_rank, timeout_s=60)


def arrived(hidden, num_rows, wire="mxfp4"):
    """What a dispatch brought in, with so many rows for each expert."""
    idx = torch.arange(len(num_rows)).repeat_interleave(torch.tensor(num_rows))[:, None].to(DEVICE)
    x = torch.randn(len(idx), hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
    case = Case("arrived", hidden=hidden, num_experts=len(num_rows), wire=wire)
    layer = make(transport.open("local"), case, arrive="packed", expert_alignment=ALIGNMENT)
    d = layer.dispatch(x.to(DEVICE), idx)
    return Operand(d.packed, d.handle.layout), d.handle.layout


def close(got, want):
    """Sums of the same products differ in order, and in one rounding to BF16."""
    error = (got.float() - want).norm(dim=-1)
    assert (error <= 2**-8 * want.norm(dim=-1)).all()


ROWS = [1, 0, 128, 129, 300]  # of each expert


@pytest.mark.skipif("not is_fp8()", reason="needs a Hopper GPU and CUDA 12.9")
@pytest.mark.parametrize(("hidden", "out"), [(128, 128), (640, 256), (1024, 2048)])
@pytest.mark.parametrize("transposed", [False, True])
def test_fp8_rows_times_weights(hidden, out, transposed):
    rows, layout = arrived(hidden, ROWS)
    shape = (len(ROWS), hidden, out) if transposed else (len(ROWS), out, hidden)
    weights = torch.randn(shape, device=DEVICE)
    weights = weights.transpose(1, 2) if transposed else weights
    got = products.Fp8Products().rows_times_weights(rows, weights, layout)
    codes, scales = rows.packed.to_fp8_rows(layout)
    values = codes.float() * scales.repeat_interleave(128, 1)
    codes, scales = products.block_codes(weights)
    scales = scales[..., : hidden // 128].repeat_interleave(128, 1).repeat_interleave(128, 2)
    want = torch.zeros_like(got, dtype=torch.float32)
    for expert, (first, num_rows) in enumerate(zip(layout.expert_offsets.tolist(), ROWS)):  # noqa: B905
        live = slice(first, first + num_rows)
        want[live] = values[live] @ (codes[expert].float() * scales[expert]).t()
    close(got, want)


def values_of_columns(operand, layout):
    """FP8 columns in float32, ``[width, M]``, tile by tile; and 0 beside tiles."""
    codes, scales = operand.packed.to_fp8_columns(operand.layout)
    values = torch.zeros(codes.shape, device=DEVICE)
    starts = range(0, codes.shape[1], 128)  # segments are of one tile or several
    if operand.layout is not None:
        starts = layout.tiles[: len(scales)].tolist()
    for tile, start in zip(scales, starts, strict=True):
        part = slice(start, start + 128)
        values[:, part] = codes[:, part].float() * tile[:, None]
    return values


@pytest.mark.skipif("not is_fp8()", reason="needs a Hopper GPU and CUDA 12.9")
@pytest.mark.parametrize("cached", ["mxfp4", "bf16 rows"])
@pytest.mark.parametrize(("hidden", "out"), [(128, 128), (640, 256), (1024, 2048)])
def test_fp8_weight_gradients(hidden, out, cached):
    rows, layout = arrived(hidden, ROWS)
    if cached != "mxfp4":
        rows = Operand.of(rows.packed.to_bf16(layout))
    live = (layout.row_source >= 0)[:, None]
    grad = Operand.of(torch.randn(layout.num_expert_rows, out, device=DEVICE).mul_(live))
    found = list(products.Fp8Products().weight_gradients(grad, rows, layout))
    grads, values = values_of_columns(grad, layout), values_of_columns(rows, layout)
    ends = layout.expert_offsets.tolist()
    for gradient, first, last, num_rows in zip(found, ends, ends[1:], ROWS):  # noqa: B905
        assert (gradient is None) == (num_rows == 0)
        if gradient is not None:
            assert gradient.dtype == torch.float32
            close(gradient, grads[:, first:last] @ values[:, first:last].t())


def run(cache, case=WIDE, alignment=ALIGNMENT):
    """y and the gradients of the layer, on the device."""
    x, idx, weights, dy = to(DEVICE, inputs(case, 0))
    own = (part.to(DEVICE) for part in parameters(case, INNER))
    made = [part.requires_grad_() for part in (x, weights, *own)]
    layer = make(transport.open("local"), case, expert_alignment=alignment)
    y = experts.swiglu(layer, x, idx, *made[1:], cache=cache)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in made)]


def test_a_cache_of_wire_rows_gives_the_same_bits_with_and_without_recomputation():
    for packed, recomputed in zip(run("packed"), run("recompute"), strict=True):
        assert torch.equal(packed, recomputed)


@pytest.mark.parametrize("cache", experts.CACHES)
def test_products_in_fp8_are_near_those_in_float32(cache):
    """Of E4M3, with 3 bits of mantissa: some 5 % by norm.  128 + 1 rows are no FP8 alignment."""
    for number, (got, want) in enumerate(zip(run(cache), run(cache, alignment=1), strict=True)):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error <= 0.1, number
        if is_fp8():
            assert error > 1e-4, "not in FP8"


@pytest.mark.skipif("DEVICE.type != 'cuda'", reason="asks CUDA's allocator")
@pytest.mark.parametrize("topk", [1, 2])
def test_the_cache_of_the_input_by_the_allocator(topk):
    """At most 0.53 of FP8 rows and 0.27 of BF16 rows, and half of it with two experts a token."""
    case = Case("memory", (4096,), 1024, 8, topk)
    x, _, weights, _ = to(DEVICE, inputs(case, 0))
    idx = (torch.arange(4096 * topk, device=DEVICE) % 8).view(4096, topk)
    made = [part.to(DEVICE).requires_grad_() for part in parameters(case, INNER)]
    layer = make(transport.open("local"), case, expert_alignment=ALIGNMENT)

    def taken(function, *args, **kwargs):
        function(*args, **kwargs)  # what is allocated once
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        result = function(*args, **kwargs)
        torch.cuda.synchronize()
        taken_bytes = torch.cuda.memory_allocated() - before
        del result
        return taken_bytes

    kept = {
        cache: taken(experts.swiglu, layer, x, idx, weights, *made, cache=cache)
        for cache in experts.CACHES
    }
    with torch.no_grad():
        layout = layer.dispatch(x, idx, weights).handle.layout
        fp8_rows = taken(quantize(x).to_fp8_rows, layout)
        bf16_rows = taken(quantize(x).to_bf16, layout)
    wire_rows = bf16_rows - (kept["bf16"] - kept["packed"])
    assert 0 < wire_rows <= 0.53 * fp8_rows / topk
    assert wire_rows <= 0.27 * bf16_rows / topk
    assert kept["recompute"] < kept["packed"]
