/*
formats: the wire formats as the kernels see them.  Facts and sources: fp4comm/formats.py.

A kernel is compiled for one wire format, given as -DWIRE=..., and works on pieces of N elements of
a row, N a power of two and at most MX_BLOCK; a block of a format is one piece or a few neighbouring
lanes' pieces.
*/
#pragma once

#include "bits.cuh"

enum Wire { WIRE_BF16, WIRE_FP8, WIRE_MXFP8, WIRE_MXFP4 };

constexpr int MX_BLOCK = 32;    // elements under one E8M0 scale
constexpr int FP8_BLOCK = 128;  // elements under one scale of an FP8 row
constexpr int TILE_ROWS = 128;  // expert rows under one scale of an FP8 column

constexpr u32 E8M0_NAN = 0xFF;
constexpr u32 E4M3_NAN = 0x7F;
constexpr u32 BF16_NAN = 0x7FC0;
constexpr u32 F32_NAN = 0x7FC00000;
constexpr u32 F32_INF = 0x7F800000;
constexpr u32 NO_SIGN = 0x7FFFFFFF;

constexpr int E2M1_EMAX = 2, E4M3_EMAX = 8;  // exponent of the largest value
constexpr int E2M1_SCALE_MAX = 252, E4M3_SCALE_MAX = 254;
constexpr int E2M1_HEADROOM = 6;           // binades between 6.0 and the largest E4M3 power of two
constexpr u32 E4M3_CEIL_ROUND = 0x1FFFFF;  // scale rule "ceil": BF16 that becomes FP8 on arrival

CONSTANT int element_bits(int wire) { return wire == WIRE_BF16 ? 16 : wire == WIRE_MXFP4 ? 4 : 8; }
CONSTANT u32 block_elements(int wire) { return wire == WIRE_FP8 ? FP8_BLOCK : MX_BLOCK; }
// Lanes that a block's elements lie in, piece_elements each.
CONSTANT int block_lanes(int wire, int piece_elements) {
    return wire == WIRE_BF16 ? 1 : block_elements(wire) / piece_elements;
}
// Which block of its row an element is in, and the blocks of a row; the last may be short.
CONSTANT int block_idx(int wire, int element) {
    return wire == WIRE_BF16 ? 0 : wire == WIRE_FP8 ? element / FP8_BLOCK : element / MX_BLOCK;
}
CONSTANT int num_blocks(int wire, int hidden) {
    return wire == WIRE_BF16 ? 0 : block_idx(wire, hidden - 1) + 1;
}

// A row of an array.  Rows are numbered by 31 bits (plans and layouts are int32), their places in
// memory are not: one wide multiplication and addition.
template <typename T>
DEVICE T* at_row(T* array, int row, int row_size) {
    return array + static_cast<u64>(static_cast<u32>(row)) * static_cast<u32>(row_size);
}
DEVICE int row_bytes(int hidden, int bits) { return hidden / 8 * bits; }  // hidden % 32 == 0

// 2^(scale - 127); byte 0 is a float32 subnormal, byte 255 the NaN.
DEVICE float e8m0_to_f32(u32 scale) {
    return bits_float(scale == 0 ? 0x00400000u : scale == E8M0_NAN ? F32_NAN : scale << 23);
}

// 2^(127 - scale), what a block is multiplied by before its elements are rounded.
DEVICE float e8m0_inverse(u32 scale) { return e8m0_to_f32(254u - min(scale, 254u)); }

// Scale byte of a block from the float32 bits of its largest magnitude; 0xFF for NaN and Inf.
// `round` is the scale rule: it carries into the exponent from some mantissa on.
DEVICE u32 scale_from_amax(u32 amax_bits, u32 round, int emax, int largest) {
    const int scale = static_cast<int>((amax_bits + round) >> 23) - emax;
    return amax_bits >= F32_INF ? E8M0_NAN : static_cast<u32>(min(max(scale, 0), largest));
}

// --- BF16

// Two BF16 that cvt_bf16x2 made: every NaN becomes 0x7FC0.
DEVICE u32 bf16x2_of_one_nan(u32 pair) {
    // Read as signed integers, no number is above Inf (0x7F80), and cvt makes each NaN 0x7FFF.
    return min_s16x2(pair, BF16_NAN << 16 | BF16_NAN);
}

// Two float32 -> two BF16, ties to even; every NaN becomes 0x7FC0.
DEVICE u32 bf16x2_from_f32(float low, float high) {
    return bf16x2_of_one_nan(cvt_bf16x2(low, high));
}

DEVICE float bf16_low(u32 pair) { return bits_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return bits_float(pair & 0xFFFF0000u); }

// --- decoding: N elements of a row -> float32

template <int N>
DEVICE void bf16_to_f32(const u32 (&words)[N / 2], float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        values[2 * i] = bf16_low(words[i]);
        values[2 * i + 1] = bf16_high(words[i]);
    }
}

// Bytes whose top bit is the sign of each of eight E2M1 codes, the other bits garbage.
DEVICE void e2m1_signs(u32 codes, u32& first, u32& second) {
    // In selector nibbles, 8 repeats the sign of a byte: 0..3 the odd codes, 4..7 the even ones.
    first = __byte_perm(codes, codes << 4, 0x9D8C);
    second = __byte_perm(codes, codes << 4, 0xBFAE);
}

// Eight E2M1 codes -> float32.
DEVICE void e2m1x8_to_f32(u32 codes, float* values) {
    u32 signs[2];
    e2m1_signs(codes, signs[0], signs[1]);
    const u32 magnitudes = codes & 0x77777777u;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Upper bytes of 0 0.5 1 1.5 | 2 3 4 6 as FP16; the lower ones are 0.
        const u32 upper = __byte_perm(0x3E3C3800u, 0x46444240u, magnitudes >> 16 * half) |
                          (signs[half] & 0x80808080u);
        const u32 pairs[2] = {__byte_perm(upper, 0, 0x1404), __byte_perm(upper, 0, 0x3424)};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            f16x2_to_f32(pairs[i], values[4 * half + 2 * i], values[4 * half + 2 * i + 1]);
        }
    }
}

// Codes 2 * i and 2 * i + 1 of a word -> FP16, exactly; NaN of some bits.
DEVICE u32 f16x2_from_e4m3(u32 codes, int i) {
#if HAS_E4M3
    return cvt_f16x2(static_cast<u16>(codes >> 16 * i));
#else
    const u32 upper = __byte_perm(codes, 0, i == 0 ? 0x1404 : 0x3424);
    const u32 magnitudes = upper & 0x7F007F00u;
    const u32 is_nan = (magnitudes + 0x01000100u) & 0x80008000u;
    // Read as FP16 a magnitude is its value times 2^-8.
    const u32 halves = mul_f16x2(magnitudes >> 1, 0x5C005C00u);
    return halves | (upper & 0x80008000u) | (is_nan - (is_nan >> 15));
#endif
}

// N E4M3 codes -> float32; 0x7F and 0xFF give NaN.
template <int N>
DEVICE void e4m3_to_f32(const u32 (&codes)[N / 4], float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        f16x2_to_f32(f16x2_from_e4m3(codes[i / 2], i % 2), values[2 * i], values[2 * i + 1]);
}

// N elements of a wire row -> float32: code times 2^(scale - 127).  NaN of any bits.
template <int Format, int N>
DEVICE void decode(const u32 (&words)[N * element_bits(Format) / 32],
                   u32 scale,
                   float (&values)[N]) {
    if constexpr (Format == WIRE_BF16) {
        bf16_to_f32<N>(words, values);
    } else {
        if constexpr (Format == WIRE_MXFP4) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) e2m1x8_to_f32(words[i], values + 8 * i);
        } else {
            e4m3_to_f32<N>(words, values);
        }
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = __fmul_rn(values[i], e8m0_to_f32(scale));
    }
}

// --- sums

// Up to this scale the product of any code and 2^(scale - 127) is a float32, so that rounding it
// before it is added changes nothing: one instruction does both.
constexpr u32 LAST_EXACT_SCALE = 240;
constexpr u32 E2M1_IN_F16_BINADES = 14;  // 2^-14 is FP16's least exponent, 2^0 that of E2M1

// Eight E2M1 codes -> float32 times 2^-14: bits 0..2 of a code are bits 9..11 of an FP16, those
// without implicit bit as well.
DEVICE void e2m1x8_to_small_f32(u32 codes, float* values) {
    // Upper bytes of the FP16 of even and of odd codes.
    const u32 upper[2] = {(codes << 4 & 0x80808080u) | (codes << 1 & 0x0E0E0E0Eu),
                          (codes & 0x80808080u) | (codes >> 3 & 0x0E0E0E0Eu)};
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        f16x2_to_f32(__byte_perm(upper[odd], 0, 0x1404), values[odd], values[odd + 2]);
        f16x2_to_f32(__byte_perm(upper[odd], 0, 0x3424), values[odd + 4], values[odd + 6]);
    }
}

// Add N elements of a wire row, whose scale is at most LAST_EXACT_SCALE.
template <int Format, int N>
DEVICE void add(const u32 (&words)[N * element_bits(Format) / 32], u32 scale, float (&sums)[N]) {
    float values[N], factor = 1.0f;
    if constexpr (Format == WIRE_BF16) {
        bf16_to_f32<N>(words, values);
    } else if constexpr (Format == WIRE_MXFP4) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) e2m1x8_to_small_f32(words[i], values + 8 * i);
        factor = bits_float((scale + E2M1_IN_F16_BINADES) << 23);
    } else {
        e4m3_to_f32<N>(words, values);
        factor = e8m0_to_f32(scale);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        sums[i] = Format == WIRE_BF16 ? __fadd_rn(sums[i], values[i])
                                      : __fmaf_rn(values[i], factor, sums[i]);
    }
}
