"""Gradients of a layer of linear experts, checked against a model in float32 on any transport.

The model has all ranks in one process and the same quantized tokens.  Used on threads by
test_autograd.py, on real processes by mpi/cases.py, and on a GPU by gpu/test_autograd_cuda.py.
"""

import dataclasses
import functools

import torch

from fp4comm import AllToAll, Precision, quantize
from fp4comm.routing import Placement

LIMIT = 1e-2  # relative error of a row, by norm


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer; rank r has tokens[r % len(tokens)] tokens."""

    id: str
    tokens: tuple = (17, 9)
    hidden: int = 64
    num_experts: int = 6
    topk: int = 3
    wire: str = "mxfp4"
    combine_grad: str = "bf16"
    routing: str = "random"  # with -1 and repeats
    weights: torch.dtype | None = torch.float32
    weighted: bool = True  # False: the experts apply the weights
    integers: bool = False
    seed: int = 0
    node_sizes: tuple = ()  # ranks of each node, by the two-hop route; else by the flat one


ROUTINGS = {
    "random": lambda shape, experts, g: torch.randint(-1, experts, shape, generator=g),
    "mostly none": lambda shape, experts, g: torch.randint(-9, experts, shape, generator=g).clamp_(
        -1
    ),
    "all to expert 0": lambda shape, experts, g: torch.zeros(shape, dtype=torch.int64),
    "repeated": lambda shape, experts, g: torch.randint(
        0, experts, (shape[0], 1), generator=g
    ).expand(shape),
    "none": lambda shape, experts, g: torch.full(shape, -1),
}

CASES = [
    *(Case(f"{wire} forward", wire=wire) for wire in ("bf16", "fp8", "mxfp8", "mxfp4")),
    *(Case(f"{wire} backward", combine_grad=wire) for wire in ("fp8", "mxfp8", "mxfp4")),
    *(Case(f"experts weigh, {wire} backward", combine_grad=wire, weighted=False)
      for wire in ("bf16", "fp8")),
    *(Case(f"{dtype} weights", weights=dtype)
      for dtype in (None, torch.bfloat16, torch.float16, torch.float64)),
    *(Case(routing, routing=routing) for routing in ROUTINGS),
    Case("GRD-12 all tokens to rank 0", routing="all to expert 0", topk=1),
    Case("a rank without tokens", tokens=(0, 5)),
    Case("no tokens at all", tokens=(0,)),
    Case("fewer experts than ranks", num_experts=1),
    Case("hidden 160", hidden=160),
    *(Case(f"small integers, {wire}", wire=wire, combine_grad=back, weighted=weighted, hidden=32,
           integers=True)
      for wire, back in (("mxfp4", "bf16"), ("mxfp4", "fp8"), ("fp8", "mxfp4"), ("bf16", "mxfp8"))
      for weighted in (True, False)),
]  # fmt: skip

SOME_CASES = CASES[::3]  # for processes, which take longer


def inputs(case, rank):
    """Make x, topk_idx, topk_weights and dy of a rank."""
    g = torch.Generator().manual_seed(100 * case.seed + rank)
    num_tokens = case.tokens[rank % len(case.tokens)]
    idx = ROUTINGS[case.routing]((num_tokens, case.topk), case.num_experts, g)
    if case.integers:
        x, dy = (torch.randint(-n, n + 1, (num_tokens, case.hidden), generator=g) for n in (4, 2))
        weights = torch.exp2(torch.randint(-1, 2, (num_tokens, case.topk), generator=g).float())
    else:
        x, dy = (torch.randn(num_tokens, case.hidden, generator=g) for _ in range(2))
        weights = torch.rand(num_tokens, case.topk, generator=g)
    weights = None if case.weights is None else weights.to(case.weights)
    return x.bfloat16(), idx, weights, dy.bfloat16()


def expert_matrices(case):
    """One matrix for each expert, ``[E, hidden, hidden]`` float32; of integers: 3 in a row."""
    g = torch.Generator().manual_seed(7)
    shape = (case.num_experts, case.hidden, case.hidden)
    if not case.integers:
        return torch.randn(shape, generator=g) / case.hidden**0.5
    signs = torch.randint(0, 2, shape, generator=g) * 2.0 - 1
    row = torch.arange(case.hidden)
    distance = (row[:, None] - row) % case.hidden
    return torch.where(distance < 3, signs, 0)


def apply_experts(d, matrices):
    """Multiply each expert's rows, padding included, by its matrix: float32."""
    ends = d.expert_offsets.tolist()
    parts = [d.rows[i:j].float() @ w for i, j, w in zip(ends, ends[1:], matrices, strict=False)]
    return torch.cat([*parts, d.rows[:0].float() @ matrices.sum(0)])


def make(transport, case, kind=AllToAll, **changed):
    """Make the object that a case is run with."""
    precision = Precision(case.wire, combine_grad=case.combine_grad)
    kwargs = {"num_experts": case.num_experts, "hidden": case.hidden, "precision": precision}
    if case.node_sizes:
        kwargs |= {"route": "two_hop", "ranks_per_node": case.node_sizes}
    return kind(
        transport, **(kwargs | {"arrive": "bf16", "expert_alignment": 4, "timeout_s": 60} | changed)
    )


def local_experts(case, transport):
    """Numbers of the experts of this rank."""
    offsets = Placement(case.num_experts, transport.num_ranks).offsets
    return slice(int(offsets[transport.rank]), int(offsets[transport.rank + 1]))


def round_trip(a2a, case, x, idx, weights, matrices):
    """Dispatch, experts, combine."""
    d = a2a.dispatch(x, idx, weights)
    out = apply_experts(d, matrices)
    if not case.weighted:
        out = out * d.row_weights[:, None]
    return a2a.combine(out.bfloat16(), d.handle, weighted=case.weighted)


def gradients(transport, case, device="cpu"):
    """Run a round and its backward; return the gradients of x, topk_weights and the matrices."""
    x, idx, weights, dy = (
        None if t is None else t.to(device) for t in inputs(case, transport.rank)
    )
    matrices = expert_matrices(case)[local_experts(case, transport)].to(device)
    leaves = [t.requires_grad_() for t in (x, weights, matrices) if t is not None]
    y = round_trip(make(transport, case), case, x, idx, weights, matrices)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad.dtype, leaf.grad.shape) == (leaf.dtype, leaf.shape)
    return [None if t is None else t.grad for t in (x, weights, matrices)]


@functools.lru_cache(maxsize=4)
def model(case, num_ranks):
    """Gradients of all ranks' x and topk_weights and of all matrices, in float32."""
    matrices = expert_matrices(case).requires_grad_()
    leaves = []
    for rank in range(num_ranks):
        x, idx, weights, dy = inputs(case, rank)
        tokens = quantize(x, case.wire).to_float32().requires_grad_()
        weights = torch.ones(idx.shape) if weights is None else weights.float()
        weights.requires_grad_()
        out = torch.einsum("th,tkhi->tki", tokens, matrices[idx.clamp(min=0)])
        if case.weighted:  # then what the weights multiply has been rounded to BF16
            out = out + (out.bfloat16().float() - out).detach()
        y = (out * (weights * (idx >= 0))[..., None]).sum(1)
        y.backward(quantize(dy, case.combine_grad).to_float32())
        leaves.append((tokens, weights))
    return [(tokens.grad, weights.grad) for tokens, weights in leaves], matrices.grad


def check_gradients(transport, case, device="cpu"):
    """Compare this rank's gradients with the model's: exactly, where the data are integers."""
    of_ranks, of_matrices = model(case, transport.num_ranks)
    x, weights, matrices = gradients(transport, case, device)
    want_x, want_weights = of_ranks[transport.rank]
    compare = equal_rows if case.integers else close_rows
    compare(x, want_x)
    if weights is not None:
        compare(weights, want_weights)
    compare(matrices.flatten(1), of_matrices[local_experts(case, transport)].flatten(1))


def close_rows(got, want):
    """Compare row by row by norm; what is zero in the model is exactly zero."""
    got = got.detach().float().cpu()
    assert got.shape == want.shape
    error, size = (got - want).norm(dim=1), want.norm(dim=1)
    assert (error <= LIMIT * size).all(), f"relative errors {(error / size).tolist()}"
    assert (got[want == 0] == 0).all()


def equal_rows(got, want):
    """Compare bit by bit, but for the sign of zero."""
    torch.testing.assert_close(got.detach().float().cpu(), want, rtol=0, atol=0)
