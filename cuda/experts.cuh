/*
experts: which rank an expert stands on, and which ranks a token goes to.

A warp takes a chunk of tokens, one a lane, and looks at the ranks by windows of 32: each lane has a
word with a bit for each rank that its token goes to; seen by rank those bits are what the warp
votes.  So a token makes one row of a rank however many experts it has there, and the tokens of a
chunk number their rows of a rank by counting bits.
*/
#pragma once

#include "routing.cuh"

constexpr int CHUNK_TOKENS = 32;
constexpr int WINDOW_RANKS = 32;

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

// The ranks that a token with these experts goes to: bit r for first_rank + r.
template <typename Index>
DEVICE u32 ranks_of(const Index* experts, int num_topk, int first_rank, Placement p) {
    u32 ranks = 0;
#pragma unroll 8
    for (int k = 0; k < num_topk; k++) {
        const u32 r = static_cast<u32>(owner_of(experts[k], p) - first_rank);
        if (r < WINDOW_RANKS) ranks |= 1u << r;
    }
    return ranks;
}

// Turn bits: from a token's ranks to the tokens of rank first_rank + lane.  All lanes take part.
DEVICE u32 tokens_of_lane(u32 ranks, int num_window_ranks) {
    const int lane = threadIdx.x % 32;
    u32 tokens = 0;
    for (int r = 0; r < num_window_ranks; r++) {
        const u32 of_rank = __ballot_sync(ALL_LANES, ranks >> r & 1);
        if (lane == r) tokens = of_rank;
    }
    return tokens;
}
