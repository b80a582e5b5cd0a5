/*
route_counts: top-k experts -> how many wire rows and expert rows each rank gets, first pass.

  topk_idx   [T, K]   i32 or i64 (Index)   expert of each slot, or -1
  numbers    [1 + num_ranks + num_ranks * most]  u64
             slots from the first wrong index on, or 0; wire rows of each rank; rows of its experts
  cells      [num_ranks][num_chunks]  i32   wire rows of each rank in each chunk
  num_places [T]                      i32   wire rows of each token

All three are zero before.  A wrong index is beyond -1..num_experts - 1.

Launcher: fp4comm/routing/cuda.py
*/
#include "experts.cuh"

using Index = INDEX;

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
    const int most = place.base + (place.extra > 0);
    u64* rank_rows = numbers + 1;
    u64* expert_rows = rank_rows + num_ranks;

    for_each_slot_of_chunk(num_tokens, num_topk, [&](Slot slot) {
        const Index* experts = topk_idx + slot.row * num_topk;
        int owner = NO_KEY, expert_cell = NO_KEY;
        if (slot.at >= 0) {
            const Index expert = experts[slot.k];
            owner = owner_of(expert, place);
            if (owner != NO_KEY) {
                expert_cell = owner * most + static_cast<int>(expert) - first_expert(owner, place);
            } else if (expert != -1) {
                atomicMax(numbers, static_cast<u64>(num_tokens * num_topk - slot.at));
            }
        }
        const bool is_new = is_new_row(experts, slot.k, num_topk, owner, place);
        if (is_new) atomicAdd(num_places + slot.row, 1);
        const int key = is_new ? owner : NO_KEY;
        count(expert_cell, expert_rows + expert_cell);
        count(key, rank_rows + key);
        count(key, cells + key * num_chunks + slot.chunk);
    });
}
