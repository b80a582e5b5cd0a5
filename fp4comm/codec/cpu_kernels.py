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
    DOT_LANES,
    E2M1,
    E2M1_SCALE_MAX,
    E4M3,
    E4M3_MAX,
    E4M3_NAN,
    E8M0_MAX,
    E8M0_NAN,
    F32_NAN,
    FP8_BLOCK,
    MX_BLOCK,
    TILE_ROWS,
    WireFormat,
)

BFLOAT16_ROWS, E4M3_ROWS, E2M1_ROWS = 0, 1, 2  # kinds of wire rows


def jit(function):
    """Compile with a disk cache, or without one where no cache folder can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # "cannot cache function": read-only install and no home
        return njit(nogil=True)(function)


# --- constants, derived from formats.py (numba takes plain numbers, not dataclasses)

# 2**(b - 127) by scale byte; the NaN byte gives the NaN that is written.
# Made from bits: the importing thread may flush subnormals, and numba keeps the table on disk.
_SCALE_BITS = np.arange(256, dtype=np.uint32) << 23
_SCALE_BITS[[0, E8M0_NAN]] = 0x00400000, F32_NAN
SCALES = _SCALE_BITS.view(np.float32)

E2M1_EMAX, E4M3_EMAX, E2M1_HEADROOM = E2M1.emax, E4M3.emax, E2M1.headroom
E4M3_BIAS, E4M3_MANTISSA = E4M3.bias, E4M3.mantissa_bits
FP8_ROUND = WireFormat("fp8").scale_round  # BF16 is quantized so on arrival

# From this gap between the scales of block and group on, every code is zero: 448 * 2**-19 and
# 6 * 2**(6 - 19) are below half of 2**-9.
MAX_GAP = 19

MAX_STRIP = 2048  # columns of a tile that are converted at a time: 256 KiB

# Scale bytes up to these: an element without implicit bit can have a code other than 0.
E2M1_SMALL, E4M3_SMALL = 2, 10


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


@intrinsic
def fill_block(typingctx, row, start, value):
    """Set row[start : start + 32] to one value, in one store."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        element = context.get_data_type(signature.args[0].dtype)
        vector, lane = ir.VectorType(element, MX_BLOCK), ir.IntType(32)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[2], lane(0))
        zeros = ir.Constant(ir.VectorType(lane, MX_BLOCK), [0] * MX_BLOCK)
        filled = builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)
        at = builder.bitcast(builder.gep(array.data, [args[1]]), vector.as_pointer())
        builder.store(filled, at, align=1)
        return context.get_dummy_value()

    return types.none(row, types.intp, row.dtype), codegen


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
def scale_of(magnitude, mantissa_bits, emax, largest, scale_round):
    """Scale byte of a block, from the bit pattern of its largest magnitude; 0xFF of NaN and Inf."""
    if magnitude >= 255 << mantissa_bits:
        return E8M0_NAN
    return max(0, min(((magnitude + scale_round) >> mantissa_bits) - emax, largest))


@jit
def encode_e2m1(row, mantissa_bits, scale_round, payload_row, scale_row):
    """MXFP4: row holds bit patterns, int16 of BF16 (7 mantissa bits) or int32 of float32 (23).

    Positive floats order as their bits do, so an element is rounded by its distance from the bit
    pattern of 1.0 at its scale.  From 1.0 on the upper bits of the distance, rounded to nearest
    even, count codes (a carry into the exponent is right); 0.75 and 0.25 are the midpoints below.
    """
    typed = row.dtype.type
    one, two, largest = typed(1), typed(2), typed(7)
    code_bits = mantissa_bits - 1
    shift, no_sign = typed(code_bits), typed((256 << mantissa_bits) - 1)
    below_half = typed((2 << code_bits) + (1 << code_bits) // 2 - 1)  # 1.0 has code 2
    at_0_25, at_0_75 = typed(-(4 << code_bits)), typed(-(1 << code_bits))
    to_sign, sign = typed(mantissa_bits + 5), typed(8)
    codes = np.empty(row.shape[0], np.int16)
    for b in range(scale_row.shape[0]):
        start = b * MX_BLOCK
        magnitude = np.int64(block_magnitude(row, start))  # type: ignore[call-arg]
        scale = scale_of(magnitude, mantissa_bits, E2M1_EMAX, E2M1_SCALE_MAX, scale_round)
        scale_row[b] = scale
        if scale == E8M0_NAN:
            codes[start : start + MX_BLOCK] = 0
            continue
        if scale <= E2M1_SMALL:
            small_e2m1_codes(row, start, scale, codes, mantissa_bits)
            continue
        at_1 = typed(scale << mantissa_bits)
        for i in range(MX_BLOCK):
            v = row[start + i]
            distance = np.subtract(np.bitwise_and(v, no_sign), at_1)
            odd = np.bitwise_and(np.right_shift(distance, shift), one)
            code = np.right_shift(np.add(np.add(distance, below_half), odd), shift)
            code = np.maximum(np.minimum(code, largest), two)
            code = code if distance >= at_0_75 else typed(distance > at_0_25)
            negative = np.bitwise_and(np.right_shift(v, to_sign), sign)
            codes[start + i] = np.int16(np.bitwise_or(code, negative))
    pairs = codes.view(np.uint32)
    for i in range(payload_row.shape[0]):
        payload_row[i] = np.uint8(np.bitwise_or(pairs[i], np.right_shift(pairs[i], np.uint32(12))))


@jit
def small_e4m3_codes(row, start, stop, scale, codes_row, mantissa_bits):
    """E4M3 codes of elements under a scale byte of at most 10: some may have no implicit bit.

    Magnitudes are integers here, in units of the smallest subnormal of the input format.
    """
    implicit = 1 << mantissa_bits
    step = scale + mantissa_bits - 10  # log2 of the step 2**-9 at this scale, in units
    for i in range(start, stop):
        magnitude = np.int64(row[i]) & ((implicit << 8) - 1)
        exponent = magnitude >> mantissa_bits
        if exponent > 0:
            magnitude = ((magnitude & (implicit - 1)) | implicit) << (exponent - 1)
        in_steps = magnitude / 2.0**step
        shift = 0
        while in_steps >= 16.0:
            in_steps /= 2.0
            shift += 1
        code = np.int64(np.rint(in_steps)) + 8 * shift
        codes_row[i] = min(code, E4M3_MAX) | (0x80 if row[i] < 0 else 0)


@jit
def encode_e4m3(row, mantissa_bits, block, scale_round, codes_row, scale_row):
    """Blocks of E4M3 codes: row as in `encode_e2m1`.

    With the exponents rebased, the upper bits of a float are the code, and rounding them to nearest
    even carries into the exponent as it should.  Below the least normal code the significand is
    shifted further, with its implicit bit.
    """
    typed = row.dtype.type
    one = typed(1)
    mantissa, shift = typed(mantissa_bits), typed(mantissa_bits - E4M3_MANTISSA)
    below_half = typed((1 << (mantissa_bits - E4M3_MANTISSA - 1)) - 1)
    no_sign, implicit = typed((256 << mantissa_bits) - 1), typed(1 << mantissa_bits)
    to_sign, sign = typed(mantissa_bits + 1), typed(0x80)
    least_shift, most_shift = typed(mantissa_bits - E4M3_MANTISSA + 1), typed(mantissa_bits + 3)
    largest = typed(E4M3_MAX)
    rebase = np.empty_like(row)
    for b in range(scale_row.shape[0]):
        start, stop = b * block, min((b + 1) * block, row.shape[0])
        magnitude = np.int64(0)
        for at in range(start, stop, MX_BLOCK):
            magnitude = max(magnitude, np.int64(block_magnitude(row, at)))  # type: ignore[call-arg]
        scale = scale_of(magnitude, mantissa_bits, E4M3_EMAX, E8M0_MAX, scale_round)
        scale_row[b] = scale
        for at in range(start, stop, MX_BLOCK):
            fill_block(rebase, at, typed((scale - E4M3_BIAS) << mantissa_bits))  # type: ignore[call-arg]
    for i in range(row.shape[0]):
        v = row[i]
        a = np.bitwise_and(v, no_sign)
        t = np.subtract(a, rebase[i])
        odd = np.bitwise_and(np.right_shift(t, shift), one)
        normal = np.right_shift(np.add(np.add(t, below_half), odd), shift)
        normal = np.minimum(normal, largest)
        further = np.subtract(least_shift, np.right_shift(t, mantissa))
        further = np.maximum(np.minimum(further, most_shift), one)
        significand = np.bitwise_or(np.bitwise_and(a, np.subtract(implicit, one)), implicit)
        odd = np.bitwise_and(np.right_shift(significand, further), one)
        half = np.left_shift(one, np.subtract(further, one))
        rounded = np.add(significand, np.add(np.subtract(half, one), odd))
        subnormal = np.right_shift(rounded, further)
        code = normal if t >= implicit else subnormal
        negative = np.bitwise_and(np.right_shift(v, to_sign), sign)
        codes_row[i] = np.uint8(np.bitwise_or(code, negative))
    for b in range(scale_row.shape[0]):
        start, stop = b * block, min((b + 1) * block, row.shape[0])
        if scale_row[b] <= E4M3_SMALL:
            small_e4m3_codes(row, start, stop, np.int64(scale_row[b]), codes_row, mantissa_bits)
        elif scale_row[b] == E8M0_NAN:
            codes_row[start:stop] = 0


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
def encode_row(kind, block, scale_round, values, payload_row, scale_row):
    """One float32 row -> one wire row."""
    if kind == E2M1_ROWS:
        encode_e2m1(values.view(np.int32), 23, scale_round, payload_row, scale_row)
    elif kind == E4M3_ROWS:
        encode_e4m3(values.view(np.int32), 23, block, scale_round, payload_row, scale_row)
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
def spread_e2m1(payload_row, codes_row):
    """MXFP4 payload -> a byte an element, each the E4M3 code of its value times 2**-6.

    The three low bits of a nibble at bits 4..2 of an E4M3 byte are just that, subnormal 0.5 and
    zero included.
    """
    pairs = codes_row.view(np.uint16)
    for i in range(payload_row.shape[0]):
        v = np.uint16(payload_row[i])
        nibbles = np.bitwise_and(
            np.bitwise_or(v, np.left_shift(v, np.uint16(4))), np.uint16(0x0F0F)
        )
        magnitude = np.left_shift(np.bitwise_and(nibbles, np.uint16(0x0707)), np.uint16(2))
        sign = np.left_shift(np.bitwise_and(nibbles, np.uint16(0x0808)), np.uint16(4))
        pairs[i] = np.bitwise_or(magnitude, sign)


@jit
def decode_e4m3(codes_row, exponent, scales_row, values):
    """E4M3 codes -> float32 values times 2**exponent (0 or 6) times a float32 scale an element."""
    rebias = np.int32((127 - E4M3_BIAS + exponent) << 23)
    step = np.float32(2.0 ** (exponent + 1 - E4M3_BIAS - E4M3_MANTISSA))
    for i in range(codes_row.shape[0]):
        v = np.int32(codes_row[i])
        magnitude = np.bitwise_and(v, np.int32(0x7F))
        normal = np.add(np.left_shift(magnitude, np.int32(20)), rebias)
        subnormal = bits_of(np.float32(magnitude) * step)
        bits = normal if magnitude >= np.int32(8) else subnormal
        bits = np.bitwise_or(bits, np.left_shift(np.bitwise_and(v, np.int32(0x80)), np.int32(24)))
        bits = np.int32(F32_NAN) if magnitude == np.int32(E4M3_NAN) else bits
        values[i] = float_of(bits) * scales_row[i]


@jit
def decode_row(kind, block, payload_row, scale_row, values):
    """One wire row -> one float32 row; block NaNs decode to the one NaN."""
    if kind == BFLOAT16_ROWS:
        widen_bf16(payload_row.view(np.int16), values)
        return
    scales_row = np.empty(values.shape[0], np.float32)
    for b in range(scale_row.shape[0]):
        for at in range(b * block, min((b + 1) * block, values.shape[0]), MX_BLOCK):
            fill_block(scales_row, at, SCALES[scale_row[b]])  # type: ignore[call-arg]
    if kind == E2M1_ROWS:
        codes_row = np.empty(values.shape[0], np.uint8)
        spread_e2m1(payload_row, codes_row)
        decode_e4m3(codes_row, E2M1_HEADROOM, scales_row, values)
    else:
        decode_e4m3(payload_row, 0, scales_row, values)


@jit
def decode_fp8_row(codes_row, scale_row, values):
    """An FP8 input row -> float32: one rounding a product; an unfit scale makes its group NaN."""
    scales_row = np.empty(values.shape[0], np.float32)
    for group in range(scale_row.shape[0]):
        scale = scale_row[group]
        fit = scale if 0 < scale < np.inf else np.float32(np.nan)
        scales_row[group * FP8_BLOCK : (group + 1) * FP8_BLOCK] = fit
    decode_e4m3(codes_row, 0, scales_row, values)


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
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        if kind == BFLOAT16_ROWS:
            payload[row].view(np.int16)[:] = x[t]
        elif kind == E2M1_ROWS:
            encode_e2m1(x[t], 7, scale_round >> 16, payload[row], scales[row])
        else:
            encode_e4m3(x[t], 7, block, scale_round >> 16, payload[row], scales[row])
        copy_to_places(place_offsets[t], place_offsets[t + 1], places, payload, scales)


@jit
def quantize_f32_rows(
    first, last, x, kind, block, scale_round, place_offsets, places, payload, scales
):
    """Rows of x, float32 -> wire rows."""
    values = np.empty(x.shape[1], np.float32)
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        values[:] = x[t]
        encode_row(kind, block, scale_round, values, payload[row], scales[row])
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
    for t in range(first, last):
        if place_offsets[t] == place_offsets[t + 1]:
            continue
        row = places[place_offsets[t]]
        decode_fp8_row(x[t], x_scales[t], values)
        encode_row(kind, block, scale_round, values, payload[row], scales[row])
        if kind == E4M3_ROWS and block == FP8_BLOCK:
            keep_fp8_groups(x[t], x_scales[t], payload[row], scales[row])
        copy_to_places(place_offsets[t], place_offsets[t + 1], places, payload, scales)


# --- on arrival


@jit
def fp8_exponent(scale, headroom):
    """S of the arrival rule, from the largest scale byte of a group."""
    return max(np.int64(scale) - headroom, 1)


@jit
def group_exponents(block, headroom, scale_row, exponents, out_scale_row):
    """S for each block of a row, from the largest scale of its group, and the group's FP8 scale."""
    blocks_a_group = FP8_BLOCK // block
    for group in range(out_scale_row.shape[0]):
        first = group * blocks_a_group
        last = min(first + blocks_a_group, scale_row.shape[0])
        largest = 0
        for b in range(first, last):
            scale = np.int64(scale_row[b])
            largest = max(largest, 0 if scale == E8M0_NAN else scale)
        exponent = fp8_exponent(largest, headroom)
        exponents[first:last] = exponent
        out_scale_row[group] = SCALES[exponent]


@jit
def e2m1_to_fp8(payload_row, scale_row, exponents, out_row):
    """MXFP4 row -> E4M3 codes of value * 2**(E - S), rounded once.

    Spread, a nibble is the E4M3 code of its value times 2**-6.  To raise it by n binades, n is
    added to the exponent field; 0.5, which has no implicit bit, becomes the power of two itself.
    """
    spread_e2m1(payload_row, out_row)
    pairs, ups = out_row.view(np.uint16), np.empty(out_row.shape[0], np.uint8)  # 8 n an element
    for b in range(scale_row.shape[0]):
        binades = 2 * E2M1_HEADROOM - fp8_gap(scale_row[b], exponents[b], E2M1_HEADROOM)
        fill_block(ups, b * MX_BLOCK, np.uint8(8 * max(binades, 0)))  # type: ignore[call-arg]
    for i in range(pairs.shape[0]):
        v, up = pairs[i], np.uint16(ups[2 * i])
        upper = np.bitwise_or(np.right_shift(v, np.uint16(3)), np.right_shift(v, np.uint16(4)))
        upper = np.bitwise_and(upper, np.uint16(0x0101))  # 1.0 or more
        lower = np.bitwise_and(np.right_shift(v, np.uint16(2)), np.uint16(0x0101))
        only_half = np.bitwise_and(lower, np.bitwise_xor(upper, np.uint16(0x0101)))
        half_up = np.subtract(np.maximum(up, np.uint16(4)), np.uint16(4))
        v = np.add(v, np.multiply(upper, up))
        pairs[i] = np.add(v, np.multiply(only_half, half_up))
    for b in range(scale_row.shape[0]):
        start = b * MX_BLOCK
        gap = fp8_gap(scale_row[b], exponents[b], E2M1_HEADROOM) - 2 * E2M1_HEADROOM
        if scale_row[b] == E8M0_NAN:
            out_row[start : start + MX_BLOCK] = E4M3_NAN
        elif gap > 0:
            for i in range(start, start + MX_BLOCK):
                out_row[i] = shifted_down(out_row[i], np.int16(gap))


@jit
def fp8_gap(scale, exponent, headroom):
    """Binades between a block and the largest code that its group has room for; MAX_GAP is all."""
    return min(max(np.int64(exponent) + headroom - np.int64(scale), 0), MAX_GAP)


@jit
def shifted_down(code, gap):
    """Divide an E4M3 code by 2**gap (int16), rounding to nearest even; any NaN becomes 0x7F."""
    one = np.int16(1)
    v = np.int16(code)
    a = np.bitwise_and(v, np.int16(0x7F))
    exponent = np.right_shift(a, np.int16(3))
    implicit = np.int16(8) if a >= np.int16(8) else np.int16(0)
    significand = np.bitwise_or(np.bitwise_and(a, np.int16(7)), implicit)
    shift = np.subtract(np.add(gap, one), np.maximum(exponent, one))
    shift = np.maximum(np.minimum(shift, np.int16(6)), np.int16(0))
    odd = np.bitwise_and(np.right_shift(significand, shift), one)
    half = np.right_shift(np.left_shift(one, shift), one)
    up = np.maximum(np.add(np.subtract(half, one), odd), np.int16(0))
    subnormal = np.right_shift(np.add(significand, up), shift)
    drop = np.left_shift(gap, np.int16(3))
    shifted = np.subtract(a, drop) if exponent > gap else subnormal
    shifted = np.bitwise_or(shifted, np.bitwise_and(v, np.int16(0x80)))
    return np.uint8(np.int16(E4M3_NAN) if a == np.int16(E4M3_NAN) else shifted)


@jit
def e4m3_to_fp8(payload_row, scale_row, exponents, block, out_row):
    """E4M3 row -> E4M3 codes of value * 2**(E - S), rounded once."""
    gaps = np.empty(out_row.shape[0], np.int16)
    largest_gap = np.int16(0)
    for b in range(scale_row.shape[0]):
        gap = np.int16(fp8_gap(scale_row[b], exponents[b], 0))
        largest_gap = max(largest_gap, gap)
        for at in range(b * block, min((b + 1) * block, out_row.shape[0]), MX_BLOCK):
            fill_block(gaps, at, gap)  # type: ignore[call-arg]
    if largest_gap > 0:
        for i in range(out_row.shape[0]):
            out_row[i] = shifted_down(payload_row[i], gaps[i])
    else:
        for i in range(out_row.shape[0]):
            v = payload_row[i]
            is_nan = np.bitwise_and(v, np.uint8(0x7F)) == np.uint8(E4M3_NAN)
            out_row[i] = np.uint8(E4M3_NAN) if is_nan else v
    for b in range(scale_row.shape[0]):
        if scale_row[b] == E8M0_NAN:
            out_row[b * block : (b + 1) * block] = E4M3_NAN


@jit
def wire_row_to_fp8(kind, block, headroom, payload_row, scale_row, out_row, out_scale_row):
    """One wire row -> one FP8 row and its float32 scales; BF16 is quantized as on the fp8 wire."""
    exponents = np.empty(out_row.shape[0] // MX_BLOCK, np.uint8)
    if kind == E2M1_ROWS:
        group_exponents(block, headroom, scale_row, exponents, out_scale_row)
        e2m1_to_fp8(payload_row, scale_row, exponents, out_row)
    elif kind == E4M3_ROWS:
        group_exponents(block, headroom, scale_row, exponents, out_scale_row)
        e4m3_to_fp8(payload_row, scale_row, exponents, block, out_row)
    else:
        bf16_to_fp8(payload_row.view(np.int16), FP8_BLOCK, out_row, out_scale_row)


@jit
def bf16_to_fp8(row, block, out_row, out_scale_row):
    """BF16 (int16) -> E4M3 codes and float32 scales of blocks, by way of the fp8 wire."""
    codes_row = np.empty(row.shape[0], np.uint8)
    scale_row = np.empty(out_scale_row.shape[0], np.uint8)
    exponents = np.empty(out_scale_row.shape[0], np.uint8)
    encode_e4m3(row, 7, block, FP8_ROUND >> 16, codes_row, scale_row)
    group_exponents(FP8_BLOCK, 0, scale_row, exponents, out_scale_row)
    e4m3_to_fp8(codes_row, scale_row, exponents, block, out_row)


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
    fp8_scales = np.empty(out_scales.shape[1], np.float32)
    for r in range(first, last):
        slot = first_slot(slot_rows[r])
        if slot == slot_rows.shape[1]:
            continue
        row = slot_rows[r, slot]
        wire_row_to_fp8(kind, block, headroom, payload[r], scales[r], out[row], fp8_scales)
        out_scales[row] = fp8_scales
        for k in range(slot + 1, slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                out[slot_rows[r, k]] = out[row]
                out_scales[slot_rows[r, k]] = fp8_scales


@jit
def to_bf16_rows(first, last, kind, block, payload, scales, slot_rows, row_weights, out):
    """Wire rows -> BF16 rows (uint16) at each of their expert rows.  See `cpu.to_bf16_rows`."""
    values = np.empty(out.shape[1], np.float32)
    weighted_values = np.empty(out.shape[1], np.float32)
    weighted = row_weights.shape[0] > 0
    for r in range(first, last):
        slot = first_slot(slot_rows[r])
        if slot == slot_rows.shape[1]:
            continue
        row = slot_rows[r, slot]
        decode_row(kind, block, payload[r], scales[r], values)
        if not weighted:
            encode_bf16(values, out[row])
        for k in range(slot, slot_rows.shape[1]):
            to = slot_rows[r, k]
            if to >= 0 and weighted:
                for i in range(values.shape[0]):
                    weighted_values[i] = values[i] * row_weights[to]
                encode_bf16(weighted_values, out[to])
            elif to >= 0 and to != row:
                out[to] = out[row]


@jit
def dot(values, row, sums):
    """Dot product of float32 values and BF16 bit patterns (int16); see `reference.row_dots`."""
    sums[:] = 0.0
    for start in range(0, values.shape[0], DOT_LANES):
        for i in range(min(DOT_LANES, values.shape[0] - start)):
            sums[i] = sums[i] + values[start + i] * f32_from_bf16(row[start + i])
    width = DOT_LANES // 2
    while width > 0:
        for i in range(width):
            sums[i] = sums[i] + sums[width + i]
        width //= 2
    return sums[0] if sums[0] == sums[0] else float_of(F32_NAN)


@jit
def row_dots(first, last, kind, block, payload, scales, expert_out, slot_rows, out):
    """Dot product of each expert row and its wire row.  See `cpu.row_dots`."""
    values = np.empty(expert_out.shape[1], np.float32)
    sums = np.empty(DOT_LANES, np.float32)
    for r in range(first, last):
        if first_slot(slot_rows[r]) == slot_rows.shape[1]:
            continue
        decode_row(kind, block, payload[r], scales[r], values)
        for k in range(slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                out[slot_rows[r, k]] = dot(values, expert_out[slot_rows[r, k]], sums)


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
def strip_exponents(headroom, scales, sources, exponents):
    """S for each strip of columns under one scale, over the rows of a tile."""
    exponents[:] = 1
    for m in range(sources.shape[0]):
        for b in range(exponents.shape[0]):
            scale = np.int64(scales[sources[m], b])
            largest = fp8_exponent(0 if scale == E8M0_NAN else scale, headroom)
            exponents[b] = max(np.int64(exponents[b]), largest)


@jit
def bf16_tile_to_fp8(x, sources, transposed, out_scale_row):
    """FP8 codes of a tile from BF16 rows (int16): each column is one block, scale rule "ceil"."""
    column = np.zeros(TILE_ROWS, np.int16)
    for j in range(transposed.shape[0]):
        for m in range(sources.shape[0]):
            column[m] = x[sources[m], j]
        bf16_to_fp8(column, TILE_ROWS, transposed[j], out_scale_row[j : j + 1])


@jit
def tile_to_fp8(kind, block, codes, scales, sources, exponents, transposed, out_scale_row):
    """FP8 codes of a tile from block-scaled rows; a strip of columns has one exponent."""
    tile = np.empty((TILE_ROWS, transposed.shape[0]), np.uint8)
    for m in range(sources.shape[0]):
        if kind == E2M1_ROWS:
            e2m1_to_fp8(codes[sources[m]], scales[sources[m]], exponents, tile[m])
        else:
            e4m3_to_fp8(codes[sources[m]], scales[sources[m]], exponents, block, tile[m])
    transpose_bytes(tile, sources.shape[0], transposed)
    for j in range(transposed.shape[0]):
        out_scale_row[j] = SCALES[exponents[j // block]]


@jit
def swapped(upper, lower, shift, mask):
    """Exchange the upper parts of the first word with the lower parts of the second."""
    change = ((upper >> np.uint64(shift)) ^ lower) & np.uint64(mask)
    return upper ^ (change << np.uint64(shift)), lower ^ change


@jit
def transpose_bytes(tile, num_rows, transposed):
    """Set transposed[j, m] = tile[m, j] for the first num_rows rows (at least) of the tile.

    Eight by eight bytes at a time, side by side along the rows, so that it becomes vector code: in
    three steps, neighbouring halves of two words change places.
    """
    words, transposed_words = tile.view(np.uint64), transposed.view(np.uint64)
    turned = np.empty((8, words.shape[1]), np.uint64)
    for m in range(0, num_rows, 8):
        for j in range(words.shape[1]):
            a0, a4 = swapped(words[m, j], words[m + 4, j], 32, 0x00000000FFFFFFFF)
            a1, a5 = swapped(words[m + 1, j], words[m + 5, j], 32, 0x00000000FFFFFFFF)
            a2, a6 = swapped(words[m + 2, j], words[m + 6, j], 32, 0x00000000FFFFFFFF)
            a3, a7 = swapped(words[m + 3, j], words[m + 7, j], 32, 0x00000000FFFFFFFF)
            a0, a2 = swapped(a0, a2, 16, 0x0000FFFF0000FFFF)
            a1, a3 = swapped(a1, a3, 16, 0x0000FFFF0000FFFF)
            a4, a6 = swapped(a4, a6, 16, 0x0000FFFF0000FFFF)
            a5, a7 = swapped(a5, a7, 16, 0x0000FFFF0000FFFF)
            turned[0, j], turned[1, j] = swapped(a0, a1, 8, 0x00FF00FF00FF00FF)
            turned[2, j], turned[3, j] = swapped(a2, a3, 8, 0x00FF00FF00FF00FF)
            turned[4, j], turned[5, j] = swapped(a4, a5, 8, 0x00FF00FF00FF00FF)
            turned[6, j], turned[7, j] = swapped(a6, a7, 8, 0x00FF00FF00FF00FF)
        for j in range(words.shape[1]):
            for i in range(8):
                transposed_words[8 * j + i, m >> 3] = turned[i, j]


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
    elements_a_byte = hidden // payload.shape[1]
    exponents = np.empty(scales.shape[1], np.uint8)
    for t in range(first, last):
        start, num_rows = tile_starts[t], tile_rows[t]
        sources = row_source[start : start + num_rows]
        strip_exponents(headroom, scales, sources, exponents)
        for column in range(0, hidden, MAX_STRIP):
            stop = min(column + MAX_STRIP, hidden)
            transposed = np.empty((stop - column, TILE_ROWS), np.uint8)
            scale_row = out_scales[t, column:stop]
            if kind == BFLOAT16_ROWS:
                x = payload.view(np.int16)[:, column:stop]
                bf16_tile_to_fp8(x, sources, transposed, scale_row)
            else:
                codes = payload[:, column // elements_a_byte : stop // elements_a_byte]
                blocks = slice(column // block, (stop + block - 1) // block)
                part, strip = scales[:, blocks], exponents[blocks]
                tile_to_fp8(kind, block, codes, part, sources, strip, transposed, scale_row)
            for j in range(stop - column):
                out_row = out[column + j]
                for m in range(num_rows):
                    out_row[start + m] = transposed[j, m]
                out_row[start + num_rows : tile_starts[t + 1]] = 0


# --- combine


@jit
def add_bf16_row(total, row, weight):
    """Add weight * row of BF16 bit patterns (int16): product and sum rounded separately."""
    for i in range(total.shape[0]):
        total[i] = total[i] + weight * f32_from_bf16(row[i])


@jit
def add_two_bf16_rows(total, row, weight, next_row, next_weight):
    """Add one row, then the next, in one pass over the sums."""
    for i in range(total.shape[0]):
        first = total[i] + weight * f32_from_bf16(row[i])
        total[i] = first + next_weight * f32_from_bf16(next_row[i])


@jit
def sum_bf16_rows(total, rows, places, weights):
    """Set total to the sum of weights * rows[places], in that order, from +0."""
    total[:] = 0.0
    for p in range(0, places.shape[0] - 1, 2):
        row, next_row = rows[places[p]], rows[places[p + 1]]
        add_two_bf16_rows(total, row, weights[p], next_row, weights[p + 1])
    if places.shape[0] % 2:
        add_bf16_row(total, rows[places[-1]], weights[places.shape[0] - 1])


@jit
def weighted_reduce(
    first, last, expert_out, slot_rows, weights, kind, block, scale_round, payload, scales
):
    """Sum the expert outputs of each wire row.  See `cpu.weighted_reduce`."""
    total = np.empty(expert_out.shape[1], np.float32)
    own_rows = np.empty(slot_rows.shape[1], np.int32)
    own_weights = np.ones(slot_rows.shape[1], np.float32)
    weighted = weights.shape[0] > 0
    for r in range(first, last):
        num_own = 0
        for k in range(slot_rows.shape[1]):
            if slot_rows[r, k] >= 0:
                own_rows[num_own] = slot_rows[r, k]
                if weighted:
                    own_weights[num_own] = weights[r, k]
                num_own += 1
        sum_bf16_rows(total, expert_out, own_rows[:num_own], own_weights)
        encode_row(kind, block, scale_round, total, payload[r], scales[r])


@jit
def sum_wire_rows(total, values, kind, block, payload, scales, own):
    """Sum these wire rows in order, from +0; values is room for one of them."""
    if kind == BFLOAT16_ROWS:
        sum_bf16_rows(total, payload.view(np.int16), own, np.ones(own.shape[0], np.float32))
        return
    total[:] = 0.0
    for p in range(own.shape[0]):
        decode_row(kind, block, payload[own[p]], scales[own[p]], values)
        for i in range(total.shape[0]):
            total[i] = total[i] + values[i]


@jit
def final_reduce(first, last, kind, block, payload, scales, place_offsets, places, out):
    """Sum the wire rows of each token, by ascending rank, and round to BF16 (uint16)."""
    total = np.empty(out.shape[1], np.float32)
    values = np.empty(out.shape[1], np.float32)
    for t in range(first, last):
        own = places[place_offsets[t] : place_offsets[t + 1]]
        sum_wire_rows(total, values, kind, block, payload, scales, own)
        encode_bf16(total, out[t])


@jit
def relay_reduce(
    first,
    last,
    hidden,
    kind,
    block,
    scale_round,
    payload,
    scales,
    place_offsets,
    places,
    out,
    out_scales,
):
    """Sum the wire rows of each token, by ascending rank, and pack the sums."""
    total = np.empty(hidden, np.float32)
    values = np.empty(hidden, np.float32)
    for t in range(first, last):
        own = places[place_offsets[t] : place_offsets[t + 1]]
        sum_wire_rows(total, values, kind, block, payload, scales, own)
        encode_row(kind, block, scale_round, total, out[t], out_scales[t])
