"""The two-hop route: rows of the flat route, sums and gradients of the reference, on every node."""

import dataclasses
import operator
import re
import threading
import time

import numpy as np
import pytest
import torch
import two_hop
from gradients import Case, check_gradients, gradients, inputs, make
from rounds import Round, check_round

from fp4comm import AllToAll, hops, transport
from fp4comm.hops import Nodes
from fp4comm.routing import Placement

NUM_RANDOM = 16


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_rounds_of_any_shape(seed):
    case = two_hop.random_round(seed)
    transport.run_local(sum(case.node_sizes), lambda t: check_round(t, case), timeout_s=60)


@pytest.mark.parametrize("case", two_hop.rounds_of(5), ids=lambda case: case.id)
def test_rounds_on_threads(case):
    transport.run_local(5, lambda t: check_round(t, case), timeout_s=60)


SKEWED = [
    Round(
        f"{share} % of tokens on 4 experts", tokens=(40, 0, 25), hidden=32, num_experts=24, topk=2
    )
    for share in (30, 50, 80, 95)
]


@pytest.mark.parametrize("case", SKEWED, ids=lambda case: case.id)
def test_skewed_routing_arrives_as_by_the_flat_route(case):
    share = int(case.id.split()[0]) / 100

    def on_rank(t):
        g = torch.Generator().manual_seed(t.rank)
        num_tokens = case.tokens[t.rank % 3]
        idx = torch.rand(num_tokens, case.num_experts, generator=g).topk(2).indices
        hot = torch.rand(num_tokens, generator=g) < share
        idx[hot] = torch.rand(int(hot.sum()), 4, generator=g).topk(2).indices
        x = torch.randn(num_tokens, case.hidden, generator=g).bfloat16()
        weights = torch.rand(idx.shape, generator=g)
        for route in ("flat", "two_hop"):
            nodes = {"route": route, "ranks_per_node": [3, 2]}
            a2a = AllToAll(t, num_experts=case.num_experts, hidden=case.hidden, **nodes)
            d = a2a.dispatch(x, idx, weights)
            parts = d.rows.view(torch.uint8), d.scales, d.row_weights, d.num_rows, d.expert_offsets
            if route == "flat":
                want = parts
        for a, b in zip(parts, want, strict=True):
            assert torch.equal(a, b)

    transport.run_local(5, on_rank, timeout_s=60)


@pytest.mark.parametrize("case", two_hop.gradient_cases(5), ids=lambda case: case.id)
def test_gradients_on_threads(case):
    transport.run_local(5, lambda t: check_gradients(t, case), timeout_s=60)


def test_gradients_of_weights_are_those_of_the_flat_route():
    """Slots are not rounded on the way, by either route; x's go over another wire rounding."""

    def on_rank(t, **changed):
        return gradients(t, dataclasses.replace(Case("weights"), **changed))

    flat = transport.run_local(4, on_rank, timeout_s=30)
    hop = transport.run_local(4, lambda t: on_rank(t, node_sizes=(3, 1)), timeout_s=30)
    for a, b in zip(flat, hop, strict=True):
        assert a[1].abs().sum() > 0
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("check", [two_hop.check_auto, two_hop.check_async])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_calls_on_threads(check, num_ranks):
    transport.run_local(num_ranks, check, timeout_s=60)


# Rows on the way


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 2, 3), (4,)])
def test_a_token_crosses_once_to_each_node(sizes):
    """Rows of both hops, against the routing itself."""
    num_experts, num_tokens, topk = 13, 31, 5
    num_ranks = sum(sizes)
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, num_experts, (num_ranks, num_tokens, topk), generator=g)
    owners = np.append(Placement(num_experts, num_ranks).owners, num_ranks)  # the last is of -1
    nodes = np.append(np.repeat(np.arange(len(sizes)), sizes), len(sizes))

    def on_rank(t):
        a2a = AllToAll(t, num_experts=num_experts, hidden=32, route="two_hop", ranks_per_node=sizes)
        d = a2a.dispatch(torch.zeros(num_tokens, 32).bfloat16(), ids[t.rank])
        return [to for to, _ in d.handle._way.hops], d.handle._way.recv_splits

    sent, arrived = zip(*transport.run_local(num_ranks, on_rank), strict=True)
    for source in range(num_ranks):
        ranks_of = [set(owners[row]) - {num_ranks} for row in ids[source].numpy()]
        per_rank = [sum(r in of for of in ranks_of) for r in range(num_ranks)]
        assert [int(splits[source]) for splits in arrived] == per_rank
        if len(sizes) > 1:
            per_node = [sum(n in nodes[list(of)] for of in ranks_of) for n in range(len(sizes))]
            by_node = np.bincount(nodes[:-1], weights=sent[source][0], minlength=len(sizes))
            assert by_node.tolist() == per_node
            assert np.count_nonzero(sent[source][0]) <= len(sizes)
    if len(sizes) > 1:  # nothing leaves the node in the second hop
        for rank in range(num_ranks):
            assert set(nodes[np.flatnonzero(sent[rank][1])]) <= {nodes[rank]}
        assert sum(hop[1] for hop in sent).sum() == sum(splits.sum() for splits in arrived)
    else:
        assert all(len(hop) == 1 for hop in sent)  # the flat route


def test_relays_share_the_work():
    nodes = Nodes((4, 4, 2))
    taken_in = np.zeros(10, int)
    for source in range(10):
        np.add.at(taken_in, nodes.relays[source][nodes.of_rank[source] != np.arange(3)], 1)
    assert taken_in.tolist() == [2, 2, 1, 1, 2, 2, 1, 1, 4, 4]


def test_a_sum_is_rounded_once_a_hop():
    """Experts on ranks 0, 1 | 2, 3 give 256, 1, 1 and 1.5; in BF16 256 + 1 is 256."""

    def on_rank(t, route):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive="bf16", route=route, ranks_per_node=2)
        num_tokens = int(t.rank == 0)
        x = torch.ones(num_tokens, 32).bfloat16()
        d = a2a.dispatch(x, torch.arange(4)[None].expand(num_tokens, 4))
        out = torch.full(d.rows.shape, (256.0, 1.0, 1.0, 1.5)[t.rank]).bfloat16()
        return a2a.combine(out, d.handle)[:, 0].tolist()

    sums = {
        route: transport.run_local(4, lambda t, route=route: on_rank(t, route))[0]
        for route in ("flat", "two_hop")
    }
    assert sums == {"flat": [260.0], "two_hop": [258.0]}  # 259.5 and 256 + 2.5


# What all ranks have to agree on, and what may fail


def test_other_nodes_or_links_on_one_rank_are_an_error_on_all():
    def on_rank(t):
        kwargs = {"num_experts": 8, "hidden": 32, "timeout_s": 20}
        other = {"ranks_per_node": [1, 2, 1]} if t.rank == 2 else {"ranks_per_node": 2}
        text = "rank 2 of 4: ranks_per_node and links: expected the one as on rank 0, got another"
        with pytest.raises(ValueError, match=text):
            AllToAll(t, **kwargs, route="two_hop", **other)
        other = {"links": hops.Links(between_gbs=25.0)} if t.rank == 2 else {}
        with pytest.raises(ValueError, match=text):
            AllToAll(t, **kwargs, route="auto", ranks_per_node=2, **other)
        route = "auto" if t.rank == 3 else "two_hop"
        with pytest.raises(ValueError, match="rank 3 of 4: route: expected two_hop as on rank 0"):
            AllToAll(t, **kwargs, route=route, ranks_per_node=2)
        with pytest.raises(ValueError, match="num_experts: expected at most 32767 a node by the"):
            AllToAll(t, **(kwargs | {"num_experts": 4 * 32767}), route="two_hop", ranks_per_node=2)
        check_round(t, Round("after mistakes", node_sizes=(2, 2)))

    transport.run_local(4, on_rank, timeout_s=30)


def test_threads_of_one_process_are_one_node():
    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, route="two_hop")
        d = a2a.dispatch(torch.ones(1, 32).bfloat16(), torch.tensor([[3]]))
        return len(d.handle._way.hops)

    assert transport.run_local(2, on_rank) == [1, 1]


def test_links_are_checked():
    with pytest.raises(ValueError, match=r"expected 0 < between_gbs <= 1e\+09, got 0"):
        hops.Links(between_gbs=0)
    with pytest.raises(TypeError, match="links: hop_us: expected a number, got str"):
        hops.Links(hop_us="fast")


def test_a_handle_of_either_route_works_on_an_object_of_the_other():
    def on_rank(t):
        case = Case("handles", tokens=(7, 4))
        x, idx, weights, _ = inputs(case, t.rank)
        flat, hop = (make(t, case, route=r, ranks_per_node=2) for r in ("flat", "two_hop"))
        d = hop.dispatch(x, idx, weights)
        y = hop.combine(d.rows, d.handle)
        assert torch.equal(flat.combine(d.rows, d.handle), y)
        assert torch.equal(flat.dispatch(x, handle=d.handle).rows, d.rows)

    transport.run_local(4, on_rank, timeout_s=30)


VICTIM, LAST_WORDS, LIMIT_S = 2, "the disk is full", 1.0
FAILURES = [
    *(
        ("raise", operation, hop)
        for operation in ("dispatch", "dispatch again", "combine", "backward")
        for hop in (1, 2)
    ),
    *(("stall", operation, 2) for operation in ("dispatch", "combine", "backward")),
    ("stall", "combine", 1),
]


def fail_in_hop(t, hop, how):
    """Have this rank stall or fail as it begins this exchange, counted from 1."""
    exchange, calls = t.exchange, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == hop:
            if how == "stall":
                time.sleep(2 * LIMIT_S)
            else:
                raise MemoryError(LAST_WORDS)
        return exchange(*args, **options)

    t.exchange = failing


@pytest.mark.parametrize(("how", "operation", "hop"), FAILURES)
def test_a_rank_that_fails_in_a_hop_stops_the_others(how, operation, hop):
    """Those that it has no rows for in that hop find out in their next call."""
    case = Case("failing", tokens=(6,), num_experts=8, topk=8)
    all_made = threading.Barrier(4)  # what a failing rank had sent may be lost with it

    def on_rank(t):
        x, _, weights, dy = inputs(case, t.rank)
        idx = torch.arange(8).expand(6, 8).contiguous()
        a2a = make(t, case, route="two_hop", ranks_per_node=2)
        x.requires_grad_()
        d = a2a.dispatch(x, idx, weights)
        y = a2a.combine(d.rows, d.handle)
        call = {
            "dispatch": lambda: a2a.dispatch(x, idx, weights),
            "dispatch again": lambda: a2a.dispatch(x.detach(), handle=d.handle),
            "combine": lambda: a2a.combine(d.rows.detach(), d.handle),
            "backward": lambda: y.backward(dy),
        }[operation]
        all_made.wait(30)
        a2a.timeout_s = LIMIT_S if how == "stall" else 20
        if t.rank == VICTIM:
            fail_in_hop(t, hop, how)
        start, raised = time.monotonic(), None
        try:
            call()
            a2a.dispatch(x.detach(), idx, weights)
        except (RuntimeError, TimeoutError, MemoryError) as error:
            raised = error
        took = time.monotonic() - start
        with pytest.raises(RuntimeError, match="broken"):
            a2a.dispatch(x.detach(), idx, weights)
        return str(raised), took

    results = transport.run_local(4, on_rank, timeout_s=30)
    where = "combine backward" if operation == "backward" else operation.split()[0]
    for rank, (text, took) in enumerate(results):
        if how == "raise":
            told = f"stopped by rank {VICTIM}: {where}: MemoryError: {LAST_WORDS}"
            assert (told if rank != VICTIM else LAST_WORDS) in text
        else:
            assert re.search(r"rank \d of 4: [a-z ]* (exchange|counts): no answer from", text), text
            assert took < 2 * LIMIT_S + 10


def test_rounds_are_of_every_kind():
    """Of the tests themselves: 16 random rounds have what many have."""
    few, many = ([two_hop.random_round(seed) for seed in range(n)] for n in (NUM_RANDOM, 60))
    for kind in (
        *("wire", "combine", "arrive", "routing", "weights", "idx_dtype", "alignment", "hidden"),
        lambda case: len(case.node_sizes),
        lambda case: len(set(case.node_sizes)) > 1,
        lambda case: case.num_experts < sum(case.node_sizes),
        lambda case: case.topk > case.num_experts,
        lambda case: 0 in case.tokens,
    ):
        of = operator.attrgetter(kind) if isinstance(kind, str) else kind
        assert set(map(of, few)) == set(map(of, many)), kind
