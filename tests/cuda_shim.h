/*
cuda_shim: what cuda/bits.cuh takes from nvcc, in plain C++, so that g++ compiles the other headers.

Put before them.  Not for code with barriers or shuffles.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

using std::max;
using std::min;

#define DEVICE static inline
#define TABLE static constexpr
#define CONSTANT constexpr

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <int N>
static inline void load_words(const uint8_t* at, uint32_t (&words)[N]) {
    std::memcpy(words, at, sizeof words);
}

template <int N>
static inline void store_words(uint8_t* at, const uint32_t (&words)[N]) {
    if (reinterpret_cast<uintptr_t>(at) % std::min(4 * N, 16) != 0) std::abort();
    std::memcpy(at, words, sizeof words);
}

static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }

static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t pick = selector >> (4 * i) & 15;
        const uint32_t byte = (pick & 4 ? b : a) >> (8 * (pick & 3)) & 0xFF;
        result |= (pick & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << (8 * i);
    }
    return result;
}

// --- BF16

static inline double bf16_value(uint32_t bits) { return bits_float(bits << 16); }

// Round a double that has at most 64 significant bits' worth of exactness to BF16, to even.
static inline uint32_t bf16_of(double value) {
    if (std::isnan(value)) return 0x7FFF;
    const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    if (std::isinf(magnitude)) return sign | 0x7F80;
    const int exponent = std::max(std::ilogb(magnitude), -126);
    const double steps = std::nearbyint(std::ldexp(magnitude, 7 - exponent));  // 1 is the last bit
    const uint32_t field = exponent + 126;  // without the implicit bit, which steps carries
    return sign | std::min<uint32_t>(field * 128 + static_cast<uint32_t>(steps), 0x7F80);
}

static inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const double product = bf16_value(a >> shift & 0xFFFF) * bf16_value(b >> shift & 0xFFFF);
        // long double: the sum of a tiny product and 128 must not become a tie.
        const long double sum = static_cast<long double>(product) + bf16_value(c >> shift & 0xFFFF);
        double rounded = static_cast<double>(sum);  // to odd, if inexact
        if (rounded != sum) {
            uint64_t bits;
            std::memcpy(&bits, &rounded, 8);
            if (std::fabs(static_cast<long double>(rounded)) > std::fabs(sum)) bits--;
            bits |= 1;
            std::memcpy(&rounded, &bits, 8);
        }
        result |= bf16_of(rounded) << shift;
    }
    return result;
}

static inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const uint32_t x = a >> shift & 0xFFFF, y = b >> shift & 0xFFFF;
        const bool first = std::isnan(bf16_value(y)) || bf16_value(x) < bf16_value(y);
        result |= (first ? x : y) << shift;
    }
    return result;
}

static inline uint32_t cvt_bf16x2(float low, float high) {
    return bf16_of(high) << 16 | bf16_of(low);
}

// --- FP16

static inline double f16_value(uint32_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

static inline uint32_t f16_of(double value) {
    if (std::isnan(value)) return 0x7FFF;
    const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return sign;
    if (magnitude > 1e6) return sign | 0x7C00;
    const int exponent = std::max(std::ilogb(magnitude), -14);
    const double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    return sign | std::min<uint32_t>((exponent + 14) * 1024 + static_cast<uint32_t>(steps), 0x7C00);
}

static inline void f16x2_to_f32(uint32_t halves, float& low, float& high) {
    low = static_cast<float>(f16_value(halves & 0xFFFF));
    high = static_cast<float>(f16_value(halves >> 16));
}

// FP16 products and sums are exact in double.
static inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t result = 0;
    for (int s = 0; s < 32; s += 16)
        result |= f16_of(f16_value(a >> s & 0xFFFF) * f16_value(b >> s & 0xFFFF) +
                         f16_value(c >> s & 0xFFFF))
                  << s;
    return result;
}

static inline uint32_t min_f16x2(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (int s = 0; s < 32; s += 16) {
        const uint32_t x = a >> s & 0xFFFF, y = b >> s & 0xFFFF;
        const bool first = std::isnan(f16_value(y)) || f16_value(x) < f16_value(y);
        result |= (first ? x : y) << s;
    }
    return result;
}

static inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (int s = 0; s < 32; s += 16)
        result |= f16_of(f16_value(a >> s & 0xFFFF) * f16_value(b >> s & 0xFFFF)) << s;
    return result;
}

// --- 16-bit integers

static inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
    return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}

static inline uint32_t min_u16x2(uint32_t a, uint32_t b) {
    return std::min(a >> 16, b >> 16) << 16 | std::min(a & 0xFFFF, b & 0xFFFF);
}

static inline uint32_t min_s16x2(uint32_t a, uint32_t b) {
    const int16_t high = std::min<int16_t>(a >> 16, b >> 16), low = std::min<int16_t>(a, b);
    return static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16 | static_cast<uint16_t>(low);
}
