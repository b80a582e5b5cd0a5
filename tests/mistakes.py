"""Mistakes made on one rank: each must become the same error on all ranks, and nothing else.

Used on threads by test_mistakes.py and, on real processes, by mpi/mistakes.py.
"""

import dataclasses
import re
from collections.abc import Callable

import torch

from fp4comm import AllToAll, Precision, WireFormat

EXPERTS, HIDDEN, TOKENS, TOPK = 10, 64, 5, 3
GOOD = {"num_experts": EXPERTS, "hidden": HIDDEN, "expert_alignment": 4}


def good_call():
    """Make the arguments of a dispatch without a mistake."""
    idx = torch.arange(TOKENS * TOPK).reshape(TOKENS, TOPK) % EXPERTS
    return torch.ones(TOKENS, HIDDEN).bfloat16(), idx, torch.ones(TOKENS, TOPK)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What the last rank does wrong, and the error of all ranks ({r} and {n}: its rank, ranks)."""

    id: str
    change: Callable
    error: type
    text: str


def at(position, value):
    """Put another value at a position of the arguments of dispatch."""

    def change(args):
        changed = list(args)
        changed[position] = value(args[position]) if callable(value) else value
        return tuple(changed)

    return change


def with_id(value):
    def change(idx):
        changed = idx.clone()
        changed[2, 1] = value
        return changed

    return at(1, change)


X, IDX, WEIGHTS = 0, 1, 2
OUT_OF_RANGE = r"topk_idx: expected values in -1\.\.9 \(10 experts\), got {0} at \[2, 1\]"
DTYPES = "x: expected bfloat16 or an FP8 pair .float8_e4m3fn codes, float32 scales., got {0}"

DISPATCH_MISTAKES = [
    *(
        Mistake(f"SHP-13 id {value}", with_id(value), ValueError,
                "rank {r} of {n}: " + OUT_OF_RANGE.format(value))
        for value in (-2, EXPERTS, EXPERTS + 7, 2**31 - 1)
    ),
    *(
        Mistake(f"SHP-27 x {dtype}", at(X, lambda x, d=dtype: x.to(d)), TypeError,
                "rank {r} of {n}: " + DTYPES.format(str(dtype).removeprefix("torch.")))
        for dtype in (torch.float16, torch.float32, torch.float64, torch.int8, torch.complex64)
    ),
    *(
        Mistake(f"SHP-25 ids {dtype}", at(IDX, lambda i, d=dtype: i.to(d)), TypeError,
                "rank {r} of {n}: topk_idx: expected int32 or int64, got "
                + str(dtype).removeprefix("torch."))
        for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool)
    ),
    Mistake("SHP-28 x 3-D", at(X, lambda x: x.reshape(1, TOKENS, HIDDEN)), ValueError,
            r"rank {r} of {n}: x: expected shape \[tokens, hidden\], got \[1, 5, 64\]"),
    Mistake("SHP-28 x 1-D", at(X, lambda x: x[0]), ValueError,
            r"rank {r} of {n}: x: expected shape \[tokens, hidden\], got \[64\]"),
    Mistake("COM-16 other hidden", at(X, torch.ones(TOKENS, 96).bfloat16()), ValueError,
            "rank {r} of {n}: x: expected hidden 64, got 96"),
    Mistake("SHP-01 hidden 48", at(X, torch.ones(TOKENS, 48).bfloat16()), ValueError,
            r"rank {r} of {n}: x: expected hidden 64, got 48"),
    Mistake("x is a list", at(X, [1.0]), TypeError,
            r"rank {r} of {n}: x: expected a tensor or a pair \(codes, scales\), got 1 items"),
    Mistake("x is None", at(X, None), TypeError,
            "rank {r} of {n}: x: expected a tensor, got NoneType"),
    Mistake("x has three parts", at(X, (1, 2, 3)), TypeError,
            r"rank {r} of {n}: x: expected a tensor or a pair \(codes, scales\), got 3 items"),
    Mistake("FP8 scales of another shape",
            at(X, lambda x: (x.to(torch.float8_e4m3fn), torch.ones(TOKENS, 2))), ValueError,
            r"rank {r} of {n}: x scales: expected shape \[5, 1\] .*, got \[5, 2\]"),
    Mistake("FP8 scales of another dtype",
            at(X, lambda x: (x.to(torch.float8_e4m3fn), torch.ones(TOKENS, 1).half())), TypeError,
            "rank {r} of {n}: x: expected a pair of float8_e4m3fn codes and float32 scales, got"
            " float8_e4m3fn and float16"),
    Mistake("ids of another number of tokens", at(IDX, lambda i: i[:-1]), ValueError,
            r"rank {r} of {n}: topk_idx: expected shape \[5, K\] .*, got \[4, 3\]"),
    Mistake("ids 1-D", at(IDX, lambda i: i[:, 0]), ValueError,
            r"rank {r} of {n}: topk_idx: expected shape \[5, K\] .*, got \[5\]"),
    Mistake("no slots", at(IDX, lambda i: i[:, :0]), ValueError,
            r"rank {r} of {n}: topk_idx: expected shape \[5, K\] with K >= 1 .*, got \[5, 0\]"),
    Mistake("ids missing", at(IDX, None), TypeError,
            "rank {r} of {n}: topk_idx: expected a tensor, got NoneType"),
    Mistake("weights of another shape", at(WEIGHTS, lambda w: w[:, :1]), ValueError,
            r"rank {r} of {n}: topk_weights: expected shape \[5, 3\] as topk_idx, got \[5, 1\]"),
    Mistake("integer weights", at(WEIGHTS, lambda w: w.long()), TypeError,
            "rank {r} of {n}: topk_weights: expected float32, .*, got int64"),
    Mistake("GRD-08 x wants a gradient", at(X, lambda x: x.requires_grad_()), RuntimeError,
            "rank {r} of {n}: x: expected no gradient to be wanted, got requires_grad=True"),
    Mistake("GRD-03 weights want a gradient", at(WEIGHTS, lambda w: w.requires_grad_()),
            RuntimeError, "rank {r} of {n}: topk_weights: expected no gradient to be wanted"),
    Mistake("x is sparse", at(X, lambda x: x.to_sparse()), TypeError,
            "rank {r} of {n}: x: expected a dense tensor, got a torch.sparse_coo one"),
    Mistake("x cannot be handed over", at(X, lambda x: Foreign()), RuntimeError,
            "rank {r} of {n}: AttributeError: no capsule"),
    Mistake("x on a device without a codec", at(X, lambda x: x.to("meta")), RuntimeError,
            "rank {r} of {n}: x: expected a CPU or CUDA tensor, got one on meta"),
]  # fmt: skip

# Right by themselves, but not what the other ranks do: only where there are others.
DIFFERENCES = [
    Mistake("COM-14 x is an FP8 pair on one rank",
            at(X, lambda x: (x.to(torch.float8_e4m3fn), torch.ones(TOKENS, 1))), TypeError,
            "rank {r} of {n}: x: expected bfloat16 as on rank 0, got float8_e4m3fn with float32"),
    Mistake("another top-k", lambda a: (a[0], a[1][:, :2], a[2][:, :2]), ValueError,
            "rank {r} of {n}: topk_idx: top-k: expected 3 as on rank 0, got 2"),
    Mistake("no weights on one rank", at(WEIGHTS, None), ValueError,
            "rank {r} of {n}: topk_weights: expected topk_weights given as on rank 0, got no"),
]  # fmt: skip


class Foreign:
    """An array of another library whose hand-over fails with an error of its own."""

    def __dlpack__(self, **kwargs):
        raise AttributeError("no capsule")

    def __dlpack_device__(self):
        return (1, 0)


def option(**changed):
    return lambda kwargs: kwargs | changed


OBJECT_MISTAKES = [
    Mistake("SHP-01 hidden 7150", option(hidden=7150), ValueError,
            r"rank {r} of {n}: hidden: expected a multiple of 32, got 7150 \(an MX block has 32"),
    Mistake("hidden 0", option(hidden=0), ValueError,
            "rank {r} of {n}: hidden: expected at least 1, got 0"),
    Mistake("hidden a float", option(hidden=64.0), TypeError,
            "rank {r} of {n}: hidden: expected an int, got float"),
    Mistake("no experts", option(num_experts=0), ValueError,
            "rank {r} of {n}: num_experts: expected at least 1, got 0"),
    Mistake("too many experts", option(num_experts=10**6), ValueError,
            "rank {r} of {n}: num_experts: expected at most 32767 a rank .*, got 1000000"),
    Mistake("unknown arrival", option(arrive="fp4"), ValueError,
            "rank {r} of {n}: arrive: expected one of fp8, bf16, packed, got 'fp4'"),
    Mistake("unknown scale layout", option(scale_layout="col"), ValueError,
            "rank {r} of {n}: scale_layout: expected one of row, column, got 'col'"),
    Mistake("alignment 0", option(expert_alignment=0), ValueError,
            "rank {r} of {n}: expert_alignment: expected at least 1, got 0"),
    Mistake("precision a name", option(precision="mxfp4"), TypeError,
            "rank {r} of {n}: precision: expected a Precision, got str"),
    Mistake("hidden beyond 32 bits", option(hidden=2**70), ValueError,
            "rank {r} of {n}: hidden: expected at most 2147483647, got"),
    Mistake("no time", option(timeout_s=0), ValueError,
            "rank {r} of {n}: timeout_s: expected more than 0 seconds, got 0"),
    Mistake("no end", option(timeout_s=10**400), ValueError,
            "rank {r} of {n}: timeout_s: expected what a float can hold, got 1329 bits"),
    Mistake("unknown route", option(route="three_hop"), ValueError,
            "rank {r} of {n}: route: expected one of flat, two_hop, auto, got 'three_hop'"),
    Mistake("nodes that do not divide", option(ranks_per_node=7), ValueError,
            "rank {r} of {n}: ranks_per_node: expected a divisor of {n} ranks, .*, got 7"),
    Mistake("nodes of another sum", option(ranks_per_node=[1, 7]), ValueError,
            r"rank {r} of {n}: ranks_per_node: expected a sum of {n} ranks, got \[1, 7\]"),
    Mistake("a node without ranks", option(ranks_per_node=0), ValueError,
            "rank {r} of {n}: ranks_per_node: expected at least 1, got 0"),
    Mistake("nodes by name", option(ranks_per_node="a"), TypeError,
            "rank {r} of {n}: ranks_per_node: expected an int, got str"),
    Mistake("links a number", option(links=9.0), TypeError,
            "rank {r} of {n}: links: expected Links, got float"),
]  # fmt: skip

OBJECT_DIFFERENCES = [
    Mistake("other hidden", option(hidden=96), ValueError,
            "rank {r} of {n}: hidden: expected 64 as on rank 0, got 96"),
    Mistake("other number of experts", option(num_experts=12), ValueError,
            "rank {r} of {n}: num_experts: expected 10 as on rank 0, got 12"),
    Mistake("other wire", option(precision=Precision(dispatch="fp8")), ValueError,
            r"rank {r} of {n}: dispatch: expected mxfp4 \(even\) as on rank 0, got fp8 \(ceil\)"),
    Mistake("other route", option(route="two_hop", ranks_per_node=1), ValueError,
            "rank {r} of {n}: route: expected flat as on rank 0, got two_hop"),
    Mistake("other rule", option(precision=Precision(WireFormat("mxfp4", "floor"))), ValueError,
            r"rank {r} of {n}: dispatch: expected mxfp4 \(even\) .*, got mxfp4 \(floor\)"),
]  # fmt: skip


def check_mistakes(transport):
    """Make each mistake on the last rank, then a good round on the same transport."""
    wrong, several = transport.num_ranks - 1, transport.num_ranks > 1
    a2a = AllToAll(transport, **GOOD)
    for mistake in DISPATCH_MISTAKES + (DIFFERENCES if several else []):
        args = good_call()
        if transport.rank == wrong:
            args = mistake.change(args)
        expect(mistake, wrong, transport.num_ranks, lambda args=args: a2a.dispatch(*args))
        check_good_round(a2a)
    for mistake in OBJECT_MISTAKES + (OBJECT_DIFFERENCES if several else []):
        kwargs = mistake.change(GOOD) if transport.rank == wrong else GOOD
        expect(
            mistake,
            wrong,
            transport.num_ranks,
            lambda kwargs=kwargs: AllToAll(transport, **kwargs),
        )
        check_good_round(a2a)
    if several:
        check_order_of_objects(transport, a2a)
    return len(DISPATCH_MISTAKES + DIFFERENCES + OBJECT_MISTAKES + OBJECT_DIFFERENCES)


def check_order_of_objects(transport, a2a):
    """Layers called in another order on one rank: an error on all, not each other's rows."""
    rank, last = transport.rank, transport.num_ranks - 1
    in_use = "rank {r} of {n}: AllToAll object in use: expected the one as on rank 0, got another"
    for kwargs in (GOOD, GOOD | {"num_experts": 2000}, GOOD | {"num_experts": 3}):
        other = AllToAll(transport, **kwargs)
        used = other if rank == last else a2a
        mistake = Mistake(f"order, {kwargs}", None, ValueError, in_use)
        x, idx, weights = good_call()
        args = x, idx.clamp(max=2), weights
        expect(
            mistake, last, transport.num_ranks, lambda used=used, args=args: used.dispatch(*args)
        )
        check_good_round(a2a)
    operation = "rank {r} of {n}: operation: expected dispatch as on rank 0, got AllToAll"
    mistake = Mistake("made while others dispatch", None, ValueError, operation)
    call = (
        (lambda: AllToAll(transport, **GOOD))
        if rank == last
        else (lambda: a2a.dispatch(*good_call()))
    )
    expect(mistake, last, transport.num_ranks, call)
    check_good_round(a2a)


def make_different_calls(transport, name):
    """Call combine, or dispatch with a handle, for another purpose on the last rank: no counts."""
    a2a, other = (AllToAll(transport, **GOOD, arrive="bf16", timeout_s=5) for _ in range(2))
    one, two, third = (a.dispatch(*good_call()) for a in (a2a, a2a, other))
    x = good_call()[0]
    calls = {
        "handles of two dispatches": (
            lambda: a2a.combine(one.rows, one.handle),
            lambda: a2a.combine(two.rows, two.handle),
        ),
        "handles of two objects": (
            lambda: a2a.combine(one.rows, one.handle),
            lambda: other.combine(third.rows, third.handle),
        ),
        "weighted and not": (
            lambda: a2a.combine(one.rows, one.handle),
            lambda: a2a.combine(one.rows, one.handle, weighted=False),
        ),
        "combine and dispatch": (
            lambda: a2a.combine(one.rows, one.handle),
            lambda: a2a.dispatch(x, handle=one.handle),
        ),
    }[name]
    is_last = transport.rank == transport.num_ranks - 1
    raised = None
    try:
        calls[is_last]()
    except Exception as error:
        raised = error
    assert isinstance(raised, (ValueError, TimeoutError)), repr(raised)
    return str(raised)


DIFFERENT_CALLS = (
    "handles of two dispatches",
    "handles of two objects",
    "weighted and not",
    "combine and dispatch",
)


def expect(mistake, rank, num_ranks, call):
    """Call and compare the error's type and text."""
    raised = None
    try:
        call()
    except Exception as error:
        raised = error
    assert type(raised) is mistake.error, f"{mistake.id}: {raised!r}"
    pattern = mistake.text.format(r=rank, n=num_ranks)
    assert re.match(pattern, str(raised)), f"{mistake.id}: {raised} does not match {pattern}"


def check_good_round(a2a):
    """Nothing was lost: identity experts with weight 1 give each token three times."""
    x, idx, weights = good_call()
    d = a2a.dispatch(x, idx, weights)
    values = d.packed.to_bf16(d.handle.layout)
    assert (a2a.combine(values, d.handle) == 3).all()
