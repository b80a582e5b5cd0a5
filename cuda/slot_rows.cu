/*
slot_rows: the route that arrived -> the expert row of each slot, and what belongs to it.

  route        [num_rows, route_bytes]       K i16 local experts or -1, then weights
  cells        [num_experts][num_chunks] i32 number of the first live row of each cell; counted up
  shifts       [num_experts]   i64           from a live row's number to its expert row
  slot_rows    [num_rows, K]   i32           expert row of each slot, or -1
  weights      [num_rows, K]   f32           or null
  row_weights  [M]             f32           written where an expert row is live
  row_source   [M]             i32           wire row, likewise

Expert rows are ordered by expert, then wire row, then slot.

Launcher: fp4comm/routing/cuda.py
*/
#include "arrived_route.cuh"

extern "C" __global__ void slot_rows(const u8* __restrict__ route,
                                     int* __restrict__ cells,
                                     const i64* __restrict__ shifts,
                                     int* __restrict__ slot_rows,
                                     float* __restrict__ weights,
                                     float* __restrict__ row_weights,
                                     int* __restrict__ row_source,
                                     i64 num_rows,
                                     int num_topk,
                                     int route_bytes,
                                     int num_experts,
                                     i64 num_chunks,
                                     i64 num_expert_rows) {
    for_each_slot_of_chunk(num_rows, num_topk, [&](Slot slot) {
        Arrived own{NO_KEY, 0.0f};
        if (slot.at >= 0) own = arrived(route, slot, num_topk, route_bytes);
        const int key = own.expert < num_experts ? own.expert : NO_KEY;
        const int number = take_number(key, cells + key * num_chunks + slot.chunk);
        if (slot.at < 0) return;
        const i64 row = key == NO_KEY ? -1 : number + shifts[key];
        const bool is_live = row >= 0 && row < num_expert_rows;
        slot_rows[slot.at] = is_live ? static_cast<int>(row) : -1;
        if (weights != nullptr) weights[slot.at] = own.weight;
        if (is_live) {
            row_weights[row] = own.weight;
            row_source[row] = static_cast<int>(slot.row);
        }
    });
}
