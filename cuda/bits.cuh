/*
bits: integer types, packed 16-bit arithmetic and memory access that the kernels share.

A u32 holds two 16-bit floats, element 0 in the low half.  Arithmetic is by single PTX instructions,
so that a rounding is never left to the compiler.  Without nvcc (`__CUDACC__` unset) the same
functions come from the header that the tests put before this one, and g++ compiles the rest.
*/
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
#define TABLE __device__ const
#define CONSTANT __host__ __device__ constexpr

// a * b + c in two BF16, rounded once.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// The smaller of two BF16; of a NaN and a number the number.
DEVICE u32 min_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// a * b + c in two FP16, rounded once.
DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE u32 min_f16x2(u32 a, u32 b) {
    u32 d;
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// The larger of two unsigned 16-bit integers.
DEVICE u32 max_u16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 d;
    asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return __vmaxu2(a, b);
#endif
}

// The smaller of two unsigned 16-bit integers.
DEVICE u32 min_u16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 d;
    asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return __vminu2(a, b);
#endif
}

// The smaller of two signed 16-bit integers.
DEVICE u32 min_s16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 d;
    asm("min.s16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return __vmins2(a, b);
#endif
}

// Two float32 -> BF16, ties to even, low in the low half; a NaN becomes 0x7FFF.
DEVICE u32 cvt_bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Does the GPU convert E4M3?
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define HAS_E4M3 1
#else
#define HAS_E4M3 0
#endif

#if HAS_E4M3
// Two E4M3 codes -> FP16, exactly; a NaN stays one.
DEVICE u32 cvt_f16x2(u16 codes) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(codes));
    return d;
}

// Two FP16 -> E4M3, ties to even, saturating; a NaN becomes 0x7F.
DEVICE u16 cvt_e4m3x2(u32 halves) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(halves));
    return d;
}
#endif

// Two FP16 -> float32, exactly.
DEVICE void f16x2_to_f32(u32 halves, float& low, float& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(halves));
}

DEVICE u32 float_bits(float value) { return __float_as_uint(value); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }

// Largest value among `lanes` neighbours of a warp (a power of two); all of them take part.
DEVICE u32 max_of_lanes(u32 value, int lanes) {
    for (int step = 1; step < lanes; step *= 2) {
        value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
    }
    return value;
}

// Read 4 * N bytes, aligned to them (at most 16).  Volatile, so that the compiler leaves the loads
// where they stand, in front of a barrier or of the first use of others.
template <int N>
DEVICE void load_words(const u8* at, u32 (&words)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]),
                           "=r"(words[i + 3])
                         : "l"(at + 4 * i));
        }
    } else if constexpr (N == 2) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(at));
    } else {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(at));
    }
}

// A pointer that the compiler takes as it is.  Then the address of a row is one multiplication and
// addition; otherwise the compiler adds the base last, by several instructions a row.
template <typename T>
DEVICE T* settled(T* pointer) {
    asm("" : "+l"(pointer));
    return pointer;
}

// Volatile as load_words.
DEVICE u32 load_byte(const u8* at) {
    u32 byte;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(at));
    return byte;
}

DEVICE float load_float(const float* at) {
    u32 bits[1];
    load_words(reinterpret_cast<const u8*>(at), bits);
    return bits_float(bits[0]);
}

template <int N>
DEVICE void store_words(u8* at, const u32 (&words)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            *reinterpret_cast<uint4*>(at + 4 * i) =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        }
    } else if constexpr (N == 2) {
        *reinterpret_cast<uint2*>(at) = make_uint2(words[0], words[1]);
    } else {
        *reinterpret_cast<u32*>(at) = words[0];
    }
}

#endif  // __CUDACC__
