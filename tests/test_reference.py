"""The oracle against cases worked by hand, ml_dtypes, and exhaustive sweeps of formats.md."""

import itertools

import ml_dtypes
import numeric_cases as cases
import numpy as np
import pytest

from fp4comm import reference
from fp4comm.formats import FORMATS, WireFormat

BF16 = WireFormat("bf16")
FP8 = WireFormat("fp8")
MXFP8 = WireFormat("mxfp8")
MXFP4 = WireFormat("mxfp4")
WIRES = [BF16, *(WireFormat(f.name, rule) for f in FORMATS.values() for rule in f.scale_rules)]
BLOCK_WIRES = WIRES[1:]
NAN, INF = np.nan, np.inf


def by_id(case):
    return case.id


def wire_id(wire):
    return f"{wire.name}-{wire.scale_rule}"


def bf16_bits(values):
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def constant_rows(values, hidden=32):
    return bf16_bits(np.float32(values)[:, None] * np.ones(hidden))


def assert_same_bits(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def canonical(values):
    values = np.array(values, np.float32)
    values.view(np.uint32)[np.isnan(values)] = 0x7FC00000
    return values


def to_e4m3(values):
    """Oracle of the E4M3 cast; ml_dtypes has no saturation, so the value is clamped first."""
    values = np.clip(np.asarray(values, np.float64), -448, 448)
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def pack(codes):
    return codes[:, 0::2] | codes[:, 1::2] << 4


# Cases


@pytest.mark.parametrize("case", cases.CASES, ids=by_id)
@pytest.mark.filterwarnings("error")  # NUM-08: no warning raised
def test_quantizes_to_the_bytes_of_the_case(case):
    payload, scales = reference.quantize_rows(case.x, case.wire)
    np.testing.assert_array_equal(scales, case.scales)
    np.testing.assert_array_equal(payload, case.payload)
    decoded = reference.dequantize(payload, scales, case.wire, case.x.shape[1])
    assert_same_bits(decoded, canonical(case.decoded))


@pytest.mark.parametrize("case", cases.DECODE_CASES, ids=by_id)
@pytest.mark.filterwarnings("error")
def test_decodes_to_the_values_of_the_case(case):
    hidden = case.decoded.shape[1]
    decoded = reference.dequantize(case.payload, case.scales, case.wire, hidden)
    assert_same_bits(decoded, canonical(case.decoded))
    bits = reference.to_bf16_rows(case.payload, case.scales, case.wire, hidden)
    np.testing.assert_array_equal(bits, reference.float32_to_bf16(decoded))


def test_num_01_bf16_of_scale_byte_0():
    bits = reference.to_bf16_rows(cases.ALL_ONES, np.zeros((1, 1), np.uint8), MXFP4, 32)
    np.testing.assert_array_equal(bits, 0x0040)


@pytest.mark.parametrize("case", cases.CAST_CASES, ids=by_id)
def test_casts_to_the_codes_of_the_case(case):
    np.testing.assert_array_equal(reference.float32_to_e4m3(case.values), case.codes)


@pytest.mark.parametrize("case", cases.FP8_CASES, ids=by_id)
@pytest.mark.filterwarnings("error")
def test_arrives_as_the_fp8_of_the_case(case):
    hidden = case.codes.shape[1]
    codes, scales = reference.to_fp8_rows(case.payload, case.scales, case.wire, hidden)
    np.testing.assert_array_equal(codes, case.codes)
    assert_same_bits(scales, case.fp8_scales)


# Quantize, swept


@pytest.mark.parametrize("wire", BLOCK_WIRES, ids=wire_id)
def test_num_36_all_bf16_patterns(wire):
    """Blocks of consecutive patterns, and each pattern beside a 2.0: against casts of ml_dtypes."""
    patterns = np.arange(65536, dtype=np.uint16).reshape(2048, 32)
    mixed = np.where(np.arange(32) % 2 == 0, patterns, 0x4000).astype(np.uint16)
    x = np.concatenate([patterns, mixed])
    payload, scales = reference.quantize_rows(x, wire)

    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = x.view(ml_dtypes.bfloat16).astype(np.float64)
    bad = ~np.isfinite(values).all(axis=1)
    np.testing.assert_array_equal(scales[:, 0] == 0xFF, bad)
    # The scales are tested in test_formats; here they are taken as they are.
    scaled = np.ldexp(values, 127 - scales.astype(int))
    element = wire.format.element
    dtype = ml_dtypes.float4_e2m1fn if element.name == "e2m1" else ml_dtypes.float8_e4m3fn
    with np.errstate(invalid="ignore"):
        clamped = np.clip(scaled, -element.largest, element.largest).astype(np.float32)
        codes = clamped.astype(dtype).view(np.uint8)
    codes[bad] = 0
    np.testing.assert_array_equal(payload, pack(codes) if element.name == "e2m1" else codes)
    decoded = reference.dequantize(payload, scales, wire, 32)
    overflow = np.isinf(decoded) & ~bad[:, None]
    if element.name == "e2m1" or wire.scale_rule == "floor":
        assert not overflow.any(), "formats.md 2: no BF16 input decodes to Inf"
    else:  # E4M3 under ceil: from 248 * 2^120 on the code rounds up to 256, and 2^128 is Inf
        np.testing.assert_array_equal(overflow, (np.abs(values) >= 248 * 2.0**120) & ~bad[:, None])
    np.testing.assert_array_equal(decoded[bad].view(np.uint32), 0x7FC00000)


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_bf16_and_float32_input_give_the_same_bytes(wire):
    bits = np.random.default_rng(1).integers(0, 65536, (64, 160)).astype(np.uint16)
    bits[bits & 0x7F80 == 0x7F80] ^= 0x4000  # finite: the bf16 wire keeps NaN payloads of BF16
    from_bf16 = reference.quantize_rows(bits, wire)
    from_float32 = reference.quantize_rows(reference.bf16_to_float32(bits), wire)
    for got, want in zip(from_bf16, from_float32, strict=True):
        np.testing.assert_array_equal(got, want)


def test_bf16_wire_keeps_bits_and_arrival_canonicalizes():
    bits = np.array([[0x7F81, 0xFFFF, 0x8000, 0x7F80] + 28 * [0x3F80]], np.uint16)
    payload, scales = reference.quantize_rows(bits, BF16)
    np.testing.assert_array_equal(payload.view(np.uint16), bits)
    rows = reference.to_bf16_rows(payload, scales, BF16, 32)
    np.testing.assert_array_equal(rows[0, :5], [0x7FC0, 0x7FC0, 0x8000, 0x7F80, 0x3F80])


@pytest.mark.parametrize("wire", BLOCK_WIRES, ids=wire_id)
def test_blocks_do_not_see_each_other(wire):
    """A row of 2880, short last fp8 block and one NaN block included, equals its blocks alone."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((2, 2880)) * 2.0 ** rng.integers(-140, 120, (2, 2880))).astype("f4")
    x[0, 2879] = NAN
    payload, scales = reference.quantize_rows(x, wire)
    decoded = reference.dequantize(payload, scales, wire, 2880)
    for b, first in enumerate(range(0, 2880, wire.format.block)):
        part = x[:, first : first + wire.format.block]
        alone, scale = reference.quantize_rows(part, wire)
        np.testing.assert_array_equal(scales[:, b : b + 1], scale)
        values = reference.dequantize(alone, scale, wire, part.shape[1])
        assert_same_bits(decoded[:, first : first + wire.format.block].copy(), values)


SQNR_DB = {  # formats.md 2
    "Gaussian": {"floor": 18.80, "ceil": 18.76, "even": 19.02},
    "Laplace": {"floor": 17.94, "ceil": 17.59, "even": 18.13},
    "Student t(3)": {"floor": 17.01, "ceil": 16.47, "even": 17.14},
    "outlier channels": {"floor": 16.11, "ceil": 16.43, "even": 16.74},
}


def sample(name, rng, shape):
    if name == "Gaussian":
        return rng.standard_normal(shape)
    if name == "Laplace":
        return rng.laplace(size=shape)
    if name == "Student t(3)":
        return rng.standard_t(3, shape)
    channels = np.where(rng.random(shape[1]) < 0.003, 30.0, 1.0)
    return rng.standard_normal(shape) * channels


@pytest.mark.parametrize("data", SQNR_DB)
def test_sqnr_table(data):
    x = bf16_bits(sample(data, np.random.default_rng(3), (64, 7168)))
    values = reference.bf16_to_float32(x).astype(np.float64)
    tolerance_db = 0.15 if data in ("Gaussian", "Laplace") else 0.5  # the others vary with the seed
    got = {}
    for rule, want in SQNR_DB[data].items():
        wire = WireFormat("mxfp4", rule)
        decoded = reference.dequantize(*reference.quantize_rows(x, wire), wire, 7168)
        got[rule] = 10 * np.log10((values**2).sum() / ((values - decoded) ** 2).sum())
        assert abs(got[rule] - want) < tolerance_db, f"{rule}: {got[rule]:.2f} dB"
    assert max(got, key=got.get) == "even"


# FP8 input (formats.md 5)


def fp8_pair(scale_rows, hidden, seed=4):
    """Random codes, NaNs left out, with the scales given, float32 [T, ceil(H/128)]."""
    scales = np.array(scale_rows, np.float32)
    codes = np.random.default_rng(seed).integers(0, 256, (len(scales), hidden)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x3A
    return codes, scales


def test_pair_is_one_rounding_of_code_times_scale():
    rng = np.random.default_rng(5)
    scales = (rng.random((32, 2)) * 2.0 ** rng.integers(-149, 110, (32, 2))).astype(np.float32)
    codes, scales = fp8_pair(scales, 256)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(scales, 128, axis=1)
    assert_same_bits(reference.load((codes, scales)), want)
    assert (np.abs(want[want != 0]) < 2.0**-126).any(), "subnormals are part of it"


def test_pair_with_power_of_two_scales_passes_the_fp8_wire_unchanged():
    exponents = np.arange(-127, 128)
    scales = np.ldexp(np.float32(1), exponents)[:, None]
    codes = np.tile(np.arange(128, dtype=np.uint8), (255, 1))  # a NaN code too
    codes[1::2] |= 0x80
    payload, bytes_ = reference.quantize_rows((codes, scales), FP8)
    np.testing.assert_array_equal(payload, codes)
    np.testing.assert_array_equal(bytes_[:, 0], exponents + 127)
    assert scales[0].view(np.uint32) == 0x00400000


def test_pair_with_other_scales_is_requantized_on_the_fp8_wire():
    """Groups are judged one by one; 2^-128 is a power of two, but not one that E8M0 has."""
    pair = fp8_pair([[2.0, 3.0, 0.5], [1.1, 2.0**-128, 2.0**127]], 2 * 128 + 64)
    payload, scales = reference.quantize_rows(pair, FP8)
    want_payload, want_scales = reference.quantize_rows(reference.load(pair), FP8)
    for row, group in ((0, 0), (0, 2), (1, 2)):
        columns = slice(group * 128, group * 128 + 128)
        np.testing.assert_array_equal(payload[row, columns], pair[0][row, columns])
    assert scales[:, [0, 2]].tolist() == [[128, 126], [want_scales[1, 0], 254]]
    for row, group in ((0, 1), (1, 0), (1, 1)):
        columns = slice(group * 128, group * 128 + 128)
        np.testing.assert_array_equal(payload[row, columns], want_payload[row, columns])
        assert scales[row, group] == want_scales[row, group]


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, -(2.0**-3), NAN, INF, -INF])
@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_bad_fp8_scale_makes_its_group_nan_and_no_other(wire, bad):
    pair = fp8_pair([[1.0, bad, 4.0]], 3 * 128 - 64)
    decoded = reference.dequantize(*reference.quantize_rows(pair, wire), wire, 320)
    np.testing.assert_array_equal(decoded[:, 128:256].view(np.uint32), 0x7FC00000)
    assert np.isfinite(decoded[:, :128]).all()
    assert np.isfinite(decoded[:, 256:]).all()


def test_pair_goes_to_the_bf16_wire_by_rounding():
    pair = fp8_pair([[1.1], [2.0**-130]], 128)
    pair[0][0, 3] = 0xFF
    payload, _ = reference.quantize_rows(pair, BF16)
    want = reference.float32_to_bf16(reference.load(pair))
    np.testing.assert_array_equal(payload.view(np.uint16), want)
    assert want[0, 3] == 0x7FC0


# Arrival as FP8 (formats.md 4)


def all_code_rows(wire):
    """One block [block] with every code of the element, NaN codes included."""
    num_codes = 2**wire.format.element.bits
    return np.resize(np.arange(num_codes, dtype=np.uint8), (num_codes // 16, 16)).reshape(-1)


def decode_codes(codes, wire):
    dtype = ml_dtypes.float4_e2m1fn if wire.name == "mxfp4" else ml_dtypes.float8_e4m3fn
    return codes.view(dtype).astype(np.float64)


@pytest.mark.parametrize("wire", [MXFP4, MXFP8], ids=wire_id)
@pytest.mark.parametrize("largest", [0, 1, 3, 5, 6, 7, 8, 26, 127, 252, 254])
def test_all_codes_at_all_gaps_equal_one_rounding(wire, largest):
    """The block under test is k = 0..25 binades below another of its group, at each end of E8M0."""
    codes = np.resize(all_code_rows(wire), (8, 32))  # E4M3 has 256 codes, E2M1 repeats
    headroom = wire.format.element.headroom
    shared = max(largest - headroom, 1)
    for gap in range(min(largest, 25) + 1):
        blocks = np.concatenate([np.zeros((8, 32), np.uint8), codes], axis=1)
        payload = pack(blocks) if wire.name == "mxfp4" else blocks
        scales = np.tile(np.uint8([largest, largest - gap]), (8, 1))
        got, got_scales = reference.to_fp8_rows(payload, scales, wire, 64)
        value = decode_codes(codes, wire)
        nan = np.isnan(value)
        want = to_e4m3(np.ldexp(value, largest - gap - shared))
        np.testing.assert_array_equal(got[:, 32:], np.where(nan, 0x7F, want), err_msg=f"k={gap}")
        np.testing.assert_array_equal(got_scales, np.ldexp(np.float32(1), shared - 127))
        if wire.name == "mxfp4" and gap <= 14 and largest > headroom:
            decoded = reference.e4m3_to_float32(got) * got_scales.astype(np.float64)
            exact = np.ldexp(value, largest - gap - 127)
            np.testing.assert_array_equal(decoded[:, 32:], exact)
        if wire.name == "mxfp4" and gap >= 19 and largest > headroom:
            np.testing.assert_array_equal(got[:, 32:] & 0x7F, 0)


def test_nibble_placed_in_an_e4m3_byte_is_the_value_times_2_to_minus_6():
    """formats.md 4: the three low bits at bits 4..2, the sign at bit 7."""
    codes = np.arange(16, dtype=np.uint8)
    placed = (codes & 7) << 2 | (codes & 8) << 4
    np.testing.assert_array_equal(
        reference.e4m3_to_float32(placed), reference.e2m1_to_float32(codes) * 2.0**-6
    )


def test_group_maximum_leaves_nan_and_zero_blocks_out():
    """A 0xFF block does not raise E*, an all-zero block (byte 0) does not lower it."""
    codes = np.tile(np.uint8([7, 1, 15, 0] + 28 * [0]), (3, 4))
    scales = np.uint8([[100, 0xFF, 0, 101], [0xFF, 0xFF, 9, 0xFF], [0, 0xFF, 0, 0]])
    got, got_scales = reference.to_fp8_rows(pack(codes), scales, MXFP4, 128)
    np.testing.assert_array_equal(got_scales[:, 0], np.float32([2.0**-32, 2.0**-124, 2.0**-126]))
    assert got[0, :3].tolist() == [0x74, 0x58, 0xF4]  # 192, 16, -192
    np.testing.assert_array_equal(got[0, 32:64], 0x7F)
    assert got[1, 64] == 0x7C
    np.testing.assert_array_equal(got[2, :3], to_e4m3([3.0, 0.25, -3.0]))  # S = 1: 2^(0 - 1)


@pytest.mark.parametrize("hidden", [32, 64, 96, 160, 224, 2880])
@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_short_last_group_equals_that_group_alone(wire, hidden):
    rng = np.random.default_rng(6)
    x = bf16_bits(rng.standard_normal((3, hidden)) * 2.0 ** rng.integers(-20, 20, (3, hidden)))
    codes, scales = reference.to_fp8_rows(*reference.quantize_rows(x, wire), wire, hidden)
    assert scales.shape == (3, -(-hidden // 128))
    first = (hidden - 1) // 128 * 128
    alone = reference.quantize_rows(x[:, first:], wire)
    tail, tail_scale = reference.to_fp8_rows(*alone, wire, hidden - first)
    np.testing.assert_array_equal(codes[:, first:], tail)
    np.testing.assert_array_equal(scales[:, -1:], tail_scale)


def test_bf16_wire_arrives_as_the_fp8_wire_would():
    x = bf16_bits(np.random.default_rng(7).standard_normal((5, 320)) * 1e-38)
    x[2, 7] = 0x7F80
    from_bf16 = reference.to_fp8_rows(*reference.quantize_rows(x, BF16), BF16, 320)
    from_fp8 = reference.to_fp8_rows(*reference.quantize_rows(x, FP8), FP8, 320)
    for got, want in zip(from_bf16, from_fp8, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(from_bf16[0][2, :128], 0x7F)


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_gathered_rows_and_padding(wire):
    x = np.arange(1, 4, dtype=np.float32)[:, None] * np.ones(160, np.float32)
    packed = reference.quantize_rows(x, wire)
    row_source = np.array([2, -1, 0, 2])
    codes, scales = reference.to_fp8_rows(*packed, wire, 160, row_source)
    all_codes, all_scales = reference.to_fp8_rows(*packed, wire, 160)
    np.testing.assert_array_equal(codes[[0, 2, 3]], all_codes[[2, 0, 2]])
    np.testing.assert_array_equal(scales[[0, 2, 3]], all_scales[[2, 0, 2]])
    np.testing.assert_array_equal(codes[1], 0)
    np.testing.assert_array_equal(scales[1], 1.0)
    bits = reference.to_bf16_rows(*packed, wire, 160, row_source)
    np.testing.assert_array_equal(bits[1], 0)
    np.testing.assert_array_equal(bits[[0, 2, 3]], bf16_bits(x[[2, 0, 2]]))  # 1, 2, 3 are exact


# Columns


def columns_by_definition(payload, scales, wire, hidden, segments, num_rows_padded):
    """formats.md 4 element by element, for block-scaled wires; segments are (start, live rows)."""
    values = decode_codes(
        np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)
        if wire.name == "mxfp4"
        else payload,
        wire,
    )
    codes = np.zeros((hidden, num_rows_padded), np.uint8)
    tile_scales = []
    for start, count in segments:
        for first in range(start, start + count, 128):
            rows = range(first, min(first + 128, start + count))
            tile_scales.append([])
            for h in range(hidden):
                column_bytes = [int(scales[r, h // wire.format.block]) for r in rows]
                finite = [b for b in column_bytes if b != 0xFF]
                shared = max(max(finite, default=0) - wire.format.element.headroom, 1)
                tile_scales[-1].append(2.0 ** (shared - 127))
                for r, b in zip(rows, column_bytes, strict=True):
                    nan = b == 0xFF or np.isnan(values[r, h])
                    codes[h, r] = 0x7F if nan else to_e4m3(np.ldexp(values[r, h], b - shared))
    return codes, np.array(tile_scales, np.float32).reshape(-1, hidden)


@pytest.mark.parametrize("wire", [MXFP4, MXFP8, FP8], ids=wire_id)
def test_columns_tile_by_tile(wire):
    """Experts of 2, 0 and 130 rows: 1 + 0 + 2 tiles; binades up to 30 apart, one NaN block."""
    rng = np.random.default_rng(8)
    num_rows, offsets, hidden = np.array([2, 0, 130]), np.array([0, 4, 4, 136]), 160
    exponents = rng.integers(-15, 16, (136, 1))
    x = (rng.standard_normal((136, hidden)) * 2.0**exponents).astype(np.float32)
    x[5, 40] = INF
    payload, scales = reference.quantize_rows(x, wire)
    got = reference.to_fp8_columns(payload, scales, wire, hidden, None, num_rows, offsets)
    want = columns_by_definition(payload, scales, wire, hidden, [(0, 2), (4, 130)], 136)
    np.testing.assert_array_equal(got[0], want[0])
    assert_same_bits(got[1], want[1])
    np.testing.assert_array_equal(got[0][:, [2, 3, 134, 135]], 0)  # padding


@pytest.mark.parametrize("wire", [MXFP4, MXFP8, FP8], ids=wire_id)
@pytest.mark.parametrize("lowest", [0, 229])
def test_columns_of_any_bytes_at_both_ends_of_e8m0(wire, lowest):
    """Foreign payloads, NaN codes of E4M3 among them; S is held at 1 at the lower end."""
    rng = np.random.default_rng(13)
    payload = rng.integers(0, 256, (7, wire.payload_bytes(160))).astype(np.uint8)
    scales = rng.integers(lowest, lowest + 26, (7, wire.scale_bytes(160))).astype(np.uint8)
    scales[2] = 0xFF
    scales[:, 0] = lowest
    got = reference.to_fp8_columns(payload, scales, wire, 160)
    want = columns_by_definition(payload, scales, wire, 160, [(0, 7)], 7)
    np.testing.assert_array_equal(got[0], want[0])
    assert_same_bits(got[1], want[1])


def test_columns_of_the_bf16_wire_equal_rows_of_the_transposed_tile():
    x = bf16_bits(np.random.default_rng(14).standard_normal((100, 64)) * 2.0**-125)
    codes, scales = reference.to_fp8_columns(*reference.quantize_rows(x, BF16), BF16, 64)
    transposed = reference.quantize_rows(np.ascontiguousarray(x.T), FP8)
    want_codes, want_scales = reference.to_fp8_rows(*transposed, FP8, 100)
    np.testing.assert_array_equal(codes, want_codes)
    assert_same_bits(scales, np.ascontiguousarray(want_scales.T))


def test_columns_gather_and_take_all_rows_as_one_expert_without_a_layout():
    x = np.float32([1, 2, 3])[:, None] * np.ones(32, np.float32)
    packed = reference.quantize_rows(x, MXFP4)
    row_source = np.array([2, 0, 0, -1])
    codes, scales = reference.to_fp8_columns(*packed, MXFP4, 32, row_source, [3], [0, 4])
    np.testing.assert_array_equal(codes[0] * [1, 1, 1, 0], codes[0])
    decoded = reference.e4m3_to_float32(codes) * scales.T
    np.testing.assert_array_equal(decoded, np.tile([3, 1, 1, 0], (32, 1)))
    codes, scales = reference.to_fp8_columns(*packed, MXFP4, 32)
    np.testing.assert_array_equal(reference.e4m3_to_float32(codes) * scales.T, x.T)


def test_columns_of_the_bf16_wire_quantize_each_column_by_itself():
    """Column h holds 448 * 2^h in one row, 2^h / 2 in the others; column 3 has an Inf."""
    x = np.full((130, 32), 0.5, np.float32)
    x[7] = 448
    x *= 2.0 ** np.arange(32)
    x[9, 3] = INF
    x[129] = 0
    packed = reference.quantize_rows(bf16_bits(x), BF16)
    codes, scales = reference.to_fp8_columns(*packed, BF16, 32)
    assert codes.shape == (32, 130)
    assert scales.shape == (2, 32)
    finite = np.arange(32) != 3
    np.testing.assert_array_equal(scales[0, finite], (2.0 ** np.arange(32))[finite])
    assert scales[0, 3] == 2.0**-126  # all NaN
    np.testing.assert_array_equal(codes[3, :128], 0x7F)
    np.testing.assert_array_equal(codes[finite, 7], 0x7E)
    np.testing.assert_array_equal(codes[finite, 0], 0x30)  # 0.5
    # The second tile: 0.5 * 2^h and 0; 0.5 * 2^h = 256 * 2^(h - 9).
    np.testing.assert_array_equal(scales[1], 2.0 ** (np.arange(32) - 9))
    np.testing.assert_array_equal(codes[:, 128], 0x78)
    np.testing.assert_array_equal(codes[:, 129], 0)


# Sums


def test_weighted_reduce_rounds_product_and_sum_separately():
    """-1 + 3 * (1/3): the product rounds to 1, the sum is 0; a fused multiply-add leaves 3e-8."""
    third = np.float32(1) / np.float32(3)
    assert np.float64(third) * 3 - 1 > 2e-8
    expert_out = constant_rows([-1.0, 3.0])
    weights = np.array([[1.0, third]], np.float32)
    payload, _ = reference.weighted_reduce(expert_out, np.array([[0, 1]]), weights, BF16)
    np.testing.assert_array_equal(payload, 0)


def test_weighted_reduce_takes_slots_by_ascending_k():
    """(2^30 + 1) - 2^30 is 0 in float32, (2^30 - 2^30) + 1 is 1."""
    expert_out = bf16_bits(np.float32([2.0**30, 1, -(2.0**30)])[:, None] * np.ones(32))
    slots = np.array([[0, 1, 2], [0, 2, 1], [-1, 1, -1], [-1, -1, -1]])
    payload, _ = reference.weighted_reduce(expert_out, slots, None, BF16)
    np.testing.assert_array_equal(payload.view(np.uint16)[:, 0], bf16_bits([0, 1, 1, 0]))


def test_sums_start_at_plus_zero():
    minus_zero = bf16_bits(np.full((1, 32), -0.0))
    payload, scales = reference.weighted_reduce(minus_zero, np.array([[0]]), None, BF16)
    np.testing.assert_array_equal(payload, 0)
    packed = reference.quantize_rows(minus_zero, BF16)
    y = reference.final_reduce(*packed, BF16, 32, np.array([0, 1, 1]), np.array([0]))
    np.testing.assert_array_equal(y, np.zeros((2, 32)))


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_weighted_reduce_packs_as_quantize_rows(wire):
    rng = np.random.default_rng(9)
    expert_out = bf16_bits(rng.standard_normal((6, 96)))
    slots = np.array([[5, 0], [-1, 3], [2, -1]])
    weights = rng.random((3, 2)).astype(np.float32)
    values = reference.bf16_to_float32(expert_out)
    sums = np.zeros((3, 96), np.float32)
    for i, k in itertools.product(range(3), range(2)):
        if slots[i, k] >= 0:
            sums[i] += weights[i, k] * values[slots[i, k]]
    payload, scales = reference.weighted_reduce(expert_out, slots, weights, wire)
    want_payload, want_scales = reference.quantize_rows(sums, wire)
    np.testing.assert_array_equal(payload, want_payload)
    np.testing.assert_array_equal(scales, want_scales)


def test_final_reduce_follows_the_order_given():
    values = np.float32([2.0**30, 1, -(2.0**30), NAN])[:, None] * np.ones(32, np.float32)
    packed = reference.quantize_rows(values, BF16)
    offsets, rows = np.array([0, 3, 3, 6, 8]), np.array([0, 1, 2, 0, 2, 1, 3, 1])
    y = reference.final_reduce(*packed, BF16, 32, offsets, rows)
    np.testing.assert_array_equal(y[:, 0], [0, 0, 0x3F80, 0x7FC0])


# Dispatch and combine


def scaled_experts(arrived, num_experts):
    """Expert e multiplies its BF16 rows by e + 1, so that a misrouted row shows."""
    outs = []
    for rank, a in enumerate(arrived):
        local = reference.expert_range(rank, len(arrived), num_experts)
        factor = np.zeros(len(a.row_source), np.float32)
        for e, start, count in zip(local, a.expert_offsets, a.num_rows, strict=False):
            factor[start : start + count] = e + 1
        outs.append(bf16_bits(reference.bf16_to_float32(a.rows) * factor[:, None]))
    return outs


def identity_round(xs, topk_idxs, topk_weights, num_experts, wire=MXFP4):
    arrived = reference.dispatch(xs, topk_idxs, topk_weights, num_experts, wire, "bf16")
    outs = [a.rows for a in arrived]
    return arrived, reference.combine(outs, arrived, [len(i) for i in topk_idxs], BF16)


def test_two_ranks_by_hand():
    """Ranks hold experts 0, 1 | 2, 3.  Rank 0: [0, 2], [2, 3]; rank 1: [3, 0]; alignment 2."""
    xs = [constant_rows([1, 2]), constant_rows([4])]
    idx = [np.array([[0, 2], [2, 3]]), np.array([[3, 0]])]
    weights = [np.float32([[0.5, 0.25], [1, 2]]), np.float32([[3, 4]])]
    first, second = reference.dispatch(xs, idx, weights, 4, MXFP4, "bf16", expert_alignment=2)

    assert first.origins.tolist() == [[0, 0], [1, 0]]
    assert first.num_rows.tolist() == [2, 0]
    assert first.expert_offsets.tolist() == [0, 2, 2]
    assert first.row_origins.tolist() == [[0, 0, 0], [1, 0, 1]]
    assert first.row_source.tolist() == [0, 1]
    assert first.slot_rows.tolist() == [[0, -1], [-1, 1]]
    assert first.row_weights.tolist() == [0.5, 4]
    np.testing.assert_array_equal(first.rows, constant_rows([1, 4]))

    # Token 1 of rank 0 travels once, though both its experts live here.
    assert second.origins.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert second.num_rows.tolist() == [2, 2]
    assert second.expert_offsets.tolist() == [0, 2, 4]
    assert second.row_origins.tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]]
    assert second.row_source.tolist() == [0, 1, 1, 2]
    assert second.slot_rows.tolist() == [[-1, 0], [1, 2], [3, -1]]
    assert second.weights.tolist() == [[0.5, 0.25], [1, 2], [3, 4]]
    assert second.row_weights.tolist() == [0.25, 1, 2, 3]
    np.testing.assert_array_equal(second.rows, constant_rows([1, 2, 2, 4]))

    y = reference.combine(scaled_experts([first, second], 4), [first, second], [2, 1], BF16)
    # rank 0: 0.5*1*1 + 0.25*1*3 = 1.25; 1*2*3 + 2*2*4 = 22.  rank 1: 3*4*4 + 4*4*1 = 64
    np.testing.assert_array_equal(y[0], constant_rows([1.25, 22]))
    np.testing.assert_array_equal(y[1], constant_rows([64]))


def test_padding_rows_of_an_expert():
    xs, idx = [constant_rows([1, 2, 4])], [np.array([[1], [1], [0]])]
    (a,) = reference.dispatch(xs, idx, [None], 3, MXFP4, "fp8", expert_alignment=4)
    assert a.num_rows.tolist() == [1, 2, 0]
    assert a.expert_offsets.tolist() == [0, 4, 8, 8]
    assert a.row_source.tolist() == [2, -1, -1, -1, 0, 1, -1, -1]
    assert a.row_weights.tolist() == [1, 0, 0, 0, 1, 1, 0, 0]
    assert a.row_origins[:2].tolist() == [[0, 2, 0], [-1, -1, -1]]
    np.testing.assert_array_equal(a.rows[[1, 2, 3, 6, 7]], 0)
    np.testing.assert_array_equal(a.row_scales[[1, 2, 3, 6, 7]], 1.0)
    decoded = reference.e4m3_to_float32(a.rows) * a.row_scales
    np.testing.assert_array_equal(decoded[:, 0], [4, 0, 0, 0, 1, 2, 0, 0])
    # Combine does not read padding.
    outs = constant_rows(np.where(a.row_source < 0, NAN, decoded[:, 0]))
    (y,) = reference.combine([outs], [a], [3], BF16)
    np.testing.assert_array_equal(y, constant_rows([1, 2, 4]))


def test_packed_arrival_has_no_rows():
    (a,) = reference.dispatch([constant_rows([1])], [np.array([[0]])], [None], 1, MXFP4, "packed")
    assert a.rows is None
    assert a.row_scales is None
    assert a.payload.tolist() == [[0x66] * 16]
    assert a.scales.tolist() == [[0x7D]]


def test_grd_01_forward():
    idx, weights = [np.array([[0, 2]])], [np.float32([[0.25, 0.75]])]
    arrived = reference.dispatch([constant_rows([1])], idx, weights, 4, MXFP4, "bf16")
    (y,) = reference.combine(scaled_experts(arrived, 4), arrived, [1], BF16)
    np.testing.assert_array_equal(y, constant_rows([2.5]))
    (y,) = reference.combine(scaled_experts(arrived, 4), arrived, [1], BF16, weighted=False)
    np.testing.assert_array_equal(y, constant_rows([4.0]))


def test_shp_09_rank_that_receives_nothing():
    xs = [constant_rows([1, 2, 3, 4]), constant_rows([6, 8, 12, 16])]
    idx = [np.zeros((4, 1), np.int64)] * 2
    arrived, ys = identity_round(xs, idx, [None, None], 4)
    assert arrived[1].payload.shape == (0, 16)
    assert arrived[1].rows.shape == (0, 32)
    assert arrived[1].rows.dtype == np.uint16
    assert arrived[1].expert_offsets.tolist() == [0, 0, 0]
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_array_equal(y, x)


def test_shp_11_minus_one_is_no_expert():
    idx = [np.array([[0, -1], [-1, 3], [-1, -1], [2, 1]])] * 2
    weights = [np.full((4, 2), 0.5, np.float32)] * 2
    xs = [constant_rows([1, 2, 4, 8]), constant_rows([3, 6, 12, 16])]
    arrived, ys = identity_round(xs, idx, weights, 4)
    assert [a.num_rows.tolist() for a in arrived] == [[2, 2], [2, 2]]
    np.testing.assert_array_equal(ys[0], constant_rows([0.5, 1, 0, 8]))
    np.testing.assert_array_equal(ys[1], constant_rows([1.5, 3, 0, 16]))


def test_shp_14_same_expert_twice_is_two_rows():
    idx, weights = [np.array([[3, 3]])], [np.float32([[0.25, 0.5]])]
    (a,), (y,) = identity_round([constant_rows([4])], idx, weights, 4)
    assert len(a.origins) == 1
    assert a.num_rows.tolist() == [0, 0, 0, 2]
    assert a.slot_rows.tolist() == [[0, 1]]
    np.testing.assert_array_equal(y, constant_rows([3]))


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "sizes"),
    [
        pytest.param(22, 8, [3, 3, 3, 3, 3, 3, 2, 2], id="SHP-15 22 on 8"),
        pytest.param(10, 4, [3, 3, 2, 2], id="SHP-15 10 on 4"),
        pytest.param(2, 4, [1, 1, 0, 0], id="fewer experts than ranks"),
        pytest.param(256, 8, [32] * 8, id="even"),
    ],
)
def test_shp_15_experts_are_contiguous_and_the_first_ranks_hold_one_more(
    num_experts, num_ranks, sizes
):
    ranges = [reference.expert_range(rank, num_ranks, num_experts) for rank in range(num_ranks)]
    assert [len(r) for r in ranges] == sizes
    assert list(itertools.chain(*ranges)) == list(range(num_experts))


def test_shp_16_every_expert_is_seen_exactly_once():
    xs = [constant_rows(np.arange(1, 11))] + [np.zeros((0, 32), np.uint16)] * 3
    idx = [np.arange(10)[:, None]] + [np.zeros((0, 1), np.int64)] * 3
    arrived = reference.dispatch(xs, idx, [None] * 4, 10, BF16, "bf16")
    assert [a.num_rows.tolist() for a in arrived] == [[1, 1, 1], [1, 1, 1], [1, 1], [1, 1]]
    np.testing.assert_array_equal(arrived[3].rows, constant_rows([9, 10]))


def test_com_32_random_routing_on_four_ranks():
    """y = weights x expert(dq(q(x))): BF16 sum of each rank, then BF16 sum of the ranks."""
    rng = np.random.default_rng(10)
    num_experts, num_tokens = 10, [5, 0, 7, 3]
    xs = [bf16_bits(rng.standard_normal((t, 64))) for t in num_tokens]
    idx = [rng.integers(-1, num_experts, (t, 2)) for t in num_tokens]
    weights = [rng.random((t, 2)).astype(np.float32) for t in num_tokens]
    arrived = reference.dispatch(xs, idx, weights, num_experts, MXFP4, "bf16")
    ys = reference.combine(scaled_experts(arrived, num_experts), arrived, num_tokens, BF16)
    owner = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for x, i, w, y in zip(xs, idx, weights, ys, strict=True):
        decoded = reference.dequantize(*reference.quantize_rows(x, MXFP4), MXFP4, 64)
        for t in range(len(x)):
            total = np.zeros(64, np.float32)
            for rank in range(4):
                part = np.zeros(64, np.float32)
                for k in range(2):
                    if i[t, k] >= 0 and owner[i[t, k]] == rank:
                        out = (decoded[t] * np.float32(i[t, k] + 1)).astype(ml_dtypes.bfloat16)
                        part += w[t, k] * out.astype(np.float32)
                total += part.astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(y[t], bf16_bits(total))


def test_com_41_sum_over_experts_is_float32():
    """32 + 7 * 0.125 = 32.875, rounded once to 33.0; a running BF16 sum stays at 32."""
    idx, weights = [np.arange(8)[None]], [np.full((1, 8), 0.125, np.float32)]
    (a,) = reference.dispatch([constant_rows([1])], idx, weights, 8, MXFP4, "bf16")
    outs = constant_rows([256, 1, 1, 1, 1, 1, 1, 1])
    (y,) = reference.combine([outs], [a], [1], BF16)
    np.testing.assert_array_equal(y, constant_rows([33.0]))


def test_shp_30_each_row_keeps_its_own_scales():
    rng = np.random.default_rng(11)
    xs = [constant_rows(2.0 ** (np.arange(17) - 8), hidden=256)] * 2
    idx = [rng.permutation(17)[:, None] % 6 for _ in range(2)]
    arrived = reference.dispatch(xs, idx, [None] * 2, 6, MXFP4, "fp8")
    assert sum(len(a.row_source) for a in arrived) == 34
    for a in arrived:
        np.testing.assert_array_equal(a.scales, np.tile(117 + a.origins[:, 1:], (1, 8)))
        decoded = reference.e4m3_to_float32(a.rows) * np.repeat(a.row_scales, 128, axis=1)
        want = 2.0 ** (a.row_origins[:, 1:2].astype(float) - 8)
        np.testing.assert_array_equal(decoded, np.tile(want, (1, 256)))


@pytest.mark.parametrize("arrive", ["fp8", "bf16", "packed"])
@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_no_tokens_at_all(wire, arrive):
    xs = [np.zeros((0, 160), np.uint16)] * 2
    idx = [np.zeros((0, 2), np.int64)] * 2
    arrived = reference.dispatch(xs, idx, [None, np.zeros((0, 2))], 4, wire, arrive, 128)
    for a in arrived:
        assert a.payload.shape == (0, wire.payload_bytes(160))
        assert a.scales.shape == (0, wire.scale_bytes(160))
        assert a.expert_offsets.tolist() == [0, 0, 0]
        if arrive != "packed":
            assert a.rows.shape == (0, 160)
        codes, scales = reference.to_fp8_columns(
            a.payload, a.scales, wire, 160, a.row_source, a.num_rows, a.expert_offsets
        )
        assert codes.shape == (160, 0)
        assert scales.shape == (0, 160)
    outs = [np.zeros((0, 160), np.uint16)] * 2
    for y in reference.combine(outs, arrived, [0, 0], wire):
        assert y.shape == (0, 160)
        assert y.dtype == np.uint16


@pytest.mark.parametrize("wire", WIRES, ids=wire_id)
def test_dispatch_of_an_fp8_pair_equals_its_rows_alone(wire):
    pairs = [fp8_pair([[1.0, 0.3], [2.0, 8.0]], 192), fp8_pair([[0.7, 4.0]], 192, seed=12)]
    idx = [np.array([[0], [1]]), np.array([[0]])]
    arrived = reference.dispatch(pairs, idx, [None, None], 2, wire, "packed")
    assert arrived[0].origins.tolist() == [[0, 0], [1, 0]]
    for i, (source, token) in enumerate(arrived[0].origins):
        one = tuple(part[token : token + 1] for part in pairs[source])
        payload, scales = reference.quantize_rows(one, wire)
        np.testing.assert_array_equal(arrived[0].payload[i], payload[0])
        np.testing.assert_array_equal(arrived[0].scales[i], scales[0])
