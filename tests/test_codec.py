"""The codec against the reference, byte by byte, on the data where rounding goes wrong."""

import contextlib
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from numeric_cases import CASES, DECODE_CASES, FP8_CASES

from fp4comm import PackedRows, WireFormat, quantize, reference, routing
from fp4comm.codec import cpu, threads

WIRES = [
    WireFormat(name, rule)
    for name, rules in [
        ("bf16", [None]),
        ("fp8", ["ceil", "floor"]),
        ("mxfp8", ["ceil", "floor"]),
        ("mxfp4", ["even", "ceil", "floor"]),
    ]
    for rule in rules
]
by_wire = pytest.mark.parametrize("wire", WIRES, ids=lambda w: f"{w.name}-{w.scale_rule}")
POISON = 0xA5


def bf16_tensor(bits):
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def bf16_bits(tensor):
    return tensor.view(torch.int16).numpy().view(np.uint16)


def packed_of(payload, scales, wire, hidden):
    return PackedRows(torch.tensor(payload), torch.tensor(scales), wire, hidden)


def assert_rows_equal(got, want):
    """Compare row by row, the parts of a row together."""
    assert [g.shape for g in got] == [w.shape for w in want]
    wrong = np.zeros(len(want[0]), bool)
    for g, w in zip(got, want, strict=True):
        g, w = (a if a.dtype != np.float32 else a.view(np.uint32) for a in (g, w))
        wrong |= (g != w).reshape(len(w), -1).any(axis=1)
    rows = np.flatnonzero(wrong)
    assert not len(rows), f"{len(rows)} rows differ, first {rows[0]}: " + "; ".join(
        f"{g[rows[0]]} != {w[rows[0]]}" for g, w in zip(got, want, strict=True)
    )


def hard_bf16_rows(hidden):
    """All 65536 patterns, runs of neighbours, random patterns, and blocks of every magnitude."""
    rng = np.random.default_rng(5)
    every = np.arange(65536, dtype=np.uint16)
    shuffled = rng.permutation(every)
    narrow = rng.integers(0, 0x10000, 65536, dtype=np.uint16) & 0x807F
    exponents = np.repeat(rng.integers(0, 250, 65536 // 32), 32) + rng.integers(0, 5, 65536)
    scaled = narrow | (exponents << 7).astype(np.uint16)
    tiny = narrow | (np.repeat(rng.integers(0, 5, 65536 // 32), 32) << 7).astype(np.uint16)
    flat = np.concatenate([every, shuffled, scaled, tiny, np.zeros(hidden, np.uint16)])
    return flat[: len(flat) // hidden * hidden].reshape(-1, hidden)


def hard_f32_rows(hidden):
    """Midpoints of E2M1 and E4M3 and their neighbours at every scale, random patterns."""
    rng = np.random.default_rng(6)
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, 4.25, 4.75, 464, 2**-10, 3])
    near = np.concatenate([np.nextafter(middles.astype(np.float32), s) for s in (-9e9, 9e9)])
    values = np.concatenate([middles.astype(np.float32), near])
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values[None, :], np.arange(-149, 127)[:, None], dtype=np.float32)
    scaled = scaled.reshape(-1)
    scaled = np.concatenate([scaled, -scaled])
    bits = rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint32)
    narrow = (bits & 0x807FFFFF) | (rng.integers(100, 108, len(bits)) << 23).astype(np.uint32)
    with np.errstate(invalid="ignore"):
        flat = np.concatenate([scaled, bits.view(np.float32), narrow.view(np.float32)])
    return flat[: len(flat) // hidden * hidden].reshape(-1, hidden)


def hard_fp8_pairs(hidden):
    """All codes under powers of two, other scales, subnormal ones and unfit ones."""
    rng = np.random.default_rng(7)
    scales = [1.0, 2**-127, 2**-126, 2**-149, 2**127, 3e38, 0.3, 1.7e-38, 0.0, -1.0, np.nan, np.inf]
    groups = -(-hidden // 128)
    x_scales = rng.choice(np.array(scales, np.float32), (256, groups))
    codes = rng.integers(0, 256, (256, hidden), dtype=np.uint8)
    codes[:128] &= 0xBF  # without NaN
    return codes, x_scales


def random_layout(num_rows, num_topk, num_experts, alignment, seed=0):
    """Slots of wire rows -> an expert layout, made by a plain loop."""
    rng = np.random.default_rng(seed)
    experts = rng.integers(-1, num_experts, (num_rows, num_topk))
    counts = np.array([(experts == e).sum() for e in range(num_experts)], np.int64)
    offsets = np.concatenate([[0], np.cumsum(-(-counts // alignment) * alignment)]).astype(np.int64)
    slot_rows = np.full((num_rows, num_topk), -1, np.int32)
    source = np.full(offsets[-1], -1, np.int64)
    fill = offsets[:-1].copy()
    for r in range(num_rows):
        for k in range(num_topk):
            if experts[r, k] >= 0:
                slot_rows[r, k] = fill[experts[r, k]]
                source[fill[experts[r, k]]] = r
                fill[experts[r, k]] += 1
    weights = rng.normal(size=(num_rows, num_topk)).astype(np.float32)
    padding = np.stack([offsets[:-1] + counts, offsets[1:]])
    return types.SimpleNamespace(
        num_expert_rows=int(offsets[-1]),
        num_rows_list=counts.tolist(),
        expert_offsets_array=offsets,
        padding=torch.from_numpy(padding),
        tiles=torch.from_numpy(routing.tile_table(counts, offsets)),
        slot_rows=torch.from_numpy(slot_rows),
        weights=torch.from_numpy(weights),
        row_source=torch.from_numpy(source.astype(np.int32)),
        source=source,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_quantize_and_decode_make_the_bytes_of_the_case(case):
    x = bf16_tensor(case.x) if case.x.dtype == np.uint16 else torch.from_numpy(case.x)
    packed = quantize(x, case.wire)
    assert_rows_equal(
        (packed.payload.numpy(), packed.scales.numpy(), packed.to_float32().numpy()),
        (case.payload, case.scales, case.decoded),
    )


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda c: c.id)
def test_decodes_to_the_values_of_the_case(case):
    packed = packed_of(case.payload, case.scales, case.wire, case.decoded.shape[1])
    assert_rows_equal((packed.to_float32().numpy(),), (case.decoded,))


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda c: c.id)
def test_arrives_as_the_fp8_of_the_case(case):
    packed = packed_of(case.payload, case.scales, case.wire, case.codes.shape[1])
    codes, scales = packed.to_fp8_rows()
    got = codes.view(torch.uint8).numpy(), scales.numpy()
    assert_rows_equal(got, (case.codes, case.fp8_scales))


@pytest.mark.parametrize("hidden", [32, 96, 1024, 2880])
@by_wire
def test_quantizes_any_bf16_as_the_reference(wire, hidden):
    """NUM-36: all 65536 patterns are among them."""
    bits = hard_bf16_rows(hidden)
    packed = quantize(bf16_tensor(bits), wire)
    got = packed.payload.numpy(), packed.scales.numpy()
    assert_rows_equal(got, reference.quantize_rows(bits, wire))


@pytest.mark.parametrize("hidden", [32, 160, 1024])
@by_wire
def test_quantizes_any_float32_as_the_reference(wire, hidden):
    values = hard_f32_rows(hidden)
    packed = quantize(torch.from_numpy(values), wire)
    got = packed.payload.numpy(), packed.scales.numpy()
    assert_rows_equal(got, reference.quantize_rows(values, wire))


@pytest.mark.parametrize("hidden", [32, 160, 1024])
@by_wire
def test_quantizes_any_fp8_pair_as_the_reference(wire, hidden):
    codes, scales = hard_fp8_pairs(hidden)
    pair = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
    packed = quantize(pair, wire)
    got = packed.payload.numpy(), packed.scales.numpy()
    assert_rows_equal(got, reference.quantize_rows((codes, scales), wire))


def any_wire_rows(wire, hidden, num_rows=300):
    """Random bytes, half of the scales close together so that gaps of every size occur."""
    rng = np.random.default_rng(8)
    payload = rng.integers(0, 256, (num_rows, wire.payload_bytes(hidden)), dtype=np.uint8)
    scales = rng.integers(0, 256, (num_rows, wire.scale_bytes(hidden)), dtype=np.uint8)
    base = rng.integers(0, 230, (num_rows, 1))
    near = base + rng.integers(0, 24, scales.shape)
    scales[::2] = near[::2]
    scales[1::7] = rng.choice(np.array([0, 1, 2, 255], np.uint8), scales[1::7].shape)
    return payload, scales


LAYOUTS = [
    pytest.param(None, id="in order"),
    pytest.param((3, 5, 128), id="expert-major"),
    pytest.param((1, 2, 1), id="unaligned"),
    pytest.param((2, 400, 16), id="more experts than rows"),
]


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("hidden", [32, 1024, 2880])
@by_wire
def test_arrival_of_any_bytes_as_the_reference(wire, hidden, shape):
    payload, scales = any_wire_rows(wire, hidden)
    layout = random_layout(len(payload), *shape) if shape else None
    source = layout.source if shape else None
    packed = packed_of(payload, scales, wire, hidden)
    want = reference.to_fp8_rows(payload, scales, wire, hidden, source)
    for scale_layout in ("row", "column"):
        codes, fp8_scales = packed.to_fp8_rows(layout, scale_layout)
        assert fp8_scales.stride()[0 if scale_layout == "column" else 1] == 1
        assert_rows_equal((codes.view(torch.uint8).numpy(), fp8_scales.numpy()), want)
    got = bf16_bits(packed.to_bf16(layout))
    assert_rows_equal((got,), (reference.to_bf16_rows(payload, scales, wire, hidden, source),))
    assert_rows_equal(
        (packed.to_float32().numpy(),), (reference.dequantize(payload, scales, wire, hidden),)
    )


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("hidden", [32, 160, 2880])
@by_wire
def test_columns_of_any_bytes_as_the_reference(wire, hidden, shape):
    payload, scales = any_wire_rows(wire, hidden)
    layout = random_layout(len(payload), *shape) if shape else None
    segments = (
        (layout.source, np.array(layout.num_rows_list), layout.expert_offsets_array)
        if layout
        else (None, None, None)
    )
    codes, fp8_scales = packed_of(payload, scales, wire, hidden).to_fp8_columns(layout)
    want = reference.to_fp8_columns(payload, scales, wire, hidden, *segments)
    assert_rows_equal((codes.view(torch.uint8).numpy(),), want[:1])
    assert_rows_equal((fp8_scales.numpy(),), want[1:])


@pytest.mark.parametrize("weighted", [True, False])
@by_wire
def test_weighted_reduce_as_the_reference(wire, weighted):
    layout = random_layout(200, 3, 5, 16)
    rng = np.random.default_rng(9)
    out = rng.integers(0, 65536, (layout.num_expert_rows, 160), dtype=np.uint16)
    out[::2] = reference.float32_to_bf16(rng.normal(size=out[::2].shape).astype(np.float32))
    weights = layout.weights.numpy() if weighted else None
    got = cpu.weighted_reduce(bf16_tensor(out), layout, wire, weighted=weighted)
    with np.errstate(invalid="ignore", over="ignore"):
        want = reference.weighted_reduce(out, layout.slot_rows.numpy(), weights, wire)
    assert_rows_equal([part.numpy() for part in got], want)


@pytest.mark.parametrize("hidden", [32, 160, 2880])
@by_wire
def test_backward_operations_as_the_reference(wire, hidden):
    """Weighted BF16 rows, and the gradient of the weights."""
    payload, scales = any_wire_rows(wire, hidden)
    layout = random_layout(len(payload), 3, 5, 16)
    rng = np.random.default_rng(13)
    row_weights = rng.normal(size=layout.num_expert_rows).astype(np.float32)
    out = rng.integers(0, 65536, (layout.num_expert_rows, hidden), dtype=np.uint16)
    out[::2] = reference.float32_to_bf16(rng.normal(size=out[::2].shape).astype(np.float32))
    parts = torch.from_numpy(payload), torch.from_numpy(scales), wire, hidden
    rows = cpu.to_bf16_rows(*parts, layout, torch.from_numpy(row_weights))
    want = reference.to_bf16_rows(payload, scales, wire, hidden, layout.source, row_weights)
    assert_rows_equal((bf16_bits(rows),), (want,))
    dots = cpu.row_dots(*parts, bf16_tensor(out), layout).numpy()
    want = reference.row_dots(payload, scales, wire, hidden, out, layout.source)
    assert_rows_equal((dots[:, None],), (want[:, None],))
    assert np.isfinite(dots).any()


@by_wire
def test_reduces_of_wire_rows_as_the_reference(wire):
    payload, scales = any_wire_rows(wire, 160)
    rng = np.random.default_rng(10)
    counts = rng.integers(0, 4, 130)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places = np.concatenate(
        [np.sort(rng.choice(len(payload), n, replace=False)) for n in counts]
    ).astype(np.int32)
    plan = types.SimpleNamespace(
        num_tokens=130,
        place_offsets=torch.from_numpy(offsets),
        places=torch.from_numpy(places),
    )
    parts = torch.from_numpy(payload), torch.from_numpy(scales)
    got = cpu.final_reduce(*parts, wire, 160, plan)
    sums = cpu.relay_reduce(*parts, wire, 160, plan)
    with np.errstate(invalid="ignore", over="ignore"):
        want = reference.final_reduce(payload, scales, wire, 160, offsets, places)
        want_sums = reference.relay_reduce(payload, scales, wire, 160, offsets, places)
    assert_rows_equal((bf16_bits(got),), (want,))
    assert_rows_equal([part.numpy() for part in sums], want_sums)


@by_wire
def test_every_place_of_a_token_gets_the_same_row_and_no_other_row_is_written(wire, monkeypatch):
    bits = hard_bf16_rows(64)[:500]
    places = np.random.default_rng(11).permutation(900).astype(np.int32)
    offsets = np.sort(np.random.default_rng(12).integers(0, 801, 501)).astype(np.int32)
    offsets[0], offsets[-1] = 0, 800  # the places from 800 on belong to no token
    plan = types.SimpleNamespace(
        place_offsets=torch.from_numpy(offsets), places=torch.from_numpy(places)
    )
    poisoned = lambda n, wire, hidden, device: (  # noqa: E731
        torch.full((n, wire.payload_bytes(hidden)), POISON, dtype=torch.uint8),
        torch.full((n, wire.scale_bytes(hidden)), POISON, dtype=torch.uint8),
    )
    monkeypatch.setattr(cpu, "empty_rows", poisoned)
    payload, scales = cpu.quantize_rows(bf16_tensor(bits), wire, plan)
    want = [np.full(part.shape, POISON, np.uint8) for part in (payload, scales)]
    tokens = np.repeat(np.arange(500), np.diff(offsets))
    for part, rows in zip(want, reference.quantize_rows(bits, wire), strict=True):
        part[places[:800]] = rows[tokens]
    assert_rows_equal((payload.numpy(), scales.numpy()), want)


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def every_input(wire):
    """Make inputs for `every_operation`."""
    x = bf16_tensor(hard_bf16_rows(1024)[:256])
    codes, scales = hard_fp8_pairs(160)
    pair = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
    parts = *map(torch.from_numpy, any_wire_rows(wire, 160)), wire, 160
    layout = random_layout(300, 2, 7, 8)
    out = bf16_tensor(np.resize(hard_bf16_rows(1024), (layout.num_expert_rows, 160)))
    return x, torch.from_numpy(hard_f32_rows(1024)[:64]), pair, parts, layout, out


def every_operation(wire, inputs):
    """Run all operations of the codec and return what they made."""
    x, floats, pair, parts, layout, out = inputs
    made = [*cpu.quantize_rows(x, wire), *cpu.quantize_rows(floats, wire)]
    made += cpu.quantize_rows(pair, wire)
    fp8_rows, fp8_scales = cpu.to_fp8_rows(*parts, layout)
    columns, column_scales = cpu.to_fp8_columns(*parts, layout)
    made += [fp8_rows.view(torch.uint8), fp8_scales, columns.view(torch.uint8), column_scales]
    made += [cpu.to_bf16_rows(*parts, layout).view(torch.int16), cpu.dequantize(*parts)]
    made += cpu.weighted_reduce(out, layout, wire, weighted=True)
    plan = types.SimpleNamespace(
        num_tokens=100,
        place_offsets=torch.arange(0, 303, 3, dtype=torch.int32),
        places=torch.arange(300, dtype=torch.int32),
    )
    made.append(cpu.final_reduce(*parts, plan).view(torch.int16))
    return [part.numpy() for part in made]


@by_wire
def test_bytes_do_not_depend_on_the_number_of_threads(wire, monkeypatch):
    """COM-40: nor on the run."""
    monkeypatch.setattr(threads, "MIN_BYTES", 1)
    monkeypatch.setattr(threads, "num_cores", lambda: 64)
    inputs, made = every_input(wire), []
    for count in (1, 1, 2, 7, 64):
        with torch_threads(count):
            made.append(every_operation(wire, inputs))
    for other in made[1:]:
        for got, want in zip(other, made[0], strict=True):
            assert_rows_equal((got,), (want,))


@by_wire
def test_a_caller_that_flushes_subnormals_gets_the_same_bytes(wire):
    inputs = every_input(wire)
    want = every_operation(wire, inputs)
    torch.set_flush_denormal(True)
    try:
        made = every_operation(wire, inputs)
    finally:
        torch.set_flush_denormal(False)
    for got, wanted in zip(made, want, strict=True):
        assert_rows_equal((got,), (wanted,))


def test_threads_are_no_more_than_the_cores_of_the_process(monkeypatch):
    """INS-16: mpirun pins a rank to one core."""
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    with torch_threads(4):
        assert threads.num_threads() == 1


def test_kernel_ranges_cover_every_row_once(monkeypatch):
    monkeypatch.setattr(threads, "MIN_BYTES", 1)
    monkeypatch.setattr(threads, "num_threads", lambda: 5)
    for num_rows in (0, 1, 4, 5, 6, 1001):
        seen = np.zeros(num_rows, int)

        def count(first, last, seen=seen):
            seen[first:last] += 1

        threads.run(count, num_rows, 1)
        assert (seen == 1).all()


def test_first_error_of_a_kernel_reaches_the_caller():
    def fail(first, last):
        raise MemoryError("no scratch")

    with pytest.raises(MemoryError, match="no scratch"):
        threads.run(fail, 3, 1)


@by_wire
def test_shp_07_no_rows(wire):
    packed = quantize(torch.empty(0, 7168).bfloat16(), wire)
    assert packed.payload.shape == (0, wire.payload_bytes(7168))
    assert packed.scales.shape == (0, wire.scale_bytes(7168))
    codes, scales = packed.to_fp8_rows()
    assert (codes.shape, scales.shape) == ((0, 7168), (0, 56))
    columns, column_scales = packed.to_fp8_columns()
    assert (columns.shape, column_scales.shape) == ((7168, 0), (0, 7168))
    assert packed.to_bf16().shape == packed.to_float32().shape == (0, 7168)


@pytest.mark.parametrize("shape", [(2, 16384), (2, 32768), (7000, 32), (1, 2_097_152)])
def test_shp_22_long_rows_and_many(shape):
    bits = np.resize(hard_bf16_rows(1024).reshape(-1), shape)
    packed = quantize(bf16_tensor(bits), "mxfp4")
    payload, scales = reference.quantize_rows(bits, packed.format)
    assert_rows_equal((packed.payload.numpy(), packed.scales.numpy()), (payload, scales))
    codes, fp8_scales = packed.to_fp8_rows()
    want = reference.to_fp8_rows(payload, scales, packed.format, shape[1])
    assert_rows_equal((codes.view(torch.uint8).numpy(), fp8_scales.numpy()), want)


def test_shp_20_elements_beyond_2_to_the_31():
    """The last of 299594 rows of 7168; the others have no place and their memory is not touched."""
    num_rows = 299_594
    x = torch.from_numpy(np.empty((num_rows, 7168), np.int16)).view(torch.bfloat16)
    x[-1] = bf16_tensor(hard_bf16_rows(7168)[:1])[0]
    offsets = torch.zeros(num_rows + 1, dtype=torch.int32)
    offsets[-1] = 1
    places = torch.zeros(1, dtype=torch.int32)
    plan = types.SimpleNamespace(place_offsets=offsets, places=places)
    wire = WireFormat("mxfp4")
    payload, scales = cpu.quantize_rows(x, wire, plan)
    want = reference.quantize_rows(bf16_bits(x[-1:]), wire)
    assert_rows_equal((payload.numpy(), scales.numpy()), want)


@by_wire
def test_num_35_padding_is_written_whatever_was_in_memory(wire, monkeypatch):
    """Codes 0 with scale 1.0, BF16 +0; no other row than the live ones and the padding is there."""
    layout = random_layout(7, 2, 3, 8)
    packed = quantize(torch.randn(7, 160), wire)
    poison = 0xFF
    monkeypatch.setattr(
        cpu,
        "empty",
        lambda shape, dtype: torch.from_numpy(
            np.frombuffer(
                bytearray([poison]) * int(np.prod(shape) * np.dtype(dtype).itemsize), dtype
            ).reshape(shape)
        ),
    )
    codes, scales = packed.to_fp8_rows(layout)
    padding = torch.from_numpy(layout.source) < 0
    assert padding.any()
    assert not codes.view(torch.uint8)[padding].any()
    assert (scales[padding] == 1).all()
    assert not packed.to_bf16(layout).view(torch.int16)[padding].any()
    arrays = packed.payload.numpy(), packed.scales.numpy(), wire, 160, layout.source
    want = reference.to_fp8_rows(*arrays)
    assert_rows_equal((codes.view(torch.uint8).numpy(), scales.numpy()), want)


def test_shp_34_scales_are_contiguous_and_can_be_viewed_as_bytes():
    packed = quantize(torch.randn(16, 640), "mxfp8")
    _, scales = packed.to_fp8_rows()
    assert scales.shape == (16, 5)  # SHP-33: five groups, not padded to a multiple of four
    assert scales.is_contiguous()
    assert scales.view(torch.uint8).shape == (16, 20)
    assert packed.scales.is_contiguous()


def test_num_01_kernels_compiled_by_a_process_that_flushes_subnormals(tmp_path):
    """The tables that numba keeps on disk are made from bits: 2**-127 does not become 0."""
    code = (
        "import sys, torch\n"
        "torch.set_flush_denormal(sys.argv[1] == 'flush')\n"
        "from fp4comm import PackedRows\n"
        "ones, zeros = torch.full((1, 16), 0x22).byte(), torch.zeros(1, 1).byte()\n"
        "values = PackedRows(ones, zeros, 'mxfp4', 32).to_float32()\n"
        "print(hex(values.view(torch.int32)[0, 0].item()))\n"
    )
    for mode in ("flush", "keep"):
        done = subprocess.run(
            [sys.executable, "-c", code, mode],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "0x400000"
