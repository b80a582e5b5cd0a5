"""Rounds and gradients by the two-hop route, for test_two_hop.py and, on real ranks, mpi/cases.py
and gpu/rank_program.py."""

import dataclasses
import itertools

import gradients
import numpy as np
import torch
from rounds import ROUNDS, WIRES, Round, same_rows

from fp4comm import AllToAll, WireFormat
from fp4comm.hops import Links

TIMEOUT_S = 60
FAST_NETWORK = Links(inside_gbs=1.0, between_gbs=1000.0)
SLOW_NETWORK = Links(inside_gbs=1e6, between_gbs=0.001, hop_us=0.001)


def node_sizes(num_ranks):
    """Ways to put ranks on several nodes, even and uneven ones."""
    half = num_ranks // 2
    found = [(num_ranks - half, half), (1, num_ranks - 1), (num_ranks - 1, 1), (1,) * num_ranks]
    if num_ranks >= 5:
        found.append((2, 1, num_ranks - 3))
    return list(dict.fromkeys(found))


def rounds_of(num_ranks, rounds=ROUNDS):
    """Each round on some nodes, in turn."""
    sizes = itertools.cycle(node_sizes(num_ranks))
    return [dataclasses.replace(case, node_sizes=next(sizes)) for case in rounds]


def random_round(seed):
    """A round of any shape, wires in turn; ranks are as many as its nodes have."""
    rng = np.random.default_rng(seed)
    sizes = tuple(rng.integers(1, 4, rng.integers(1, 5)).tolist())
    sizes = sizes if sum(sizes) <= 7 else (3, 2, 1)
    wires = [
        WireFormat(wire, rule) for wire in WIRES for rule in WireFormat(wire).format.scale_rules
    ]
    wires.append(WireFormat("bf16"))
    return Round(
        f"random {seed}",
        tokens=tuple(rng.integers(0, 12, rng.integers(1, 4)).tolist()),
        hidden=int(rng.choice([32, 64, 96, 160, 640, 2880])),
        num_experts=int(rng.integers(1, 30)),
        topk=int(rng.integers(1, 17)),
        wire=wires[seed % len(wires)],
        combine=wires[(3 * seed + seed // len(wires)) % len(wires)],
        arrive=str(rng.choice(["fp8", "bf16", "packed"])),
        alignment=int(rng.choice([1, 4, 16])),
        routing=str(rng.choice(["random", "all to expert 0", "mostly none", "repeated", "none"])),
        weights=torch.float32 if rng.random() < 0.7 else None,
        idx_dtype=torch.int64 if rng.random() < 0.5 else torch.int32,
        node_sizes=sizes,
    )


def gradient_cases(num_ranks):
    """Each case of gradients.py on some nodes, in turn."""
    sizes = itertools.cycle(node_sizes(num_ranks))
    return [dataclasses.replace(case, node_sizes=next(sizes)) for case in gradients.CASES]


def check_auto(t, device="cpu"):
    """Both choices give the rows of the flat route, and the sums of the route that was chosen."""
    case = gradients.Case("auto", tokens=(13, 4, 9))
    x, idx, weights, _ = (part.to(device) for part in gradients.inputs(case, t.rank))
    half = t.num_ranks - t.num_ranks // 2
    sizes = half, t.num_ranks - half
    made = {
        name: gradients.make(t, case, route=route, ranks_per_node=sizes, **options)
        for name, (route, options) in {
            "flat": ("flat", {}),
            "two_hop": ("two_hop", {}),
            "fast network": ("auto", {"links": FAST_NETWORK}),
            "slow network": ("auto", {"links": SLOW_NETWORK}),
        }.items()
    }
    results = {}
    for name, a2a in made.items():
        d = a2a.dispatch(x, idx, weights)
        results[name] = d, a2a.combine(d.rows * (1 + t.rank), d.handle)
    for auto, chosen in (("fast network", "flat"), ("slow network", "two_hop")):
        d, y = results[auto]
        want, want_y = results[chosen]
        assert len(d.handle._way.hops) == len(want.handle._way.hops) == 1 + (chosen == "two_hop")
        assert torch.equal(d.rows.view(torch.int16), results["flat"][0].rows.view(torch.int16))
        assert torch.equal(d.row_weights, results["flat"][0].row_weights)
        assert torch.equal(y.view(torch.int16), want_y.view(torch.int16))


def check_async(t, device="cpu"):
    """Two dispatches and combines under way at once, waited for in the other order."""
    case = gradients.Case("async", tokens=(40, 3, 25), hidden=160)
    x, idx, weights, _ = (part.to(device) for part in gradients.inputs(case, t.rank))
    half = t.num_ranks - t.num_ranks // 2
    sizes = half, t.num_ranks - half
    a2a = gradients.make(t, case, route="two_hop", ranks_per_node=sizes)
    xs = [x, x.flip(0).contiguous()]
    for _ in range(2):
        want = [a2a.dispatch(x, idx, weights) for x in xs]
        pending = [a2a.dispatch(x, idx, weights, async_op=True) for x in xs]
        got = [p.wait() for p in reversed(pending)][::-1]
        again = a2a.dispatch(xs[1], handle=got[0].handle, async_op=True)
        for d, w in zip(got, want, strict=True):
            same_rows([bits(d.rows)], [bits(w.rows)])
        outs = [d.rows * 3 for d in got]
        sums = [a2a.combine(o, d.handle) for o, d in zip(outs, got, strict=True)]
        same_rows([bits(again.wait().rows)], [bits(want[1].rows)])
        pending = [a2a.combine(o, d.handle, async_op=True) for o, d in zip(outs, got, strict=True)]
        for p, y in reversed(list(zip(pending, sums, strict=True))):
            same_rows([bits(p.wait())], [bits(y)])


def bits(tensor):
    return tensor.view(torch.int16).cpu().numpy()


def check_hosts(t, set_host):
    """Nodes found by the names of the hosts; ranks that are not consecutive are refused."""
    kwargs = {"num_experts": 8, "hidden": 32, "route": "two_hop", "timeout_s": TIMEOUT_S}
    set_host(f"node{t.rank // 2}")
    a2a = AllToAll(t, **kwargs)
    d = a2a.dispatch(torch.ones(3, 32).bfloat16(), torch.arange(24).reshape(3, 8) % 8)
    assert [hop[0].tolist() for hop in d.handle._way.hops] == hops_of_ones(t.rank, t.num_ranks)
    set_host(f"node{t.rank % 2}")
    raised = None
    try:
        AllToAll(t, **kwargs)
    except ValueError as error:
        raised = str(error)
    ranks = list(range(0, t.num_ranks, 2))
    text = f"route: expected the ranks of a node to be consecutive, got ranks {ranks} of"
    assert raised is not None
    assert raised.startswith(text), raised
    a2a.combine(torch.zeros(len(d.row_weights), 32).bfloat16(), d.handle)  # it stays usable


def hops_of_ones(rank, num_ranks):
    """Rows to each rank if 3 tokens of each go everywhere and nodes have 2 ranks."""
    own, place = rank // 2, rank % 2
    hop_1 = [3 * (r == 2 * (r // 2) + place) for r in range(num_ranks)]
    hop_2 = [3 * (num_ranks // 2) * (r // 2 == own) for r in range(num_ranks)]
    return [hop_1, hop_2]
