/*
experts: which rank an expert stands on, and which slots of a token make a wire row.
*/
#pragma once

#include "routing.cuh"

// Experts stand in ranges: the first `extra` ranks hold base + 1 each, the others base.
struct Placement {
    int num_experts;
    int base;
    int extra;
};

DEVICE int owner_of(i64 expert, Placement p) {
    if (expert < 0 || expert >= p.num_experts) return NO_KEY;
    const u32 e = static_cast<u32>(expert), in_front = p.extra * (p.base + 1);
    return e < in_front ? e / (p.base + 1) : p.extra + (e - in_front) / p.base;
}

DEVICE int first_expert(int rank, Placement p) {
    return rank * p.base + (rank < p.extra ? rank : p.extra);
}

// The owner of another slot of this lane's token: that of a lane `distance` in front, or looked up
// where the token began in an earlier 32 slots.  All lanes take part.
template <typename Index>
DEVICE int owner_in_front(const Index* experts, int k, int owner, int distance, Placement p) {
    const int other = __shfl_up_sync(ALL_LANES, owner, distance);
    if (distance > k) return NO_KEY;
    const int lane = threadIdx.x % 32;
    return lane >= distance ? other : owner_of(experts[k - distance], p);
}

// Whether no earlier slot of the token goes to the owner of this one.  All lanes take part.
template <typename Index>
DEVICE bool is_new_row(const Index* experts, int k, int num_topk, int owner, Placement p) {
    bool is_new = owner != NO_KEY;
    for (int distance = 1; distance < num_topk && distance < 32; distance++) {
        if (owner_in_front(experts, k, owner, distance, p) == owner) is_new = false;
    }
    for (int i = 0; i <= k - 32; i++) {  // K above 32
        if (owner_of(experts[i], p) == owner) is_new = false;
    }
    return is_new;
}
