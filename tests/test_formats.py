"""formats.py against ml_dtypes, and its integer scale rules against a definition in floats."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from fp4comm import reference
from fp4comm.formats import E2M1_VALUES, FORMATS, WireFormat, fp8_row_bytes

ALL_BYTES = np.arange(256, dtype=np.uint8)
E4M3_MAGNITUDES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
ROUTE_BYTES_TOP_8 = 8 * (2 + 4)  # int16 local expert and float32 weight of each slot


def assert_same_values(got, want):
    """Equal by bits, except that a NaN is a NaN."""
    want = np.asarray(want, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(got.view(np.uint32)[finite], want.view(np.uint32)[finite])


def midpoints(values):
    """Every value, every midpoint of neighbours and its two float32 neighbours, both signs."""
    for low, high in itertools.pairwise(np.asarray(values, np.float32)):
        middle = np.float32((low + high) / 2)
        for v in (low, np.nextafter(middle, low), middle, np.nextafter(middle, high), high):
            yield v
            yield -v


def test_every_code_decodes_as_in_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    assert_same_values(reference.e2m1_to_float32(codes), codes.view(ml_dtypes.float4_e2m1fn))
    e4m3 = ALL_BYTES.view(ml_dtypes.float8_e4m3fn)
    assert_same_values(reference.e4m3_to_float32(ALL_BYTES), e4m3)
    assert_same_values(
        reference.e8m0_to_float32(ALL_BYTES), ALL_BYTES.view(ml_dtypes.float8_e8m0fnu)
    )
    bits = np.arange(65536, dtype=np.uint16)
    assert_same_values(reference.bf16_to_float32(bits), bits.view(ml_dtypes.bfloat16))


def test_decoded_nan_is_the_canonical_one():
    assert reference.e8m0_to_float32(np.uint8([255])).view(np.uint32) == 0x7FC00000
    nans = reference.e4m3_to_float32(np.uint8([0x7F, 0xFF])).view(np.uint32)
    np.testing.assert_array_equal(nans, 0x7FC00000)


def test_scale_byte_0_is_a_subnormal():
    assert reference.e8m0_to_float32(np.uint8([0])).view(np.uint32) == 0x00400000


@pytest.mark.parametrize(
    ("cast", "magnitudes", "oracle"),
    [
        pytest.param(
            reference.float32_to_e2m1, E2M1_VALUES, ml_dtypes.float4_e2m1fn, id="NUM-12 E2M1"
        ),
        pytest.param(
            reference.float32_to_e4m3, E4M3_MAGNITUDES, ml_dtypes.float8_e4m3fn, id="E4M3"
        ),
    ],
)
def test_rounds_to_nearest_even_at_every_midpoint(cast, magnitudes, oracle):
    values = np.array(list(midpoints(magnitudes)), np.float32)
    assert len(values) == 10 * (len(magnitudes) - 1)
    np.testing.assert_array_equal(cast(values), values.astype(oracle).view(np.uint8))
    beyond = np.float32([magnitudes[-1] * 1.03, magnitudes[-1] * 2, 3e38, np.inf])
    largest = len(magnitudes) - 1
    np.testing.assert_array_equal(cast(beyond), largest)
    np.testing.assert_array_equal(cast(-beyond), largest | (0x80 if largest > 7 else 8))


def test_e2m1_codes_equal_the_encoder_without_tables():
    """With y the scaled magnitude, min(2y, y + 2, y/2 + 4, 7) rounded half to even."""
    y = reference.bf16_to_float32(np.arange(0x7F80, dtype=np.uint16)).astype(np.float64)
    want = np.rint(np.minimum.reduce([2 * y, y + 2, y / 2 + 4, np.full_like(y, 7)]))
    np.testing.assert_array_equal(reference.float32_to_e2m1(y), want)


def test_bf16_rounding_as_in_ml_dtypes():
    bits = np.arange(65535, dtype=np.uint32)
    low_halves = np.uint32([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = ((bits[:, None] << 16) | low_halves).view(np.float32)
    got = reference.float32_to_bf16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(got[nan], 0x7FC0)
    with np.errstate(over="ignore"):
        want = values[~nan].astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(got[~nan], want)


@pytest.mark.parametrize(
    ("name", "hidden", "payload_bytes", "scale_bytes"),
    [
        pytest.param("bf16", 7168, 14336, 0, id="BEN-12 bf16"),
        pytest.param("fp8", 7168, 7168, 56, id="BEN-12 fp8"),
        pytest.param("mxfp8", 7168, 7168, 224, id="BEN-12 mxfp8"),
        pytest.param("mxfp4", 7168, 3584, 224, id="BEN-12 mxfp4"),
        pytest.param("bf16", 2880, 5760, 0, id="SHP-03 bf16"),
        pytest.param("fp8", 2880, 2880, 23, id="SHP-03 fp8"),
        pytest.param("mxfp8", 2880, 2880, 90, id="SHP-03 mxfp8"),
        pytest.param("mxfp4", 2880, 1440, 90, id="SHP-03 mxfp4"),
        pytest.param("fp8", 32, 32, 1, id="fp8 short block only"),
        pytest.param("mxfp4", 32, 16, 1, id="mxfp4 smallest"),
    ],
)
def test_bytes_of_a_row(name, hidden, payload_bytes, scale_bytes):
    wire = WireFormat(name)
    assert wire.payload_bytes(hidden) == payload_bytes
    assert wire.scale_bytes(hidden) == scale_bytes
    assert wire.row_bytes(hidden) == payload_bytes + scale_bytes
    payload, scales = reference.quantize_rows(np.ones((3, hidden), np.float32), wire)
    assert payload.shape == (3, payload_bytes)
    assert scales.shape == (3, scale_bytes)


@pytest.mark.parametrize("hidden", [32, 128, 160, 7168])
def test_bytes_of_an_fp8_row_are_those_of_its_arrays(hidden):
    made = reference.quantize_rows(np.zeros((1, hidden), np.uint16), WireFormat("bf16"))
    arrays = reference.to_fp8_rows(*made, WireFormat("bf16"), hidden)
    assert fp8_row_bytes(hidden) == sum(array.nbytes for array in arrays)


def test_gain_of_mxfp4_over_bf16():
    """BEN-12: 3.765 a row; with the route of top-8, 48 bytes each, 3.73."""
    bf16, mxfp4 = (WireFormat(name).row_bytes(7168) for name in ("bf16", "mxfp4"))
    assert round(bf16 / mxfp4, 3) == 3.765
    assert round((bf16 + ROUTE_BYTES_TOP_8) / (mxfp4 + ROUTE_BYTES_TOP_8), 2) == 3.73


# Scale rules

BLOCK_WIRES = [WireFormat(f.name, rule) for f in FORMATS.values() for rule in f.scale_rules]
CRITICAL_MANTISSAS = [0, 1, 0x7FFFFF] + [
    m + d for m in (0x200000, 0x400000, 0x600000) for d in (-1, 0, 1)
]


def wire_id(wire):
    return f"{wire.name}-{wire.scale_rule}"


def scale_by_definition(amax, wire):
    """The rules in floats: the exponent from frexp, products by powers of two exact in float64."""
    if amax == 0:
        return 0
    element = wire.format.element
    fraction, exponent = math.frexp(amax)
    m, e = 2 * fraction, exponent - 1
    if wire.scale_rule == "floor":
        s = e - element.emax
    elif wire.scale_rule == "even":
        s = e - 1 if m >= 1.75 else e - 2
    else:
        s = -300
        while math.ldexp(amax, -s) > element.largest:
            s += 1
    largest = 125 if element.name == "e2m1" else 127
    return min(max(s, -127), largest) + 127


@pytest.mark.parametrize("wire", BLOCK_WIRES, ids=wire_id)
def test_scale_of_every_exponent_and_critical_mantissa(wire):
    """NUM-16, NUM-18, NUM-19: exactly at, one below and one above each carry of a rule."""
    bits = np.array([e << 23 | m for e in range(255) for m in CRITICAL_MANTISSAS], np.uint32)
    want = [scale_by_definition(float(a), wire) for a in bits.view(np.float32)]
    np.testing.assert_array_equal(reference.scale_from_amax(bits, wire), want)


@pytest.mark.parametrize("wire", BLOCK_WIRES, ids=wire_id)
def test_scale_of_inf_and_every_kind_of_nan(wire):
    bits = np.uint32([0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF])
    np.testing.assert_array_equal(reference.scale_from_amax(bits, wire), 0xFF)


@pytest.mark.parametrize(
    ("wire", "low", "high"),
    [
        pytest.param(WireFormat("mxfp4", "floor"), 4.0, 7.9999, id="floor"),
        pytest.param(WireFormat("mxfp4", "ceil"), 3.0001, 6.0, id="ceil"),
        pytest.param(WireFormat("mxfp4", "even"), 3.5, 6.9999, id="even"),
        pytest.param(WireFormat("fp8", "floor"), 256.0, 511.999, id="fp8 floor"),
        pytest.param(WireFormat("fp8", "ceil"), 224.01, 448.0, id="fp8 ceil"),
    ],
)
def test_range_of_the_scaled_abs_max(wire, low, high):
    """The third column of the rule table, over every normal BF16 magnitude that is not clamped."""
    amax = reference.bf16_to_float32(np.arange(0x0700, 0x7F00, dtype=np.uint16))
    scale = reference.scale_from_amax(amax.view(np.uint32), wire)
    scaled = np.ldexp(amax.astype(np.float64), 127 - scale.astype(int))
    assert low <= scaled.min()
    assert scaled.max() <= high


def test_default_rules():
    assert WireFormat("mxfp4").scale_rule == "even"
    assert WireFormat("mxfp8").scale_rule == "ceil"
    assert WireFormat("fp8").scale_rule == "ceil"
    assert WireFormat("bf16").scale_rule is None
    assert WireFormat("mxfp4") == WireFormat("mxfp4", "even") == WireFormat.of("mxfp4")
    wire = WireFormat("mxfp4", scale_rule="ceil")
    assert WireFormat.of(wire) is wire


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("fp4",), "name: expected one of bf16, .*got 'fp4'", id="name"),
        pytest.param(
            ("mxfp4", "rceil"), "scale_rule: expected one of even.*mxfp4.*'rceil'", id="rule"
        ),
        pytest.param(("fp8", "even"), "scale_rule: expected one of ceil.*fp8", id="even for E4M3"),
        pytest.param(("bf16", "even"), "scale_rule: expected None for bf16", id="rule for bf16"),
    ],
)
def test_wire_format_refuses(args, message):
    with pytest.raises(ValueError, match=message):
        WireFormat(*args)


def test_wire_format_of_refuses_other_types():
    with pytest.raises(TypeError, match="wire: expected a name or a WireFormat, got int"):
        WireFormat.of(4)
