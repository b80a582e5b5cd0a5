/*
row_source: expert rows of each wire row -> wire row of each expert row.

  slot_rows  [num_rows, num_slots]  i32   expert row of each slot, or -1
  source     [M]                    i32   written where an expert row is live

Launcher: fp4comm/codec/cuda.py
*/
#include "bits.cuh"

extern "C" __global__ void row_source(const int* __restrict__ slot_rows,
                                      int* __restrict__ source,
                                      i64 num_rows,
                                      int num_slots) {
    const i64 slot = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (slot >= num_rows * num_slots) return;
    const int row = __ldg(slot_rows + slot);
    if (row >= 0) source[row] = static_cast<int>(slot / num_slots);
}
