/*
routing: a stable counting sort of slots, in two passes over chunks of them.

Slot i of row r is at r * num_slots + i.  A warp takes a chunk of CHUNK_SLOTS slots, 32 at a time.
The first pass counts each key in each chunk: cells [num_keys][num_chunks].  Their running sum,
taken in between, tells the second pass where the slots of a cell begin; there it counts them again.
Results do not depend on the order of the warps.
*/
#pragma once

#include "bits.cuh"

constexpr int CHUNK_SLOTS = 128;
constexpr int NO_KEY = -1;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// --- chunks

struct Slot {
    i64 chunk;
    i64 at;   // -1 behind the last slot
    i64 row;  // token or wire row
    int k;    // slot of the row
};

// Calls visit(slot) for each slot of this warp's chunk, all lanes together.
template <typename Visit>
DEVICE void for_each_slot_of_chunk(i64 num_rows, int num_topk, Visit visit) {
    const i64 chunk = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const i64 num_slots = num_rows * num_topk, first = chunk * CHUNK_SLOTS;
    if (first >= num_slots) return;
    const i64 first_row = first / num_topk;  // the only wide division
    const u32 first_k = static_cast<u32>(first - first_row * num_topk);
    for (int i = 0; i < CHUNK_SLOTS && first + i < num_slots; i += 32) {
        const u32 offset = first_k + i + threadIdx.x % 32, row = offset / num_topk;
        const i64 at = first + i + threadIdx.x % 32;
        visit({chunk, at < num_slots ? at : -1, first_row + row,
               static_cast<int>(offset - row * num_topk)});
    }
}

// Add the lanes with this key to their cell.
template <typename Cell>
DEVICE void count(int key, Cell* cell) {
    const u32 peers = __match_any_sync(ALL_LANES, key);
    if (key != NO_KEY && threadIdx.x % 32 == __ffs(peers) - 1) {
        atomicAdd(cell, static_cast<Cell>(__popc(peers)));
    }
}

// Take a number from the cell for each lane with this key, in the order of the lanes.
DEVICE int take_number(int key, int* cell) {
    const u32 peers = __match_any_sync(ALL_LANES, key);
    const int lane = threadIdx.x % 32, leader = __ffs(peers) - 1;
    int first = 0;
    if (key != NO_KEY && lane == leader) first = atomicAdd(cell, __popc(peers));
    first = __shfl_sync(ALL_LANES, first, leader);
    return first + __popc(peers & ((1u << lane) - 1));
}
