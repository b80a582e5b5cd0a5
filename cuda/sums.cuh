/*
sums: the float32 sums of a wire row, packed and stored.
*/
#pragma once

#include "encode.cuh"
#include "rows.cuh"

// Pack the N sums of this thread's piece of a wire row, and store them with the scale of their
// block, which the thread of its first piece does.  All lanes take part; those not live store
// nothing.
template <int Format, int N>
DEVICE void store_sums(const float (&sums)[N],
                       u8* payload,
                       u8* scales,
                       int row,
                       int piece,
                       int hidden,
                       bool is_live,
                       int scale_round) {
    constexpr int WORDS = N * element_bits(Format) / 32;
    constexpr int BLOCK_LANES = block_lanes(Format, N);
    const bool paired = is_paired<WORDS>(piece, hidden / N);
    u32 amax_bits = 0, scale = 0, words[WORDS];
    if constexpr (Format != WIRE_BF16) {
        amax_bits = max_of_lanes(amax_of<Format, N>(sums), BLOCK_LANES);
        scale = wire_scale<Format>(amax_bits, scale_round);
    }
    encode<Format, N>(sums, amax_bits, scale, words);
    exchange(words, piece, paired);
    if (!is_live) return;
    u8* payload_row = at_row(payload, row, row_bytes(hidden, element_bits(Format)));
    store_piece(payload_row, piece, paired, words);
    if (Format != WIRE_BF16 && piece % BLOCK_LANES == 0) {
        at_row(scales, row, num_blocks(Format, hidden))[piece / BLOCK_LANES] =
            static_cast<u8>(scale);
    }
}
