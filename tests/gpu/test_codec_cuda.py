"""The CUDA codec against the reference and the CPU codec, byte by byte.

The cases are those of tests/test_codec.py.  Every output lies in poisoned memory between canaries.
"""

import math
import types

import numpy as np
import pytest
import torch
from compiled import kernels_are_compiled  # noqa: F401
from numeric_cases import CASES, DECODE_CASES, FP8_CASES
from test_codec import (
    LAYOUTS,
    POISON,
    any_wire_rows,
    assert_rows_equal,
    bf16_tensor,
    by_wire,
    hard_bf16_rows,
    hard_f32_rows,
    hard_fp8_pairs,
    random_layout,
)

from fp4comm import WireFormat, reference, routing
from fp4comm.codec import cpu, cuda

EDGE = 512  # bytes of canary on each side of an output: its alignment stays
HIDDENS = [32, 96, 160, 2880, 7168, 16384, 32768]
MXFP4, BF16 = WireFormat("mxfp4"), WireFormat("bf16")
by_hidden = pytest.mark.parametrize("hidden", HIDDENS)


@pytest.fixture(autouse=True)
def canaries(monkeypatch):
    """Give the codec poisoned outputs between canaries, and look at the canaries afterwards."""
    buffers = []

    def empty(shape, dtype, device):
        shape = (shape,) if isinstance(shape, int) else shape
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = torch.empty(EDGE + num_bytes + EDGE, dtype=torch.uint8, device=device)
        buffer.fill_(POISON)
        buffers.append((buffer, num_bytes))
        return buffer[EDGE : EDGE + num_bytes].view(dtype).view(shape)

    class PoisoningTorch(types.ModuleType):
        def __getattr__(self, name):
            return getattr(torch, name)

    patched = PoisoningTorch("torch")
    patched.empty = empty
    monkeypatch.setattr(cuda, "torch", patched)
    yield
    for buffer, num_bytes in buffers:
        assert (buffer[:EDGE] == POISON).all(), "bytes in front of an output were written"
        assert (buffer[EDGE + num_bytes :] == POISON).all(), "bytes behind an output were written"


def host(*tensors):
    """NumPy arrays as `assert_rows_equal` compares them."""
    views = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    arrays = [t.cpu().view(views.get(t.dtype, t.dtype)).numpy() for t in tensors]
    return [a.view(np.uint16) if a.dtype == np.int16 else a for a in arrays]


def device_rows(*arrays):
    return [torch.tensor(a, device="cuda") for a in arrays]


def to_cuda(tables):
    """A plan or a layout with its tensors on the GPU."""
    fields = {name: v.cuda() if torch.is_tensor(v) else v for name, v in vars(tables).items()}
    return types.SimpleNamespace(**fields)


def fp8_pair(codes, scales):
    codes, scales = device_rows(codes, scales)
    return codes.view(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_quantize_and_decode_make_the_bytes_of_the_case(case):
    x = bf16_tensor(case.x) if case.x.dtype == np.uint16 else torch.from_numpy(case.x)
    payload, scales = cuda.quantize_rows(x.cuda(), case.wire)
    decoded = cuda.dequantize(payload, scales, case.wire, case.x.shape[1])
    assert_rows_equal(host(payload, scales, decoded), (case.payload, case.scales, case.decoded))


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda c: c.id)
def test_decodes_to_the_values_of_the_case(case):
    parts = device_rows(case.payload, case.scales)
    decoded = cuda.dequantize(*parts, case.wire, case.decoded.shape[1])
    assert_rows_equal(host(decoded), (case.decoded,))


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda c: c.id)
def test_arrives_as_the_fp8_of_the_case(case):
    parts = device_rows(case.payload, case.scales)
    got = cuda.to_fp8_rows(*parts, case.wire, case.codes.shape[1])
    assert_rows_equal(host(*got), (case.codes, case.fp8_scales))


@by_hidden
@by_wire
def test_quantizes_any_bf16_as_the_reference(wire, hidden):
    bits = hard_bf16_rows(hidden)
    got = cuda.quantize_rows(bf16_tensor(bits).cuda(), wire)
    assert_rows_equal(host(*got), reference.quantize_rows(bits, wire))


@pytest.mark.parametrize("hidden", [32, 96, 160, 1024, 2880, 7168])
@by_wire
def test_quantizes_any_float32_as_the_reference(wire, hidden):
    values = hard_f32_rows(hidden)
    got = cuda.quantize_rows(torch.from_numpy(values).cuda(), wire)
    assert_rows_equal(host(*got), reference.quantize_rows(values, wire))


@pytest.mark.parametrize("hidden", [32, 96, 160, 1024, 2880, 7168])
@by_wire
def test_quantizes_any_fp8_pair_as_the_reference(wire, hidden):
    codes, scales = hard_fp8_pairs(hidden)
    got = cuda.quantize_rows(fp8_pair(codes, scales), wire)
    assert_rows_equal(host(*got), reference.quantize_rows((codes, scales), wire))


def mantissas_beside_ratios():
    """Scale mantissas where a product code * scale is next to a midpoint of E2M1, and random."""
    ratios = [m / c for m in (8, 10, 12, 14) for c in range(8, 16)]
    near = [np.float32(2 * r if r < 1 else r).view(np.uint32) for r in ratios]
    mantissas = [(int(bits) + d) & 0x7FFFFF for bits in near for d in range(-3, 4)]
    cells = [(cell << 15) + d & 0x7FFFFF for cell in range(256) for d in (-1, 0, 1)]
    random = np.random.default_rng(3).integers(0, 1 << 23, 2000).tolist()
    return np.array([*mantissas, *cells, *random], np.uint32)


@pytest.mark.parametrize("many", [0, cuda.MANY], ids=["many", "few"])
@pytest.mark.parametrize("rule", ["even", "ceil", "floor"])
def test_quantizes_every_fp8_code_under_every_kind_of_scale_as_the_reference(
    rule, many, monkeypatch
):
    monkeypatch.setattr(cuda, "MANY", many)
    mantissas = mantissas_beside_ratios()
    codes = np.random.default_rng(4).integers(0, 256, (len(mantissas), 1024), dtype=np.uint8)
    codes[:, :512] &= 0xF7  # without NaN; then blocks of one binade and less
    codes[:, 512:768] = codes[:, 512:768] & 0x8F | 0x40
    codes[:, 768:] &= 0x8F
    exponents = np.random.default_rng(5).integers(90, 160, (len(mantissas), 8), dtype=np.uint32)
    scales = (exponents << 23 | mantissas[:, None]).astype(np.uint32).view(np.float32)
    wire = WireFormat("mxfp4", rule)
    got = cuda.quantize_rows(fp8_pair(codes, scales), wire)
    assert_rows_equal(host(*got), reference.quantize_rows((codes, scales), wire))


MANY_SLOTS = pytest.param((70, 4, 16), id="more slots than lanes")


@pytest.mark.parametrize("shape", [*LAYOUTS, MANY_SLOTS])
@by_hidden
@by_wire
def test_arrival_of_any_bytes_as_the_reference(wire, hidden, shape):
    payload, scales = any_wire_rows(wire, hidden, 300 if hidden < 2000 else 40)
    layout = to_cuda(random_layout(len(payload), *shape)) if shape else None
    source_rows = layout.source if shape else None
    parts = (*device_rows(payload, scales), wire, hidden)
    want = reference.to_fp8_rows(payload, scales, wire, hidden, source_rows)
    for scale_layout in ("row", "column"):
        codes, fp8_scales = cuda.to_fp8_rows(*parts, layout, scale_layout)
        assert fp8_scales.stride()[0 if scale_layout == "column" else 1] == 1
        assert_rows_equal(host(codes, fp8_scales), want)
    got = cuda.to_bf16_rows(*parts, layout)
    want = reference.to_bf16_rows(payload, scales, wire, hidden, source_rows)
    assert_rows_equal(host(got), (want,))
    got = cuda.dequantize(*parts)
    assert_rows_equal(host(got), (reference.dequantize(payload, scales, wire, hidden),))


@pytest.mark.parametrize("shape", [*LAYOUTS[1:], MANY_SLOTS])
@by_hidden
@by_wire
def test_operations_of_the_backward_pass_as_the_reference(wire, hidden, shape):
    payload, scales = any_wire_rows(wire, hidden, 300 if hidden < 2000 else 40)
    layout = to_cuda(random_layout(len(payload), *shape))
    rng = np.random.default_rng(13)
    row_weights = rng.normal(size=layout.num_expert_rows).astype(np.float32)
    row_weights[::5] = 1e-30
    out = rng.integers(0, 65536, (layout.num_expert_rows, hidden), dtype=np.uint16)
    out[::2] = reference.float32_to_bf16(rng.normal(size=out[::2].shape).astype(np.float32))
    parts = (*device_rows(payload, scales), wire, hidden)
    want_of = payload, scales, wire, hidden
    rows = cuda.to_bf16_rows(*parts, layout, torch.from_numpy(row_weights).cuda())
    want = reference.to_bf16_rows(*want_of, layout.source, row_weights)
    assert_rows_equal(host(rows), (want,))
    dots = cuda.row_dots(*parts, bf16_tensor(out).cuda(), layout)
    want = reference.row_dots(*want_of, out, layout.source)
    assert_rows_equal((host(dots)[0][:, None],), (want[:, None],))


@pytest.mark.parametrize("shape", [*LAYOUTS, pytest.param((1, 2, 256), id="wide padding")])
@pytest.mark.parametrize("hidden", [32, 96, 160, 2880, 7168])
@by_wire
def test_columns_of_any_bytes_as_the_reference(wire, hidden, shape):
    payload, scales = any_wire_rows(wire, hidden)
    layout = to_cuda(random_layout(len(payload), *shape)) if shape else None
    segments = (
        (layout.source, np.array(layout.num_rows_list), layout.expert_offsets_array)
        if layout
        else (None, None, None)
    )
    codes, fp8_scales = cuda.to_fp8_columns(*device_rows(payload, scales), wire, hidden, layout)
    want = reference.to_fp8_columns(payload, scales, wire, hidden, *segments)
    assert_rows_equal(host(codes), want[:1])
    assert_rows_equal(host(fp8_scales), want[1:])


@pytest.mark.parametrize(
    ("hidden", "num_topk"), [(32, 1), (160, 3), (2880, 8), (7168, 9), (96, 70)]
)
@pytest.mark.parametrize("weighted", [True, False])
@by_wire
def test_weighted_reduce_as_the_reference(wire, weighted, hidden, num_topk):
    layout = to_cuda(random_layout(200, num_topk, 5, 16))
    rng = np.random.default_rng(9)
    out = rng.integers(0, 65536, (layout.num_expert_rows, hidden), dtype=np.uint16)
    out[::2] = reference.float32_to_bf16(rng.normal(size=out[::2].shape).astype(np.float32))
    weights = layout.weights.cpu().numpy() if weighted else None
    got = cuda.weighted_reduce(bf16_tensor(out).cuda(), layout, wire, weighted=weighted)
    with np.errstate(invalid="ignore", over="ignore"):
        want = reference.weighted_reduce(out, layout.slot_rows.cpu().numpy(), weights, wire)
    assert_rows_equal(host(*got), want)


def random_places(num_tokens, num_rows, most, seed=10):
    """A plan in which each token has up to `most` of the wire rows, in order."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, num_tokens)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places = [np.sort(rng.choice(num_rows, n, replace=False)) for n in counts]
    return types.SimpleNamespace(
        num_tokens=num_tokens,
        place_offsets=torch.from_numpy(offsets),
        places=torch.from_numpy(np.concatenate(places).astype(np.int32)),
    )


@pytest.mark.parametrize("many", [0, cuda.MANY], ids=["many", "few"])
@pytest.mark.parametrize(("hidden", "most"), [(32, 3), (160, 3), (2880, 8), (7168, 9)])
@by_wire
def test_reduces_of_wire_rows_as_the_reference(wire, hidden, most, many, monkeypatch):
    monkeypatch.setattr(cuda, "MANY", many)
    payload, scales = any_wire_rows(wire, hidden)
    plan = random_places(130, len(payload), most)
    got = cuda.final_reduce(*device_rows(payload, scales), wire, hidden, to_cuda(plan))
    with np.errstate(invalid="ignore", over="ignore"):
        offsets, places = plan.place_offsets.numpy(), plan.places.numpy()
        want = reference.final_reduce(payload, scales, wire, hidden, offsets, places)
        want_sums = reference.relay_reduce(payload, scales, wire, hidden, offsets, places)
    assert_rows_equal(host(got), (want,))
    sums = cuda.relay_reduce(*device_rows(payload, scales), wire, hidden, to_cuda(plan))
    assert_rows_equal(host(*sums), want_sums)


@pytest.mark.parametrize("hidden", [64, 2880])
@by_wire
def test_every_place_of_a_token_gets_the_same_row_and_no_other_row_is_written(wire, hidden):
    bits = hard_bf16_rows(hidden)[-80:]
    num_tokens = len(bits)
    places = np.random.default_rng(11).permutation(900).astype(np.int32)
    offsets = np.sort(np.random.default_rng(12).integers(0, 801, num_tokens + 1)).astype(np.int32)
    offsets[0], offsets[-1] = 0, 800  # the places from 800 on belong to no token
    plan = types.SimpleNamespace(
        place_offsets=torch.from_numpy(offsets), places=torch.from_numpy(places)
    )
    got = cuda.quantize_rows(bf16_tensor(bits).cuda(), wire, to_cuda(plan))
    want = [np.full(part.shape, POISON, np.uint8) for part in got]
    tokens = np.repeat(np.arange(num_tokens), np.diff(offsets))
    for part, rows in zip(want, reference.quantize_rows(bits, wire), strict=True):
        part[places[:800]] = rows[tokens]
    assert_rows_equal(host(*got), want)


@by_wire
def test_no_rows_make_no_rows(wire):
    """SHP-07."""
    hidden = 96
    payload, scales = cuda.quantize_rows(
        torch.zeros((0, hidden), dtype=torch.bfloat16).cuda(), wire
    )
    assert payload.shape == (0, wire.payload_bytes(hidden))
    parts = payload, scales, wire, hidden
    layout = to_cuda(random_layout(0, 2, 3, 128))
    for given in (None, layout):
        codes, fp8_scales = cuda.to_fp8_rows(*parts, given)
        assert (codes.shape, fp8_scales.shape) == ((0, hidden), (0, 1))
        assert cuda.to_bf16_rows(*parts, given).shape == (0, hidden)
        codes, fp8_scales = cuda.to_fp8_columns(*parts, given)
        assert (codes.shape, fp8_scales.shape) == ((hidden, 0), (0, hidden))
    assert cuda.dequantize(*parts).shape == (0, hidden)
    out = torch.zeros((0, hidden), dtype=torch.bfloat16).cuda()
    assert cuda.weighted_reduce(out, layout, wire, weighted=True)[0].shape == payload.shape
    plan = to_cuda(random_places(5, 0, 0))
    assert (cuda.final_reduce(*parts, plan) == 0).all()


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_views_that_start_anywhere_are_read_where_they_start(offset):
    bits = hard_bf16_rows(1024)[:64]
    flat = torch.zeros(bits.size + 16, dtype=torch.bfloat16, device="cuda")
    flat[offset : offset + bits.size] = bf16_tensor(bits).cuda().view(-1)
    x = flat[offset : offset + bits.size].view(bits.shape)
    got = cuda.quantize_rows(x, MXFP4)
    assert_rows_equal(host(*got), reference.quantize_rows(bits, MXFP4))
    payload, scales = got
    shifted = torch.zeros(payload.numel() + 16, dtype=torch.uint8, device="cuda")
    shifted[offset : offset + payload.numel()] = payload.view(-1)
    view = shifted[offset : offset + payload.numel()].view(payload.shape)
    want = host(*cuda.to_fp8_rows(payload, scales, MXFP4, 1024))
    assert_rows_equal(host(*cuda.to_fp8_rows(view, scales, MXFP4, 1024)), want)


def test_runs_on_the_current_stream_behind_a_busy_kernel():
    bits = hard_bf16_rows(1024)
    x = torch.zeros(bits.shape, dtype=torch.bfloat16, device="cuda")
    late = bf16_tensor(bits).cuda()
    cuda.to_fp8_rows(*cuda.quantize_rows(x, MXFP4), MXFP4, 1024)  # loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # some 250 ms, then x is filled
        x.copy_(late)
        parts = cuda.quantize_rows(x, MXFP4)
        got = cuda.to_fp8_rows(*parts, MXFP4, 1024)
        assert not stream.query(), "the host waited"
    stream.synchronize()
    want = reference.quantize_rows(bits, MXFP4)
    assert_rows_equal(host(*parts), want)
    assert_rows_equal(host(*got), reference.to_fp8_rows(*want, MXFP4, 1024))


def test_forty_runs_are_bit_equal():
    x = torch.randn(512, 2880, device="cuda").bfloat16()
    layout = to_cuda(random_layout(512, 2, 4, 128))
    expert_out = torch.randn(layout.num_expert_rows, 2880, device="cuda").bfloat16()
    seen = set()
    for _ in range(40):
        parts = cuda.quantize_rows(x, MXFP4)
        made = (
            *parts,
            *cuda.to_fp8_rows(*parts, MXFP4, 2880, layout, "column"),
            *cuda.to_fp8_columns(*parts, MXFP4, 2880, layout),
            *cuda.weighted_reduce(expert_out, layout, MXFP4, weighted=True),
        )
        seen.add(tuple(a.tobytes() for a in host(*made)))
    assert len(seen) == 1


@by_wire
def test_large_rows_as_the_cpu_codec(wire):
    """4096 x 7168, planned and laid out by routing, as a dispatch and a combine of one rank."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 7168, generator=rng).bfloat16()
    idx = torch.rand(4096, 64, generator=rng).topk(8).indices
    weights = torch.rand(4096, 8, generator=rng)
    plan, layout = planned(idx, weights)
    device_plan, device_layout = planned(idx.cuda(), weights.cuda())
    parts, want = cuda.quantize_rows(x.cuda(), wire, device_plan), cpu.quantize_rows(x, wire, plan)
    assert_rows_equal(host(*parts), host(*want))
    rows = *parts, wire, 7168
    host_rows = *want, wire, 7168
    got = cuda.to_fp8_rows(*rows, device_layout, "column")
    assert_rows_equal(host(*got), host(*cpu.to_fp8_rows(*host_rows, layout, "column")))
    got = cuda.to_fp8_columns(*rows, device_layout)
    for g, w in zip(got, cpu.to_fp8_columns(*host_rows, layout), strict=True):
        assert_rows_equal(host(g), host(w))
    out = cpu.to_bf16_rows(*host_rows, layout)
    assert_rows_equal(host(cuda.to_bf16_rows(*rows, device_layout)), host(out))
    sums = cuda.weighted_reduce(out.cuda(), device_layout, wire, weighted=True)
    host_sums = cpu.weighted_reduce(out, layout, wire, weighted=True)
    assert_rows_equal(host(*sums), host(*host_sums))
    y = cuda.final_reduce(*sums, wire, 7168, device_plan)
    assert_rows_equal(host(y), host(cpu.final_reduce(*host_sums, wire, 7168, plan)))


def planned(idx, weights):
    """The plan of one rank with 64 experts, and the layout of what it sends to itself."""
    plan = routing.plan(idx, weights, routing.Placement(64, 1))
    num_rows = plan.expert_counts.sum(0)
    return plan, routing.expert_layout(plan.route, 8, num_rows, 128)


def same_bytes(a, b):
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def test_rows_beyond_two_to_the_31_elements():
    """SHP-20: 299594 x 7168, in one call as in parts that lie below."""
    num_rows, hidden, part = 299594, 7168, 100000
    x = torch.empty((num_rows, hidden), dtype=torch.bfloat16, device="cuda")
    for start in range(0, num_rows, part):
        x[start : start + part].normal_()
    wires = [WireFormat(name) for name in ("mxfp4", "fp8", "bf16")]
    for wire in wires:
        payload, scales = cuda.quantize_rows(x, wire)
        codes, fp8_scales = cuda.to_fp8_rows(payload, scales, wire, hidden, None, "column")
        rows = cuda.to_bf16_rows(payload, scales, wire, hidden)
        for start in range(0, num_rows, part):
            few = slice(start, start + part)
            own = cuda.quantize_rows(x[few].clone(), wire)
            assert same_bytes(payload[few], own[0])
            assert same_bytes(scales[few], own[1])
            own_codes, own_scales = cuda.to_fp8_rows(*own, wire, hidden)
            assert same_bytes(codes[few], own_codes)
            assert same_bytes(fp8_scales[few], own_scales)
            assert same_bytes(rows[few], cuda.to_bf16_rows(*own, wire, hidden))
            del own, own_codes, own_scales
    last = num_rows // 128 * 128
    payload, scales = cuda.quantize_rows(x, MXFP4)
    columns, column_scales = cuda.to_fp8_columns(payload, scales, MXFP4, hidden)
    own, own_scales = cuda.to_fp8_columns(payload[last:], scales[last:], MXFP4, hidden)
    assert same_bytes(columns[:, last:], own)
    assert same_bytes(column_scales[-1:], own_scales)
    first, first_scales = cuda.to_fp8_columns(payload[:1024], scales[:1024], MXFP4, hidden)
    assert same_bytes(columns[:, :1024], first)
    assert same_bytes(column_scales[:8], first_scales)


def test_reduces_beyond_two_to_the_31_elements():
    """SHP-20 for combine: the last of 299594 rows."""
    num_rows, hidden, few = 299594, 7168, 40
    x = torch.empty((num_rows, hidden), dtype=torch.bfloat16, device="cuda")
    for start in range(0, num_rows, 100000):
        x[start : start + 100000].normal_()
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda").flip(0)[:, None].contiguous()
    layout = types.SimpleNamespace(slot_rows=slots, weights=None)
    payload, _ = cuda.weighted_reduce(x, layout, BF16, weighted=False)
    assert same_bytes(payload.view(torch.bfloat16)[-few:], x[:few].flip(0) + 0)
    assert same_bytes(payload.view(torch.bfloat16)[:few], x[-few:].flip(0) + 0)
    plan = types.SimpleNamespace(
        num_tokens=num_rows,
        place_offsets=torch.arange(num_rows + 1, dtype=torch.int32, device="cuda"),
        places=slots.view(-1),
    )
    y = cuda.final_reduce(payload, torch.empty((num_rows, 0)).cuda(), BF16, hidden, plan)
    assert same_bytes(y[-few:], x[-few:] + 0)
    assert same_bytes(y[:few], x[:few] + 0)
