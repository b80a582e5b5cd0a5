"""What every adapter has to do: one MoE layer of known experts, checked bit by bit on each rank.

An expert multiplies each element of its rows by 1, 2, -1 or -2, its own pattern of them; tokens,
gradients of y and routing weights are small integers and powers of two.  Then all products and
sums are exact in BF16, in any order, and so is the conversion to each wire format: y and the
gradient of x have to be equal to the bit.  Random reals are held to the roundings on their way.
"""

import dataclasses

import torch

from fp4comm import quantize
from fp4comm.routing import Placement

BF16_ROUNDING = 2.0**-8  # largest relative error of one
MAX_TOPK = 8  # sums of more slots are not exact in BF16


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of all ranks; equal on all, since each draws it by the same seed."""

    id: str
    tokens: tuple  # of each rank
    topk: int
    seed: int
    routing: str = "random"
    experts: str = "scaled"  # or "identity"
    reals: bool = False


def check(
    moe,
    t,
    *,
    num_experts,
    hidden,
    trains,
    none_allowed=True,
    wire="mxfp4",
    combine="bf16",
    topk=None,
    empty_allowed=True,
    arrived=None,
    device="cpu",
    num_random=16,
):
    """Check an adapter on this rank.  Collective.

    Args:
        moe: ``moe(x [T, hidden] bfloat16, topk_idx [T, K] int64, topk_weights [T, K] float32,
            expert) -> y [T, hidden]``, which sends this rank's tokens through the adapter;
            ``expert(rows [n, hidden], expert_id) -> [n, hidden]`` is to be applied to the rows of
            each local expert.  The weights may be applied by whom the framework wants.
        t: has ``rank`` and ``num_ranks``.
        num_experts: on all ranks, in contiguous ranges.
        hidden: elements in a token.
        trains: gradients go through, to x and to the weights.
        none_allowed: topk_idx may have -1.
        wire: format of dispatch.
        combine: format of combine.
        topk: K, where the framework fixes it; None: several.
        empty_allowed: T may differ between ranks, and be 0.
        arrived: what experts get of x ``[T, hidden]``, if that is not its BF16 form on the wire.
        device: where the tensors are.
        num_random: how many random cases.

    Raises:
        AssertionError: naming the cases, after all of them, so that no rank leaves the others.
    """
    arrived = arrived or (lambda x: quantize(x, wire).to_bf16())
    failures = []
    for case in cases(t.num_ranks, num_experts, none_allowed, topk, empty_allowed, num_random):
        if case.reals and combine != "bf16":
            continue  # a rounding before it may change a code
        x, idx, weights, dy = (v.to(device) for v in inputs(case, t.rank, num_experts, hidden))
        factors = expert_factors(case, num_experts, hidden).to(device)
        if trains:
            x.requires_grad_()
            weights.requires_grad_()
        y = moe(x, idx, weights, lambda rows, e, f=factors: rows * f[e].to(rows.dtype))
        if trains:
            (y.float() * dy.float()).sum().backward()
        try:
            outputs = slot_outputs(arrived(x.detach()), idx, factors)
            compare_y(case, y.detach(), outputs, idx, weights.detach(), num_experts, t, combine)
            if trains and not case.reals:
                compare_gradients(x.grad, weights, dy, idx, factors, outputs)
        except AssertionError as error:
            failures.append(f"rank {t.rank}: {case}: {error}")
    assert not failures, f"{len(failures)} cases:\n" + "\n".join(failures)


def cases(num_ranks, num_experts, none_allowed, topk, empty_allowed, num_random):
    """Draw the cases, the same on every rank."""
    most = min(num_experts, MAX_TOPK)
    ks = [topk] if topk else sorted({1, 2, 3, most} & set(range(1, most + 1)))
    some = tuple(7 + (3 * r if empty_allowed else 0) for r in range(num_ranks))

    def of(name, tokens=some, **more):
        more = {"topk": ks[-1], "seed": len(name), **more}
        return Case(name, tokens, **more)

    yield of("identity experts", experts="identity")
    yield of("identity experts, first K", experts="identity", topk=ks[0])
    yield of("scaled experts")
    yield of("one token each", tokens=(1,) * num_ranks)
    yield of("all to one expert", routing="skew", topk=ks[0])
    yield of("all to the last rank", routing="last rank")
    if none_allowed:
        yield of("mostly -1", routing="mostly none")
        yield of("nothing routed", routing="none")
    if empty_allowed:
        yield of("only rank 0 has tokens", tokens=(9, *[0] * (num_ranks - 1)))
        yield of("rank 0 has no tokens", tokens=(0, *[9] * (num_ranks - 1)))
        yield of("no tokens at all", tokens=(0,) * num_ranks)
    g = torch.Generator().manual_seed(5)
    for i in range(num_random):
        k = ks[i % len(ks)]
        tokens = torch.randint(0 if empty_allowed else 1, 48, (num_ranks,), generator=g)
        tokens = tokens if empty_allowed else tokens[:1].expand(num_ranks)
        routing = "with none" if none_allowed and i % 2 else "random"
        reals = i % 4 == 3
        yield of(
            f"random {i}", tuple(tokens.tolist()), topk=k, seed=i, routing=routing, reals=reals
        )


def inputs(case, rank, num_experts, hidden):
    """Make x, topk_idx, topk_weights and the gradient of y of a rank."""
    g = torch.Generator().manual_seed(1000 * case.seed + rank)
    num_tokens, shape = case.tokens[rank], (case.tokens[rank], case.topk)
    if case.reals:
        x, dy = (torch.randn(num_tokens, hidden, generator=g) for _ in range(2))
        weights = torch.rand(shape, generator=g)
    else:
        x, dy = (torch.randint(-n, n + 1, (num_tokens, hidden), generator=g) for n in (4, 2))
        weights = torch.exp2(torch.randint(-1, 1, shape, generator=g).float())
    scores = torch.rand(num_tokens, num_experts, generator=g)
    if case.routing == "skew":  # the same K for all
        scores = torch.arange(num_experts).roll(num_experts // 2).expand_as(scores)
    elif case.routing == "last rank":  # as far as it has K experts
        scores = scores + torch.arange(num_experts)
    idx = scores.topk(case.topk).indices
    dropped = {"mostly none": 0.8, "none": 1.0, "with none": 0.2}.get(case.routing, 0.0)
    idx = idx.masked_fill(torch.rand(shape, generator=g) < dropped, -1)
    return x.bfloat16(), idx, weights, dy.bfloat16()


def expert_factors(case, num_experts, hidden):
    """What each expert multiplies its rows with, ``[num_experts, hidden]`` bfloat16."""
    if case.experts == "identity":
        return torch.ones(num_experts, hidden, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    choice = torch.randint(0, 4, (num_experts, hidden), generator=g)
    return torch.tensor([1, 2, -1, -2], dtype=torch.bfloat16)[choice]


def slot_outputs(arrived, idx, factors):
    """Return what each slot's expert makes of its token, ``[T, K, hidden]`` float32; -1: zero."""
    outputs = arrived.float()[:, None] * factors.float()[idx.clamp(min=0)]
    return outputs * (idx >= 0)[:, :, None]


def compare_y(case, y, outputs, idx, weights, num_experts, t, combine):
    """Compare y with the sum of the weighted outputs, which travels by rank."""
    terms = outputs * weights[:, :, None]
    want = torch.zeros_like(y, dtype=torch.float32)
    offsets = Placement(num_experts, t.num_ranks).offsets
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        here = ((idx >= first) & (idx < end))[:, :, None]
        want += quantize((terms * here).sum(1), combine).to_float32()
    if not case.reals:
        same("y", y, want.bfloat16())
        return
    # Weight, product, weighted product, partial sums and the whole sum are each rounded once.
    limit = (case.topk + 5) * BF16_ROUNDING * terms.abs().sum(1)
    excess = (y.float() - terms.sum(1)).abs() - limit
    assert (excess <= 0).all(), f"y: {(excess > 0).sum()} elements beyond BF16 rounding"


def compare_gradients(grad_x, weights, dy, idx, factors, outputs):
    """Compare the gradients of x, exactly, and of the weights, which may be kept in BF16."""
    routed = (weights.detach() * (idx >= 0))[:, :, None]
    of_slots = factors.float()[idx.clamp(min=0)] * routed
    want_x = (of_slots * dy.float()[:, None]).sum(1)
    same("gradient of x", _grad(grad_x, want_x), want_x.bfloat16())
    want = (outputs * dy.float()[:, None]).sum(2)
    got = _grad(weights.grad, want).float()
    excess = (got - want).abs() - 2 * BF16_ROUNDING * want.abs()
    assert (excess <= 0).all(), f"gradient of topk_weights: {got} instead of {want}"


def same(name, got, want):
    """Compare row by row; +0 and -0 are the same."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
    wrong = torch.nonzero((got.float() != want.float()).any(1)).flatten().tolist()
    assert not wrong, f"{name}: {len(wrong)} of {len(want)} rows differ: {wrong[:8]}"


def _grad(grad, want):
    """Take what nothing went through as zero: it is of no tokens."""
    return torch.zeros_like(want) if grad is None and not want.numel() else grad
