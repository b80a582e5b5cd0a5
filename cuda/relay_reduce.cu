/*
relay_reduce: wire rows of combine -> wire rows: the sum of each token's rows, packed again.

  payload        [num_rows, payload bytes]    u8    -DWIRE
  scales         [num_rows, num_blocks]       u8    E8M0
  place_offsets  [num_tokens + 1]             i32
  places         [num_rows]                   i32   wire rows of token t from place_offsets[t] on,
                                                    by ascending rank
  out            [num_tokens, payload bytes]  u8    written
  out_scales     [num_tokens, num_blocks]     u8    written; E8M0
  scale_round    addend of the scale rule, formats.py

Float32 sums from +0 in that order, packed as weighted_reduce packs its sums.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
Reads each wire row once: bound by memory bandwidth.
*/
#include "sums.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D); UNROLL is 1
constexpr int WORDS = N * element_bits(WIRE) / 32;
// AHEAD: rows that are loaded before the first is added

extern "C" __global__ void relay_reduce(const u8* __restrict__ payload,
                                        const u8* __restrict__ scales,
                                        const int* __restrict__ place_offsets,
                                        const int* __restrict__ places,
                                        u8* __restrict__ out,
                                        u8* __restrict__ out_scales,
                                        i64 num_tokens,
                                        int hidden,
                                        int chunks,
                                        int scale_round) {
    const Part part = part_of_thread(0, chunks);
    const int token = part.row;
    const int piece = part.piece, num_pieces = hidden / N, scale_columns = num_blocks(WIRE, hidden);
    const int payload_bytes = row_bytes(hidden, element_bits(WIRE));
    const bool is_live = token < num_tokens && piece < num_pieces;
    const int first = is_live ? __ldg(place_offsets + token) : 0;
    const int last = is_live ? __ldg(place_offsets + token + 1) : 0;

    const u8* payload_piece = settled(payload + static_cast<u32>(piece) * (4 * WORDS));
    const u8* scale_piece = settled(scales + static_cast<u32>(piece) * N / block_elements(WIRE));
    float sums[N] = {};
    for (int p = first; p < last; p += AHEAD) {
        u32 words[AHEAD][WORDS], scale[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            scale[a] = 0;
            if (p + a >= last) continue;
            const int row = __ldg(places + p + a);
            load_words(at_row(payload_piece, row, payload_bytes), words[a]);
            if constexpr (WIRE != WIRE_BF16) {
                scale[a] = load_byte(at_row(scale_piece, row, scale_columns));
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (p + a >= last) continue;
            float values[N];
            decode<WIRE, N>(words[a], scale[a], values);
#pragma unroll
            for (int i = 0; i < N; i++) sums[i] = __fadd_rn(sums[i], values[i]);
        }
    }
    store_sums<WIRE, N>(sums, out, out_scales, token, piece, hidden, is_live, scale_round);
}
