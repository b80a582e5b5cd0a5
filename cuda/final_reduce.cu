/*
final_reduce: wire rows of combine -> tokens: the sum of each token's rows.

  payload        [num_rows, payload bytes]  u8    -DWIRE
  scales         [num_rows, num_blocks]     u8    E8M0
  place_offsets  [num_tokens + 1]           i32
  places         [num_rows]                 i32   wire rows of token t from place_offsets[t] on, by
                                                  ascending rank
  out            [num_tokens, hidden]       BF16  written; +0 for a token without rows

Float32 sums from +0 in that order, rounded to BF16 once; every NaN is 0x7FC0.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
Reads each wire row once: bound by memory bandwidth.
*/
#include "rows.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D)
constexpr int WORDS = N * element_bits(WIRE) / 32;
// AHEAD: rows that are loaded before the first is added
// UNROLL: tokens of a thread (-D).  They follow each other: offsets and places of all but the first
// are in the cache.

// The sums of rows with a scale beyond LAST_EXACT_SCALE, from the start.
DEVICE void sum_rounded(const u8* payload_piece,
                        const u8* scale_piece,
                        const int* places,
                        int first,
                        int last,
                        int payload_bytes,
                        int scale_columns,
                        float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) sums[i] = 0.0f;
#pragma unroll 1
    for (int p = first; p < last; p++) {
        const int row = __ldg(places + p);
        u32 words[WORDS];
        float values[N];
        load_words(at_row(payload_piece, row, payload_bytes), words);
        decode<WIRE, N>(words, load_byte(at_row(scale_piece, row, scale_columns)), values);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = __fadd_rn(sums[i], values[i]);
    }
}

extern "C" __global__ void final_reduce(const u8* __restrict__ payload,
                                        const u8* __restrict__ scales,
                                        const int* __restrict__ place_offsets,
                                        const int* __restrict__ places,
                                        u8* __restrict__ out,
                                        i64 num_tokens,
                                        int hidden,
                                        int chunks) {
    const Part part = part_of_thread(0, chunks);
    const int piece = part.piece, num_pieces = hidden / N, scale_columns = num_blocks(WIRE, hidden);
    const int payload_bytes = row_bytes(hidden, element_bits(WIRE));
    const bool paired = is_paired<N / 2>(piece, num_pieces);
    const int lane = threadIdx.x % 32;
    if (piece - lane >= num_pieces) return;  // a whole warp
    const u32 loaded = min(piece, num_pieces - 1);
    const u8* payload_piece = settled(payload + loaded * (4 * WORDS));
    const u8* scale_piece = settled(scales + loaded * N / block_elements(WIRE));

    const i64 first_token = part.row + static_cast<i64>(threadIdx.y) * (UNROLL - 1);
    const int end = static_cast<int>(min(first_token + UNROLL, num_tokens));
#pragma unroll 1
    for (int token = static_cast<int>(first_token); token < end; token++) {
        const int first = __ldg(place_offsets + token), last = __ldg(place_offsets + token + 1);
        float sums[N] = {};
        u32 largest_scale = 0;
#pragma unroll 1
        for (int p = first; p < last; p += AHEAD) {
            u32 words[AHEAD][WORDS], scale[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (a > 0 && p + a >= last) continue;
                const int row = __ldg(places + p + a);
                load_words(at_row(payload_piece, row, payload_bytes), words[a]);
                if constexpr (WIRE != WIRE_BF16) {
                    scale[a] = load_byte(at_row(scale_piece, row, scale_columns));
                }
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (a > 0 && p + a >= last) break;
                add<WIRE, N>(words[a], scale[a], sums);
                if constexpr (WIRE != WIRE_BF16) largest_scale = max(largest_scale, scale[a]);
            }
        }
        const bool is_exact = WIRE == WIRE_BF16 || largest_scale <= LAST_EXACT_SCALE;
        if (!is_exact) {
            sum_rounded(payload_piece, scale_piece, places, first, last, payload_bytes,
                        scale_columns, sums);
        }
        u32 pairs[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) pairs[i] = cvt_bf16x2(sums[2 * i], sums[2 * i + 1]);
        if (WIRE != WIRE_MXFP4 || !is_exact) {  // else no sum is NaN
#pragma unroll
            for (int i = 0; i < N / 2; i++) pairs[i] = bf16x2_of_one_nan(pairs[i]);
        }
        exchange(pairs, piece, paired);
        if (piece < num_pieces) store_piece(at_row(out, token, 2 * hidden), piece, paired, pairs);
    }
}
