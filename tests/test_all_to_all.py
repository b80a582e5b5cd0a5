"""dispatch and combine on every transport against the reference."""

import copy
import time

import numpy as np
import pytest
import torch
from rounds import (
    ROUNDS,
    WIRES,
    Foreign,
    Round,
    bf16_bits,
    check_round,
    expected,
    expert_out,
    inputs,
    same_rows,
)

from fp4comm import AllToAll, Precision, agreement, quantize, transport
from fp4comm.transport.local import LocalTransport

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", ROUNDS, ids=lambda case: case.id)
def test_round_on_threads(case, num_ranks):
    transport.run_local(num_ranks, lambda t: check_round(t, case), timeout_s=60)


def rows_by_expert(case, num_ranks):
    """Codes, scales and weights of the live expert rows, by expert, and the combined tokens.

    The same tokens are cut to any number of ranks.
    """
    xs, ids, weights = zip(*(inputs(case, rank) for rank in range(8)), strict=True)
    x, idx, w = torch.cat(xs), torch.cat(ids), torch.cat(weights)
    cuts = [len(x) * r // num_ranks for r in range(num_ranks + 1)]

    def on_rank(t):
        own = slice(cuts[t.rank], cuts[t.rank + 1])
        a2a = AllToAll(
            t, num_experts=case.num_experts, hidden=case.hidden, precision=case.precision
        )
        d = a2a.dispatch(x[own], idx[own], w[own])
        rows = torch.cat(
            [torch.arange(n) + o for n, o in zip(d.num_rows_list, d.expert_offsets, strict=False)]
        )
        packed = d.rows[rows].view(torch.uint8), d.scales[rows], d.row_weights[rows]
        # an expert that doubles, so that sums depend on the order only in their rounding
        out = torch.zeros(len(d.row_weights), case.hidden).bfloat16()
        values = d.packed.to_bf16(d.handle.layout)
        out[rows] = torch.where(values.abs() < 1e30, values, 0)[rows] * 2
        y = a2a.combine(out, d.handle)
        return [part.numpy() for part in packed], y

    results = transport.run_local(num_ranks, on_rank, timeout_s=60)
    parts = [np.concatenate([rank[0][i] for rank in results]) for i in range(3)]
    return parts, torch.cat([rank[1] for rank in results])


@pytest.mark.parametrize("wire", WIRES)
def test_dispatched_rows_are_the_same_for_any_number_of_ranks(wire):
    """Rows of an expert, by source token and slot, do not depend on how tokens are cut to ranks."""
    case = Round("any ranks", wire=wire, num_experts=24, topk=3, tokens=(9, 4), hidden=160)
    rows_of_one, y_of_one = rows_by_expert(case, 1)
    for num_ranks in RANKS[1:]:
        rows, y = rows_by_expert(case, num_ranks)
        same_rows(rows, rows_of_one)
        same_to_two_roundings(y, y_of_one, case)


def same_to_two_roundings(y, y_one, case):
    """Sums over other groups of ranks differ by two BF16 roundings of the largest part at most."""
    xs = torch.cat([inputs(case, rank)[0] for rank in range(8)]).float()
    largest = torch.where(xs.abs() < 1e30, xs, 0).abs().amax(1, keepdim=True) * 2 * case.topk
    assert ((y.float() - y_one.float()).abs() <= 2 * 2**-8 * largest).all()


def test_com_31_rounds_without_synchronization_are_those_of_the_reference():
    """500 rounds on 4 ranks, one of which is late at random."""
    case = Round("com 31", tokens=(5, 0, 3), topk=2, num_experts=6, hidden=32)
    arrived, sums = expected(case, 4)

    def on_rank(t):
        a2a = AllToAll(t, num_experts=6, hidden=32, expert_alignment=case.alignment)
        x, idx, weights = inputs(case, t.rank)
        late = np.random.default_rng(t.rank)
        for _ in range(500):
            if t.rank == 3 and late.random() < 0.02:
                time.sleep(0.02)
            d = a2a.dispatch(x, idx, weights)
            same_rows((d.packed.payload.numpy(),), (arrived[t.rank].payload,))
            y = a2a.combine(expert_out(case, t.rank, len(d.row_weights)), d.handle)
            same_rows((bf16_bits(y),), (sums[True][t.rank],))

    transport.run_local(4, on_rank, timeout_s=60)


def one_rank(**kwargs):
    kwargs = {"num_experts": 4, "hidden": 32, "arrive": "bf16", "expert_alignment": 1} | kwargs
    return AllToAll(transport.open("local"), **kwargs)


def test_grd_01_forward_by_hand():
    """Experts that multiply by e + 1: y = 0.25 * 1 + 0.75 * 3 = 2.5."""
    a2a = one_rank()
    d = a2a.dispatch(
        torch.ones(1, 32).bfloat16(), torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]])
    )
    out = d.rows * torch.tensor([[1.0], [3.0]]).bfloat16()
    assert a2a.combine(out, d.handle).tolist() == [[2.5] * 32]


def test_com_41_sum_over_experts_is_in_float32():
    a2a = one_rank(num_experts=8)
    d = a2a.dispatch(torch.ones(1, 32).bfloat16(), torch.arange(8)[None], torch.full((1, 8), 0.125))
    out = torch.ones(8, 32).bfloat16()
    out[0] = 256
    assert a2a.combine(out, d.handle).tolist() == [[33.0] * 32]


def test_a_token_without_experts_gets_plus_zero():
    a2a = one_rank()
    d = a2a.dispatch(torch.ones(2, 32).bfloat16(), torch.tensor([[-1], [1]]), torch.ones(2, 1))
    y = a2a.combine(d.rows, d.handle)
    assert bf16_bits(y)[0].tolist() == [0] * 32


def test_shp_30_each_row_keeps_its_own_scales():
    """Token t is the constant 2**(t - 8): each received row decodes to its own."""
    idx = torch.randperm(34, generator=torch.Generator().manual_seed(3)).reshape(2, 17) % 4

    def on_rank(t):
        x = torch.exp2(torch.arange(17) - 8.0)[:, None].expand(17, 256).bfloat16()
        a2a = AllToAll(t, num_experts=4, hidden=256, expert_alignment=1)
        d = a2a.dispatch(x, idx[t.rank][:, None])
        values = d.rows.float() * d.scales.repeat_interleave(128, 1)
        tokens = [
            k for e in (0, 1) for r in (0, 1) for k in range(17) if idx[r][k] == 2 * t.rank + e
        ]
        assert values.tolist() == [[2.0 ** (k - 8)] * 256 for k in tokens]

    transport.run_local(2, on_rank)


def test_shp_06_hidden_96_on_two_ranks():
    """x[t, h] = t: every row that arrives is constant, exactly t in BF16."""

    def on_rank(t):
        x = torch.arange(7.0)[:, None].expand(7, 96).bfloat16()
        idx = torch.arange(7)[:, None] % 4
        for wire in ("bf16", "mxfp4"):
            a2a = AllToAll(
                t,
                num_experts=4,
                hidden=96,
                arrive="bf16",
                expert_alignment=1,
                precision=Precision(wire),
            )
            d = a2a.dispatch(x, idx)
            values = d.rows.float()
            assert (values == values[:, :1]).all()
            tokens = [
                k for e in (0, 1) for _ in (0, 1) for k in range(7) if k % 4 == 2 * t.rank + e
            ]
            quantized = quantize(x, wire).to_bf16().float()[:, 0]
            assert values[:, 0].tolist() == [float(quantized[k]) for k in tokens]
            if wire == "bf16":
                assert values[:, 0].tolist() == [float(k) for k in tokens]

    transport.run_local(2, on_rank)


def test_ins_21_odd_calls_after_a_normal_warm_up():
    """No tokens on one rank, and no weights: weight 1."""

    def on_rank(t):
        a2a = AllToAll(t, num_experts=4, hidden=32, arrive="bf16", expert_alignment=1)
        ones, idx = torch.ones(3, 32).bfloat16(), torch.tensor([[0, 3], [1, 2], [3, -1]])
        a2a.dispatch(ones, idx, torch.rand(3, 2))
        num = 3 if t.rank else 0
        for weights in (torch.ones(num, 2), None):
            d = a2a.dispatch(ones[:num], idx[:num], weights)
            y = a2a.combine(d.rows, d.handle)
            assert y[:, 0].tolist() == [2.0, 2.0, 1.0][:num]

    transport.run_local(2, on_rank)


def test_any_strides_of_x_give_the_bytes_of_the_contiguous_copy():
    """SHP-23, GRD-24: views are never read as if they were contiguous."""
    base = torch.randn(64, 64).bfloat16()
    views = [torch.randn(8, 128).bfloat16()[:, ::2], base.t()[:8], base[:1].expand(8, 64)]
    a2a = one_rank(hidden=64)
    idx = torch.arange(8)[:, None] % 4
    for x in views:
        got, want = a2a.dispatch(x, idx), a2a.dispatch(x.contiguous(), idx)
        assert torch.equal(got.packed.payload, want.packed.payload)
        y = a2a.combine(got.rows.t().contiguous().t(), got.handle)
        assert torch.equal(y, a2a.combine(want.rows, want.handle))


def test_arrays_of_other_libraries_come_in_through_dlpack():
    """INS-18: BF16 too."""

    x = torch.randn(3, 32).bfloat16()
    idx, weights = np.array([[0, 1], [2, 3], [1, -1]]), np.ones((3, 2), np.float64)
    a2a = one_rank()
    got = a2a.dispatch(Foreign(x), idx, weights)
    want = a2a.dispatch(x, torch.from_numpy(idx), torch.from_numpy(weights))
    assert torch.equal(got.packed.payload, want.packed.payload)
    assert got.num_rows_list == want.num_rows_list == [1, 2, 1, 1]


def test_arrays_that_run_backwards_come_in_as_copies():
    """torch.from_dlpack ends the process at a negative stride."""
    scores = np.random.default_rng(3).random((5, 4))
    idx = np.argsort(scores, axis=1)[:, ::-1][:, :2]
    a2a, x = one_rank(), torch.randn(5, 32).bfloat16()
    got = a2a.dispatch(x, idx, scores[:, ::-1][:, :2])
    want = a2a.dispatch(x, idx.copy(), scores[:, ::-1][:, :2].copy())
    assert got.num_rows_list == want.num_rows_list
    assert torch.equal(got.row_weights, want.row_weights)
    rows = np.ones((2, 64), np.float32) * [[1], [2]]
    backwards = quantize(rows.astype(np.float32)[::-1])
    assert backwards.to_float32()[:, 0].tolist() == [2, 1]


def test_autocast_casts_x():
    x = torch.randn(2, 32)
    a2a = one_rank()
    idx = torch.tensor([[0], [1]])
    with torch.autocast("cpu", torch.bfloat16):
        got = a2a.dispatch(x, idx)
    assert torch.equal(got.packed.payload, a2a.dispatch(x.bfloat16(), idx).packed.payload)
    with pytest.raises(TypeError, match="x: expected bfloat16"):
        a2a.dispatch(x, idx)


def test_packed_rows_of_a_dispatch_convert_to_what_arrival_would_have_been():
    case = Round("packed converts", hidden=160)
    x, idx, weights = inputs(case, 0)

    def arrived(arrive):
        a2a = one_rank(num_experts=22, hidden=160, arrive=arrive, expert_alignment=16)
        return a2a.dispatch(x, idx, weights)

    packed, fp8, bf16 = arrived("packed"), arrived("fp8"), arrived("bf16")
    layout = packed.handle.layout
    codes, scales = packed.packed.to_fp8_rows(layout)
    assert torch.equal(codes.view(torch.uint8), fp8.rows.view(torch.uint8))
    assert torch.equal(scales, fp8.scales)
    rows = packed.packed.to_bf16(layout)
    assert torch.equal(rows.view(torch.int16), bf16.rows.view(torch.int16))
    expanded = packed.packed.expand(layout).to_bf16()
    assert torch.equal(expanded.view(torch.int16), bf16.rows.view(torch.int16))


def test_precision_takes_names_and_formats():
    assert Precision("fp8").dispatch.name == "fp8"
    with pytest.raises(ValueError, match="combine: expected one of"):
        Precision(combine="fp3")
    with pytest.raises(TypeError, match="combine: expected a name or a WireFormat, got int"):
        Precision(combine=8)


def test_conversions_on_a_rank_without_experts():
    def on_rank(t):
        d = AllToAll(t, num_experts=1, hidden=32).dispatch(
            torch.ones(1, 32).bfloat16(), torch.tensor([[0]])
        )
        columns, scales = d.packed.to_fp8_columns(d.handle.layout)
        expanded = d.packed.expand(d.handle.layout)
        return columns.shape, scales.shape, len(expanded)

    shapes = transport.run_local(2, on_rank)
    assert shapes == [((32, 128), (1, 32), 128), ((32, 0), (0, 32), 0)]


def test_too_many_expert_rows_with_padding_are_refused():
    a2a = one_rank(arrive="packed", expert_alignment=2**31 - 1)
    with pytest.raises(ValueError, match="expert_alignment: expected fewer than 2"):
        a2a.dispatch(torch.ones(2, 32).bfloat16(), torch.tensor([[0], [1]]))


def test_what_dispatch_returns_can_be_compared_and_kept_in_a_dict():
    a2a = one_rank()
    d = a2a.dispatch(torch.ones(1, 32).bfloat16(), torch.tensor([[0]]))
    kept = {d.handle: 1, d.packed: 2}
    assert kept[d.handle] == 1
    assert d.handle == d.handle
    assert d.packed != quantize(torch.ones(1, 32))


def test_copies_of_a_model_send_by_the_same_object():
    a2a = one_rank()
    assert copy.deepcopy(a2a) is a2a
    assert copy.copy(a2a) is a2a


def test_pending_that_failed_says_so_again_and_keeps_nothing():
    def on_rank(t):
        a2a = AllToAll(t, num_experts=2, hidden=32, arrive="bf16")
        args = torch.ones(1, 32).bfloat16(), torch.tensor([[t.rank]])
        pending = a2a.dispatch(*args, async_op=True)
        if t.rank == 0:
            pending._finish = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                pending.wait()
            with pytest.raises(RuntimeError, match="wait: failed before"):
                pending.wait()
            assert pending._tensors == []
        else:
            assert pending.wait() is pending.wait()

    transport.run_local(2, on_rank, timeout_s=20)


def test_shp_34_without_rows_strides_are_those_of_rows():
    a2a = AllToAll(transport.open("local"), num_experts=2, hidden=128)
    d = a2a.dispatch(torch.empty(0, 128).bfloat16(), torch.empty((0, 1), dtype=torch.int64))
    assert d.rows.stride() == (128, 1)
    assert d.scales.view(torch.uint8).shape == (0, 4)


def test_com_25_another_order_of_exchanges_is_noticed_with_the_next_counts():
    """NCCL does not compare labels, so that combines could be mixed up without an error."""

    def on_rank(t):
        a2a = AllToAll(t, num_experts=2, hidden=32, arrive="bf16")
        args = torch.ones(1, 32).bfloat16(), torch.tensor([[0]])
        before = t.history
        a2a.dispatch(*args)
        assert t.history != before
        t.history += t.rank
        with pytest.raises(ValueError, match="rank 1 of 2: order of earlier exchanges: expected"):
            a2a.dispatch(*args)

    transport.run_local(2, on_rank, timeout_s=20)


def test_rows_on_other_kinds_of_device_are_refused_on_all_ranks():
    """Before any row moves: a group with gloo and NCCL takes both."""

    def on_rank(t):
        mine = agreement.Fingerprint(agreement.DISPATCH, device=t.rank)
        with pytest.raises(ValueError, match="rank 1 of 2: x: expected on the CPU as on rank 0"):
            agreement.agree(t, mine, np.zeros((2, 1), np.int64), None)

    transport.run_local(2, on_rank, timeout_s=20)


@pytest.mark.parametrize(("num_counts", "num_exchanges"), [(0, 1), (172, 1), (173, 2), (400, 2)])
def test_counts_that_do_not_fit_the_first_message_follow(monkeypatch, num_counts, num_exchanges):
    calls, exchange = [], LocalTransport.exchange_counts

    def counted(t, counts):
        calls.append(t.rank)
        return exchange(t, counts)

    def on_rank(t):
        told = np.arange(2 * num_counts).reshape(2, -1)
        mine = agreement.Fingerprint(agreement.DISPATCH)
        got = agreement.agree(t, mine, told + 10**4 * t.rank, None)
        assert np.array_equal(got, [told[t.rank], told[t.rank] + 10**4])

    monkeypatch.setattr(LocalTransport, "exchange_counts", counted)
    transport.run_local(2, on_rank, timeout_s=20)
    assert calls.count(0) == num_exchanges
