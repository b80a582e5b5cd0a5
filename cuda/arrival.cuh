/*
arrival: codes of block-scaled wire rows -> E4M3 codes under a shared scale (docs/formats.md 4).

A block lies `gap` binades below the largest value its group has room for: gap = S + h - E, with E
the block's scale byte, S the shared one and h the headroom (6 for E2M1, 0 for E4M3).  Codes are
RNE_E4M3(value * 2^(E - S)); from MAX_GAP on all of them are zero.
*/
#pragma once

#include "formats.cuh"

constexpr int MAX_GAP = 19;

template <int Format>
DEVICE int headroom() {
    return Format == WIRE_MXFP4 ? E2M1_HEADROOM : 0;
}

// The scale byte of a block as it counts for the largest of its group: 0xFF does not.
DEVICE u32 scale_in_group(u32 scale) { return scale == E8M0_NAN ? 0 : scale; }

// S of a group whose largest scale byte is this one.
template <int Format>
DEVICE u32 shared_scale(u32 largest) {
    return max(static_cast<int>(largest) - headroom<Format>(), 1);
}

// The gap of a block; of one with scale 0xFF, whose codes do not count, some gap in range.
template <int Format>
DEVICE u32 gap_below(u32 shared, u32 scale) {
    const int gap = static_cast<int>(shared) + headroom<Format>() - static_cast<int>(scale);
    return min(max(gap, 0), MAX_GAP);
}

// --- E2M1

// The E4M3 bytes of magnitudes 0 0.5 1 1.5 and 2 3 4 6 at one gap, and the sign bits that are kept.
struct E4M3Row {
    u32 low, high, signs;
};

constexpr u32 LOW_AT_GAP_0 = 0x6C686000, HIGH_AT_GAP_0 = 0x7C787470;  // the values times 2^6
constexpr u32 LAST_NORMAL_GAP = 11;  // up to here every byte but the zero has an implicit bit

// E4M3 code of an E2M1 magnitude at a gap above LAST_NORMAL_GAP.
CONSTANT u32 subnormal_e4m3(int magnitude, int gap) {
    // In halves the values are 0 1 2 3 4 6 8 12; the step of E4M3 subnormals is 2^-9.
    const int halves = magnitude < 5 ? magnitude : 2 * magnitude - 4 + 2 * (magnitude == 7);
    const int up = gap <= 14 ? 14 - gap : 0, down = gap <= 14 ? 0 : gap - 14;
    int steps = halves << up, code = 0;
    if (down > 0) {
        const int odd = steps >> down & 1;
        steps = (steps + (1 << (down - 1)) - 1 + odd) >> down;
    }
    for (; steps >= 16; steps /= 2) code += 8;  // binades above the one that continues subnormals
    return static_cast<u32>(code + steps);
}

struct SubnormalRows {
    u32 words[MAX_GAP - LAST_NORMAL_GAP][2];
};

CONSTANT SubnormalRows make_subnormal_rows() {
    SubnormalRows rows{};
    for (int gap = LAST_NORMAL_GAP + 1; gap <= MAX_GAP; gap++) {
        for (int magnitude = 0; magnitude < 8; magnitude++) {
            rows.words[gap - LAST_NORMAL_GAP - 1][magnitude / 4] |= subnormal_e4m3(magnitude, gap)
                                                                    << 8 * (magnitude % 4);
        }
    }
    return rows;
}

TABLE SubnormalRows SUBNORMAL_ROWS = make_subnormal_rows();

// The table row of a block with this scale byte in a group with this shared scale.
DEVICE E4M3Row e4m3_row(u32 scale, u32 shared) {
    const u32 gap = gap_below<WIRE_MXFP4>(shared, scale);
    E4M3Row row = {LOW_AT_GAP_0 - gap * 0x08080800u, HIGH_AT_GAP_0 - gap * 0x08080808u,
                   0x80808080u};
    if (gap > LAST_NORMAL_GAP) {
        row.low = SUBNORMAL_ROWS.words[gap - LAST_NORMAL_GAP - 1][0];
        row.high = SUBNORMAL_ROWS.words[gap - LAST_NORMAL_GAP - 1][1];
    }
    if (scale == E8M0_NAN) row = {0x7F7F7F7Fu, 0x7F7F7F7Fu, 0};
    return row;
}

// Eight E2M1 codes -> eight E4M3 codes.
DEVICE void e4m3x8_from_e2m1(u32 codes, const E4M3Row& row, u32& first, u32& second) {
    u32 first_signs, second_signs;
    e2m1_signs(codes, first_signs, second_signs);
    const u32 magnitudes = codes & 0x77777777u;
    first = __byte_perm(row.low, row.high, magnitudes) | (first_signs & row.signs);
    second = __byte_perm(row.low, row.high, magnitudes >> 16) | (second_signs & row.signs);
}

// --- E4M3

// Two FP16 of few bits, in the range of E4M3 -> codes, ties to even; every NaN becomes 0x7F.
DEVICE u32 e4m3x2_from_f16(u32 halves) {
#if HAS_E4M3
    return cvt_e4m3x2(halves);
#else
    const u32 magnitudes = halves & 0x7FFF7FFFu;
    const u32 shifted = mul_f16x2(magnitudes, 0x1C001C00u);  // 2^-8: the code, 7 bits up
    const u32 odd = shifted >> 7 & 0x00010001u;
    const u32 codes = (shifted + 0x003F003Fu + odd) >> 7 & 0x007F007Fu;
    const u32 is_nan = (magnitudes + 0x03FF03FFu) & 0x80008000u;
    const u32 signs = halves >> 8 & 0x00800080u & ~(is_nan >> 8);
    const u32 both = codes | (is_nan >> 8) - (is_nan >> 15) | signs;
    return both & 0xFF | both >> 8;
#endif
}

// Factor of a block's codes in a group with this shared scale, as two FP16.
template <int Format>
DEVICE u32 e4m3_factor(u32 scale, u32 shared) {
    const u32 gap = gap_below<Format>(shared, scale);
    const u32 factor = (gap < 15 ? (15u - gap) << 10 : 0x0400u >> (gap - 14)) * 0x00010001u;
    return scale == E8M0_NAN ? 0x7FFF7FFFu : factor;
}

// Four E4M3 codes times a power of two up to 1, rounded to nearest even; every NaN becomes 0x7F.
DEVICE u32 e4m3x4_scaled(u32 codes, u32 factor) {
    const u32 first = e4m3x2_from_f16(mul_f16x2(f16x2_from_e4m3(codes, 0), factor));
    const u32 second = e4m3x2_from_f16(mul_f16x2(f16x2_from_e4m3(codes, 1), factor));
    return first | second << 16;
}

// N codes of a block with this scale byte -> E4M3 codes in a group with this shared scale.
template <int Format, int N>
DEVICE void to_e4m3(const u32 (&words)[N * element_bits(Format) / 32],
                    u32 scale,
                    u32 shared,
                    u32 (&codes)[N / 4]) {
    if constexpr (Format == WIRE_MXFP4) {
        const E4M3Row row = e4m3_row(scale, shared);
#pragma unroll
        for (int i = 0; i < N / 8; i++)
            e4m3x8_from_e2m1(words[i], row, codes[2 * i], codes[2 * i + 1]);
    } else {
        const u32 factor = e4m3_factor<Format>(scale, shared);
#pragma unroll
        for (int i = 0; i < N / 4; i++) codes[i] = e4m3x4_scaled(words[i], factor);
    }
}
