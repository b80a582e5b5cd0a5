/*
route_counts: top-k experts -> how many wire rows and expert rows each rank gets, first pass.

  topk_idx   [T, K]   i32 or i64 (Index)   expert of each slot, or -1
  numbers    [1 + num_ranks + num_ranks * most]  u64
             slots from the first wrong index on, or 0; wire rows of each rank; rows of its experts
             zero before
  cells      [num_ranks][num_chunks]  i32   written; wire rows of each rank in each chunk of tokens
  num_places [T]                      i32   written; wire rows of each token

A wrong index is beyond -1..num_experts - 1.

Launcher: fp4comm/routing/cuda.py
*/
#include "experts.cuh"

using Index = INDEX;

// Cells of experts that a thread block adds up by itself, so that those of all meet less often.
constexpr int MAX_OWN_CELLS = 4096;

extern "C" __global__ void route_counts(const Index* __restrict__ topk_idx,
                                        u64* __restrict__ numbers,
                                        int* __restrict__ cells,
                                        int* __restrict__ num_places,
                                        i64 num_tokens,
                                        int num_topk,
                                        int num_experts,
                                        int num_ranks,
                                        i64 num_chunks) {
    const Placement place{num_experts, num_experts / num_ranks, num_experts % num_ranks};
    const int most = place.base + (place.extra > 0), num_cells = num_ranks * most;
    u64* rank_rows = numbers + 1;
    u64* expert_rows = rank_rows + num_ranks;
    const int lane = threadIdx.x % 32;
    const i64 chunk = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const i64 token = chunk * CHUNK_TOKENS + lane;
    const bool is_token = token < num_tokens;
    const Index* experts = topk_idx + token * num_topk;

    __shared__ u32 own_cells[MAX_OWN_CELLS];
    const bool has_own_cells = num_cells <= MAX_OWN_CELLS;
    for (int i = threadIdx.x; has_own_cells && i < num_cells; i += blockDim.x) own_cells[i] = 0;
    __syncthreads();

    int num_rows = 0;
    for (int first_rank = 0; first_rank < num_ranks; first_rank += WINDOW_RANKS) {
        const u32 ranks = is_token ? ranks_of(experts, num_topk, first_rank, place) : 0;
        num_rows += __popc(ranks);
        const int in_window = min(WINDOW_RANKS, num_ranks - first_rank);
        const int of_lane = __popc(tokens_of_lane(ranks, in_window));
        if (lane >= in_window || chunk >= num_chunks) continue;
        cells[(first_rank + lane) * num_chunks + chunk] = of_lane;
        if (of_lane > 0) atomicAdd(rank_rows + first_rank + lane, static_cast<u64>(of_lane));
    }
    if (is_token) num_places[token] = num_rows;

#pragma unroll 4
    for (int k = 0; k < num_topk; k++) {
        const i64 expert = is_token ? experts[k] : -1;
        const int owner = owner_of(expert, place);
        int cell = NO_KEY;
        if (owner != NO_KEY) {
            cell = owner * most + static_cast<int>(expert) - first_expert(owner, place);
        } else if (expert != -1) {
            atomicMax(numbers, static_cast<u64>((num_tokens - token) * num_topk - k));
        }
        if (!has_own_cells) {
            count(cell, expert_rows + cell);
        } else if (cell != NO_KEY) {
            atomicAdd(own_cells + cell, 1u);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; has_own_cells && i < num_cells; i += blockDim.x) {
        if (own_cells[i] > 0) atomicAdd(expert_rows + i, static_cast<u64>(own_cells[i]));
    }
}
