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
#include "routing.cuh"

using Index = INDEX;

// Slots of the token that make a wire row of a lower rank.
DEVICE int num_rows_before(const Index* experts, int num_topk, int owner, Placement place) {
    int num_rows = 0;
    for (int k = 0; k < num_topk; k++) {
        const int other = owner_of(experts[k], place);
        if (other < owner && is_new_row(experts, k, other, place)) num_rows++;
    }
    return num_rows;
}

// The route is written in 16-bit halves: rows of an odd K start between the addresses of words.
DEVICE void write_route(u16* route,
                        const Index* experts,
                        const float* weights,
                        int num_topk,
                        int owner,
                        Placement place) {
    const int first = first_expert(owner, place);
    for (int k = 0; k < num_topk; k++) {
        const bool is_here = owner_of(experts[k], place) == owner;
        route[k] = static_cast<u16>(is_here ? static_cast<int>(experts[k]) - first : -1);
        if (weights != nullptr) {
            const u32 bits = is_here ? __float_as_uint(weights[k]) : 0;
            route[num_topk + 2 * k] = static_cast<u16>(bits);
            route[num_topk + 2 * k + 1] = static_cast<u16>(bits >> 16);
        }
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

    for_each_slot_of_chunk(num_tokens * num_topk, [&](i64 chunk, i64 slot) {
        const i64 token = slot < 0 ? 0 : slot / num_topk;
        const Index* experts = topk_idx + token * num_topk;
        int key = NO_KEY;
        if (slot >= 0) {
            const int k = static_cast<int>(slot - token * num_topk);
            const int owner = owner_of(experts[k], place);
            if (is_new_row(experts, k, owner, place)) key = owner;
        }
        const int row = take_number(key, cells + key * num_chunks + chunk);
        if (key == NO_KEY) return;
        places[place_offsets[token] + num_rows_before(experts, num_topk, key, place)] = row;
        const float* weights = topk_weights ? topk_weights + token * num_topk : nullptr;
        write_route(route + static_cast<i64>(row) * route_halves, experts, weights, num_topk, key,
                    place);
    });
}
