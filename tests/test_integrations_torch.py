"""The conformance test of adapters, and the torch.distributed adapter, on ranks."""

import conformance
import numpy as np
import pytest
import ranks
import row_exchanges
import torch

import fp4comm
from fp4comm import AllToAll, Precision, agreement, all_to_all_rows, quantize, transport
from fp4comm.integrations import torch_distributed

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


SPLITS = [  # SPLITS[i][j]: rows that rank i sends to rank j
    pytest.param([[3]], id="one rank"),
    pytest.param([[0, 0], [0, 0]], id="none"),
    pytest.param([[1, 2, 0], [0, 0, 5], [4, 0, 0]], id="ragged"),
    pytest.param([[7, 0, 0], [7, 0, 0], [7, 0, 0]], id="all to one"),
    pytest.param([[0, 0], [4, 3]], id="from one"),
    pytest.param(np.random.default_rng(0).integers(0, 40, (4, 4)).tolist(), id="random"),
]


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(("wire", "grad_wire"), [("mxfp4", "bf16"), ("fp8", "mxfp8")])
def test_rows_and_gradients_go_where_splits_say(splits, wire, grad_wire):
    transport.run_local(
        len(splits), lambda t: row_exchanges.check_rows(t, t, splits, wire, grad_wire)
    )


def test_a_layer_of_row_exchanges_conforms():
    def on_rank(t):
        moe = row_exchanges.layer(t, t, 6, "mxfp4", "bf16")
        conformance.check(moe, t, num_experts=6, hidden=HIDDEN, trains=True)

    transport.run_local(3, on_rank)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array, None])
def test_splits_may_be_lists_tensors_arrays_or_none(kind):
    def on_rank(t):
        rows = torch.arange(4.0)[:, None].expand(4, 32).bfloat16() + 8 * t.rank
        splits = (None, None) if kind is None else (kind([2, 2]), kind([2, 2]))
        return all_to_all_rows(rows, *splits, t, "bf16")[:, 0].tolist()

    assert transport.run_local(2, on_rank) == [[0, 1, 8, 9], [2, 3, 10, 11]]


ROWS = torch.ones(4, 32, dtype=torch.bfloat16)
EVEN = [2, 2]

# What rank 1 does, its error, and its text; rank 0 does it right, with splits (EVEN, EVEN).
WRONG_CALLS = {
    "recv_splits: expected 2 rows from rank 0, as its send_splits has for this one, got 3": (
        ValueError, {"recv_splits": [3, 2]}),
    "send_splits: expected 4 together, as there are rows, got 5": (
        ValueError, {"send_splits": [2, 3]}),
    "send_splits: expected rows for each of 2 ranks, got shape [3]": (
        ValueError, {"send_splits": [2, 2, 0]}),
    f"recv_splits: expected 0..{2**63 - 1} rows, got -2 at [0]": (
        ValueError, {"recv_splits": [-2, 2]}),
    f"recv_splits: expected 0..{2**63 - 1} rows, got {2**63} at [1]": (
        ValueError, {"recv_splits": np.array([2, 2**63], np.uint64)}),
    f"send_splits: expected 0..{2**63 - 1} rows, got {2**64 - 1} at [0]": (
        ValueError, {"send_splits": [2**64 - 1, 5]}),
    "recv_splits: expected integers, got float at [0]": (TypeError, {"recv_splits": [2.0, 2.0]}),
    "recv_splits: expected integers, got bool at [1]": (TypeError, {"recv_splits": [2, True]}),
    "send_splits: expected integers, got bool at [0]": (
        TypeError, {"send_splits": [np.True_, 3], "recv_splits": [2, 2]}),
    "send_splits: expected integers, got list at [1]": (TypeError, {"send_splits": [2, [2]]}),
    "recv_splits: expected with send_splits, got None": (ValueError, {"recv_splits": None}),
    "rows: expected bfloat16, got float32": (TypeError, {"rows": ROWS.float()}),
    "rows: expected hidden to be a multiple of 32, got 31 (an MX block has 32 elements)": (
        ValueError, {"rows": ROWS[:, :31]}),
    "rows: expected shape [tokens, hidden], got [4, 4, 8]": (
        ValueError, {"rows": ROWS.view(4, 4, 8)}),
    "rows: expected a tensor, got tuple": (
        TypeError, {"rows": (ROWS.to(torch.float8_e4m3fn), torch.ones(4, 1))}),
    "hidden: expected 32 as on rank 0, got 64": (
        ValueError, {"rows": torch.ones(4, 64, dtype=torch.bfloat16)}),
    "wire: expected mxfp4 (even) as on rank 0, got fp8 (ceil)": (ValueError, {"wire": "fp8"}),
    "wire: expected one of bf16, fp8, mxfp8, mxfp4, got 'fp5'": (ValueError, {"wire": "fp5"}),
    "grad_wire: expected a name or a WireFormat, got int": (TypeError, {"grad_wire": 4}),
    "grad_wire: expected bf16 as on rank 0, got mxfp8 (ceil)": (ValueError, {"grad_wire": "mxfp8"}),
    "gradients wanted (requires_grad): expected none as on rank 0, got of rows": (
        ValueError, {"rows": ROWS.clone().requires_grad_()}),
    "timeout_s: expected more than 0 seconds, got 0": (ValueError, {"timeout_s": 0}),
}  # fmt: skip


def test_a_mistake_is_the_same_error_on_all_ranks_and_leaves_them_usable():
    def on_rank(t):
        right = {"rows": ROWS, "send_splits": EVEN, "recv_splits": EVEN}
        for text, (kind, wrong) in WRONG_CALLS.items():
            with pytest.raises(kind) as caught:
                all_to_all_rows(**(right | (wrong if t.rank else {})), group=t)
            assert str(caught.value) == f"rank 1 of 2: {text}"
            assert torch.equal(all_to_all_rows(**right, group=t), ROWS)

    transport.run_local(2, on_rank, timeout_s=20)


def test_what_is_found_before_and_with_the_counts_is_named_as_the_caller_does():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(ROWS, ROWS)
        with pytest.raises(RuntimeError, match="rows: expected a tensor without tangent"):
            all_to_all_rows(dual, group=transport.open("local"))

    def on_rank(t):
        mine = agreement.Fingerprint(agreement.ROWS, device=t.rank)
        with pytest.raises(ValueError, match="rows: expected on the CPU as on rank 0, got on a G"):
            agreement.agree(t, mine, np.zeros((2, 0), np.int64), None)

    transport.run_local(2, on_rank, timeout_s=20)


def test_splits_that_agree_in_sum_alone_are_found():
    """Two mistakes that cancel out in every sum over ranks, and one between ranks 1 and 2 alone."""
    wrong = torch.tensor([[0, 1, -1], [-1, 0, 1], [1, -1, 0]])

    def on_rank(t):
        for recv in (2 + wrong[t.rank], 2 + (wrong[t.rank] if t.rank else 0 * wrong[0])):
            with pytest.raises(ValueError, match=r"rank [01] of 3: recv_splits: expected 2 rows"):
                all_to_all_rows(ROWS[:1].expand(6, 32), [2, 2, 2], recv, t)

    transport.run_local(3, on_rank, timeout_s=20)


def test_a_failure_in_backward_stops_the_peers():
    def on_rank(t):
        y = all_to_all_rows(ROWS.clone().requires_grad_(), EVEN, EVEN, t).sum()
        y.backward(retain_graph=t.rank == 1)
        text = "stopped by rank 0: all_to_all_rows backward: RuntimeError: " if t.rank else ""
        with pytest.raises(RuntimeError, match=text + "Trying to backward through the graph a sec"):
            y.backward()

    transport.run_local(2, on_rank, timeout_s=20)


def test_under_autocast_and_checkpoint():
    def on_rank(t):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(t.rank)).requires_grad_()

        def layer(x):
            y = all_to_all_rows(x * 2, EVEN, EVEN, t)
            return all_to_all_rows(y, EVEN, EVEN, t, "bf16", grad_wire="mxfp8")

        with torch.autocast("cpu", torch.bfloat16):
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        y.float().sum().backward()
        assert torch.equal(y, quantize((2 * x.detach()).bfloat16(), "mxfp4").to_bf16())
        assert torch.equal(x.grad, torch.full_like(x, 2))

    transport.run_local(2, on_rank, timeout_s=20)


def test_on_groups_of_torch_distributed():
    ranks.passed(*ranks.torch_ranks(3, "torch_rows.py"))


def test_it_is_a_public_name():
    assert "all_to_all_rows" in fp4comm.__all__
    assert fp4comm.all_to_all_rows is torch_distributed.all_to_all_rows
    with pytest.raises(AttributeError, match="module 'fp4comm' has no attribute 'no_such_name'"):
        _ = fp4comm.no_such_name


@pytest.mark.parametrize("group", ["foo", -100, [0, 1]])  # -100: torch's to a rank outside
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match="group: expected a torch.distributed ProcessGroup"):
        all_to_all_rows(torch.zeros(2, 32).bfloat16(), group=group)


def test_splits_whose_sum_would_wrap_are_refused():
    most = 2**63 - 1
    with pytest.raises(ValueError, match=f"expected 2 together, as there are rows, got {most}"):
        all_to_all_rows(torch.zeros(2, 32).bfloat16(), [most], [2], transport.open("local"))
