/*
routing: a stable counting sort of slots, in two passes over chunks of them.

Slot i of row r is at r * num_slots + i.  A warp takes a chunk of CHUNK_SLOTS slots, 32 at a time.
The first pass counts each key in each chunk: cells [num_keys][num_chunks].  Their running sum,
taken in between, tells the second pass where the slots of a cell begin; there it counts them again.
Results do not depend on the order of the warps.
*/
#pragma once

#include "bits.cuh"

constexpr int CHUNK_SLOTS = 256;
constexpr int NO_KEY = -1;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// --- chunks

// Calls visit(chunk, slot) for each slot of this warp's chunk, all lanes together; behind the last
// slot it is -1.
template <typename Visit>
DEVICE void for_each_slot_of_chunk(i64 num_slots, Visit visit) {
    const i64 chunk = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    for (int i = 0; i < CHUNK_SLOTS; i += 32) {
        const i64 slot = chunk * CHUNK_SLOTS + i + threadIdx.x % 32;
        if (!__any_sync(ALL_LANES, slot < num_slots)) return;
        visit(chunk, slot < num_slots ? slot : -1);
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

// --- experts

// Experts stand in ranges: the first `extra` ranks hold base + 1 each, the others base.
struct Placement {
    int num_experts;
    int base;
    int extra;
};

DEVICE int owner_of(i64 expert, Placement p) {
    if (expert < 0 || expert >= p.num_experts) return NO_KEY;
    const int e = static_cast<int>(expert), in_front = p.extra * (p.base + 1);
    return e < in_front ? e / (p.base + 1) : p.extra + (e - in_front) / p.base;
}

DEVICE int first_expert(int rank, Placement p) {
    return rank * p.base + (rank < p.extra ? rank : p.extra);
}

// Whether no earlier slot of the token goes to the owner of this one.
template <typename Index>
DEVICE bool is_new_row(const Index* experts, int k, int owner, Placement p) {
    for (int i = 0; i < k; i++) {
        if (owner_of(experts[i], p) == owner) return false;
    }
    return owner != NO_KEY;
}
