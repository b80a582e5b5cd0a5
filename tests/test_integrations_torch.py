"""The conformance test of adapters, and the torch.distributed adapter, on ranks."""

import conformance
import pytest
import torch

from fp4comm import AllToAll, Precision, transport

HIDDEN = 64


def direct(t, num_experts, precision, *, weighted, mistake=None, arrive="bf16"):
    """Make a moe of `conformance.check` that calls AllToAll itself."""
    a2a = AllToAll(
        t,
        num_experts=num_experts,
        hidden=HIDDEN,
        precision=precision,
        arrive=arrive,
        expert_alignment=4,
        timeout_s=20,
    )
    first = int(a2a._placement.offsets[t.rank])

    def moe(x, idx, weights, expert):
        d = a2a.dispatch(x, idx, weights)
        rows = d.rows
        if arrive == "fp8":
            rows = d.packed.to_bf16(d.handle.layout)
        ends = d.expert_offsets.tolist()
        parts = [
            expert(rows[i:j], first + e)
            for e, (i, j) in enumerate(zip(ends, ends[1:], strict=False))
        ]
        out = torch.cat([rows[:0], *parts])
        if mistake is not None:
            out = mistake(out)
        if not weighted:
            out = (out * d.row_weights[:, None]).bfloat16()
        return a2a.combine(out, d.handle, weighted=weighted)

    return moe


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "wire", "combine", "weighted"),
    [
        (3, 8, "mxfp4", "bf16", True),
        (2, 4, "bf16", "bf16", False),
        (3, 2, "mxfp8", "mxfp4", True),
        (1, 5, "fp8", "fp8", False),
    ],
)
def test_all_to_all_itself_conforms(num_ranks, num_experts, wire, combine, weighted):
    def on_rank(t):
        moe = direct(t, num_experts, Precision(wire, combine), weighted=weighted)
        sizes = {"num_experts": num_experts, "hidden": HIDDEN}
        conformance.check(moe, t, **sizes, trains=True, wire=wire, combine=combine)

    transport.run_local(num_ranks, on_rank)


MISTAKES = {
    "rows of another token": lambda out: out.roll(1, 0),
    "no gradient of x": lambda out: out.detach().requires_grad_(),
    "one element of one row": lambda out: out + torch.eye(len(out), HIDDEN, dtype=out.dtype)[:, :1],
    "gradients doubled": lambda out: out * 2 - out.detach(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_conformance_finds(mistake):
    def on_rank(t):
        moe = direct(t, 4, Precision(), weighted=True, mistake=MISTAKES[mistake])
        with pytest.raises(AssertionError, match="cases:\n"):
            conformance.check(moe, t, num_experts=4, hidden=HIDDEN, trains=True)

    transport.run_local(2, on_rank)
