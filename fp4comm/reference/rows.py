"""Operations of the oracle on rows: quantize, dequantize, arrive as FP8 or BF16, reduce.

T tokens, n wire rows, M expert rows (padding included), H hidden, K top-k.  A ``row_source [M]``
names the wire row of each expert row, -1 in padding; None takes the wire rows as they are.
"""

from __future__ import annotations

import numpy as np

from fp4comm.formats import (
    DOT_LANES,
    E2M1,
    E4M3_NAN,
    E8M0_BIAS,
    E8M0_NAN,
    FP8_BLOCK,
    TILE_ROWS,
    WireFormat,
)
from fp4comm.reference.casts import (
    Array,
    bf16_to_float32,
    canonical_nan,
    e2m1_to_float32,
    e4m3_to_float32,
    e8m0_to_float32,
    float32_to_bf16,
    float32_to_e2m1,
    float32_to_e4m3,
)

Rows = Array | tuple[Array, Array]  # bf16 bits, float32, or (E4M3 codes, float32 scales per 128)


def scale_from_amax(amax_bits: Array, wire: WireFormat) -> Array:
    """Scale bytes of blocks whose largest magnitude has these float32 bits (formats.md 2, 3).

    >>> scale_from_amax(np.float32([6.0, 7.0, 0.0, np.inf]).view(np.uint32), WireFormat("mxfp4"))
    array([127, 128,   0, 255], dtype=uint8)
    """
    amax = np.asarray(amax_bits, np.int64)
    scale = ((amax + wire.scale_round) >> 23) - wire.format.element.emax
    scale = np.clip(scale, 0, wire.format.largest_scale)
    return np.where(amax >= 0x7F800000, E8M0_NAN, scale).astype(np.uint8)  # Inf and every NaN


def load(x: Rows) -> Array:
    """Read rows as float32 [T, H].

    Args:
        x: uint16 BF16 bits [T, H], float32 [T, H], or a pair of E4M3 codes uint8 [T, H] and
            float32 scales [T, ceil(H/128)].  The pair's values are code * scale, rounded once; a
            scale that is not positive and finite makes its group NaN (formats.md 5).
    """
    if not isinstance(x, tuple):
        return bf16_to_float32(x) if x.dtype == np.uint16 else np.asarray(x, np.float32)
    codes, scales = x
    valid = np.where(np.isfinite(scales) & (scales > 0), scales, np.nan).astype(np.float64)
    per_element = np.repeat(valid, FP8_BLOCK, axis=1)[:, : codes.shape[1]]
    with np.errstate(over="ignore", under="ignore"):
        product = e4m3_to_float32(codes) * per_element  # exact in float64
        return canonical_nan(product.astype(np.float32))


def quantize_rows(x: Rows, wire: WireFormat) -> tuple[Array, Array]:
    """Quantize and pack rows into a wire format.

    BF16 input goes to the bf16 wire bit for bit.  On the fp8 wire, groups of an FP8 pair whose
    scale is a power of two pass with all codes unchanged.

    Args:
        x: [T, H] as `load` takes it.
        wire: the wire format.

    Returns:
        payload uint8 [T, payload_bytes], E2M1 with the even element in the low nibble, and scales
        uint8 [T, scale_bytes], E8M0.  A block with a NaN or Inf has scale 0xFF and codes 0.

    >>> x = np.array([[0.5, 6.0] + 30 * [0.0]], np.float32)
    >>> payload, scales = quantize_rows(x, WireFormat("mxfp4"))
    >>> payload[0, :2].tolist(), scales.tolist()
    ([113, 0], [[127]])
    """
    values = load(x)
    num_rows, hidden = values.shape
    scales = np.zeros((num_rows, wire.scale_bytes(hidden)), np.uint8)
    if wire.name == "bf16":
        unchanged = not isinstance(x, tuple) and x.dtype == np.uint16
        bits = np.ascontiguousarray(x) if unchanged else float32_to_bf16(values)
        return bits.view(np.uint8), scales

    encode = float32_to_e2m1 if wire.format.element is E2M1 else float32_to_e4m3
    codes = np.zeros((num_rows, hidden), np.uint8)
    for b in range(wire.format.num_blocks(hidden)):
        columns = slice(b * wire.format.block, (b + 1) * wire.format.block)
        block = np.ascontiguousarray(values[:, columns])
        # Magnitudes compare as integers, so that a NaN is the largest.
        scales[:, b] = scale_from_amax((block.view(np.uint32) & 0x7FFFFFFF).max(axis=1), wire)
        scale = scales[:, b, None].astype(np.int32)
        finite = np.where(scale == E8M0_NAN, 0, block).astype(np.float64)  # codes 0 under 0xFF
        codes[:, columns] = encode(np.ldexp(finite, E8M0_BIAS - scale))  # the scaling is exact
    if wire.name == "fp8" and isinstance(x, tuple):
        _keep_power_of_two_groups(x, codes, scales)
    return (codes[:, 0::2] | codes[:, 1::2] << 4 if wire.format.element is E2M1 else codes), scales


def _keep_power_of_two_groups(x: tuple[Array, Array], codes: Array, scales: Array) -> None:
    """Put the codes of x back wherever its scale is one that E8M0 has."""
    bits = np.ascontiguousarray(x[1], np.float32).view(np.uint32)
    exponent = bits >> 23  # 256 and up with the sign
    normal = (bits & 0x7FFFFF == 0) & (exponent >= 1) & (exponent <= 254)
    keep = normal | (bits == 0x00400000)  # 2^-127, byte 0
    scales[keep] = exponent[keep]
    keep = np.repeat(keep, FP8_BLOCK, axis=1)[:, : codes.shape[1]]
    codes[keep] = x[0][keep]


def _element_values(payload: Array, wire: WireFormat) -> Array:
    """Unpack a payload to float32 values [n, H], before their scales."""
    if wire.name == "bf16":
        return bf16_to_float32(np.ascontiguousarray(payload).view(np.uint16))
    if wire.format.element is E2M1:
        nibbles = np.stack([payload & 0x0F, payload >> 4], axis=-1)
        return e2m1_to_float32(nibbles.reshape(len(payload), 2 * payload.shape[1]))
    return e4m3_to_float32(payload)


def _element_scales(scales: Array, wire: WireFormat, hidden: int) -> Array:
    """Repeat the scale bytes so that each of the [n, H] elements has its own."""
    return np.repeat(scales, wire.format.block, axis=1)[:, :hidden]


def dequantize(payload: Array, scales: Array, wire: WireFormat, hidden: int) -> Array:
    """Decode wire rows to float32 [n, H]: one multiplication by the scale, NaN 0x7FC00000."""
    values = _element_values(payload, wire)
    if wire.name != "bf16":
        with np.errstate(over="ignore"):  # scale bytes 253 and 254, which we never make
            values = values * e8m0_to_float32(_element_scales(scales, wire, hidden))
    return canonical_nan(values)


# Arrival


def _gather(array: Array, row_source: Array | None) -> Array:
    """Take the rows of `array` that `row_source` names; zeros for -1."""
    if row_source is None:
        return array
    rows = np.zeros((len(row_source), array.shape[1]), array.dtype)
    rows[row_source >= 0] = array[row_source[row_source >= 0]]
    return rows


def _fp8_groups(hidden: int) -> list[slice]:
    """Columns of the groups of 128; the last may be short."""
    return [slice(c, min(c + FP8_BLOCK, hidden)) for c in range(0, hidden, FP8_BLOCK)]


def _largest_scale(scales: Array, axis: int) -> Array:
    """E* of formats.md 4: the largest scale byte other than 0xFF, 0 if there is none; int64."""
    return np.where(scales == E8M0_NAN, 0, scales).max(axis=axis, initial=0).astype(np.int64)


def _shift_to_e4m3(values: Array, scales: Array, shared: Array) -> Array:
    """RNE_E4M3(value * 2^(E - S)) of elements with scale bytes E; NaN where E is 0xFF."""
    # In float64 the product is exact: a float32 step could round before E4M3 does.
    shifted = np.ldexp(values.astype(np.float64), scales.astype(np.int64) - shared)
    return np.where(scales == E8M0_NAN, E4M3_NAN, float32_to_e4m3(shifted)).astype(np.uint8)


def to_bf16_rows(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    row_source: Array | None = None,
    row_weights: Array | None = None,
) -> Array:
    """Convert wire rows to BF16 expert rows, uint16 [M, H]; NaN is 0x7FC0, padding +0.

    With row_weights, float32 [M], each value is multiplied by its row's in float32 first.
    """
    values = dequantize(_gather(payload, row_source), _gather(scales, row_source), wire, hidden)
    if row_source is not None and row_weights is not None:
        with np.errstate(all="ignore"):
            values = values * row_weights.astype(np.float32)[:, None]
        values[row_source < 0] = 0.0
    return float32_to_bf16(values)


def row_dots(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    expert_out: Array,
    row_source: Array,
) -> Array:
    """Dot product of each expert row and its wire row: the gradient of its weight.

    DOT_LANES partial sums from +0, column c into sum c % DOT_LANES by ascending c, product and sum
    rounded separately; then the upper half of the sums is added to the lower until one is left.

    Args:
        payload: wire rows uint8 [n, payload_bytes].
        scales: uint8 [n, scale_bytes].
        wire: their format.
        hidden: H.
        expert_out: BF16 bits [M, H].
        row_source: int64 [M], wire row of each expert row, -1 in padding.

    Returns:
        float32 [M], 0 in padding; NaN is 0x7FC00000.
    """
    values = dequantize(_gather(payload, row_source), _gather(scales, row_source), wire, hidden)
    own = bf16_to_float32(expert_out)
    sums = np.zeros((len(own), DOT_LANES), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, hidden, DOT_LANES):
            last = min(first + DOT_LANES, hidden)
            sums[:, : last - first] += own[:, first:last] * values[:, first:last]
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
    return np.where(row_source < 0, np.float32(0.0), canonical_nan(sums[:, 0]))


def to_fp8_rows(
    payload: Array, scales: Array, wire: WireFormat, hidden: int, row_source: Array | None = None
) -> tuple[Array, Array]:
    """Convert wire rows to E4M3 expert rows with one power-of-two scale per 128 (formats.md 4).

    Returns:
        codes uint8 [M, H] and scales float32 [M, ceil(H/128)]; padding has codes 0 and scale 1.0.
    """
    payload, scales = _gather(payload, row_source), _gather(scales, row_source)
    if wire.name == "bf16":
        wire = WireFormat("fp8")
        payload, scales = quantize_rows(np.ascontiguousarray(payload).view(np.uint16), wire)
    values = _element_values(payload, wire)
    element_scales = _element_scales(scales, wire, hidden)
    codes = np.zeros(values.shape, np.uint8)
    fp8_scales = np.zeros((len(values), len(_fp8_groups(hidden))), np.float32)
    for g, columns in enumerate(_fp8_groups(hidden)):
        group = element_scales[:, columns]
        shared = np.maximum(_largest_scale(group, axis=1) - wire.format.element.headroom, 1)
        codes[:, columns] = _shift_to_e4m3(values[:, columns], group, shared[:, None])
        fp8_scales[:, g] = e8m0_to_float32(shared)
    if row_source is not None:
        fp8_scales[row_source < 0] = 1.0
    return codes, fp8_scales


def to_fp8_columns(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    row_source: Array | None = None,
    num_rows: Array | None = None,
    expert_offsets: Array | None = None,
) -> tuple[Array, Array]:
    """Convert wire rows to E4M3 columns with one power-of-two scale per 128 rows (formats.md 4).

    Tiles of 128 rows restart at each expert.  In a tile, a strip of `block` columns has one scale;
    from the bf16 wire each column is quantized by itself, as a block of the fp8 wire.

    Args:
        payload: wire rows uint8 [n, payload_bytes].
        scales: uint8 [n, scale_bytes].
        wire: their format.
        hidden: H.
        row_source: int64 [M].
        num_rows: live rows of each expert; None takes all M as one expert's.
        expert_offsets: first row of each expert, then M; given together with `num_rows`.

    Returns:
        codes uint8 [H, M], 0 in padding, and scales float32 [tiles, H], ceil(num_rows/128) tiles
        for each expert.
    """
    payload, scales = _gather(payload, row_source), _gather(scales, row_source)
    if num_rows is None or expert_offsets is None:
        num_rows, expert_offsets = np.array([len(payload)]), np.array([0, len(payload)])
    values = _element_values(payload, wire)
    codes = np.zeros((hidden, len(payload)), np.uint8)
    tile_scales = []
    for start, count in zip(expert_offsets[:-1], num_rows, strict=True):
        for first in range(start, start + count, TILE_ROWS):
            rows = slice(first, min(first + TILE_ROWS, start + count))
            if wire.name == "bf16":
                bits = np.ascontiguousarray(payload[rows]).view(np.uint16)
                packed = quantize_rows(bits.T, WireFormat("fp8"))
                codes[:, rows], column_scales = to_fp8_rows(*packed, WireFormat("fp8"), len(bits))
                tile_scales.append(column_scales[:, 0])
            else:
                tile = _element_scales(scales[rows], wire, hidden)
                shared = np.maximum(_largest_scale(tile, axis=0) - wire.format.element.headroom, 1)
                codes[:, rows] = _shift_to_e4m3(values[rows], tile, shared).T
                tile_scales.append(e8m0_to_float32(shared))
    return codes, np.array(tile_scales, np.float32).reshape(len(tile_scales), hidden)


# Way back


def weighted_reduce(
    expert_out: Array, slot_rows: Array, weights: Array | None, wire: WireFormat
) -> tuple[Array, Array]:
    """Sum the expert outputs of each wire row and pack the sums.

    The sums are float32, start at +0 and take the slots by ascending k; product and sum are rounded
    separately.

    Args:
        expert_out: BF16 bits [M, H].
        slot_rows: int [n, K], expert row of each slot, or -1.
        weights: float32 [n, K]; None adds the rows as they are.
        wire: format of the result.

    Returns:
        payload uint8 [n, payload_bytes] and scales uint8 [n, scale_bytes].
    """
    sums = np.zeros((len(slot_rows), expert_out.shape[1]), np.float32)
    for k in range(slot_rows.shape[1]):
        live = slot_rows[:, k] >= 0
        term = bf16_to_float32(expert_out[slot_rows[live, k]])
        with np.errstate(all="ignore"):
            if weights is not None:
                term = term * weights[live, k, None].astype(np.float32)
            sums[live] = sums[live] + term
    return quantize_rows(sums, wire)


def final_reduce(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    token_offsets: Array,
    token_rows: Array,
) -> Array:
    """Sum the wire rows of each token in float32, from +0 and in the order given, to BF16.

    Args:
        payload: wire rows uint8 [n, payload_bytes].
        scales: uint8 [n, scale_bytes].
        wire: their format.
        hidden: H.
        token_offsets: int [T + 1], where each token's part of `token_rows` starts; then its end.
        token_rows: wire rows of all tokens, by ascending rank in each.

    Returns:
        BF16 bits [T, H]; +0 for a token without rows.
    """
    return float32_to_bf16(_row_sums(payload, scales, wire, hidden, token_offsets, token_rows))


def relay_reduce(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    token_offsets: Array,
    token_rows: Array,
) -> tuple[Array, Array]:
    """Sum the wire rows of each token as `final_reduce` does, to a wire row of the same format.

    Returns:
        payload uint8 [T, payload_bytes] and scales uint8 [T, scale_bytes].
    """
    sums = _row_sums(payload, scales, wire, hidden, token_offsets, token_rows)
    return quantize_rows(sums, wire)


def _row_sums(
    payload: Array,
    scales: Array,
    wire: WireFormat,
    hidden: int,
    token_offsets: Array,
    token_rows: Array,
) -> Array:
    """Sums of the wire rows of each token, float32 [T, H]."""
    values = dequantize(payload, scales, wire, hidden)
    sums = np.zeros((len(token_offsets) - 1, hidden), np.float32)
    with np.errstate(all="ignore"):
        for t in range(len(sums)):
            for row in token_rows[token_offsets[t] : token_offsets[t + 1]]:
                sums[t] = sums[t] + values[row]
    return sums
