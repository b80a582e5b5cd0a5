/*
rows: which part of the work a thread has, and how it stores what belongs to a row.

A thread takes one piece of N elements of UNROLL rows.  In a thread block threadIdx.x runs along a
row and threadIdx.y over rows; blockDim.x is a multiple of a warp, so that all lanes of a warp work
on one row.  A row longer than blockDim.x pieces has several thread blocks: `chunks`.
*/
#pragma once

#include "formats.cuh"

struct Part {
    int row;    // the first; the others follow blockDim.y apart.  May lie behind all rows
    int piece;  // may lie behind the row
};

// The part of this thread among those that thread blocks from first_block on share.
DEVICE Part part_of_thread(u32 first_block, u32 chunks) {
    const u32 block = blockIdx.x - first_block;
    const u32 row_block = chunks == 1 ? block : block / chunks;
    const u32 chunk = block - row_block * chunks;
    return {static_cast<int>(row_block * (blockDim.y * UNROLL) + threadIdx.y),
            static_cast<int>(chunk * blockDim.x + threadIdx.x)};
}

// --- stores

// A lane with 32 or 64 bytes would write half of a 32-byte sector at a time, which costs as much as
// a whole one.  So two neighbours exchange halves: together they write one sector after the other.
template <int WORDS>
DEVICE bool is_paired(int piece, int num_pieces) {
    return WORDS % 8 == 0 && (piece | 1) < num_pieces;  // the last of an odd number is alone
}

// All lanes of the warp take part.
template <int WORDS>
DEVICE void exchange(u32 (&words)[WORDS], int piece, bool paired) {
    if constexpr (WORDS % 8 == 0) {
        const bool odd = piece & 1;
#pragma unroll
        for (int i = 0; i < WORDS / 2; i++) {
            u32& first = words[i / 4 * 8 + i % 4];
            u32& second = words[i / 4 * 8 + i % 4 + 4];
            const u32 got = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, 1);
            if (paired && odd) first = got;
            if (paired && !odd) second = got;
        }
    }
}

// Write exchanged words of a piece into a row.
template <int WORDS>
DEVICE void store_piece(u8* row, int piece, bool paired, const u32 (&words)[WORDS]) {
    constexpr int BYTES = 4 * WORDS;
    if constexpr (WORDS % 8 == 0) {
        u8* first = paired ? row + (piece & ~1) * BYTES + (piece & 1) * 16 : row + piece * BYTES;
        u8* second = first + (paired ? BYTES : 16);
#pragma unroll
        for (int i = 0; i < WORDS; i += 8) {
            const u32 low[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
            const u32 high[4] = {words[i + 4], words[i + 5], words[i + 6], words[i + 7]};
            store_words(first + 4 * i, low);
            store_words(second + 4 * i, high);
        }
    } else {
        store_words(row + piece * BYTES, words);
    }
}

// --- slots

// All lanes of a warp work on one row, and each loads one of its slots.
DEVICE int slot_of_lane(const int* slot_rows, int row, int num_slots, int first) {
    const int k = first + threadIdx.x % 32;
    const bool is_slot = slot_rows && k < num_slots;
    return is_slot ? __ldg(at_row(slot_rows, row, num_slots) + k) : -1;
}

// Calls visit(expert row) for each live slot of a wire row; without slots for the row itself.  The
// first slots were loaded by slot_of_lane beforehand, beside the row's data.
template <typename Visit>
DEVICE void for_each_slot(const int* slot_rows, int row, int num_slots, int own, Visit visit) {
    if (slot_rows == nullptr) {
        visit(row);
        return;
    }
    for (int first = 0; first < num_slots; first += 32) {
        if (first > 0) own = slot_of_lane(slot_rows, row, num_slots, first);
        u32 live = __ballot_sync(0xFFFFFFFFu, own >= 0);
        for (; live != 0; live &= live - 1) {
            visit(__shfl_sync(0xFFFFFFFFu, own, __ffs(live) - 1));
        }
    }
}

// --- padding

// Thread blocks in front of the others zero the padding rows: PADDING_BLOCKS for each expert.
constexpr int PADDING_BLOCKS = 16;

// Zero rows first_row[e] .. last_row[e] of this block's expert; their scales become 1.
DEVICE void fill_padding(const i64* first_row,
                         const i64* last_row,
                         u8* out,
                         int out_bytes,
                         float* out_scales,
                         int num_scales,
                         i64 row_stride,
                         i64 group_stride) {
    const int expert = blockIdx.x / PADDING_BLOCKS, part = blockIdx.x % PADDING_BLOCKS;
    const i64 step = static_cast<i64>(PADDING_BLOCKS) * blockDim.y;
    for (i64 row = first_row[expert] + part * blockDim.y + threadIdx.y; row < last_row[expert];
         row += step) {
        for (int i = threadIdx.x; i < out_bytes / 16; i += blockDim.x) {
            *reinterpret_cast<uint4*>(out + row * out_bytes + 16 * i) = make_uint4(0, 0, 0, 0);
        }
        for (int g = threadIdx.x; g < num_scales; g += blockDim.x) {
            out_scales[row * row_stride + g * group_stride] = 1.0f;
        }
    }
}
