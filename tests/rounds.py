"""Rounds of dispatch and combine, checked byte by byte against the reference on any transport.

Used on threads by test_all_to_all.py and, on real processes, by mpi/cases.py.
"""

import dataclasses
import functools

import numpy as np
import torch

from fp4comm import AllToAll, Precision, WireFormat, reference


@dataclasses.dataclass(frozen=True)
class Round:
    """One round; rank r has tokens[r % len(tokens)] tokens."""

    id: str
    tokens: tuple = (17, 9)
    hidden: int = 96
    num_experts: int = 22
    topk: int = 3
    wire: str | WireFormat = "mxfp4"
    combine: str | WireFormat = "bf16"
    arrive: str = "fp8"
    alignment: int = 16
    scale_layout: str = "row"
    routing: str = "random"  # with -1 and repeats
    weights: torch.dtype | None = torch.float32
    idx_dtype: torch.dtype = torch.int64
    fp8_input: bool = False
    node_sizes: tuple = ()  # ranks of each node, by the two-hop route; else by the flat one

    @property
    def precision(self):
        return Precision(dispatch=self.wire, combine=self.combine)


WIRES = ("bf16", "fp8", "mxfp8", "mxfp4")
ROUNDS = [
    *(Round(f"{wire} as {a}", wire=wire, arrive=a) for wire in WIRES for a in ("fp8", "bf16")),
    *(Round(f"combine {wire}", combine=wire, topk=6) for wire in WIRES),
    *(Round(f"rule {rule}", wire=WireFormat("mxfp4", rule)) for rule in ("floor", "ceil")),
    *(Round(f"FP8 input on {wire}", wire=wire, fp8_input=True) for wire in WIRES),
    Round("packed", arrive="packed"),
    Round("scales M-major", scale_layout="column", hidden=640),
    Round("unaligned", alignment=1),
    Round("SHP-03 hidden 2880", hidden=2880, tokens=(3,)),
    Round("SHP-05 hidden 640", hidden=640, tokens=(4,)),
    Round("SHP-15 fewer experts than ranks", num_experts=3),
    Round("one expert", num_experts=1, topk=1),
    Round("no tokens at all", tokens=(0,)),
    Round("COM-01 one rank has no tokens", tokens=(2, 0)),
    Round("SHP-09 all to expert 0", routing="all to expert 0", topk=1, tokens=(4,), num_experts=4),
    Round("COM-43 one token each", routing="all to expert 0", topk=1, tokens=(1,), num_experts=64),
    Round("SHP-11 mostly -1", routing="mostly none", topk=2),
    Round("nothing routed", routing="none"),
    Round("SHP-14 always the same expert twice", routing="repeated", topk=4),
    Round("no weights", weights=None),
    Round("float16 weights, int32 ids", weights=torch.float16, idx_dtype=torch.int32),
    Round("float64 weights", weights=torch.float64),
    *(
        Round(
            f"SHP-18 top-{k}", topk=k, routing="distinct", num_experts=16, tokens=(100,), hidden=32
        )
        for k in (1, 5, 7, 9)
    ),
]


def bf16_bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def inputs(case, rank):
    """Make x, topk_idx and topk_weights of a rank."""
    g = torch.Generator().manual_seed(1000 * len(case.id) + rank)
    num_tokens = case.tokens[rank % len(case.tokens)]
    shape = (num_tokens, case.topk)
    x = torch.randn(num_tokens, case.hidden, generator=g)
    x *= torch.exp2(torch.randint(-12, 12, (num_tokens, 1), generator=g).float())
    if num_tokens:
        x[0, :7] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40, -3e38, 5e-39])
        x[-1] = 0
    idx = {
        "random": lambda: torch.randint(-1, case.num_experts, shape, generator=g),
        "distinct": lambda: (
            torch.rand(num_tokens, case.num_experts, generator=g).topk(case.topk).indices
        ),
        "all to expert 0": lambda: torch.zeros(shape, dtype=torch.int64),
        "mostly none": lambda: torch.randint(-9, case.num_experts, shape, generator=g).clamp(-1),
        "none": lambda: torch.full(shape, -1),
        "repeated": lambda: torch.randint(0, case.num_experts, (num_tokens, 1), generator=g).expand(
            shape
        ),
    }[case.routing]()
    weights = torch.rand(shape, generator=g).to(case.weights) if case.weights else None
    if case.fp8_input:
        codes = torch.randint(0, 256, x.shape, generator=g, dtype=torch.uint8)
        scales = torch.rand(num_tokens, -(-case.hidden // 128), generator=g) * 4
        scales[::2] = torch.exp2(torch.round(scales[::2]))
        return (codes.view(torch.float8_e4m3fn), scales), idx.to(case.idx_dtype), weights
    return x.bfloat16(), idx.to(case.idx_dtype), weights


def as_arrays(x):
    if isinstance(x, tuple):
        return x[0].view(torch.uint8).numpy(), x[1].numpy()
    return bf16_bits(x)


@functools.lru_cache(maxsize=4)
def expected(case, num_ranks):
    """Make the reference's result for all ranks: arrived, and the combined tokens."""
    xs, ids, weights = zip(*(inputs(case, rank) for rank in range(num_ranks)), strict=True)
    weights = [None if w is None else w.float().numpy() for w in weights]
    arrived = reference.dispatch(
        [as_arrays(x) for x in xs],
        [i.numpy() for i in ids],
        weights,
        case.num_experts,
        case.precision.dispatch,
        case.arrive,
        case.alignment,
    )
    outs = [bf16_bits(expert_out(case, rank, len(a.row_weights))) for rank, a in enumerate(arrived)]
    num_tokens = [len(i) for i in ids]
    with np.errstate(all="ignore"):
        sums = {
            weighted: reference.combine(
                outs, arrived, num_tokens, case.precision.combine, weighted, case.node_sizes
            )
            for weighted in (True, False)
        }
    return arrived, sums


def expert_out(case, rank, num_rows):
    """Expert outputs that differ in every row."""
    g = torch.Generator().manual_seed(77 + rank)
    return torch.randn(num_rows, case.hidden, generator=g).bfloat16()


def check_round(transport, case):
    """Run one round on this rank and compare it with the reference."""
    rank = transport.rank
    arrived, sums = expected(case, transport.num_ranks)
    want = in_order_of_arrival(arrived[rank], case, rank)
    x, idx, weights = inputs(case, rank)
    with AllToAll(
        transport,
        num_experts=case.num_experts,
        hidden=case.hidden,
        precision=case.precision,
        arrive=case.arrive,
        expert_alignment=case.alignment,
        scale_layout=case.scale_layout,
        timeout_s=60,
        **route_of(case),
    ) as a2a:
        d = a2a.dispatch(x, idx, weights)
        compare_dispatched(d, want, case)
        out = expert_out(case, rank, len(d.row_weights))
        padding = torch.from_numpy(np.asarray(want.row_source)) < 0
        out[padding] = float("nan")  # must not be read
        for weighted in (True, False):
            y = a2a.combine(out, d.handle, weighted=weighted)
            assert y.dtype == torch.bfloat16
            same_rows((bf16_bits(y),), (sums[weighted][rank],))
        compare_dispatched(a2a.dispatch(x, handle=d.handle), want, case)


def route_of(case):
    """Arguments of AllToAll that choose the route of a round."""
    return {"route": "two_hop", "ranks_per_node": case.node_sizes} if case.node_sizes else {}


def in_order_of_arrival(arrived, case, rank):
    """Put packed rows into the order that the two-hop route has: by relay, source, token."""
    if len(case.node_sizes) < 2:
        return arrived
    nodes = [list(g) for g in np.split(np.arange(sum(case.node_sizes)), np.cumsum(case.node_sizes))]
    own = next(ranks for ranks in nodes if rank in ranks)
    relays = []
    for source in arrived.origins[:, 0].tolist():
        place = next(ranks.index(source) for ranks in nodes if source in ranks)
        relays.append(source if source in own else own[place % len(own)])
    order = np.argsort(np.array(relays, int), kind="stable")
    row_source = np.where(arrived.row_source < 0, -1, np.argsort(order)[arrived.row_source])
    return dataclasses.replace(
        arrived,
        payload=arrived.payload[order],
        scales=arrived.scales[order],
        row_source=row_source if len(order) else arrived.row_source,
    )


def compare_dispatched(d, want, case):
    """Compare what arrived: rows with their scales and weights, counts, offsets, packed rows."""
    assert d.num_rows_list == list(want.num_rows) == d.num_rows.tolist()
    assert d.expert_offsets.tolist() == list(want.expert_offsets)
    assert d.handle.layout.row_source.tolist() == list(want.row_source)
    same_rows((d.packed.payload.numpy(), d.packed.scales.numpy()), (want.payload, want.scales))
    if case.arrive == "packed":
        assert d.rows is None
        assert d.scales is None
        same_rows((d.row_weights.numpy(),), (want.row_weights,))
    elif case.arrive == "fp8":
        if len(d.scales):
            assert d.scales.stride(0 if case.scale_layout == "column" else 1) == 1
        got = d.rows.view(torch.uint8).numpy(), d.scales.numpy(), d.row_weights.numpy()
        same_rows(got, (want.rows, want.row_scales, want.row_weights))
    else:
        assert d.scales is None
        same_rows((bf16_bits(d.rows), d.row_weights.numpy()), (want.rows, want.row_weights))


def same_rows(got, want):
    """Compare row by row, the parts of a row together, as bytes."""
    assert [g.shape for g in got] == [w.shape for w in want], "shapes differ"
    assert [g.dtype for g in got] == [w.dtype for w in want], "dtypes differ"
    if not len(want[0]):
        return
    got, want = (
        np.concatenate(
            [np.ascontiguousarray(p).reshape(len(p), -1).view(np.uint8) for p in parts], axis=1
        )
        for parts in (got, want)
    )
    wrong = np.flatnonzero((got != want).any(axis=1))
    assert not len(wrong), (
        f"{len(wrong)} of {len(want)} rows differ, first {wrong[0]} at bytes"
        f" {np.flatnonzero(got[wrong[0]] != want[wrong[0]])[:8]}"
    )


class Foreign:
    """An array of another library: only DLPack."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **kwargs):
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()
