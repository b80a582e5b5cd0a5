/*
slot_counts: the route that arrived -> how many slots of each chunk each expert has, first pass.

  route  [num_rows, route_bytes]       K i16 local experts or -1, then weights
  cells  [num_experts][num_chunks]  i32   zero before

Launcher: fp4comm/routing/cuda.py
*/
#include "arrived_route.cuh"

extern "C" __global__ void slot_counts(const u8* __restrict__ route,
                                       int* __restrict__ cells,
                                       i64 num_rows,
                                       int num_topk,
                                       int route_bytes,
                                       int num_experts,
                                       i64 num_chunks) {
    for_each_slot_of_chunk(num_rows, num_topk, [&](Slot slot) {
        int key = slot.at < 0 ? NO_KEY : arrived(route, slot, num_topk, route_bytes).expert;
        if (key >= num_experts) key = NO_KEY;
        count(key, cells + key * num_chunks + slot.chunk);
    });
}
