/*
route_rows: top-k experts -> the wire rows of each token, and the route that travels with them.

  topk_idx       [T, K]      i32 or i64 (Index)   expert of each slot, or -1
  topk_weights   [T, K]      f32                  or null
  cells          [num_ranks][num_chunks]  i32     first wire row of each cell; counted up
  place_offsets  [T + 1]     i32                  where a token's wire rows begin in places
  places         [n]         i32                  wire rows of each token, by ascending rank
  route          [n, K * 6] or [n, K * 2] bytes   K i16 local experts or -1, then K f32 weights

Wire rows are ordered by rank, then token.

Launcher: fp4comm/routing/cuda.py
*/
#include "experts.cuh"

using Index = INDEX;

// Slots of the token that make a wire row of a lower rank.  All lanes take part; own is the rank
// that this lane's slot makes a row of, or NO_KEY.
DEVICE int num_rows_before(const Index* experts, int k, int num_topk, int own, Placement p) {
    const int lane = threadIdx.x % 32;
    const bool is_whole = num_topk <= 32 && lane >= k && lane + num_topk - k <= 32;
    int num_rows = 0;
    for (int distance = 1; distance < num_topk && distance < 32; distance++) {
        const int up = __shfl_up_sync(ALL_LANES, own, distance);
        const int down = __shfl_down_sync(ALL_LANES, own, distance);
        if (!is_whole) continue;
        if (distance <= k && up != NO_KEY && up < own) num_rows++;
        if (distance < num_topk - k && down != NO_KEY && down < own) num_rows++;
    }
    if (is_whole || own == NO_KEY) return num_rows;
    for (int i = 0; i < num_topk; i++) {  // the token lies across two steps of the warp
        const int other = owner_of(experts[i], p);
        bool is_lower_row = other != NO_KEY && other < own;
        for (int j = 0; j < i && is_lower_row; j++) {
            is_lower_row = owner_of(experts[j], p) != other;
        }
        num_rows += is_lower_row;
    }
    return num_rows;
}

// One row of the route, by all lanes, in 16-bit halves: rows of an odd K start between words.
DEVICE void write_route(u16* route,
                        const Index* experts,
                        const float* weights,
                        int num_topk,
                        int owner,
                        Placement place) {
    const int num_halves = num_topk * (weights != nullptr ? 3 : 1);
    for (int half = threadIdx.x % 32; half < num_halves; half += 32) {
        const int of_weight = half - num_topk;
        const int k = of_weight < 0 ? half : of_weight / 2;
        const Index expert = experts[k];
        const bool is_here = owner_of(expert, place) == owner;
        u32 value = is_here ? static_cast<int>(expert) - first_expert(owner, place) : -1;
        if (of_weight >= 0) {
            const u32 bits = is_here ? float_bits(weights[k]) : 0;
            value = of_weight % 2 ? bits >> 16 : bits;
        }
        route[half] = static_cast<u16>(value);
    }
}

extern "C" __global__ void route_rows(const Index* __restrict__ topk_idx,
                                      const float* __restrict__ topk_weights,
                                      int* __restrict__ cells,
                                      const int* __restrict__ place_offsets,
                                      int* __restrict__ places,
                                      u16* __restrict__ route,
                                      i64 num_tokens,
                                      int num_topk,
                                      int num_experts,
                                      int num_ranks,
                                      i64 num_chunks) {
    const Placement place{num_experts, num_experts / num_ranks, num_experts % num_ranks};
    const int route_halves = num_topk * (topk_weights != nullptr ? 3 : 1);

    for_each_slot_of_chunk(num_tokens, num_topk, [&](Slot slot) {
        const Index* experts = topk_idx + slot.row * num_topk;
        const int owner = slot.at < 0 ? NO_KEY : owner_of(experts[slot.k], place);
        const int key = is_new_row(experts, slot.k, num_topk, owner, place) ? owner : NO_KEY;
        const int row = take_number(key, cells + key * num_chunks + slot.chunk);
        const int before = num_rows_before(experts, slot.k, num_topk, key, place);
        if (key != NO_KEY) places[place_offsets[slot.row] + before] = row;

        for (u32 todo = __ballot_sync(ALL_LANES, key != NO_KEY); todo != 0; todo &= todo - 1) {
            const int lane = __ffs(todo) - 1;
            const i64 token = __shfl_sync(ALL_LANES, slot.row, lane);
            const i64 to = __shfl_sync(ALL_LANES, row, lane);
            const int its_owner = __shfl_sync(ALL_LANES, key, lane);
            const float* weights = topk_weights ? topk_weights + token * num_topk : nullptr;
            write_route(route + to * route_halves, topk_idx + token * num_topk, weights, num_topk,
                        its_owner, place);
        }
    });
}
