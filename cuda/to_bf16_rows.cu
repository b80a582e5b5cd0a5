/*
to_bf16_rows: wire rows -> BF16 rows, at each of their expert rows.

  payload    [num_rows, payload bytes]     u8    -DWIRE
  scales     [num_rows, num_blocks]        u8    E8M0
  slot_rows  [num_rows, num_slots]         i32   expert rows of each wire row, -1 = none; or null:
                                                 wire row r goes to row r
  padding_from, padding_to  [num_experts]  i64   rows behind the live rows of each expert
  row_weights  [M]                         f32   -DWEIGHTED=1: of each row that is written
  out        [M, hidden]                   BF16  written; padding rows are zeroed

Code times scale as float32, with WEIGHTED times the row's weight as float32, rounded to BF16; every
NaN is 0x7FC0.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
MXFP4 reads 0.53 and writes 2 bytes an element: bound by memory bandwidth.
*/
#include "rows.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D); UNROLL is 1
constexpr int WORDS = N * element_bits(WIRE) / 32;

// Round to BF16, in the order that neighbours store.  All lanes of the warp take part.
DEVICE void to_pairs(
    const float (&values)[N], float weight, int piece, bool paired, u32 (&pairs)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {  // times 1.0 is exact
        const float low = __fmul_rn(values[2 * i], weight);
        const float high = __fmul_rn(values[2 * i + 1], weight);
        pairs[i] = bf16x2_from_f32(low, high);
    }
    exchange(pairs, piece, paired);
}

extern "C" __global__ void to_bf16_rows(const u8* __restrict__ payload,
                                        const u8* __restrict__ scales,
                                        const int* __restrict__ slot_rows,
                                        const i64* __restrict__ padding_from,
                                        const i64* __restrict__ padding_to,
                                        const float* __restrict__ row_weights,
                                        u8* __restrict__ out,
                                        i64 num_rows,
                                        int num_slots,
                                        int num_experts,
                                        int hidden,
                                        int chunks) {
    const int padding_blocks = num_experts * PADDING_BLOCKS;
    if (blockIdx.x < padding_blocks) {
        fill_padding(padding_from, padding_to, out, 2 * hidden, nullptr, 0, 0, 0);
        return;
    }
    const Part part = part_of_thread(padding_blocks, chunks);
    const int row = part.row;
    const int piece = part.piece, num_pieces = hidden / N;
    const bool is_live = row < num_rows && piece < num_pieces;
    const bool paired = is_paired<N / 2>(piece, num_pieces);

    u32 words[WORDS] = {}, scale = 0;
    const int slot = row < num_rows ? slot_of_lane(slot_rows, row, num_slots, 0) : -1;
    if (is_live) {
        const u8* payload_row = at_row(payload, row, row_bytes(hidden, element_bits(WIRE)));
        load_words(payload_row + piece * (4 * WORDS), words);
        if constexpr (WIRE != WIRE_BF16) {
            const u8* scale_row = at_row(scales, row, num_blocks(WIRE, hidden));
            scale = __ldg(scale_row + block_idx(WIRE, piece * N));
        }
    }
    float values[N];
    decode<WIRE, N>(words, scale, values);
    u32 pairs[N / 2];
    if constexpr (!WEIGHTED) to_pairs(values, 1.0f, piece, paired, pairs);
    if (row >= num_rows) return;
    for_each_slot(slot_rows, row, num_slots, slot, [&](int to) {
        if constexpr (WEIGHTED) to_pairs(values, __ldg(row_weights + to), piece, paired, pairs);
        if (is_live) store_piece(at_row(out, to, 2 * hidden), piece, paired, pairs);
    });
}
