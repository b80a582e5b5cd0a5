/*
to_fp8_rows: wire rows -> FP8 rows with one scale per 128, at each of their expert rows.

  payload      [num_rows, payload bytes]   u8    -DWIRE
  scales       [num_rows, num_blocks]      u8    E8M0
  slot_rows    [num_rows, num_slots]       i32   expert rows of each wire row, -1 = none; or null:
                                                 wire row r goes to row r
  padding_from, padding_to  [num_experts]  i64   rows behind the live rows of each expert
  out          [M, hidden]                 u8    written; E4M3 codes; padding rows are zeroed
  out_scales   [M, ceil(hidden / 128)]     f32   written; 2^(S - 127), 1.0 in padding rows; element
                                                 strides row_stride and group_stride

S and the codes: FACTS.md 4.  BF16 is quantized as the fp8 wire would (scale rule "ceil").
E2M1 is exact while the exponents of a group differ by at most 14.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
MXFP4 reads 0.53 and writes 1.03 bytes an element: bound by memory bandwidth.
*/
#include "arrival.cuh"
#include "encode.cuh"
#include "rows.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D), UNROLL times
constexpr int WORDS = N * element_bits(WIRE) / 32;
constexpr int GROUP_LANES = FP8_BLOCK / N;

// Convert N elements; returns S of their group.  All lanes of the group take part.
template <int Format>
DEVICE u32 convert(const u32 (&words)[N * element_bits(Format) / 32],
                   u32 scale,
                   u32 (&codes)[N / 4]) {
    if constexpr (Format == WIRE_BF16) {
        float values[N];
        bf16_to_f32<N>(words, values);
        const u32 amax_bits = max_of_lanes(amax_of_f32<N>(values), GROUP_LANES);
        const u32 wire_byte = wire_scale<WIRE_FP8>(amax_bits, E4M3_CEIL_ROUND);
        const u32 shared = shared_scale<WIRE_FP8>(scale_in_group(wire_byte));
        u32 wire_codes[N / 4];
        encode_e4m3<N>(values, wire_byte, wire_codes);
        to_e4m3<WIRE_FP8, N>(wire_codes, wire_byte, shared, codes);
        return shared;
    } else {
        const u32 largest = Format == WIRE_FP8 ? scale_in_group(scale)
                                               : max_of_lanes(scale_in_group(scale), GROUP_LANES);
        const u32 shared = shared_scale<Format>(largest);
        to_e4m3<Format, N>(words, scale, shared, codes);
        return shared;
    }
}

// With -DCOLUMN_SCALES=1 a thread block has 32 rows and one warp along them.  Their scales wait in
// shared memory and are written with neighbouring lanes on neighbouring wire rows: the rows that go
// to one expert follow each other there, so that a store fills sectors.
constexpr int BLOCK_ROWS = 32, CHUNK_GROUPS = 32 / GROUP_LANES;

DEVICE void write_scale_columns(const float (&waiting)[CHUNK_GROUPS][BLOCK_ROWS + 1],
                                const int* slot_rows,
                                float* out_scales,
                                int first_row,
                                i64 num_rows,
                                int num_slots,
                                int first_group,
                                int groups,
                                i64 group_stride) {
    const int num_threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < num_slots * CHUNK_GROUPS * BLOCK_ROWS;
         i += num_threads) {
        const int r = i % BLOCK_ROWS, g = i / BLOCK_ROWS % CHUNK_GROUPS;
        const int k = i / (BLOCK_ROWS * CHUNK_GROUPS);
        const int row = first_row + r;
        if (row >= num_rows || first_group + g >= groups) continue;
        const int to = slot_rows ? __ldg(at_row(slot_rows, row, num_slots) + k) : row;
        if (to >= 0) out_scales[(first_group + g) * group_stride + to] = waiting[g][r];
    }
}

extern "C" __global__ void to_fp8_rows(const u8* __restrict__ payload,
                                       const u8* __restrict__ scales,
                                       const int* __restrict__ slot_rows,
                                       const i64* __restrict__ padding_from,
                                       const i64* __restrict__ padding_to,
                                       u8* __restrict__ out,
                                       float* __restrict__ out_scales,
                                       i64 num_rows,
                                       int num_slots,
                                       int num_experts,
                                       int hidden,
                                       int chunks,
                                       i64 row_stride,
                                       i64 group_stride) {
    const int groups = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
    const int padding_blocks = num_experts * PADDING_BLOCKS;
    if (blockIdx.x < padding_blocks) {
        fill_padding(padding_from, padding_to, out, hidden, out_scales, groups, row_stride,
                     group_stride);
        return;
    }
    const Part part = part_of_thread(padding_blocks, chunks);
    const int piece = part.piece, num_pieces = hidden / N, group = piece / GROUP_LANES;
    const int scale_columns = num_blocks(WIRE, hidden);
    const int payload_bytes = row_bytes(hidden, element_bits(WIRE));
    const bool paired = is_paired<N / 4>(piece, num_pieces);

    // Have the loads of all rows in flight before the first is used.
    u32 words[UNROLL][WORDS] = {};
    u32 scale[UNROLL] = {};
    int slot[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int row = part.row + u * blockDim.y;
        slot[u] = row < num_rows ? slot_of_lane(slot_rows, row, num_slots, 0) : -1;
        if (row >= num_rows || piece >= num_pieces) continue;
        load_words(at_row(payload, row, payload_bytes) + piece * (4 * WORDS), words[u]);
        if constexpr (WIRE != WIRE_BF16) {
            scale[u] = __ldg(at_row(scales, row, scale_columns) + block_idx(WIRE, piece * N));
        }
    }
#if COLUMN_SCALES
    __shared__ float waiting[CHUNK_GROUPS][BLOCK_ROWS + 1];  // no two groups in one bank
#endif
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const int row = part.row + u * blockDim.y;
        u32 codes[N / 4];
        const float out_scale = e8m0_to_f32(convert<WIRE>(words[u], scale[u], codes));
        exchange(codes, piece, paired);
        if (row < num_rows) {
            for_each_slot(slot_rows, row, num_slots, slot[u], [&](int to) {
                if (piece >= num_pieces) return;
                store_piece(at_row(out, to, hidden), piece, paired, codes);
                if (!COLUMN_SCALES && piece % GROUP_LANES == 0) {
                    out_scales[to * row_stride + group * group_stride] = out_scale;
                }
            });
        }
#if COLUMN_SCALES
        if (piece % GROUP_LANES == 0) {
            waiting[group % CHUNK_GROUPS][threadIdx.y + u * blockDim.y] = out_scale;
        }
#endif
    }
#if COLUMN_SCALES
    __syncthreads();
    write_scale_columns(waiting, slot_rows, out_scales, part.row - threadIdx.y, num_rows, num_slots,
                        (piece - static_cast<int>(threadIdx.x)) / GROUP_LANES, groups,
                        group_stride);
#endif
}
