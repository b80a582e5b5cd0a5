"""Experts that take the wire rows as they came: Handle.topk_idx and combine_wire_rows."""

import pytest
import torch

from fp4comm import AllToAll, Precision, quantize, transport
from fp4comm.routing import Placement

TOKENS, TOPK, EXPERTS, HIDDEN = (5, 0, 9, 3), 3, 10, 96


def inputs(rank):
    g = torch.Generator().manual_seed(rank)
    x = torch.randint(-4, 5, (TOKENS[rank], HIDDEN), generator=g).bfloat16()
    idx = torch.randint(-1, EXPERTS, (TOKENS[rank], TOPK), generator=g)
    return x, idx, torch.rand(idx.shape, generator=g)


def factors(num_experts):
    return torch.arange(1, num_experts + 1).float()


def outputs_of_wire_rows(handle, rows, factor):
    """Multiply each row by the factors and weights of its local experts, as `combine` would."""
    idx, weights = handle.topk_idx, handle.topk_weights
    y = torch.zeros(rows.shape)
    for k in range(idx.shape[1]):
        out = (rows.float() * factor[idx[:, k].clamp(min=0)][:, None]).bfloat16().float()
        y += torch.where(idx[:, k : k + 1] >= 0, out * weights[:, k : k + 1], 0)
    return y.bfloat16()


@pytest.mark.parametrize("route", ["flat", "two_hop"])
def test_sums_of_wire_rows_are_combined_to_what_expert_rows_are(route):
    def on_rank(t):
        ranks = {} if route == "flat" else {"ranks_per_node": 2}
        sizes = {"num_experts": EXPERTS, "hidden": HIDDEN}
        a2a = AllToAll(t, arrive="bf16", route=route, **sizes, **ranks)
        x, idx, weights = inputs(t.rank)
        d = a2a.dispatch(x, idx, weights)
        local = factors(EXPERTS)[Placement(EXPERTS, t.num_ranks).offsets[t.rank] :]
        expert = torch.bucketize(torch.arange(len(d.rows)), d.expert_offsets[1:], right=True)
        out = (d.rows.float() * local[expert][:, None]).bfloat16()
        want = a2a.combine(out, d.handle)

        rows = outputs_of_wire_rows(d.handle, d.packed.to_bf16(), local)
        y = torch.full((len(x), HIDDEN), 7.0).bfloat16()
        assert a2a.combine_wire_rows(rows, d.handle, out=y) is y
        assert torch.equal(y, want)
        assert torch.equal(a2a.combine_wire_rows(rows, d.handle), want)
        assert torch.equal(a2a.combine_wire_rows(rows, d.handle, async_op=True).wait(), want)

    transport.run_local(4, on_rank, timeout_s=60)


@pytest.mark.parametrize("combine", ["fp8", "mxfp8", "mxfp4"])
def test_sums_of_wire_rows_are_quantized_to_combines_wire(combine):
    def on_rank(t):
        x, idx, weights = inputs(t.rank)

        def send(wire, change):
            precision = Precision(combine=wire)
            sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "precision": precision}
            a2a = AllToAll(t, arrive="packed", **sizes)
            d = a2a.dispatch(x, idx, weights)
            return a2a.combine_wire_rows(change(d.packed.to_bf16() * 1.125), d.handle)

        want = send("bf16", lambda rows: quantize(rows, combine).to_bf16())  # which is exact
        assert torch.equal(send(combine, lambda rows: rows), want)

    transport.run_local(4, on_rank, timeout_s=60)


def test_topk_idx_and_weights_of_wire_rows_are_those_of_the_tokens():
    """Experts 0 and 1 on rank 0, experts 2 and 3 on rank 1; expert 1 gets nothing."""
    idx = [torch.tensor([[0, 2], [-1, 3], [3, 3]]), torch.tensor([[2, 0]])]

    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive="packed", expert_alignment=4)
        num_tokens = len(idx[t.rank])
        weights = torch.arange(1.0, 2 * num_tokens + 1).view(-1, 2)
        handle = a2a.dispatch(torch.ones(num_tokens, 32).bfloat16(), idx[t.rank], weights).handle
        return handle.topk_idx.tolist(), handle.topk_weights.tolist()

    on_0, on_1 = transport.run_local(2, on_rank, timeout_s=60)
    assert on_0 == ([[0, -1], [-1, 0]], [[1, 0], [0, 2]])
    assert on_1 == ([[-1, 0], [-1, 1], [1, 1], [0, -1]], [[0, 2], [0, 4], [5, 6], [1, 0]])


def made(a2a):
    d = a2a.dispatch(torch.ones(3, 32).bfloat16(), torch.tensor([[0, 1]] * 3))
    return d.handle, torch.ones(3, 32).bfloat16()


def mistake(**changed):
    def on_rank(t):
        handle, rows = made(a2a := AllToAll(t, num_experts=2, hidden=32, arrive="packed"))
        assert handle.topk_weights is None
        a2a.combine_wire_rows(**{"rows": rows, "handle": handle} | changed)

    return on_rank


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"rows": torch.ones(6, 32).bfloat16()}, ValueError, r"rows: expected shape \[3, 32\] as"),
        ({"rows": torch.ones(3, 32)}, TypeError, "rows: expected bfloat16, got float32"),
        ({"out": torch.ones(3, 32)}, TypeError, "out: expected a bfloat16 tensor, got float32"),
        (
            {"out": torch.ones(32, 3).bfloat16().t()},
            ValueError,
            r"out: expected contiguous with shape \[3, 32\], got \[3, 32\] with strides \[1, 3\]",
        ),
        (
            {"out": torch.ones(3, 32, dtype=torch.bfloat16, requires_grad=True)},
            RuntimeError,
            "out: expected no gradient to be wanted",
        ),
        (
            {"out": torch.ones(97).bfloat16()[1:].view(3, 32)},
            ValueError,
            "out: expected at a multiple of 16 bytes, got 2 past one",
        ),
        (
            {"rows": torch.ones(3, 32, dtype=torch.bfloat16, requires_grad=True)},
            RuntimeError,
            "rows: expected no gradient to be wanted",
        ),
    ],
)
def test_a_mistake_names_argument_and_what_was_expected(changed, error, text):
    with pytest.raises(error, match=text):
        transport.run_local(1, mistake(**changed), timeout_s=60)


def test_a_graph_that_kept_what_is_overwritten_says_so():
    def on_rank(t):
        a2a = AllToAll(t, num_experts=1, hidden=32, arrive="packed")
        d = a2a.dispatch(torch.ones(3, 32).bfloat16(), torch.zeros(3, 1).long())
        factor = torch.ones(32, dtype=torch.bfloat16, requires_grad=True)
        out = torch.zeros(3, 32).bfloat16()
        product = (out * factor).sum()
        a2a.combine_wire_rows(torch.ones(3, 32).bfloat16(), d.handle, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    transport.run_local(1, on_rank, timeout_s=60)
