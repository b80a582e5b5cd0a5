/*
dequantize: wire rows -> float32.

  payload  [num_rows, payload bytes]  u8    -DWIRE
  scales   [num_rows, num_blocks]     u8    E8M0
  out      [num_rows, hidden]         f32   written

Code times scale, one multiplication; every NaN is 0x7FC00000.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
MXFP4 reads 0.53 and writes 4 bytes an element: bound by memory bandwidth.
*/
#include "rows.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D); UNROLL is 1
constexpr int WORDS = N * element_bits(WIRE) / 32;

extern "C" __global__ void dequantize(const u8* __restrict__ payload,
                                      const u8* __restrict__ scales,
                                      u8* __restrict__ out,
                                      i64 num_rows,
                                      int hidden,
                                      int chunks) {
    const Part part = part_of_thread(0, chunks);
    const int row = part.row;
    const int piece = part.piece, num_pieces = hidden / N;
    const bool is_live = row < num_rows && piece < num_pieces;
    const bool paired = is_paired<N>(piece, num_pieces);

    u32 words[WORDS] = {}, scale = 0;
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
    u32 bits[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        bits[i] = float_bits(values[i]);
        if ((bits[i] & NO_SIGN) > F32_INF) bits[i] = F32_NAN;
    }
    exchange(bits, piece, paired);
    if (is_live) store_piece(at_row(out, row, 4 * hidden), piece, paired, bits);
}
