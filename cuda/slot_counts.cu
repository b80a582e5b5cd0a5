/*
slot_counts: the route that arrived -> how many slots of each chunk each expert has, first pass.

  route        [num_rows, route_bytes]          K i16 local experts or -1, then weights
  cells        [num_experts][num_chunks]  i32   zero before
  row_weights  [M]  f32                         filled with 0, what padding rows have
  row_source   [M]  i32                         likewise with -1

Launcher: fp4comm/routing/cuda.py
*/
#include "arrived_route.cuh"

extern "C" __global__ void slot_counts(const u8* __restrict__ route,
                                       int* __restrict__ cells,
                                       float* __restrict__ row_weights,
                                       int* __restrict__ row_source,
                                       i64 num_rows,
                                       int num_topk,
                                       int route_bytes,
                                       int num_experts,
                                       i64 num_chunks,
                                       i64 num_expert_rows) {
    const i64 num_threads = static_cast<i64>(gridDim.x) * blockDim.x;
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (i64 row = thread; row < num_expert_rows; row += num_threads) {
        row_weights[row] = 0.0f;
        row_source[row] = -1;
    }
    for_each_slot_of_chunk(num_rows, num_topk, [&](Slot slot) {
        int key = slot.at < 0 ? NO_KEY : arrived(route, slot, num_topk, route_bytes).expert;
        if (key >= num_experts) key = NO_KEY;
        count(key, cells + key * num_chunks + slot.chunk);
    });
}
