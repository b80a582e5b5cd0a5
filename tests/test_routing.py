"""Plans and layouts against plain loops."""

import numpy as np
import pytest
import torch

from fp4comm import reference, routing
from fp4comm.routing import Placement, cpu


def plan_by_loops(idx, weights, placement):
    """Wire rows as (rank, token) -> experts and weights by slot."""
    rows = {}
    for rank in range(placement.num_ranks):
        first, last = placement.offsets[rank], placement.offsets[rank + 1]
        for token, experts in enumerate(idx):
            if any(first <= e < last for e in experts):
                local = [int(e - first) if first <= e < last else -1 for e in experts]
                own = [w if e >= 0 else 0.0 for w, e in zip(weights[token], local, strict=True)]
                rows[rank, token] = local, own
    return rows


ROUTINGS = {
    "random with -1": lambda g, t, k, e: torch.randint(-1, e, (t, k), generator=g),
    "all to one expert": lambda g, t, k, e: torch.full((t, k), e - 1),
    "none": lambda g, t, k, e: torch.full((t, k), -1),
    "one expert in many": lambda g, t, k, e: torch.randint(0, e, (t, 1), generator=g).expand(t, k),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 300])
@pytest.mark.parametrize(("num_tokens", "topk", "num_experts"), [(0, 2, 4), (1, 1, 1), (37, 3, 22)])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_plan_is_that_of_plain_loops(kind, num_tokens, topk, num_experts, num_ranks):
    g = torch.Generator().manual_seed(num_ranks)
    placement = Placement(num_experts, num_ranks)
    idx = ROUTINGS[kind](g, num_tokens, topk, num_experts).contiguous()
    weights = torch.rand(num_tokens, topk, generator=g)
    plan = routing.plan(idx, weights, placement)
    rows = plan_by_loops(idx.tolist(), weights.tolist(), placement)
    assert plan.num_rows == len(rows)
    assert plan.send_splits.tolist() == [
        sum(r == rank for r, _ in rows) for rank in range(num_ranks)
    ]
    experts, row_weights = (a.tolist() for a in cpu._route_columns(plan.route.numpy(), topk))
    assert [(e, w) for e, w in zip(experts, row_weights, strict=True)] == list(rows.values())
    offsets, places = plan.place_offsets.tolist(), plan.places.tolist()
    tokens = [token for _, token in rows]
    for token in range(num_tokens):
        own = places[offsets[token] : offsets[token + 1]]
        assert own == [row for row, t in enumerate(tokens) if t == token]
    assert (routing.count(idx, placement) == plan.counts).all()
    for rank in range(num_ranks):
        local = [e for (r, _), (es, _) in rows.items() if r == rank for e in es if e >= 0]
        counts = plan.expert_counts[rank].tolist()
        assert counts == [local.count(e) for e in range(placement.most_local_experts)]


def test_a_plan_without_weights_carries_two_bytes_a_slot():
    idx = torch.tensor([[0, 2], [2, 3]])
    plan = routing.plan(idx, None, Placement(4, 2))
    assert plan.route.shape == (3, 4)
    assert plan.route.numpy().view(np.int16).tolist() == [[0, -1], [-1, 0], [0, 1]]
    assert plan.send_splits.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "held"),
    [
        (22, 8, [3, 3, 3, 3, 3, 3, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (3, 4, [1, 1, 1, 0]),
        (8, 2, [4, 4]),
    ],
)
def test_shp_15_16_experts_stand_in_contiguous_ranges(num_experts, num_ranks, held):
    placement = Placement(num_experts, num_ranks)
    assert np.diff(placement.offsets).tolist() == held
    assert placement.owners.tolist() == [r for r, n in enumerate(held) for _ in range(n)]
    for rank in range(num_ranks):
        assert placement.num_local_experts(rank) == held[rank]
        own = reference.expert_range(rank, num_ranks, num_experts)
        assert list(own) == [e for e in range(num_experts) if placement.owners[e] == rank]


def test_relay_of_the_example():
    route = torch.tensor([[1, 3], [2, -1]], dtype=torch.int16).view(torch.uint8)
    plan, handed = routing.relay(route, 2, Placement(4, 2), np.array([1, 2]))
    assert handed.view(torch.int16).tolist() == [[1, -1], [-1, 1], [0, -1]]
    assert plan.row_tokens.tolist() == [0, 0, 1]
    assert (plan.num_tokens, plan.place_offsets.tolist()) == (2, [0, 2, 3])
    assert plan.places.tolist() == [0, 1, 2]


def test_layout_of_the_example():
    route = torch.tensor([[1, 0], [1, -1], [0, -1]], dtype=torch.int16).view(torch.uint8)
    layout = routing.expert_layout(route, 2, np.array([2, 2]), 4)
    assert layout.slot_rows.tolist() == [[4, 0], [5, -1], [1, -1]]
    assert layout.expert_offsets_array.tolist() == [0, 4, 8]
    assert layout.row_source.tolist() == [0, 2, -1, -1, 0, 1, -1, -1]
    assert layout.row_weights.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_more_than_65536_tokens():
    """Beyond the 16-bit sort keys."""
    idx = torch.randint(0, 8, (70_000, 2), generator=torch.Generator().manual_seed(1))
    plan = routing.plan(idx, None, Placement(8, 4))
    offsets, places = plan.place_offsets.numpy(), plan.places.numpy()
    ranks_of = np.repeat(np.arange(4), plan.send_splits)
    first, last = ranks_of[places[offsets[:-1]]], ranks_of[places[offsets[1:] - 1]]
    want = np.sort(idx.numpy() // 2, axis=1)
    assert (np.stack([first, last], 1) == want).all()


def test_com_10_row_counts_times_hidden_are_64_bit():
    """T = 299594 rows of 7168 BF16 elements are 2**31 elements: counts stay rows, as int64."""
    idx = torch.zeros((299_594, 1), dtype=torch.int64)
    plan = routing.plan(idx, None, Placement(2, 2))
    assert plan.send_splits.dtype == np.int64
    assert plan.send_splits.tolist() == [299_594, 0]
    assert (plan.send_splits * 7168 > 2**31).tolist() == [True, False]  # in the plan's own dtype
