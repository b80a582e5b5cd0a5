/*
route_rows: top-k experts -> the wire rows of each token, and the route that travels with them.

  topk_idx       [T, K]      i32 or i64 (Index)   expert of each slot, or -1
  topk_weights   [T, K]      f32                  or null
  cells          [num_ranks][num_chunks]  i32     first wire row of each cell, and num_rows
  place_offsets  [T + 1]     i32                  where a token's wire rows begin in places
  places         [n]         i32                  wire rows of each token, by ascending rank
  row_tokens     [n]         i32                  token of each wire row; or null
  route          [n, K * 6] or [n, K * 2] bytes   K i16 local experts or -1, then K f32 weights

Wire rows are ordered by rank, then token.  A relay plans as many rows as it was told will come:
after a stopped exchange its indices are garbage, and still nothing is written beyond those rows.

Launcher: fp4comm/routing/cuda.py
*/
#include "experts.cuh"

using Index = INDEX;

constexpr int PART = 8;  // slots that a lane has in registers

// Slots k .. k + 7 of a token.
struct Slots {
    int owner[PART];
    int local[PART];  // its number among the experts of its owner
    u32 weight[PART];
};

DEVICE Slots load_slots(const Index* experts, const u32* weights, int k, int num, Placement p) {
    Slots slots;
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const Index expert = k + i < num ? experts[k + i] : -1;
        slots.weight[i] = weights != nullptr && k + i < num ? weights[k + i] : 0;
        slots.owner[i] = owner_of(expert, p);
        slots.local[i] = static_cast<int>(expert) - first_expert(slots.owner[i], p);
    }
    return slots;
}

// Slots k .. k + 7 of a row of the route to this rank.  Rows of an odd K start between words.
DEVICE void store_slots(u8* row, const Slots& slots, int k, int num, bool weighted, int rank) {
    u32 locals[PART / 2], weights[PART];
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const bool is_here = slots.owner[i] == rank;
        const u32 half = static_cast<u32>(is_here ? slots.local[i] : -1) & 0xFFFFu;
        locals[i / 2] = i % 2 ? locals[i / 2] | half << 16 : half;
        weights[i] = is_here ? slots.weight[i] : 0;
    }
    u8* locals_at = row + 2 * k;
    u8* weights_at = row + 2 * num + 4 * k;
    if (num % PART == 0) {
        store_words(locals_at, locals);
        if (weighted) store_words(weights_at, weights);
        return;
    }
#pragma unroll
    for (int i = 0; i < PART; i++) {
        if (k + i >= num) break;
        u16* half = reinterpret_cast<u16*>(weights_at + 4 * i);
        const u32 word[1] = {weights[i]};
        reinterpret_cast<u16*>(locals_at)[i] = static_cast<u16>(locals[i / 2] >> 16 * (i % 2));
        if (!weighted) continue;
        if (num % 2 == 0) {
            store_words(weights_at + 4 * i, word);
        } else {
            half[0] = static_cast<u16>(weights[i]);
            half[1] = static_cast<u16>(weights[i] >> 16);
        }
    }
}

extern "C" __global__ void route_rows(const Index* __restrict__ topk_idx,
                                      const u32* __restrict__ topk_weights,
                                      const int* __restrict__ cells,
                                      const int* __restrict__ place_offsets,
                                      int* __restrict__ places,
                                      int* __restrict__ row_tokens,
                                      u8* __restrict__ route,
                                      i64 num_tokens,
                                      int num_topk,
                                      int num_experts,
                                      int num_ranks,
                                      i64 num_chunks,
                                      int num_rows) {
    const Placement place{num_experts, num_experts / num_ranks, num_experts % num_ranks};
    const bool weighted = topk_weights != nullptr;
    const int route_bytes = num_topk * (weighted ? 6 : 2), lane = threadIdx.x % 32;
    const i64 chunk = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const i64 token = chunk * CHUNK_TOKENS + lane;
    if (chunk >= num_chunks) return;
    const bool is_token = token < num_tokens;
    const Index* experts = topk_idx + token * num_topk;
    const u32* weights = weighted ? topk_weights + token * num_topk : nullptr;

    int next_place = is_token ? place_offsets[token] : 0;
    for (int first_rank = 0; first_rank < num_ranks; first_rank += WINDOW_RANKS) {
        const int in_window = min(WINDOW_RANKS, num_ranks - first_rank);
        const i64 cell = (first_rank + lane) * num_chunks + chunk;
        const int first_row = lane < in_window ? cells[cell] - num_rows : 0;
        const u32 ranks = is_token ? ranks_of(experts, num_topk, first_rank, place) : 0;
        const u32 tokens = tokens_of_lane(ranks, in_window);
        for (int k = 0; k < num_topk; k += PART) {
            const Slots slots = load_slots(experts, weights, k, is_token ? num_topk : 0, place);
            // Each lane takes its ranks in order; the warp goes on until all are through.
            for (u32 todo = ranks; __ballot_sync(ALL_LANES, todo != 0) != 0; todo &= todo - 1) {
                const int r = todo != 0 ? __ffs(todo) - 1 : 0;
                const u32 of_rank = __shfl_sync(ALL_LANES, tokens, r);
                const int first = __shfl_sync(ALL_LANES, first_row, r);
                if (todo == 0) continue;
                const int row = first + __popc(of_rank & ((1u << lane) - 1));
                if (static_cast<u32>(row) >= static_cast<u32>(num_rows)) continue;
                if (k == 0 && next_place < num_rows) places[next_place++] = row;
                if (k == 0 && row_tokens != nullptr) row_tokens[row] = static_cast<int>(token);
                store_slots(route + static_cast<i64>(row) * route_bytes, slots, k, num_topk,
                            weighted, first_rank + r);
            }
        }
    }
}
