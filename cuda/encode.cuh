/*
encode: floats -> E2M1 and E4M3 codes under a given scale (docs/formats.md 1 to 3).

Rounding is to nearest, ties to even, saturating; the sign of zero is kept.
*/
#pragma once

#include "formats.cuh"

// --- E2M1

// Two float32 -> BF16 by rounding to odd: cut off, with the last bit set if anything was lost.
// Rounding that once more, to fewer bits, gives what rounding the float32 at once would.
DEVICE u32 bf16x2_to_odd(float low, float high) {
    const u32 lost = __byte_perm(float_bits(low), float_bits(high), 0x5410);
    return __byte_perm(float_bits(low), float_bits(high), 0x7632) | min_u16x2(lost, 0x00010001u);
}

// Multipliers of an encoder: 2, 1 and 1/2 times 2^(127 - scale) in both halves.
struct E2M1Scale {
    u32 twice, once, half;
};

// scale in 3..252, where all three are normal BF16 and elements without implicit bit have code 0.
DEVICE E2M1Scale e2m1_scale(u32 scale) {
    const u32 once = (254u - scale) * 0x00800080u;
    return {once + 0x00800080u, once, once - 0x00800080u};
}

// Does a scale rule leave magnitudes of 7 and up?  The kernel's compiler knows (-D); by `even` and
// `ceil` only the largest scale does, and there magnitudes are cut to 6 beforehand.
#ifndef CLIPS
#define CLIPS 1
#endif
constexpr u32 LARGEST_BF16 = 0x7F40;  // 6 * 2^(E2M1_SCALE_MAX - 127)

// Two BF16 -> two E2M1 magnitudes, in bits 0..2 of each half; upper bytes are garbage.
// With y the scaled magnitude the code is min(2y, y + 2, y/2 + 4, 7) rounded to an integer: 128 is
// added, where BF16 has unit spacing and even integers are even codes.
DEVICE u32 e2m1x2_magnitudes(u32 pair, const E2M1Scale& scale) {
    const u32 magnitudes = pair & 0x7FFF7FFFu;
    const u32 below_2 = fma_bf16x2(magnitudes, scale.twice, 0x43004300u);  // 128
    const u32 below_4 = fma_bf16x2(magnitudes, scale.once, 0x43024302u);   // 130
    const u32 above_4 = fma_bf16x2(magnitudes, scale.half, 0x43044304u);   // 132
    const u32 codes = min_bf16x2(min_bf16x2(below_2, below_4), above_4);
    return CLIPS ? min_bf16x2(codes, 0x43074307u) : codes;
}

// Eight BF16 -> eight E2M1 codes, element 0 in the lowest nibble.
DEVICE u32 e2m1x8_from_bf16(const u32* pairs, const E2M1Scale& scale) {
    u32 codes[2];  // four codes, a byte each
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 magnitudes = __byte_perm(e2m1x2_magnitudes(pairs[2 * i], scale),
                                           e2m1x2_magnitudes(pairs[2 * i + 1], scale), 0x6420);
        const u32 upper_bytes = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
        codes[i] = magnitudes | (upper_bytes >> 4 & 0x08080808u);
    }
    const u32 even = __byte_perm(codes[0], codes[1], 0x6420);
    const u32 odd = __byte_perm(codes[0], codes[1], 0x7531);
    return even + 16 * odd;
}

// N elements, BF16 or float32 rounded to odd, under the block's scale -> N / 8 words of codes.
template <int N>
DEVICE void encode_e2m1(u32 (&pairs)[N / 2], u32 scale, u32 (&codes)[N / 8]) {
    if (!CLIPS && scale == E2M1_SCALE_MAX) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            pairs[i] = (pairs[i] & 0x80008000u) |
                       min_s16x2(pairs[i] & 0x7FFF7FFFu, LARGEST_BF16 << 16 | LARGEST_BF16);
        }
    }
    const E2M1Scale multipliers = e2m1_scale(min(max(scale, 3u), 252u));
    const u32 mask = scale == E8M0_NAN ? 0 : 0xFFFFFFFFu;  // no branch
#pragma unroll
    for (int i = 0; i < N / 8; i++) codes[i] = e2m1x8_from_bf16(pairs + 4 * i, multipliers) & mask;
}

// Scales up to this one: an element without implicit bit can have a code other than 0.
constexpr u32 E2M1_SMALL = 2;
constexpr float LIFT = 0x1p64f;  // gives every float32 an implicit bit, exactly
constexpr u32 LIFT_BINADES = 64;

// N BF16 elements of a block whose largest magnitude is amax_bits.
template <int N>
DEVICE void encode_e2m1_from_bf16(u32 (&pairs)[N / 2],
                                  u32 amax_bits,
                                  u32 scale,
                                  u32 (&codes)[N / 8]) {
    u32 lifted_scale = scale;
    if (scale <= E2M1_SMALL && amax_bits != 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            pairs[i] = __byte_perm(float_bits(__fmul_rn(bf16_low(pairs[i]), LIFT)),
                                   float_bits(__fmul_rn(bf16_high(pairs[i]), LIFT)), 0x7632);
        }
        lifted_scale += LIFT_BINADES;
    }
    encode_e2m1<N>(pairs, lifted_scale, codes);
}

// N float32 elements, likewise.
template <int N>
DEVICE void encode_e2m1_from_f32(const float (&values)[N],
                                 u32 amax_bits,
                                 u32 scale,
                                 u32 (&codes)[N / 8]) {
    u32 pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) pairs[i] = bf16x2_to_odd(values[2 * i], values[2 * i + 1]);
    u32 lifted_scale = scale;
    if (scale <= E2M1_SMALL && amax_bits != 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            pairs[i] =
                bf16x2_to_odd(__fmul_rn(values[2 * i], LIFT), __fmul_rn(values[2 * i + 1], LIFT));
        }
        lifted_scale += LIFT_BINADES;
    }
    encode_e2m1<N>(pairs, lifted_scale, codes);
}

// --- E4M3

// One float32 that is not NaN -> E4M3 code.
DEVICE u32 e4m3_from_f32(float value) {
    const u32 bits = float_bits(value);
    const u32 magnitude = bits & NO_SIGN;
    u32 code;
    if (magnitude >= 121u << 23) {  // 2^-6 and up: the upper bits are the code, rebased
        const u32 rebased = magnitude - (120u << 23);
        code = min((rebased + 0x7FFFFu + (rebased >> 20 & 1)) >> 20, 0x7Eu);
    } else {  // in steps of 2^-9: 2^14 is added, where float32 has that spacing
        code = float_bits(__fadd_rn(bits_float(magnitude), 0x1p14f)) & 0xF;
    }
    return code | (bits >> 24 & 0x80);
}

// Four float32 that are not NaN -> four codes, element 0 in the lowest byte.
DEVICE u32 e4m3x4_from_f32(const float* values) {
#if HAS_E4M3
    u16 first, second;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(first) : "f"(values[1]), "f"(values[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(second) : "f"(values[3]), "f"(values[2]));
    return static_cast<u32>(second) << 16 | first;
#else
    return e4m3_from_f32(values[0]) | e4m3_from_f32(values[1]) << 8 |
           e4m3_from_f32(values[2]) << 16 | e4m3_from_f32(values[3]) << 24;
#endif
}

// N elements under the block's scale -> N / 4 words of codes.
template <int N>
DEVICE void encode_e4m3(const float (&values)[N], u32 scale, u32 (&codes)[N / 4]) {
    const float inverse = e8m0_inverse(scale);  // exact where a code other than 0 comes out
    const u32 mask = scale == E8M0_NAN ? 0 : 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        float scaled[4];
#pragma unroll
        for (int j = 0; j < 4; j++) scaled[j] = __fmul_rn(values[4 * i + j], inverse);
        codes[i] = e4m3x4_from_f32(scaled) & mask;
    }
}

// --- one piece of a wire row

// Largest magnitude of N elements, as float32 bits.
template <int N>
DEVICE u32 amax_of_f32(const float (&values)[N]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < N; i++) amax = max(amax, float_bits(values[i]) & NO_SIGN);
    return amax;
}

template <int N>
DEVICE u32 amax_of_bf16(const u32 (&pairs)[N / 2]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) amax = max_u16x2(amax, pairs[i] & 0x7FFF7FFFu);
    return max(amax << 16, amax & 0xFFFF0000u);
}

// Largest magnitude of N float32 elements, for their wire scale.  For E2M1 of those rounded to odd:
// they carry into the exponent where the float32 do.
template <int Format, int N>
DEVICE u32 amax_of(const float (&values)[N]) {
    if constexpr (Format == WIRE_MXFP4) {
        u32 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) pairs[i] = bf16x2_to_odd(values[2 * i], values[2 * i + 1]);
        return amax_of_bf16<N>(pairs);
    } else {
        return amax_of_f32<N>(values);
    }
}

template <int Format>
DEVICE u32 wire_scale(u32 amax_bits, u32 round) {
    return Format == WIRE_MXFP4 ? scale_from_amax(amax_bits, round, E2M1_EMAX, E2M1_SCALE_MAX)
                                : scale_from_amax(amax_bits, round, E4M3_EMAX, E4M3_SCALE_MAX);
}

// N float32 elements of a block with this amax and scale -> words of the wire.
template <int Format, int N>
DEVICE void encode(const float (&values)[N],
                   u32 amax_bits,
                   u32 scale,
                   u32 (&words)[N * element_bits(Format) / 32]) {
    if constexpr (Format == WIRE_BF16) {
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            words[i] = bf16x2_from_f32(values[2 * i], values[2 * i + 1]);
    } else if constexpr (Format == WIRE_MXFP4) {
        encode_e2m1_from_f32<N>(values, amax_bits, scale, words);
    } else {
        encode_e4m3<N>(values, scale, words);
    }
}
