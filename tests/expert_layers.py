"""The SwiGLU layer of fp4comm.experts, checked against a model in float32 on any transport."""

import functools

import torch
import torch.nn.functional as F
from gradients import LIMIT, Case, close_rows, inputs, local_experts

from fp4comm import AllToAll, Precision, experts, quantize

INNER = 96


def parameters(case, inner=INNER):
    """Weights of all experts, ``gate_up`` and ``down``."""
    g = torch.Generator().manual_seed(11)
    gate_up = torch.randn(case.num_experts, 2 * inner, case.hidden, generator=g)
    down = torch.randn(case.num_experts, case.hidden, inner, generator=g)
    return gate_up / case.hidden**0.5, down / inner**0.5


def make(transport, case, **changed):
    """Make the object of a layer."""
    precision = Precision(case.wire, combine_grad=case.combine_grad)
    kwargs = {"num_experts": case.num_experts, "hidden": case.hidden, "precision": precision}
    return AllToAll(transport, **(kwargs | {"expert_alignment": 4, "timeout_s": 60} | changed))


def leaves(case, transport, device="cpu", dtype=torch.float32):
    """x, topk_weights, gate_up and down, which want gradients; topk_idx and dy beside them."""
    x, idx, weights, dy = (
        None if t is None else t.to(device) for t in inputs(case, transport.rank)
    )
    own = (part[local_experts(case, transport)].to(device, dtype) for part in parameters(case))
    made = [t if t is None else t.requires_grad_() for t in (x, weights, *own)]
    return made, idx, dy


def step(transport, case, cache="packed", device="cpu", dtype=torch.float32, **changed):
    """Run the layer and its backward; return y and the gradients."""
    (x, weights, *own), idx, dy = leaves(case, transport, device, dtype)
    y = experts.swiglu(make(transport, case, **changed), x, idx, weights, *own, cache=cache)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    return [y.detach(), *(None if t is None else t.grad for t in (x, weights, *own))]


@functools.lru_cache(maxsize=4)
def model(case, num_ranks):
    """y and gradients of all ranks, and of all experts' weights, in float32.

    Behind the gradient of the routing weights, each one a dot product, the norms of its factors.
    """
    gate_up, down = (part.requires_grad_() for part in parameters(case))
    of_ranks = []
    for rank in range(num_ranks):
        x, idx, weights, dy = inputs(case, rank)
        tokens = quantize(x, case.wire).to_float32().requires_grad_()
        weights = torch.ones(idx.shape) if weights is None else weights.float()
        weights.requires_grad_()
        own = idx.clamp(min=0)
        gate, up = torch.einsum("th,tkoh->tko", tokens, gate_up[own]).chunk(2, dim=-1)
        out = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[own])
        y = (out * (weights * (idx >= 0))[..., None]).sum(1)
        dy = quantize(dy, case.combine_grad).to_float32()
        y.backward(dy)
        norms = dy.norm(dim=1, keepdim=True) * out.detach().norm(dim=2)
        of_ranks.append((y.detach(), tokens.grad, weights.grad, norms))
    return of_ranks, gate_up.grad, down.grad


def check_layer(transport, case, device="cpu"):
    """Compare this rank's part with the model's: row by row, expert by expert."""
    of_ranks, gate_up, down = model(case, transport.num_ranks)
    want_y, want_x, want_weights, norms = of_ranks[transport.rank]
    own = local_experts(case, transport)
    y, x, weights, *of_experts = step(transport, case, device=device)
    close_rows(y, want_y)
    close_rows(x, want_x)
    for got, want in zip(of_experts, (gate_up[own], down[own]), strict=True):
        close_rows(got.flatten(1), want.flatten(1))
    if weights is not None:
        error = (weights.float().cpu() - want_weights).abs()
        assert (error <= LIMIT * norms).all()
        assert (weights.cpu()[want_weights == 0] == 0).all()


CASES = [
    *(Case(f"{wire} forward", wire=wire) for wire in ("bf16", "fp8", "mxfp8", "mxfp4")),
    *(Case(f"{wire} backward", combine_grad=wire) for wire in ("fp8", "mxfp4")),
    *(Case(f"{dtype} weights", weights=dtype) for dtype in (None, torch.bfloat16)),
    *(Case(routing, routing=routing) for routing in ("all to expert 0", "repeated", "none")),
    Case("a rank without tokens", tokens=(0, 5)),
    Case("no tokens at all", tokens=(0,)),
    Case("fewer experts than ranks", num_experts=1),
]
SOME_CASES = CASES[::3]  # for processes, which take longer
