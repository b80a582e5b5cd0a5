"""Dispatch and combine of CUDA tensors, on ranks that are threads, to the bytes of the CPU.

Rounds and mistakes are those of the CPU suite; the work is done on the GPU, and rows travel through
pinned memory.  Ranks with NCCL: test_nccl_ranks.py.
"""

import dataclasses

import mistakes
import numpy as np
import on_device
import pytest
import rounds
import test_all_to_all
import torch
from compiled import kernels_are_compiled  # noqa: F401
from gpu_rounds import GPU_ROUNDS
from on_device import AllToAllOnDevice, on_host, to
from rounds import Round, check_round, expected, expert_out, inputs, same_rows

# Tests of the CPU suite that run here on the GPU.
from test_all_to_all import (  # noqa: F401
    test_a_token_without_experts_gets_plus_zero,
    test_com_41_sum_over_experts_is_in_float32,
    test_conversions_on_a_rank_without_experts,
    test_dispatched_rows_are_the_same_for_any_number_of_ranks,
    test_grd_01_forward_by_hand,
    test_ins_21_odd_calls_after_a_normal_warm_up,
    test_packed_rows_of_a_dispatch_convert_to_what_arrival_would_have_been,
    test_shp_30_each_row_keeps_its_own_scales,
)

from fp4comm import AllToAll, Precision, quantize, routing, transport
from fp4comm.routing import Placement

DEVICE = on_device.DEVICE
RANKS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def work_on_the_device(monkeypatch):
    """Let the CPU suite's rounds and mistakes work on the GPU."""
    for module in (rounds, mistakes, test_all_to_all):
        monkeypatch.setattr(module, "AllToAll", AllToAllOnDevice)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", GPU_ROUNDS, ids=lambda case: case.id)
def test_round_on_threads(case, num_ranks):
    expected(case, num_ranks)  # once, and not on every thread
    transport.run_local(num_ranks, lambda t: check_round(t, case), timeout_s=60)


def same(got, want):
    """Compare tensors bit by bit."""
    got, want = (t.detach().cpu().contiguous() for t in (got, want))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [1000, 4096])
def test_many_tokens_give_the_bytes_of_the_cpu(num_tokens):
    """More tokens than the reference has time for: against the CPU's AllToAll."""

    def on_rank(t):
        g = torch.Generator().manual_seed(t.rank)
        x = torch.randn(num_tokens, 1024, generator=g).bfloat16()
        scores, idx = torch.randn(num_tokens, 32, generator=g).softmax(-1).topk(8)
        idx[::7, 3] = -1
        results = []
        for kind in (AllToAll, AllToAllOnDevice):
            a2a = kind(t, num_experts=32, hidden=1024, precision=Precision("mxfp4", "fp8"))
            d = a2a.dispatch(x, idx, scores)
            y = a2a.combine((d.packed.to_bf16(d.handle.layout)), d.handle)
            results.append((d.rows, d.scales, d.row_weights, d.packed.payload, d.packed.scales, y))
        for got, want in zip(*reversed(results), strict=True):
            same(got, want)

    transport.run_local(2, on_rank, timeout_s=60)


# Plans and layouts


def drawn(kind, num_tokens, topk, num_experts):
    g = torch.Generator().manual_seed(num_tokens + topk)
    shape = (num_tokens, topk)
    if kind == "random with -1":
        return torch.randint(-1, num_experts, shape, generator=g)
    if kind == "distinct":
        return torch.rand(num_tokens, num_experts, generator=g).argsort(1)[:, :topk].contiguous()
    if kind == "one expert in many":
        return torch.randint(0, num_experts, (num_tokens, 1), generator=g).expand(shape).clone()
    return torch.full(shape, num_experts - 1 if kind == "all to one" else -1)


KINDS = ("random with -1", "distinct", "one expert in many", "all to one", "none")
SHAPES = [(8, 256, 8), (8, 256, 64), (1, 1, 1), (9, 13, 4), (3, 22, 300), (2, 40000, 2)]


def same_tables(got, want):
    """Compare plans or layouts field by field, host arrays and tensors on the device."""
    for name, value in vars(want).items():
        found = getattr(got, name)
        if isinstance(value, torch.Tensor):
            assert found.device.type == DEVICE.type, name
            assert found.dtype == value.dtype, name
            value, found = value.numpy(), found.cpu().numpy()
        np.testing.assert_array_equal(found, value, err_msg=name)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 1000, 32768])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_and_layout_are_those_of_the_cpu(shape, num_tokens):
    topk, num_experts, num_ranks = shape
    placement = Placement(num_experts, num_ranks)
    kinds = KINDS if num_tokens * num_experts < 1 << 26 else KINDS[:1]
    for number, kind in enumerate(kinds):
        idx = drawn(kind, num_tokens, min(topk, num_experts), num_experts)
        idx = idx.int() if number % 2 else idx
        weights = torch.rand(idx.shape) if number != 2 else None
        want = routing.plan(idx, weights, placement)
        same_tables(routing.plan(to(DEVICE, idx), to(DEVICE, weights), placement), want)
        for rank in {0, num_ranks - 1, num_ranks // 2}:
            check_layout(want, placement, rank, num_sources=min(num_ranks, 3))


def check_layout(plan, placement, rank, num_sources):
    """Lay out, on this rank, what several sources with the same plan send to it."""
    ends = np.cumsum(plan.send_splits)
    rows = plan.route[ends[rank] - plan.send_splits[rank] : ends[rank]]
    route = rows.repeat(num_sources, 1)
    counts = plan.expert_counts[rank, : placement.num_local_experts(rank)] * num_sources
    for alignment in (1, 128):
        rest = plan.num_topk, counts, alignment
        want = routing.expert_layout(route, *rest)
        same_tables(routing.expert_layout(to(DEVICE, route), *rest), want)


# Arguments


def one_rank(**kwargs):
    kwargs = {"num_experts": 8, "hidden": 96, "expert_alignment": 4} | kwargs
    return AllToAll(transport.open("local"), **kwargs)


def test_any_strides_give_the_bytes_of_the_contiguous_copy():
    """SHP-23: x, indices, weights and expert outputs as views."""
    base = torch.randn(96, 192, device=DEVICE).bfloat16()
    views = [base[:, ::2][:8], base.t()[:8, :96], base[:1, :96].expand(8, 96), base[3:11, 7:103]]
    idx = (torch.arange(64, device=DEVICE).reshape(8, 8) % 8).t()[:, ::4]
    weights = torch.rand(2, 8, device=DEVICE).t()
    a2a = one_rank()
    for x in views:
        got = a2a.dispatch(x, idx, weights)
        want = a2a.dispatch(x.contiguous(), idx.contiguous(), weights.contiguous())
        out = torch.randn(96, len(got.row_weights), device=DEVICE).bfloat16().t()
        y, wanted = a2a.combine(out, got.handle), a2a.combine(out.contiguous(), want.handle)
        for a, b in ((got.rows, want.rows), (got.row_weights, want.row_weights), (y, wanted)):
            same(a, b)


def test_autocast_casts_x():
    x, idx = torch.randn(2, 96, device=DEVICE), torch.tensor([[0], [1]], device=DEVICE)
    a2a = one_rank()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        got = a2a.dispatch(x, idx)
    same(got.packed.payload, a2a.dispatch(x.bfloat16(), idx).packed.payload)


def test_converted_rows_stay_on_the_device():
    """INS-18, INS-19: BF16, FP8 and float32, also what wants a gradient under no_grad."""
    values = torch.randn(5, 96, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        packed = quantize(values.bfloat16())
    for made in (packed.to_bf16(), packed.to_float32(), *packed.to_fp8_rows()):
        assert made.device.type == DEVICE.type
    want = quantize(values.detach().cpu().bfloat16())
    same(packed.to_fp8_rows()[0], want.to_fp8_rows()[0])
    pair = packed.to_fp8_rows()
    same(quantize(pair).payload, quantize(want.to_fp8_rows()).payload)
    for wanted in (values, values.bfloat16()):
        with pytest.raises(RuntimeError, match="x: expected no gradient to be wanted"):
            quantize(wanted)


def test_shp_07_no_rows_at_all_leave_no_error_behind():
    packed = quantize(torch.empty(0, 7168, device=DEVICE).bfloat16())
    assert (packed.payload.shape, packed.scales.shape) == ((0, 3584), (0, 224))
    assert packed.to_bf16().shape == (0, 7168)
    assert packed.to_fp8_rows()[0].shape == (0, 7168)
    d = one_rank().dispatch(
        torch.empty(0, 96, device=DEVICE).bfloat16(),
        torch.empty(0, 2, device=DEVICE, dtype=torch.int64),
    )
    assert d.rows.shape == (0, 96)
    on_device.synchronize()
    assert torch.ones(3, device=DEVICE).sum().item() == 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_mistake_on_threads(num_ranks):
    transport.run_local(num_ranks, mistakes.check_mistakes, timeout_s=60)


@pytest.mark.parametrize("name", mistakes.DIFFERENT_CALLS)
def test_combines_of_different_dispatches_do_not_mix(name):
    texts = transport.run_local(2, lambda t: mistakes.make_different_calls(t, name), timeout_s=30)
    assert all("all ranks must make the same calls" in text for text in texts), texts


HERE = rf"{DEVICE.type}(:\d+)?"
ON_ANOTHER_DEVICE = {  # position of the argument that is on another device than x
    "topk_idx": (1, rf"rank 1 of 2: topk_idx: expected on {HERE} as x, got meta"),
    "topk_weights": (2, rf"rank 1 of 2: topk_weights: expected on {HERE} as x, got meta"),
}


@pytest.mark.parametrize("name", ON_ANOTHER_DEVICE)
def test_parts_on_several_devices_are_refused_on_all_ranks(name):
    position, text = ON_ANOTHER_DEVICE[name]
    elsewhere = "cpu" if DEVICE.type == "cuda" else "meta"

    def on_rank(t):
        a2a = AllToAll(t, **mistakes.GOOD)
        args = [to(DEVICE, part) for part in mistakes.good_call()]
        if t.rank == 1:
            args[position] = args[position].to(elsewhere)
        with pytest.raises(ValueError, match=text.replace("meta", elsewhere)):
            a2a.dispatch(*args)
        good = [to(DEVICE, part) for part in mistakes.good_call()]
        assert sum(a2a.dispatch(*good).num_rows_list) > 0  # it stays usable

    transport.run_local(2, on_rank, timeout_s=30)


def test_an_fp8_pair_on_two_devices_is_refused():
    codes = torch.zeros(5, 64, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.ones(5, 1, device="meta" if DEVICE.type == "cpu" else "cpu")
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    with pytest.raises(ValueError, match="rank 0 of 1: x scales: expected on"):
        a2a.dispatch((codes, scales), *[to(DEVICE, p) for p in mistakes.good_call()[1:]])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="another device than the CPU")
def test_a_handle_is_of_one_device():
    x, idx, weights = mistakes.good_call()
    on_gpu = [to(DEVICE, part) for part in (x, idx, weights)]
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    d = a2a.dispatch(*on_gpu)
    for convert in (on_host(d).packed.to_bf16, on_host(d).packed.to_fp8_rows):
        with pytest.raises(ValueError, match="layout: expected on cpu as the rows, got cuda"):
            convert(d.handle.layout)
    with pytest.raises(ValueError, match="x: expected on cuda:0, which handle was made for"):
        a2a.dispatch(x, handle=d.handle)
    a2a = AllToAll(transport.open("local"), **mistakes.GOOD)
    d = a2a.dispatch(*on_gpu)
    with pytest.raises(ValueError, match="expert_out: expected on cuda:0 as x of dispatch"):
        a2a.combine(torch.zeros(len(d.rows), 64).bfloat16(), d.handle)


def test_com_40_forty_repeats_are_equal_bit_by_bit():
    case = Round("com 40", tokens=(200,), topk=8, num_experts=32, hidden=640)
    arrived, sums = expected(case, 1)
    a2a = one_rank(num_experts=32, hidden=640, expert_alignment=case.alignment)
    args = [to(DEVICE, part) for part in inputs(case, 0)]
    out = to(DEVICE, expert_out(case, 0, len(arrived[0].row_weights)))
    for _ in range(40):
        d = a2a.dispatch(*args)
        rounds.compare_dispatched(on_host(d), arrived[0], case)
        y = a2a.combine(out, d.handle).cpu()
        same_rows((rounds.bf16_bits(y),), (sums[True][0],))


def test_what_is_on_the_host_and_on_the_device_of_a_layout_says_the_same():
    args = [to(DEVICE, part) for part in mistakes.good_call()]
    d = AllToAll(transport.open("local"), **mistakes.GOOD).dispatch(*args)
    assert d.num_rows.tolist() == d.num_rows_list
    assert d.expert_offsets.tolist() == d.handle.layout.expert_offsets_array.tolist()
    assert d.row_weights is d.handle.layout.row_weights
    assert len(d.packed) == len(d.handle.layout.slot_rows)
    names = {f.name for f in dataclasses.fields(d.handle.layout)}
    assert {"slot_rows", "weights", "row_weights", "row_source"} <= names
