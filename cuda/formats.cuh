/*
formats: the wire formats as the kernels see them.  Facts and sources: fp4comm/formats.py, FACTS.md.

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

// Two float32 -> two BF16, ties to even; every NaN becomes 0x7FC0.
DEVICE u32 bf16x2_from_f32(float low, float high) {
    // Read as signed integers, no number is above Inf (0x7F80), and cvt makes each NaN 0x7FFF.
    return min_s16x2(cvt_bf16x2(low, high), BF16_NAN << 16 | BF16_NAN);
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

// Eight E2M1 codes -> float32 times scale.
DEVICE void e2m1x8_to_f32(u32 codes, float scale, float* values) {
    u32 signs[2];
    e2m1_signs(codes, signs[0], signs[1]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Upper and lower bytes of 0 0.5 1 1.5 | 2 3 4 6 as BF16.
        const u32 select = codes >> 16 * half & 0x7777u;
        const u32 upper =
            __byte_perm(0x3F3F3F00u, 0x40404040u, select) | (signs[half] & 0x80808080u);
        const u32 lower = __byte_perm(0xC0800000u, 0xC0804000u, select);
        const u32 pairs[2] = {__byte_perm(lower, upper, 0x5140), __byte_perm(lower, upper, 0x7362)};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            values[4 * half + 2 * i] = __fmul_rn(bf16_low(pairs[i]), scale);
            values[4 * half + 2 * i + 1] = __fmul_rn(bf16_high(pairs[i]), scale);
        }
    }
}

// One E4M3 code -> float32; 0x7F and 0xFF give NaN.
DEVICE float e4m3_to_f32(u32 code) {
    const u32 magnitude = code & 0x7F;
    // Read as float32 the code is its value times 2^-120, subnormal codes included.
    const float value = __fmul_rn(bits_float(magnitude << 20), 0x1p120f);
    const u32 bits = float_bits(value) | (code & 0x80) << 24;
    return bits_float(magnitude == E4M3_NAN ? F32_NAN : bits);
}

// N elements of a wire row -> float32: code times 2^(scale - 127).  NaN of any bits.
template <int Format, int N>
DEVICE void decode(const u32 (&words)[N * element_bits(Format) / 32],
                   u32 scale,
                   float (&values)[N]) {
    if constexpr (Format == WIRE_BF16) {
        bf16_to_f32<N>(words, values);
    } else if constexpr (Format == WIRE_MXFP4) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) e2m1x8_to_f32(words[i], e8m0_to_f32(scale), values + 8 * i);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float value = e4m3_to_f32(words[i / 4] >> 8 * (i % 4) & 0xFF);
            values[i] = __fmul_rn(value, e8m0_to_f32(scale));
        }
    }
}
