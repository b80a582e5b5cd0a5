/*
to_fp8_rows: wire rows -> FP8 rows with one scale per 128, at each of their expert rows.

  payload      [num_rows, payload bytes]   u8    -DWIRE
  scales       [num_rows, num_blocks]      u8    E8M0
  slot_rows    [num_rows, num_slots]       i32   expert rows of each wire row, -1 = none; or null:
                                                 wire row r goes to row r
  row_source   [M]                         i32   wire row of each expert row, -1 = none; or null:
                                                 the same row
  padding_from, padding_to  [num_experts]  i64   rows behind the live rows of each expert
  out          [M, hidden]                 u8    written; E4M3 codes; padding rows are zeroed
  out_scales   [M, ceil(hidden / 128)]     f32   written; 2^(S - 127), 1.0 in padding rows; element
                                                 strides row_stride and group_stride

S and the codes: docs/formats.md 4.  BF16 is quantized as the fp8 wire would (scale rule "ceil").
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

// With -DCOLUMN_SCALES=1 neighbouring scales are those of neighbouring expert rows, whose wire rows
// lie apart.  So thread blocks of their own, between those of the rows, read the scale bytes once
// more and write whole lines.
constexpr bool HAS_SCALE_BLOCKS = COLUMN_SCALES && WIRE != WIRE_BF16;
constexpr int SCALE_ROWS = 64, SCALE_GROUPS = 8;  // of such a block
constexpr int GROUP_BYTES = WIRE == WIRE_FP8 ? 1 : FP8_BLOCK / MX_BLOCK;

// The scale of a group of a wire row, from its scale bytes.
DEVICE float scale_of_group(const u8* row_scales, int group, int scale_columns) {
    const u8* bytes = row_scales + group * GROUP_BYTES;
    u32 largest = 0;
    if (GROUP_BYTES == 4 && scale_columns % 4 == 0) {
        const u32 word = __ldg(reinterpret_cast<const u32*>(bytes));
#pragma unroll
        for (int i = 0; i < 4; i++) largest = max(largest, scale_in_group(word >> 8 * i & 0xFF));
    } else {
        const int num_bytes = min(GROUP_BYTES, scale_columns - group * GROUP_BYTES);
        for (int i = 0; i < num_bytes; i++)
            largest = max(largest, scale_in_group(__ldg(bytes + i)));
    }
    return e8m0_to_f32(shared_scale<WIRE>(largest));
}

// Scales of SCALE_ROWS expert rows, 1 in padding, and SCALE_GROUPS groups.
DEVICE void write_scale_block(u32 block,
                              const u8* scales,
                              const int* row_source,
                              float* out_scales,
                              int scale_columns,
                              int groups,
                              i64 num_out) {
    __shared__ float turned[SCALE_GROUPS][SCALE_ROWS + 1];
    const u32 chunks = (groups + SCALE_GROUPS - 1) / SCALE_GROUPS;
    const i64 first_row = static_cast<i64>(block / chunks) * SCALE_ROWS;
    const int first_group = block % chunks * SCALE_GROUPS;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int num_threads = blockDim.x * blockDim.y;
#pragma unroll 4
    for (int i = thread; i < SCALE_ROWS * SCALE_GROUPS; i += num_threads) {
        const int g = i % SCALE_GROUPS, r = i / SCALE_GROUPS;
        const i64 row = first_row + r;
        int from = row < num_out && first_group + g < groups ? static_cast<int>(row) : -1;
        if (row_source && from >= 0) from = __ldg(row_source + row);
        turned[g][r] = from < 0 ? 1.0f
                                : scale_of_group(at_row(scales, from, scale_columns),
                                                 first_group + g, scale_columns);
    }
    __syncthreads();
    for (int i = thread; i < SCALE_ROWS * SCALE_GROUPS; i += num_threads) {
        const int r = i % SCALE_ROWS, g = i / SCALE_ROWS;
        if (first_row + r >= num_out || first_group + g >= groups) continue;
        out_scales[(first_group + g) * num_out + first_row + r] = turned[g][r];
    }
}

// From BF16 only the rows' own thread blocks know the scales: 32 rows each and one warp along them.
// They wait in shared memory and are written with neighbouring lanes on neighbouring wire rows: the
// rows that go to one expert follow each other there, so that a store fills sectors.
constexpr bool SCALES_WAIT = COLUMN_SCALES && WIRE == WIRE_BF16;
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
                                       const int* __restrict__ row_source,
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
    const int scale_columns = num_blocks(WIRE, hidden);
    const u32 padding_blocks = num_experts * PADDING_BLOCKS;
    if (blockIdx.x < padding_blocks) {
        fill_padding(padding_from, padding_to, out, hidden, out_scales,
                     HAS_SCALE_BLOCKS ? 0 : groups, row_stride, group_stride);
        return;
    }
    u32 others = padding_blocks;  // thread blocks in front that have no rows
    if constexpr (HAS_SCALE_BLOCKS) {
        const i64 num_out = group_stride;
        const u32 num_scale_blocks = static_cast<u32>((num_out + SCALE_ROWS - 1) / SCALE_ROWS) *
                                     ((groups + SCALE_GROUPS - 1) / SCALE_GROUPS);
        const u32 period = (gridDim.x - padding_blocks) / max(num_scale_blocks, 1u);
        const u32 block = blockIdx.x - padding_blocks, scale_block = block / period;
        if (scale_block < num_scale_blocks && block % period == period - 1) {
            write_scale_block(scale_block, scales, row_source, out_scales, scale_columns, groups,
                              num_out);
            return;
        }
        others += min(scale_block, num_scale_blocks);
    }
    const Part part = part_of_thread(others, chunks);
    const int piece = part.piece, num_pieces = hidden / N, group = piece / GROUP_LANES;
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
    __shared__ float waiting[CHUNK_GROUPS][BLOCK_ROWS + 1];  // no two groups in one bank
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
        if constexpr (SCALES_WAIT) {
            if (piece % GROUP_LANES == 0) {
                waiting[group % CHUNK_GROUPS][threadIdx.y + u * blockDim.y] = out_scale;
            }
        }
    }
    if constexpr (SCALES_WAIT) {
        __syncthreads();
        write_scale_columns(waiting, slot_rows, out_scales, part.row - threadIdx.y, num_rows,
                            num_slots, (piece - static_cast<int>(threadIdx.x)) / GROUP_LANES,
                            groups, group_stride);
    }
}
