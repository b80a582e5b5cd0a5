"""Exchanges of all_to_all_rows, and an MoE layer made of them, checked on any group.

Used on threads by test_integrations_torch.py and on processes by mpi/torch_rows.py.
"""

import numpy as np
import torch

from fp4comm import all_to_all_rows, quantize
from fp4comm.routing import Placement


def rows_of(source, splits, hidden, seed=0):
    """Rows of a rank, and where in them those for each other start."""
    g = torch.Generator().manual_seed(100 * seed + source)
    rows = torch.randn(sum(splits[source]), hidden, generator=g) * 3
    return rows.bfloat16(), np.concatenate([[0], np.cumsum(splits[source])])


def all_for(rank, splits, hidden, seed=0):
    """What a plain all-to-all brings to a rank: by source rank, in its order."""
    parts = []
    for source in range(len(splits)):
        rows, offsets = rows_of(source, splits, hidden, seed)
        parts.append(rows[offsets[rank] : offsets[rank + 1]])
    return torch.cat(parts)


def check_rows(group, t, splits, wire, grad_wire, hidden=96):
    """Send rows and gradients, and compare each with what the codec alone makes of it."""
    there, back = splits[t.rank], [row[t.rank] for row in splits]
    x, _ = rows_of(t.rank, splits, hidden)
    x.requires_grad_()
    y = all_to_all_rows(x, there, back, group, wire, grad_wire=grad_wire)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.detach(), quantize(all_for(t.rank, splits, hidden), wire).to_bf16())
    transposed = np.array(splits).T.tolist()
    dy, _ = rows_of(t.rank, transposed, hidden, seed=1)
    y.backward(dy)
    want = all_for(t.rank, transposed, hidden, seed=1)
    assert torch.equal(x.grad, quantize(want, grad_wire).to_bf16())


def layer(group, t, num_experts, wire, combine):
    """Make a moe of `conformance.check`: one row a slot there and back, weighted at home."""
    placement = Placement(num_experts, t.num_ranks)
    first, end = placement.offsets[t.rank : t.rank + 2].tolist()

    def moe(x, idx, weights, expert):
        slots = torch.argsort(idx.flatten(), stable=True)
        slots = slots[idx.flatten()[slots] >= 0]
        experts = idx.flatten()[slots]
        counts = np.zeros((t.num_ranks, placement.most_local_experts), np.int64)
        for e in experts.tolist():
            owner = int(placement.owners[e])
            counts[owner, e - placement.offsets[owner]] += 1
        came = t.exchange_counts(counts)
        there, back = counts.sum(1), came.sum(1)
        rows = all_to_all_rows(x[slots // idx.shape[1]], there, back, group, wire)
        of_rows = np.concatenate([np.repeat(np.arange(came.shape[1]), row) for row in came])
        out = torch.empty_like(rows)
        for e in range(end - first):
            here = torch.from_numpy(of_rows == e)
            out = torch.where(here[:, None], expert(rows, first + e), out)
        out = all_to_all_rows(out, back, there, group, combine, grad_wire="fp8")
        weighted = out.float() * weights.flatten()[slots, None]
        y = torch.zeros(x.shape).index_add(0, slots // idx.shape[1], weighted)
        return y.bfloat16()

    return moe
