"""Numeric cases as plain data: inputs and the bytes that every codec must make of them.

Ids are rows of the numeric codec table of the case list (NUM-..) or name the fact that is tested.
Expected bytes are written down, not computed by the library.
"""

import dataclasses

import numpy as np

from fp4comm.formats import WireFormat

NAN, INF = np.nan, np.inf


def row(*values, hidden=32, fill=0.0):
    """One float32 row [1, hidden] that begins with these values."""
    return np.array([list(values) + (hidden - len(values)) * [fill]], np.float32)


def rows(*parts):
    """Stack rows to one array."""
    return np.concatenate(parts)


def bf16(bits, hidden=32, fill=0):
    """One row of BF16 bits [1, hidden]."""
    return np.array([list(bits) + (hidden - len(bits)) * [fill]], np.uint16)


def code_bytes(text, num_bytes=16):
    """One row of bytes [1, num_bytes] from hex digits, zeros behind; "66*16" repeats a byte."""
    value, _, times = text.partition("*")
    data = bytes.fromhex(value) * int(times or 1)
    return np.frombuffer(data.ljust(num_bytes, b"\0"), np.uint8)[None]


@dataclasses.dataclass(frozen=True)
class Case:
    """Quantize and decode: x -> payload and scales -> decoded.

    x is float32 or BF16 bits [n, H]; payload, scales uint8; decoded float32 [n, H], compared by
    bits (NaN is 0x7FC00000, the sign of zero counts).
    """

    id: str
    wire: WireFormat
    x: np.ndarray
    payload: np.ndarray
    scales: np.ndarray
    decoded: np.ndarray


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """Decode only: bytes that no quantizer of ours need have made."""

    id: str
    wire: WireFormat
    payload: np.ndarray
    scales: np.ndarray
    decoded: np.ndarray


@dataclasses.dataclass(frozen=True)
class CastCase:
    """Single E4M3 casts: float32 values -> codes."""

    id: str
    values: np.ndarray
    codes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fp8Case:
    """Arrival as FP8 rows: payload and scales -> E4M3 codes [n, H] and float32 scales."""

    id: str
    wire: WireFormat
    payload: np.ndarray
    scales: np.ndarray
    codes: np.ndarray
    fp8_scales: np.ndarray


EVEN = WireFormat("mxfp4", "even")
CEIL = WireFormat("mxfp4", "ceil")
FLOOR = WireFormat("mxfp4", "floor")
MXFP4_RULES = (EVEN, CEIL, FLOOR)
FP8 = WireFormat("fp8")
MXFP8_CEIL = WireFormat("mxfp8", "ceil")
MXFP8_FLOOR = WireFormat("mxfp8", "floor")


def u8(*values):
    """Scale bytes, one row."""
    return np.array([values], np.uint8)


def column(*values):
    """Scale bytes, one block a row."""
    return np.array(values, np.uint8)[:, None]


def nan_cases():
    """NUM-05, NUM-07: a NaN or Inf anywhere is scale 0xFF, and the neighbour stays as it was."""
    for wire in (EVEN, CEIL, FLOOR):
        for place in (0, 1, 5, 16, 31):
            x = row(hidden=64, fill=1.0)
            x[0, place] = NAN
            payload = np.concatenate([code_bytes("00"), code_bytes("66*16")], axis=1)
            decoded = np.concatenate([row(fill=NAN), row(fill=1.0)], axis=1)
            scales = u8(0xFF, 0x7D)
            name = f"NUM-05-{wire.scale_rule}-{place}"
            yield Case(name, wire, x, payload, scales, decoded)
            bits = (x.view(np.uint32) >> 16).astype(np.uint16)
            yield Case(name + "-bf16", wire, bits, payload, scales, decoded)
            # A NaN whose payload lies below the BF16 mantissa, and its negative.
            for pattern in (0x7F800001, 0xFF800001):
                hidden_nan = x.copy()
                hidden_nan.view(np.uint32)[0, place] = pattern
                yield Case(f"{name}-{pattern:X}", wire, hidden_nan, payload, scales, decoded)
        x = row(INF, -INF, fill=1.0)
        yield Case(f"NUM-07-{wire.scale_rule}", wire, x, code_bytes("00"), u8(0xFF), row(fill=NAN))
    for wire in (MXFP8_CEIL, MXFP8_FLOOR, FP8):
        x = row(1.0, -INF, fill=1.0)
        yield Case(
            f"NUM-07-{wire.name}-{wire.scale_rule}",
            wire,
            x,
            code_bytes("00", 32),
            u8(0xFF),
            row(fill=NAN),
        )


def binade_top_cases():
    """NUM-16: one value a block; the scale byte at the top of a binade, by rule."""
    values = (6.0, 6.5, 7.0, 7.5, 8.0)
    expected = {  # scale bytes, decoded values
        FLOOR: ((0x7F, 0x7F, 0x7F, 0x7F, 0x80), (6.0, 6.0, 6.0, 6.0, 8.0)),
        CEIL: ((0x7F, 0x80, 0x80, 0x80, 0x80), (6.0, 6.0, 8.0, 8.0, 8.0)),
        EVEN: ((0x7F, 0x7F, 0x80, 0x80, 0x80), (6.0, 6.0, 8.0, 8.0, 8.0)),
    }
    code = {(0x7F, 6.0): "07", (0x80, 6.0): "05", (0x80, 8.0): "06"}
    for wire, (scales, decoded) in expected.items():
        yield Case(
            f"NUM-16-{wire.scale_rule}",
            wire,
            rows(*[row(v) for v in values]),
            rows(*[code_bytes(code[s, d]) for s, d in zip(scales, decoded, strict=True)]),
            column(*scales),
            rows(*[row(d) for d in decoded]),
        )


def rule_independent_cases():
    """Blocks that have the same bytes under every scale rule of mxfp4."""
    ties = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0)
    rounded = (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0)
    for wire in MXFP4_RULES:
        rule = wire.scale_rule
        yield Case(
            f"NUM-08-{rule}",
            wire,
            rows(row(), row(fill=1.0)),
            rows(code_bytes("00"), code_bytes("66*16")),
            column(0x00, 0x7D),
            rows(row(), row(fill=1.0)),
        )
        tiny = (0x0001, 0x0040, 0x0080, 0x0100)  # 2^-133, 2^-127, 2^-126, 2^-125
        yield Case(
            f"NUM-10-{rule}",
            wire,
            rows(*[bf16([], fill=bits) for bits in tiny]),
            rows(*[code_bytes(f"{c}{c}*16") for c in (0, 2, 4, 6)]),
            column(0, 0, 0, 0),
            rows(*[row(fill=v) for v in (0.0, 2.0**-127, 2.0**-126, 2.0**-125)]),
        )
        yield Case(
            f"NUM-12-{rule}",
            wire,
            row(*ties, *(-v for v in ties)),
            code_bytes("20 42 64 76 A8 CA EC FE"),
            u8(0x7F),
            row(*rounded, *(-v for v in rounded)),
        )
        yield Case(
            f"NUM-14-{rule}",
            wire,
            row(4.0, 0.25, np.nextafter(np.float32(0.25), np.float32(1))),
            code_bytes("06 01"),
            u8(0x7F),
            row(4.0, 0.0, 0.5),
        )
        yield Case(
            f"NUM-14-bf16-{rule}",
            wire,
            bf16([0x4080, 0x3E80, 0x3E81]),
            code_bytes("06 01"),
            u8(0x7F),
            row(4.0, 0.0, 0.5),
        )
        yield Case(
            f"NUM-27-{rule}",
            wire,
            row(-0.0, -0.1, 4.0),
            code_bytes("88 06"),
            u8(0x7F),
            row(-0.0, -0.0, 4.0),
        )
        yield Case(
            f"NUM-27-all-negative-zero-{rule}",
            wire,
            row(fill=-0.0),
            code_bytes("88*16"),
            u8(0),
            row(fill=-0.0),
        )
        yield Case(f"NUM-39-{rule}", wire, row(0.5, 6.0), code_bytes("71"), u8(0x7F), row(0.5, 6.0))


def e4m3_cases():
    """E4M3 blocks; a 448 or a value above it sets the scale to 1."""
    wide = code_bytes("7E", 128)
    yield Case("NUM-18-fp8", FP8, row(448.0, hidden=128), wide, u8(0x7F), row(448.0, hidden=128))
    for wire in (MXFP8_CEIL, FP8):
        yield Case(
            f"NUM-19-{wire.name}-ceil", wire, row(957.0), code_bytes("77", 32), u8(0x81), row(960.0)
        )
    for wire in (MXFP8_FLOOR, WireFormat("fp8", "floor")):
        yield Case(
            f"NUM-19-{wire.name}-floor",
            wire,
            row(957.0),
            code_bytes("7E", 32),
            u8(0x80),
            row(896.0),
        )
        yield Case(
            f"NUM-20-{wire.name}",
            wire,
            row(464.0, 465.0, 511.0, -480.0),
            code_bytes("7E 7E 7E FE", 32),
            u8(0x7F),
            row(448.0, 448.0, 448.0, -448.0),
        )
    for wire in (MXFP8_CEIL, MXFP8_FLOOR, FP8):
        name = f"{wire.name}-{wire.scale_rule}"
        yield Case(
            f"NUM-37-{name}",
            wire,
            row(448.0, 4.25, 4.75, -4.25),
            code_bytes("7E 48 4A C8", 32),
            u8(0x7F),
            row(448.0, 4.0, 5.0, -4.0),
        )
        small = (2.0**-9, 2.0**-8, 2.0**-7, 2.0**-10, 1.001 * 2.0**-10, 1.5 * 2.0**-9, -(2.0**-10))
        yield Case(
            f"NUM-38-{name}",
            wire,
            row(448.0, *small),
            code_bytes("7E 01 02 04 00 01 02 80", 32),
            u8(0x7F),
            row(448.0, 2.0**-9, 2.0**-8, 2.0**-7, 0.0, 2.0**-9, 2.0**-8, -0.0),
        )
        yield Case(
            f"zero-{name}", wire, row(-0.0), code_bytes("80", 32), u8(0), row(-0.0, hidden=32)
        )


def fp8_short_block_case():
    """A row of 2880 has 23 FP8 blocks; the last covers 64 values and has a scale of its own."""
    x = row(hidden=2880, fill=448.0)
    x[0, 2816:] = 3.5 * 2.0**-20
    decoded = x.copy()
    payload = np.full((1, 2880), 0x7E, np.uint8)
    scales = np.full((1, 23), 0x7F, np.uint8)
    scales[0, 22] = 0x7F - 27  # 3.5 * 2^-20 = 448 * 2^-27
    return Case("SHP-03-fp8-short-block", FP8, x, payload, scales, decoded)


def clamp_cases():
    """formats.md 2: the largest E2M1 scale is byte 252; larger blocks saturate, none is Inf."""
    for wire in MXFP4_RULES:
        yield Case(
            f"scale-clamp-{wire.scale_rule}",
            wire,
            bf16([0x7F7F, 0xFF60, 0x7F00]),  # largest BF16; -1.75 * 2^127; 2^127
            code_bytes("F7 06"),
            u8(252),
            row(6 * 2.0**125, -6 * 2.0**125, 4 * 2.0**125),
        )


CASES = [
    *nan_cases(),
    *binade_top_cases(),
    *rule_independent_cases(),
    Case("NUM-18-ceil-6", CEIL, row(6.0), code_bytes("07"), u8(0x7F), row(6.0)),
    Case("NUM-18-ceil-12", CEIL, row(12.0), code_bytes("07"), u8(0x80), row(12.0)),
    *e4m3_cases(),
    # 1e30 as BF16 is 0x714A; both rules decode 9.507379501712e29 = 6 * 2^97 = 3 * 2^98.
    Case(
        "NUM-29-floor",
        FLOOR,
        bf16([0x714A, 0x3F80]),
        code_bytes("07"),
        u8(0xE0),
        row(6 * 2.0**97),
    ),
    Case("NUM-29-ceil", CEIL, bf16([0x714A, 0x3F80]), code_bytes("05"), u8(0xE1), row(3 * 2.0**98)),
    Case("NUM-29-even", EVEN, bf16([0x714A, 0x3F80]), code_bytes("07"), u8(0xE0), row(6 * 2.0**97)),
    fp8_short_block_case(),
    *clamp_cases(),
]

ALL_ONES = code_bytes("22*16")  # code 2 is 1.0

DECODE_CASES = [
    DecodeCase("NUM-01", EVEN, ALL_ONES, u8(0x00), row(fill=2.0**-127)),
    DecodeCase("NUM-01-mxfp8", MXFP8_CEIL, code_bytes("38*32", 32), u8(0x00), row(fill=2.0**-127)),
    DecodeCase("NUM-01-fp8", FP8, code_bytes("38*32", 32), u8(0x00), row(fill=2.0**-127)),
    DecodeCase(
        "NUM-03",
        EVEN,
        np.tile(ALL_ONES, (4, 1)),
        column(0x7F, 0x80, 0x81, 0xFC),
        rows(*[row(fill=v) for v in (1.0, 2.0, 4.0, 2.0**125)]),
    ),
    # 6 * 2^127 is Inf: a float32 multiplication.
    DecodeCase("NUM-04", EVEN, code_bytes("12 F7"), u8(0xFE), row(2.0**127, 2.0**126, INF, -INF)),
    DecodeCase("NUM-04-253", EVEN, code_bytes("67"), u8(0xFD), row(INF, INF)),
    DecodeCase("NUM-04-252", EVEN, code_bytes("67"), u8(0xFC), row(6 * 2.0**125, 2.0**127)),
    DecodeCase(
        "subnormal products of mxfp8",
        MXFP8_CEIL,
        code_bytes("01 81 7E 7F FF 09", 32),
        u8(0x00),
        row(2.0**-136, -(2.0**-136), 448 * 2.0**-127, NAN, NAN, 1.125 * 2.0**-133),
    ),
    DecodeCase("bf16 NaN", WireFormat("bf16"), *[
        np.array([[0x01, 0x00, 0xFF, 0xFF, 0x80, 0x7F, 0x81, 0x7F] + 56 * [0]], np.uint8),
        np.zeros((1, 0), np.uint8),
        row(2.0**-133, NAN, INF, NAN),
    ]),
]  # fmt: skip

CAST_CASES = [
    CastCase(
        "NUM-20",
        np.array([464, 465, 10000, -1000, NAN, -NAN, INF, -INF], np.float32),
        np.array([0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE], np.uint8),
    ),
    CastCase(
        "NUM-33",
        np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32),
        np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], np.uint8),
    ),
    CastCase("NUM-37", np.array([4.25, 4.75], np.float32), np.array([0x48, 0x4A], np.uint8)),
    CastCase(
        "NUM-38",
        np.array([2.0**-9, 2.0**-8, 2.0**-7, 2.0**-10, 1.001 * 2.0**-10, 1.5 * 2.0**-9], "f4"),
        np.array([0x01, 0x02, 0x04, 0x00, 0x01, 0x02], np.uint8),
    ),
]

CODES_0_TO_7 = code_bytes("10 32 54 76 10 32 54 76 10 32 54 76 10 32 54 76")
# value * 2^(6 - k) of E2M1 codes 0..7 as E4M3: the binade below the group's largest is k.
E4M3_AT_GAP = {
    0: "00 60 68 6C 70 74 78 7C",  # 0 32 64 96 128 192 256 384
    14: "00 01 02 03 04 06 08 0C",  # 0 .5 1 1.5 2 3 4 6, in units of 2^-8: exact
    15: "00 00 01 02 02 03 04 06",  # .25 -> 0 and .75 -> 1 (in 2^-9: half steps to even)
    18: "00 00 00 00 00 00 00 01",  # only 6 survives
    19: "00 00 00 00 00 00 00 00",
}


def gap_case(name, *gaps):
    """Four blocks of codes 0..7, `gaps` binades below byte 127."""
    codes = [code_bytes(4 * (E4M3_AT_GAP[gap] + " "), 32) for gap in gaps]
    return Fp8Case(
        name,
        EVEN,
        np.tile(CODES_0_TO_7, (1, 4)),
        u8(*(127 - gap for gap in gaps)),
        np.concatenate(codes, axis=1),
        np.array([[2.0**-6]], np.float32),
    )


FP8_CASES = [
    gap_case("NUM-31", 0, 14, 15, 18),
    gap_case("NUM-31-19", 19, 0, 19, 18),
    Fp8Case(
        "NUM-32",
        EVEN,
        code_bytes("77*64", 64),
        u8(127, 1, 127, 127),
        np.concatenate([code_bytes(f"{c}*32", 32) for c in ("7C", "00", "7C", "7C")], axis=1),
        np.array([[2.0**-6]], np.float32),
    ),
    Fp8Case(  # values 0 4 8 12 16 24 32 48
        "NUM-33",
        EVEN,
        CODES_0_TO_7,
        u8(130),
        code_bytes(4 * (E4M3_AT_GAP[0] + " "), 32),
        np.array([[2.0**-3]], np.float32),
    ),
    Fp8Case(
        "NaN block beside a finite one",
        EVEN,
        np.tile(CODES_0_TO_7, (1, 2)),
        u8(0xFF, 100),
        np.concatenate(
            [code_bytes("7F*32", 32), code_bytes(4 * (E4M3_AT_GAP[0] + " "), 32)], axis=1
        ),
        np.array([[2.0**-33]], np.float32),
    ),
    Fp8Case(
        "all-NaN group",
        EVEN,
        np.tile(CODES_0_TO_7, (1, 4)),
        u8(0xFF, 0xFF, 0xFF, 0xFF),
        code_bytes("7F*128", 128),
        np.array([[2.0**-126]], np.float32),
    ),
    Fp8Case(
        "all-zero group keeps signs",
        EVEN,
        code_bytes("80", 64),
        u8(0, 0, 0, 0),
        code_bytes("00 80", 128),
        np.array([[2.0**-126]], np.float32),
    ),
    Fp8Case(  # hidden 160: the last group has one block, and its own scale
        "short last group",
        EVEN,
        code_bytes("77*80", 80),
        u8(127, 127, 127, 127, 40),
        code_bytes("7C*160", 160),
        np.array([[2.0**-6, 2.0**-93]], np.float32),
    ),
    Fp8Case(  # E = 0 on a wire without headroom: S = 1 halves the values, 1.125 / 2 and all
        "mxfp8 byte 0",
        MXFP8_CEIL,
        code_bytes("38 39 01 03 FF", 32),
        u8(0),
        code_bytes("30 31 00 02 7F", 32),
        np.array([[2.0**-126]], np.float32),
    ),
]
