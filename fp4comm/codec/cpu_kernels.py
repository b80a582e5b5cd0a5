"""numba kernels of the CPU codec.  They release the GIL; `cpu.py` runs them on ranges of rows.

All of numba is in this one file: its disk cache notices an edit of the file that a kernel stands
in, not of files that the kernel takes functions from.

Words: a `*_row` argument is one row of a 2-D array; `values` is a scratch row of float32, `codes`
one of int16.  Integer work goes through NumPy functions (`np.add`, ...) where the width of a lane
matters, since numba's own operators widen to 64 bits.  A loop over a whole row, or over a constant
number of elements, becomes vector code; the maximum over a block does not, hence `block_magnitude`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fp4comm.formats import (
    BF16_NAN,
    E2M1,
    E2M1_SCALE_MAX,
    E2M1_VALUES,
    E4M3,
    E4M3_MAX,
    E4M3_NAN,
    E8M0_MAX,
    E8M0_NAN,
    F32_NAN,
    FP8_BLOCK,
    MX_BLOCK,
    SCALE_ROUND,
    TILE_ROWS,
)

BFLOAT16_ROWS, E4M3_ROWS, E2M1_ROWS = 0, 1, 2  # kinds of wire rows


def jit(function):
    """Compile with a disk cache, or without one where no cache folder can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function": read-only install and no home
        return njit(nogil=True)(function)


# --- tables, made once from formats.py


def _e4m3_values() -> np.ndarray:
    code = np.arange(128)
    exponent, mantissa = code >> E4M3.mantissa_bits, code & 7
    step = np.exp2(np.maximum(exponent, 1) - E4M3.bias - E4M3.mantissa_bits)
    values = ((exponent > 0) * 8 + mantissa) * step
    both = np.concatenate([values, -values]).astype(np.float32)
    both[[0x7F, 0xFF]] = np.uint32(F32_NAN).view(np.float32)
    return both


def _e4m3_of(values: np.ndarray) -> np.ndarray:
    """Round float64 values of at most 448 to E4M3, sign kept."""
    magnitude = np.abs(values)
    exponent = np.where(magnitude > 0, np.frexp(magnitude)[1] - 1, 1 - E4M3.bias)
    exponent = np.maximum(exponent, 1 - E4M3.bias)
    in_steps = np.rint(np.ldexp(magnitude, E4M3.mantissa_bits - exponent)).astype(np.int64)
    code = in_steps + 8 * (exponent + E4M3.bias - 1)
    return (code | np.signbit(values) * 0x80).astype(np.uint8)


# 2**(b - 127) by scale byte, and its inverse; a NaN byte gives the NaN that is written.
SCALES = np.exp2(np.arange(256.0) - 127)
SCALES[E8M0_NAN] = np.nan
SCALES = SCALES.astype(np.float32)
INVERSE_SCALES = np.exp2(127 - np.arange(255.0)).astype(np.float32)

E4M3_VALUES = _e4m3_values()
_SIGNED_E2M1 = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
_BYTE = np.arange(256)
# Both elements of a payload byte as float32, the low nibble first.
E2M1_PAIRS = np.stack([_SIGNED_E2M1[_BYTE & 15], _SIGNED_E2M1[_BYTE >> 4]], 1).view(np.uint64)[:, 0]

# Arrival: a code at a gap of g binades below the scale of its group, rounded once.
# From MAX_GAP on every code is zero: 448 * 2**-19 and 6 * 2**(6 - 19) are below half of 2**-9.
MAX_GAP = 19
_GAP = np.arange(MAX_GAP + 1)[:, None]
E4M3_AT_GAP = _e4m3_of(np.where(np.isnan(E4M3_VALUES), 0, E4M3_VALUES) * np.exp2(-_GAP))
E4M3_AT_GAP[:, [0x7F, 0xFF]] = E4M3_NAN
_E2M1_AT_GAP = _e4m3_of(_SIGNED_E2M1 * np.exp2(E2M1.headroom - _GAP)).astype(np.uint16)
E2M1_PAIRS_AT_GAP = _E2M1_AT_GAP[:, _BYTE & 15] | _E2M1_AT_GAP[:, _BYTE >> 4] << 8

FP8_ROUND = SCALE_ROUND["e4m3", "ceil"]  # the fp8 wire's default, which BF16 takes on arrival
LEAST_NORMAL_E4M3 = np.int32((127 + 1 - E4M3.bias) << 23)
MAGIC = np.float32(
    2.0 ** (23 + 1 - E4M3.bias - E4M3.mantissa_bits)
)  # its last bit is the step 2**-9
MAGIC_BITS = MAGIC.view(np.int32)
E2M1_EMAX, E4M3_EMAX, E2M1_HEADROOM = E2M1.emax, E4M3.emax, E2M1.headroom  # numba takes plain numbers
E4M3_REBIAS = np.int32((127 - E4M3.bias) << E4M3.mantissa_bits)


@jit
def bits_of(value):
    """The bit pattern of a float32."""
    return np.float32(value).view(np.int32)


@jit
def float_of(bits):
    """The float32 of a bit pattern."""
    return np.int32(bits).view(np.float32)


@intrinsic
def block_magnitude(typingctx, row, start):
    """Largest magnitude of row[start : start + 32], as bits: sign bits cleared, a NaN wins."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        element = context.get_data_type(signature.args[0].dtype)
        vector = ir.VectorType(element, MX_BLOCK)
        at = builder.bitcast(builder.gep(array.data, [args[1]]), vector.as_pointer())
        lanes = builder.load(at, align=element.width // 8)
        no_sign = ir.Constant(vector, [2 ** (element.width - 1) - 1] * MX_BLOCK)
        name = f"llvm.vector.reduce.umax.v{MX_BLOCK}i{element.width}"
        reduce_type = ir.FunctionType(element, [vector])
        reduce_max = cgutils.get_or_insert_function(builder.module, reduce_type, name)
        return builder.call(reduce_max, [builder.and_(lanes, no_sign)])

    return row.dtype(row, types.intp), codegen


# --- one row of floats -> one wire row


@jit
def small_e2m1_codes(row, start, scale, codes, mantissa_bits):
    """E2M1 codes of a block whose scale byte is 0, 1 or 2: some elements may have no implicit bit.

    Magnitudes are integers here, in units of the smallest subnormal of the input format.
    """
    implicit = 1 << mantissa_bits
    quarter = 1 << (scale + mantissa_bits - 3)  # 0.25 at this scale
    for i in range(start, start + MX_BLOCK):
        magnitude = np.int64(row[i]) & ((implicit << 8) - 1)
        exponent = magnitude >> mantissa_bits
        if exponent > 0:
            magnitude = ((magnitude & (implicit - 1)) | implicit) << (exponent - 1)
        code = np.int64(magnitude > quarter) + np.int64(magnitude >= 3 * quarter)
        code += np.int64(magnitude > 5 * quarter) + np.int64(magnitude >= 7 * quarter)
        code += np.int64(magnitude > 10 * quarter) + np.int64(magnitude >= 14 * quarter)
        code += np.int64(magnitude > 20 * quarter)
        codes[i] = code | (8 if row[i] < 0 else 0)


@jit
def encode_e2m1(row, mantissa_bits, scale_round, codes, payload_row, scale_row):
    """MXFP4: row holds bit patterns, int16 of BF16 (7 mantissa bits) or int32 of float32 (23).

    An element's code is the number of midpoints of E2M1 that its magnitude has passed.  Positive
    floats order as their bits do, so midpoints are bit patterns too; `>` and `>=` alternate (the
    latter as `> middle - 1`), since a midpoint's even neighbour is alternately below and above.
    """
    typed = row.dtype.type
    unit = 1 << (mantissa_bits - 7)
    no_sign = typed((256 << mantissa_bits) - 1)
    to_sign, sign = typed(mantissa_bits + 5), typed(8)
    for b in range(scale_row.shape[0]):
        start = b * MX_BLOCK
        magnitude = np.int64(block_magnitude(row, start))  # type: ignore[call-arg]
        if magnitude >= 255 << mantissa_bits:
            scale_row[b] = E8M0_NAN
            codes[start : start + MX_BLOCK] = 0
            continue
        scale = ((magnitude + scale_round) >> mantissa_bits) - E2M1_EMAX
        scale = max(0, min(scale, E2M1_SCALE_MAX))
        scale_row[b] = scale
        if scale <= 2:
            small_e2m1_codes(row, start, scale, codes, mantissa_bits)
            continue
        one = scale << mantissa_bits  # the bit pattern of 1.0 at this scale
        above_0_25 = typed(one - 256 * unit)
        from_0_75 = typed(one - 64 * unit - 1)
        above_1_25 = typed(one + 32 * unit)
        from_1_75 = typed(one + 96 * unit - 1)
        above_2_5 = typed(one + 160 * unit)
        from_3_5 = typed(one + 224 * unit - 1)
        above_5 = typed(one + 288 * unit)
        for i in range(MX_BLOCK):
            v = row[start + i]
            a = np.bitwise_and(v, no_sign)
            code = np.add(typed(a > above_0_25), typed(a > from_0_75))
            code = np.add(code, typed(a > above_1_25))
            code = np.add(code, typed(a > from_1_75))
            code = np.add(code, typed(a > above_2_5))
            code = np.add(code, typed(a > from_3_5))
            code = np.add(code, typed(a > above_5))
            codes[start + i] = np.bitwise_or(code, np.bitwise_and(np.right_shift(v, to_sign), sign))
    pairs = codes.view(np.uint32)
    for i in range(payload_row.shape[0]):
        payload_row[i] = np.uint8(np.bitwise_or(pairs[i], np.right_shift(pairs[i], np.uint32(12))))


@jit
def e4m3_from_scaled(value):
    """E4M3 code of a float32, rounded to nearest even, saturating at 448."""
    bits = bits_of(value)
    magnitude = np.bitwise_and(bits, np.int32(0x7FFFFFFF))
    odd = np.bitwise_and(np.right_shift(magnitude, np.int32(20)), np.int32(1))
    rounded = np.right_shift(np.add(np.add(magnitude, np.int32(0x7FFFF)), odd), np.int32(20))
    normal = np.minimum(np.subtract(rounded, E4M3_REBIAS), np.int32(E4M3_MAX))
    # Subnormal codes: adding MAGIC rounds to their step.
    subnormal = np.subtract(bits_of(np.float32(float_of(magnitude) + MAGIC)), MAGIC_BITS)
    code = normal if magnitude >= LEAST_NORMAL_E4M3 else subnormal
    return np.bitwise_or(code, np.bitwise_and(np.right_shift(bits, np.int32(24)), np.int32(0x80)))


@jit
def encode_e4m3(values, block, scale_round, payload_row, scale_row):
    """Blocks of E4M3 codes of a float32 row, which is scaled in place."""
    hidden = payload_row.shape[0]
    bits = values.view(np.int32)
    for b in range(scale_row.shape[0]):
        start = b * block
        stop = min(start + block, hidden)
        magnitude = np.int64(0)
        for at in range(start, stop, MX_BLOCK):
            largest = np.int64(block_magnitude(bits, at))  # type: ignore[call-arg]
            magnitude = max(magnitude, largest)
        if magnitude >= 255 << 23:
            scale_row[b] = E8M0_NAN
            values[start:stop] = 0.0
            continue
        scale = ((magnitude + scale_round) >> 23) - E4M3_EMAX
        scale = max(0, min(scale, E8M0_MAX))
        scale_row[b] = scale
        inverse = INVERSE_SCALES[scale]
        for at in range(start, stop, MX_BLOCK):
            for i in range(MX_BLOCK):
                values[at + i] = values[at + i] * inverse
    for i in range(hidden):
        payload_row[i] = np.uint8(e4m3_from_scaled(values[i]))


@jit
def bf16_from_f32(value):
    """Round a float32 to BF16, ties to even."""
    bits = np.uint32(bits_of(value))
    odd = np.bitwise_and(np.right_shift(bits, np.uint32(16)), np.uint32(1))
    rounded = np.right_shift(np.add(np.add(bits, np.uint32(0x7FFF)), odd), np.uint32(16))
    is_nan = np.bitwise_and(bits, np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(BF16_NAN) if is_nan else rounded


@jit
def encode_bf16(values, row):
    """BF16 bit patterns (uint16) of a float32 row."""
    for i in range(row.shape[0]):
        row[i] = np.uint16(bf16_from_f32(values[i]))


@jit
def encode_row(kind, block, scale_round, values, codes, payload_row, scale_row):
    """One float32 row -> one wire row.  Destroys the row."""
    if kind == E2M1_ROWS:
        encode_e2m1(values.view(np.int32), 23, scale_round, codes, payload_row, scale_row)
    elif kind == E4M3_ROWS:
        encode_e4m3(values, block, scale_round, payload_row, scale_row)
    else:
        encode_bf16(values, payload_row.view(np.uint16))


# --- one wire row -> one row of floats


@jit
def f32_from_bf16(bits):
    """Widen a BF16 bit pattern (int16) to the float32."""
    return float_of(np.left_shift(np.int32(bits), np.int32(16)))


@jit
def widen_bf16(row, values):
    """Widen a row of BF16 bit patterns (int16) to float32."""
    for i in range(row.shape[0]):
        values[i] = f32_from_bf16(row[i])


@jit
def decode_row(kind, block, payload_row, scale_row, values):
    """One wire row -> one float32 row; block NaNs decode to the one NaN."""
    if kind == BFLOAT16_ROWS:
        widen_bf16(payload_row.view(np.int16), values)
        return
    if kind == E2M1_ROWS:
        pairs = values.view(np.uint64)
        for i in range(payload_row.shape[0]):
            pairs[i] = E2M1_PAIRS[payload_row[i]]
    else:
        for i in range(payload_row.shape[0]):
            values[i] = E4M3_VALUES[payload_row[i]]
    for b in range(scale_row.shape[0]):
        scale = SCALES[scale_row[b]]
        for at in range(b * block, min((b + 1) * block, values.shape[0]), MX_BLOCK):
            for i in range(MX_BLOCK):
                values[at + i] = values[at + i] * scale


@jit
def decode_fp8_row(codes_row, scale_row, values):
    """An FP8 input row -> float32: one rounding a product; an unfit scale makes its group NaN."""
    for group in range(scale_row.shape[0]):
        scale = scale_row[group]
        start, stop = group * FP8_BLOCK, min((group + 1) * FP8_BLOCK, codes_row.shape[0])
        if 0 < scale < np.inf:
            for i in range(start, stop):
                values[i] = E4M3_VALUES[codes_row[i]] * scale
        else:
            values[start:stop] = np.nan


# --- before the exchange


@jit
def copy_to_places(first_place, last_place, places, payload, scales):
    """Copy a token's first wire row to its other places."""
    row = places[first_place]
    for p in range(first_place + 1, last_place):
        payload[places[p]] = payload[row]
        scales[places[p]] = scales[row]


@jit
def quantize_bf16_rows(
    first, last, x, kind, block, scale_round, place_offsets, places, payload, scales
):
    """Rows of x, int16 bit patterns of BF16 -> wire rows.  See `cpu.quantize_rows`."""
    values = np.empty(x.shape[1], np.float32)
    codes = np.empty(x.shape[1], np.int16)
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        if kind == BFLOAT16_ROWS:
            payload[row].view(np.int16)[:] = x[t]
        elif kind == E2M1_ROWS:
            encode_e2m1(x[t], 7, scale_round >> 16, codes, payload[row], scales[row])
        else:
            widen_bf16(x[t], values)
            encode_e4m3(values, block, scale_round, payload[row], scales[row])
        copy_to_places(place_offsets[t], place_offsets[t + 1], places, payload, scales)


@jit
def quantize_f32_rows(
    first, last, x, kind, block, scale_round, place_offsets, places, payload, scales
):
    """Rows of x, float32 -> wire rows."""
    values = np.empty(x.shape[1], np.float32)
    codes = np.empty(x.shape[1], np.int16)
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        values[:] = x[t]
        encode_row(kind, block, scale_round, values, codes, payload[row], scales[row])
        copy_to_places(place_offsets[t], place_offsets[t + 1], places, payload, scales)


@jit
def keep_fp8_groups(codes_row, scale_row, payload_row, wire_scale_row):
    """Put back the groups of an FP8 row whose scale is a power of two: they pass unchanged."""
    scale_bits = scale_row.view(np.uint32)
    for group in range(scale_row.shape[0]):
        exponent, mantissa = scale_bits[group] >> 23, scale_bits[group] & 0x7FFFFF
        smallest = scale_bits[group] == 0x400000  # 2**-127, a float32 subnormal
        if smallest or (mantissa == 0 and 0 < exponent < 255):
            wire_scale_row[group] = 0 if smallest else exponent
            start, stop = group * FP8_BLOCK, min((group + 1) * FP8_BLOCK, codes_row.shape[0])
            payload_row[start:stop] = codes_row[start:stop]


@jit
def quantize_fp8_rows(
    first, last, x, x_scales, kind, block, scale_round, place_offsets, places, payload, scales
):
    """Rows of E4M3 codes with a float32 scale per 128 -> wire rows."""
    values = np.empty(x.shape[1], np.float32)
    codes = np.empty(x.shape[1], np.int16)
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        decode_fp8_row(x[t], x_scales[t], values)
        encode_row(kind, block, scale_round, values, codes, payload[row], scales[row])
        if kind == E4M3_ROWS and block == FP8_BLOCK:
            keep_fp8_groups(x[t], x_scales[t], payload[row], scales[row])
        copy_to_places(place_offsets[t], place_offsets[t + 1], places, payload, scales)


# --- on arrival


@jit
def fp8_exponent(scale_row, first_block, last_block, headroom):
    """S of the arrival rule: the exponent byte of the FP8 scale over some blocks of a row."""
    largest = 0
    for b in range(first_block, last_block):
        if scale_row[b] != E8M0_NAN:
            largest = max(largest, np.int64(scale_row[b]))
    return max(largest - headroom, 1)


@jit
def e2m1_to_fp8(payload_row, start, stop, scale, exponent, out_row):
    """Elements [start, stop) of an MXFP4 row, all of one block -> E4M3 codes under 2**(S - 127)."""
    if scale == E8M0_NAN:
        out_row[start:stop] = E4M3_NAN
        return
    gap = min(exponent + E2M1_HEADROOM - scale, MAX_GAP)
    pairs = out_row.view(np.uint16)
    for i in range(start // 2, stop // 2):
        pairs[i] = E2M1_PAIRS_AT_GAP[gap, payload_row[i]]


@jit
def e4m3_to_fp8(payload_row, start, stop, scale, exponent, out_row):
    """Elements [start, stop) of an E4M3 row, all of one block -> E4M3 codes under 2**(S - 127)."""
    if scale == E8M0_NAN:
        out_row[start:stop] = E4M3_NAN
        return
    gap = min(exponent - scale, MAX_GAP)
    if gap > 0:
        for i in range(start, stop):
            out_row[i] = E4M3_AT_GAP[gap, payload_row[i]]
        return
    for at in range(start, stop, MX_BLOCK):
        for i in range(at, at + MX_BLOCK):
            v = payload_row[i]
            is_nan = np.bitwise_and(v, np.uint8(0x7F)) == np.uint8(E4M3_NAN)
            out_row[i] = np.uint8(E4M3_NAN) if is_nan else v


@jit
def block_to_fp8(kind, payload_row, start, stop, scale, exponent, out_row):
    """Choose by kind."""
    if kind == E2M1_ROWS:
        e2m1_to_fp8(payload_row, start, stop, scale, exponent, out_row)
    else:
        e4m3_to_fp8(payload_row, start, stop, scale, exponent, out_row)


@jit
def wire_row_to_fp8(kind, block, headroom, payload_row, scale_row, out_row, out_scale_row):
    """One block-scaled wire row -> one FP8 row and its float32 scales."""
    hidden, blocks_a_group = out_row.shape[0], FP8_BLOCK // block
    for group in range(out_scale_row.shape[0]):
        first = group * blocks_a_group
        last = min(first + blocks_a_group, scale_row.shape[0])
        exponent = fp8_exponent(scale_row, first, last, headroom)
        out_scale_row[group] = SCALES[exponent]
        for b in range(first, last):
            start, stop = b * block, min((b + 1) * block, hidden)
            scale = np.int64(scale_row[b])
            block_to_fp8(kind, payload_row, start, stop, scale, exponent, out_row)


@jit
def first_slot(slot_rows_row):
    """First slot that has an expert row, or the number of slots."""
    for k in range(slot_rows_row.shape[0]):
        if slot_rows_row[k] >= 0:
            return k
    return slot_rows_row.shape[0]


@jit
def to_fp8_rows(first, last, kind, block, headroom, payload, scales, slot_rows, out, out_scales):
    """Wire rows -> FP8 rows at each of their expert rows.  See `cpu.to_fp8_rows`."""
    hidden = out.shape[1]
    values = np.empty(hidden, np.float32)
    made = np.empty(hidden, np.uint8)
    made_scales = np.empty(out_scales.shape[1], np.uint8)
    scale_row = np.empty(out_scales.shape[1], np.float32)
    for r in range(first, last):
        slot = first_slot(slot_rows[r])
        if slot == slot_rows.shape[1]:
            continue
        row = slot_rows[r, slot]
        if kind == BFLOAT16_ROWS:
            widen_bf16(payload[r].view(np.int16), values)
            encode_e4m3(values, FP8_BLOCK, FP8_ROUND, made, made_scales)
            wire_row_to_fp8(E4M3_ROWS, FP8_BLOCK, 0, made, made_scales, out[row], scale_row)
        else:
            wire_row_to_fp8(kind, block, headroom, payload[r], scales[r], out[row], scale_row)
        out_scales[row] = scale_row
        for k in range(slot + 1, slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                out[slot_rows[r, k]] = out[row]
                out_scales[slot_rows[r, k]] = scale_row


@jit
def to_bf16_rows(first, last, kind, block, payload, scales, slot_rows, out):
    """Wire rows -> BF16 rows (uint16) at each of their expert rows."""
    values = np.empty(out.shape[1], np.float32)
    for r in range(first, last):
        slot = first_slot(slot_rows[r])
        if slot == slot_rows.shape[1]:
            continue
        row = slot_rows[r, slot]
        decode_row(kind, block, payload[r], scales[r], values)
        encode_bf16(values, out[row])
        for k in range(slot + 1, slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                out[slot_rows[r, k]] = out[row]


@jit
def dequantize(first, last, kind, block, payload, scales, out):
    """Wire rows -> float32 rows, in order."""
    for r in range(first, last):
        decode_row(kind, block, payload[r], scales[r], out[r])
        if kind == BFLOAT16_ROWS:
            for i in range(out.shape[1]):
                out[r, i] = out[r, i] if out[r, i] == out[r, i] else float_of(F32_NAN)


@jit
def fill_padding(first, last, num_rows, expert_offsets, out, out_scales):
    """Zero the rows behind the live rows of local experts [first, last); their scales become 1."""
    for e in range(first, last):
        for row in range(expert_offsets[e] + num_rows[e], expert_offsets[e + 1]):
            out[row] = 0
            out_scales[row] = 1.0


@jit
def strip_to_fp8(kind, payload, scales, sources, column, strip, width, exponent, tile):
    """One strip of columns of one tile: tile[m] gets the FP8 codes of row sources[m]."""
    for m in range(sources.shape[0]):
        r = sources[m]
        scale = np.int64(scales[r, strip])
        if kind == E2M1_ROWS:
            part = payload[r, column // 2 : (column + width) // 2]
        else:
            part = payload[r, column : column + width]
        block_to_fp8(kind, part, 0, width, scale, exponent, tile[m])


@jit
def bf16_strip_to_fp8(x, sources, column, width, tile, exponents):
    """The same from BF16 rows (int16): each column of the tile is one block, scale rule "ceil"."""
    num_rows = sources.shape[0]
    values = np.empty(TILE_ROWS, np.float32)
    made = np.empty(TILE_ROWS, np.uint8)
    scale = np.empty(1, np.uint8)
    for j in range(width):
        values[num_rows:] = 0.0
        for m in range(num_rows):
            values[m] = f32_from_bf16(x[sources[m], column + j])
        encode_e4m3(values, TILE_ROWS, FP8_ROUND, made, scale)
        exponents[j] = fp8_exponent(scale, 0, 1, 0)
        e4m3_to_fp8(made, 0, TILE_ROWS, np.int64(scale[0]), exponents[j], made)
        for m in range(num_rows):
            tile[m, j] = made[m]


@jit
def to_fp8_columns(
    first,
    last,
    kind,
    block,
    headroom,
    payload,
    scales,
    tile_starts,
    tile_rows,
    row_source,
    out,
    out_scales,
):
    """Tiles [first, last) of expert rows -> FP8 columns.  See `cpu.to_fp8_columns`."""
    hidden = out.shape[0]
    width = block if block > 0 else MX_BLOCK
    tile = np.empty((TILE_ROWS, width), np.uint8)
    exponents = np.empty(width, np.int64)
    for t in range(first, last):
        start, num_rows = tile_starts[t], tile_rows[t]
        sources = row_source[start : start + num_rows]
        for strip in range((hidden + width - 1) // width):
            column = strip * width
            columns = min(width, hidden - column)
            if kind == BFLOAT16_ROWS:
                x = payload.view(np.int16)
                bf16_strip_to_fp8(x, sources, column, columns, tile, exponents)
            else:
                exponent = 1
                for m in range(num_rows):
                    row_scales = scales[sources[m]]
                    exponent = max(exponent, fp8_exponent(row_scales, strip, strip + 1, headroom))
                exponents[:] = exponent
                strip_to_fp8(kind, payload, scales, sources, column, strip, columns, exponent, tile)
            for j in range(columns):
                out_scales[t, column + j] = SCALES[exponents[j]]
                out_row = out[column + j]
                for m in range(num_rows):
                    out_row[start + m] = tile[m, j]
                out_row[start + num_rows : tile_starts[t + 1]] = 0


# --- combine


@jit
def add_bf16_row(total, row, weight, weighted):
    """Add weight * row of BF16 bit patterns (int16): product and sum rounded separately."""
    if weighted:
        for i in range(total.shape[0]):
            total[i] = total[i] + weight * f32_from_bf16(row[i])
    else:
        for i in range(total.shape[0]):
            total[i] = total[i] + f32_from_bf16(row[i])


@jit
def weighted_reduce(
    first, last, expert_out, slot_rows, weights, kind, block, scale_round, payload, scales
):
    """Sum the expert outputs of each wire row.  See `cpu.weighted_reduce`."""
    total = np.empty(expert_out.shape[1], np.float32)
    codes = np.empty(expert_out.shape[1], np.int16)
    weighted = weights.shape[0] > 0
    for r in range(first, last):
        total[:] = 0.0
        for k in range(slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                weight = weights[r, k] if weighted else np.float32(1.0)
                add_bf16_row(total, expert_out[slot_rows[r, k]], weight, weighted)
        encode_row(kind, block, scale_round, total, codes, payload[r], scales[r])


@jit
def final_reduce(first, last, kind, block, payload, scales, place_offsets, places, out):
    """Sum the wire rows of each token, by ascending rank, and round to BF16 (uint16)."""
    total = np.empty(out.shape[1], np.float32)
    values = np.empty(out.shape[1], np.float32)
    for t in range(first, last):
        total[:] = 0.0
        for p in range(place_offsets[t], place_offsets[t + 1]):
            row = places[p]
            if kind == BFLOAT16_ROWS:
                add_bf16_row(total, payload[row].view(np.int16), np.float32(1.0), False)
            else:
                decode_row(kind, block, payload[row], scales[row], values)
                for i in range(total.shape[0]):
                    total[i] = total[i] + values[i]
        encode_bf16(total, out[t])
