/*
row_dots: the dot product of each expert row and its wire row, the gradient of the row's weight.

  payload     [n, payload bytes]  u8    -DWIRE
  scales      [n, num_blocks]     u8    E8M0
  expert_out  [M, hidden]         BF16
  row_source  [M]                 i32   wire row of each expert row, or -1 in padding
  dots        [M]                 f32   written; 0 in padding, every NaN is 0x7FC00000

DOT_LANES partial sums from +0, column c into sum c % DOT_LANES by ascending c, product and sum
rounded separately; then the upper half of the sums is added to the lower until one is left.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
Reads 2 bytes an element and the wire row: bound by memory bandwidth.
*/
#include "formats.cuh"

constexpr int N = 8;  // partial sums of a lane; a warp has DOT_LANES of them
constexpr int WORDS = N * element_bits(WIRE) / 32;

extern "C" __global__ void row_dots(const u8* __restrict__ payload,
                                    const u8* __restrict__ scales,
                                    const u8* __restrict__ expert_out,
                                    const int* __restrict__ row_source,
                                    float* __restrict__ dots,
                                    i64 num_rows,
                                    int hidden) {
    const i64 warp = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (warp >= num_rows) return;
    const int row = static_cast<int>(warp), lane = threadIdx.x % 32;
    const int source = __ldg(row_source + row);
    if (source < 0) {
        if (lane == 0) dots[row] = 0.0f;
        return;
    }
    const u8* out_row = at_row(expert_out, row, 2 * hidden);
    const u8* payload_row = at_row(payload, source, row_bytes(hidden, element_bits(WIRE)));
    const u8* scale_row = at_row(scales, source, num_blocks(WIRE, hidden));

    float sums[N] = {};
#pragma unroll 4
    for (int piece = lane; piece < hidden / N; piece += 32) {
        u32 pairs[N / 2], words[WORDS];
        load_words(out_row + piece * (2 * N), pairs);
        load_words(payload_row + piece * (4 * WORDS), words);
        u32 scale = 0;
        if constexpr (WIRE != WIRE_BF16) scale = __ldg(scale_row + block_idx(WIRE, piece * N));
        float own[N], values[N];
        bf16_to_f32<N>(pairs, own);
        decode<WIRE, N>(words, scale, values);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = __fadd_rn(sums[i], __fmul_rn(own[i], values[i]));
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[i] = __fadd_rn(sums[i], __shfl_down_sync(0xFFFFFFFFu, sums[i], half));
        }
    }
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; i++) sums[i] = __fadd_rn(sums[i], sums[i + half]);
    }
    if (lane == 0) dots[row] = sums[0] == sums[0] ? sums[0] : bits_float(F32_NAN);
}
