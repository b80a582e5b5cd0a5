/*
fp8_input: E4M3 codes with a float32 scale per 128 as input (docs/formats.md 5).

An element is code * scale, rounded once to float32.  For MXFP4 its code comes straight from the
E4M3 code, without that product: see `Ratio`.
*/
#pragma once

#include "encode.cuh"

// Is a scale one that E8M0 has: a power of two, 2^-127 (a float32 subnormal) and up?
DEVICE bool is_e8m0(float x_scale) {
    const u32 bits = float_bits(x_scale);
    const u32 exponent = bits >> 23;  // 256 and up with the sign
    return bits == 0x00400000u || ((bits & 0x7FFFFFu) == 0 && exponent - 1 < 254u);
}

// A scale as it multiplies: NaN unless it is positive and finite.
DEVICE float fit_scale(float x_scale) {
    return float_bits(x_scale) - 1 < F32_INF - 1 ? x_scale : bits_float(F32_NAN);
}

template <int N>
DEVICE void fp8_to_f32(const u32 (&codes)[N / 4], float x_scale, float (&values)[N]) {
    const float scale = fit_scale(x_scale);
    e4m3_to_f32<N>(codes, values);
#pragma unroll
    for (int i = 0; i < N; i++) values[i] = __fmul_rn(values[i], scale);
}

// Magnitudes of four codes at a time as FP16, their values times 2^-8: 0 and 2, then 1 and 3.
template <int N>
DEVICE void e4m3_magnitudes(const u32 (&codes)[N / 4], u32 (&halves)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        halves[2 * i] = codes[i] << 7 & 0x3F803F80u;
        halves[2 * i + 1] = codes[i] >> 1 & 0x3F803F80u;
    }
}

// Value of the largest of N such magnitudes; a NaN wins.
template <int N>
DEVICE float amax_of_halves(const u32 (&halves)[N / 2]) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) amax = max_u16x2(amax, halves[i]);
    amax = max(amax >> 16, amax & 0xFFFFu);
    float value, unused;
    f16x2_to_f32(amax, value, unused);
    return amax == E4M3_NAN << 7 ? bits_float(F32_NAN) : __fmul_rn(value, 0x1p8f);
}

// --- E4M3 codes and the mantissa m of their scale -> E2M1 codes

// Which side of the seven midpoints of E2M1 a product code * m is on depends only on where m lies
// among the ratios midpoint / code, some 20 in [1, 2).  So m is replaced by the middle of its
// interval between two ratios, which has so few bits that the products need no float32.
struct alignas(8) Ratio {
    u32 ratio;         // mantissa bits of the ratio in this cell as float32, or none
    u16 below, above;  // mantissa bits, as FP16, of the middles of the intervals beside it
};

constexpr int RATIO_CELLS = 256;
constexpr u32 NO_RATIO = 0xFFFFFFFFu;
constexpr int FRACTION = 30;  // bits behind the point, below

struct Ratios {
    Ratio cells[RATIO_CELLS];
};

// Smallest ratio above a number (or at it), both in [1, 2] times 2^FRACTION; the number is a ratio
// rounded down, or a bound of a cell.
CONSTANT long long next_ratio(long long number, bool or_equal) {
    long long next = 2LL << FRACTION;
    for (long long midpoint = 8; midpoint <= 14; midpoint += 2) {  // 1 1.25 1.5 1.75
        for (long long code = 8; code <= 15; code++) {
            const long long above_1 = midpoint >= code ? midpoint : 2 * midpoint;
            const long long ratio = (above_1 << FRACTION) / code;
            if ((ratio > number || (or_equal && ratio == number)) && ratio < next) next = ratio;
        }
    }
    return next;
}

CONSTANT u16 middle_f16(long long low, long long high) {
    return static_cast<u16>(((low + high) >> (FRACTION - 9)) - 1024);
}

CONSTANT Ratios make_ratios() {
    Ratios ratios{};
    const long long width = (1LL << FRACTION) / RATIO_CELLS;
    long long before = 1LL << FRACTION;  // largest ratio up to the start of the cell
    for (int i = 0; i < RATIO_CELLS; i++) {
        const long long start = (1LL << FRACTION) + i * width;
        if (next_ratio(start, true) == start) before = start;
        const long long inside = next_ratio(start, false);
        Ratio& cell = ratios.cells[i];
        if (inside < start + width) {
            const long long rounded = (inside + (1LL << (FRACTION - 24))) >> (FRACTION - 23);
            cell.ratio = static_cast<u32>(rounded) & 0x7FFFFFu;
            cell.below = middle_f16(before, inside);
            cell.above = middle_f16(inside, next_ratio(inside, false));
            before = inside;
        } else {
            cell.ratio = NO_RATIO;
            cell.below = cell.above = middle_f16(before, inside);
        }
    }
    return ratios;
}

TABLE Ratios RATIOS = make_ratios();

#ifdef __CUDACC__
// Have the table on its way to the L1 before the first scale has come.
DEVICE void fetch_ratios() {
    const Ratio* cell = RATIOS.cells + threadIdx.x % 32 * (RATIO_CELLS / 32);
    asm volatile("{ .reg .u32 unused; ld.global.u32 unused, [%0]; }" : : "l"(cell));
}
#endif

// FP16 factor that takes the value of an E4M3 code to its scaled magnitude, such that the E2M1 code
// comes out right; `usable` is false where there is none.
struct Factor {
    u32 factor;
    bool usable;
};

constexpr float LEAST_AMAX = 0x1p-4f;  // with a smaller code the factor could leave FP16

// amax: value of the block's largest code.  scale: its scale byte.
DEVICE Factor e2m1_factor(float amax, float x_scale, u32 scale) {
    const u32 bits = float_bits(x_scale), mantissa = bits & 0x7FFFFFu;
    u32 short_mantissa = mantissa >> 13;
    bool usable = true;
    if ((mantissa & 0xFFFFFu) != 0) {  // up to three bits make exact products by themselves
        u32 cell[2];
        load_words(reinterpret_cast<const u8*>(RATIOS.cells + (mantissa >> 15)), cell);
        short_mantissa = mantissa < cell[0] ? cell[1] & 0xFFFFu : cell[1] >> 16;
        usable = mantissa + 1 - cell[0] > 2;  // within a rounding of a tie float32 decides
    }
    // The scaled magnitude of amax is in [3, 8): twice and half of the factor have exponent fields
    // in 1..30.
    const int exponent = static_cast<int>(bits >> 23) - static_cast<int>(scale) + 8 + 15;
    // A scale byte of 16 and up cannot come from a subnormal x_scale.
    usable = usable && amax >= LEAST_AMAX && scale - 16 < E2M1_SCALE_MAX - 16;
    return {(static_cast<u32>(exponent) << 10 | short_mantissa) * 0x00010001u, usable};
}

// Two E4M3 magnitudes as FP16 -> two E2M1 magnitudes, in bits 0..2 of each half; upper bytes are
// garbage.  As e2m1x2_magnitudes, with 1024, where FP16 has unit spacing.
DEVICE u32 e2m1x2_from_halves(u32 halves, u32 factor) {
    const u32 below_2 = fma_f16x2(halves, factor + 0x04000400u, 0x64006400u);  // twice, 1024
    const u32 below_4 = fma_f16x2(halves, factor, 0x64026402u);                // 1026
    const u32 above_4 = fma_f16x2(halves, factor - 0x04000400u, 0x64046404u);  // half, 1028
    const u32 codes = min_f16x2(min_f16x2(below_2, below_4), above_4);
    return CLIPS ? min_f16x2(codes, 0x64076407u) : codes;
}

// Eight E4M3 codes and their magnitudes -> eight E2M1 codes, element 0 in the lowest nibble.
DEVICE u32 e2m1x8_from_e4m3(const u32* codes, const u32* halves, u32 factor) {
    const u32 even = __byte_perm(e2m1x2_from_halves(halves[0], factor),
                                 e2m1x2_from_halves(halves[2], factor), 0x6420);
    const u32 odd = __byte_perm(e2m1x2_from_halves(halves[1], factor),
                                e2m1x2_from_halves(halves[3], factor), 0x6420);
    const u32 even_signs = __byte_perm(codes[0], codes[1], 0x6420) >> 4;
    const u32 odd_signs = __byte_perm(codes[0], codes[1], 0x7531);
    return ((even + 16 * odd) | (odd_signs & 0x80808080u)) | (even_signs & 0x08080808u);
}

// N codes with their magnitudes, of a block whose largest code has the value amax -> N / 8 words of
// E2M1.
template <int N>
DEVICE void encode_e2m1_from_e4m3(const u32 (&codes)[N / 4],
                                  const u32 (&halves)[N / 2],
                                  float amax,
                                  float x_scale,
                                  u32 scale,
                                  u32 (&words)[N / 8]) {
    const Factor factor = e2m1_factor(amax, x_scale, scale);
    if (factor.usable) {
#pragma unroll
        for (int i = 0; i < N / 8; i++)
            words[i] = e2m1x8_from_e4m3(codes + 2 * i, halves + 4 * i, factor.factor);
    } else {
        const u32 amax_bits = float_bits(__fmul_rn(amax, fit_scale(x_scale)));
#pragma unroll
        for (int i = 0; i < N / 8; i++) {  // few at a time: registers are for the other branch
            const u32 eight[2] = {codes[2 * i], codes[2 * i + 1]};
            float values[8];
            u32 word[1];
            fp8_to_f32<8>(eight, x_scale, values);
            encode_e2m1_from_f32<8>(values, amax_bits, scale, word);
            words[i] = word[0];
        }
    }
}
