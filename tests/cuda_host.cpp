// The device functions of cuda/*.cuh as plain C functions on arrays, for tests/test_cuda_source.py.
// Compiled by g++ with -include cuda_shim.h.

#include "arrival.cuh"
#include "encode.cuh"
#include "fp8_input.cuh"

constexpr int N = MX_BLOCK;

template <int Format>
static void quantize_f32(const float* x, int num_blocks, u32 round, u8* payload, u8* scales) {
    constexpr int WORDS = N * element_bits(Format) / 32;
    for (int b = 0; b < num_blocks; b++) {
        float values[N];
        u32 words[WORDS];
        std::memcpy(values, x + b * N, sizeof values);
        const u32 amax_bits = amax_of<Format, N>(values);
        const u32 scale = wire_scale<Format>(amax_bits, round);
        encode<Format, N>(values, amax_bits, scale, words);
        std::memcpy(payload + 4 * WORDS * b, words, sizeof words);
        scales[b] = scale;
    }
}

template <int Format>
static void add_blocks(const u8* payload, const u8* scales, int num_blocks, float* sums) {
    constexpr int WORDS = N * element_bits(Format) / 32;
    for (int b = 0; b < num_blocks; b++) {
        u32 words[WORDS];
        float own[N];
        std::memcpy(words, payload + 4 * WORDS * b, sizeof words);
        std::memcpy(own, sums + b * N, sizeof own);
        add<Format, N>(words, scales[b], own);
        std::memcpy(sums + b * N, own, sizeof own);
    }
}

extern "C" {

// MXFP4 blocks of BF16.
void mxfp4_from_bf16(const u16* x, int num_blocks, u32 round, u8* payload, u8* scales) {
    for (int b = 0; b < num_blocks; b++) {
        u32 pairs[N / 2], words[N / 8];
        std::memcpy(pairs, x + b * N, sizeof pairs);
        const u32 amax_bits = amax_of_bf16<N>(pairs);
        const u32 scale = wire_scale<WIRE_MXFP4>(amax_bits, round);
        encode_e2m1_from_bf16<N>(pairs, amax_bits, scale, words);
        std::memcpy(payload + b * N / 2, words, sizeof words);
        scales[b] = scale;
    }
}

void mxfp4_from_f32(const float* x, int num_blocks, u32 round, u8* payload, u8* scales) {
    quantize_f32<WIRE_MXFP4>(x, num_blocks, round, payload, scales);
}

void mxfp8_from_f32(const float* x, int num_blocks, u32 round, u8* payload, u8* scales) {
    quantize_f32<WIRE_MXFP8>(x, num_blocks, round, payload, scales);
}

// MXFP4 blocks of E4M3 codes with one float32 scale a block.
void mxfp4_from_e4m3(
    const u8* codes, const float* x_scales, int num_blocks, u32 round, u8* payload, u8* scales) {
    for (int b = 0; b < num_blocks; b++) {
        u32 in[N / 4], halves[N / 2], words[N / 8];
        std::memcpy(in, codes + b * N, sizeof in);
        e4m3_magnitudes<N>(in, halves);
        const float amax = amax_of_halves<N>(halves);
        const u32 amax_bits = float_bits(__fmul_rn(amax, fit_scale(x_scales[b])));
        const u32 scale = wire_scale<WIRE_MXFP4>(amax_bits, round);
        encode_e2m1_from_e4m3<N>(in, halves, amax, x_scales[b], scale, words);
        std::memcpy(payload + b * N / 2, words, sizeof words);
        scales[b] = scale;
    }
}

// Codes of single blocks under a shared scale; the element that each byte or nibble stands for.
void e4m3_from_mxfp4(
    const u8* payload, const u8* scales, const u8* shared, int num_blocks, u8* codes) {
    for (int b = 0; b < num_blocks; b++) {
        u32 words[N / 8], out[N / 4];
        std::memcpy(words, payload + b * N / 2, sizeof words);
        to_e4m3<WIRE_MXFP4, N>(words, scales[b], shared[b], out);
        std::memcpy(codes + b * N, out, sizeof out);
    }
}

void e4m3_from_mxfp8(
    const u8* payload, const u8* scales, const u8* shared, int num_blocks, u8* codes) {
    for (int b = 0; b < num_blocks; b++) {
        u32 words[N / 4], out[N / 4];
        std::memcpy(words, payload + b * N, sizeof words);
        to_e4m3<WIRE_MXFP8, N>(words, scales[b], shared[b], out);
        std::memcpy(codes + b * N, out, sizeof out);
    }
}

void f32_from_mxfp4(const u8* payload, const u8* scales, int num_blocks, float* values) {
    for (int b = 0; b < num_blocks; b++) {
        u32 words[N / 8];
        float out[N];
        std::memcpy(words, payload + b * N / 2, sizeof words);
        decode<WIRE_MXFP4, N>(words, scales[b], out);
        std::memcpy(values + b * N, out, sizeof out);
    }
}

void f32_from_mxfp8(const u8* payload, const u8* scales, int num_blocks, float* values) {
    for (int b = 0; b < num_blocks; b++) {
        u32 words[N / 4];
        float out[N];
        std::memcpy(words, payload + b * N, sizeof words);
        decode<WIRE_MXFP8, N>(words, scales[b], out);
        std::memcpy(values + b * N, out, sizeof out);
    }
}

// Blocks added to float32.
void add_mxfp4(const u8* payload, const u8* scales, int num_blocks, float* sums) {
    add_blocks<WIRE_MXFP4>(payload, scales, num_blocks, sums);
}

void add_mxfp8(const u8* payload, const u8* scales, int num_blocks, float* sums) {
    add_blocks<WIRE_MXFP8>(payload, scales, num_blocks, sums);
}

void bf16_from_f32(const float* x, int num_values, u16* bits) {
    for (int i = 0; i < num_values; i++) bits[i] = bf16x2_from_f32(x[i], 0.0f) & 0xFFFF;
}
}
