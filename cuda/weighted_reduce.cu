/*
weighted_reduce: expert outputs -> wire rows of combine: each the weighted sum of its slots, packed.

  expert_out  [M, hidden]                BF16
  slot_rows   [num_rows, num_slots]      i32   expert row of each slot, or -1
  weights     [num_rows, num_slots]      f32   or null: the rows are added as they are
  payload     [num_rows, payload bytes]  u8    written; -DWIRE
  scales      [num_rows, num_blocks]     u8    written; E8M0
  scale_round  addend of the scale rule, formats.py

Float32 sums from +0 by ascending slot; product and sum are rounded separately.
Needs hidden % 32 == 0.  Launcher: fp4comm/codec/cuda.py
Reads 2 bytes an element of each live slot: bound by memory bandwidth.
*/
#include "sums.cuh"

constexpr int N = PIECE;  // elements of a row that a thread takes at a time (-D); UNROLL is 1
// AHEAD: slots whose rows are loaded before the first is added

extern "C" __global__ void weighted_reduce(const u8* __restrict__ expert_out,
                                           const int* __restrict__ slot_rows,
                                           const float* __restrict__ weights,
                                           u8* __restrict__ payload,
                                           u8* __restrict__ scales,
                                           i64 num_rows,
                                           int num_slots,
                                           int hidden,
                                           int chunks,
                                           int scale_round) {
    const Part part = part_of_thread(0, chunks);
    const int row = part.row;
    const int piece = part.piece, num_pieces = hidden / N;
    const bool is_live = row < num_rows && piece < num_pieces;  // others take part in shuffles

    const u8* out_piece = settled(expert_out + static_cast<u32>(piece) * (2 * N));
    float sums[N] = {};
    for (int first = 0; row < num_rows && first < num_slots; first += 32) {
        // Each lane has a slot; those that are live are added by ascending slot, AHEAD at a time.
        const int own = slot_of_lane(slot_rows, row, num_slots, first);
        const int own_slot = first + static_cast<int>(threadIdx.x % 32);
        const bool has_weight = weights && own_slot < num_slots;
        const float own_weight =
            has_weight ? __ldg(at_row(weights, row, num_slots) + own_slot) : 1.0f;
        u32 live = __ballot_sync(0xFFFFFFFFu, own >= 0);
        while (live != 0) {
            u32 pairs[AHEAD][N / 2];
            int lane[AHEAD];  // that has the slot; -1 = none
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                lane[a] = __ffs(live) - 1;
                const int from = __shfl_sync(0xFFFFFFFFu, own, lane[a] & 31);
                if (lane[a] >= 0 && is_live) {
                    load_words(at_row(out_piece, from, 2 * hidden), pairs[a]);
                }
                live &= live - 1;
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const float weight = __shfl_sync(0xFFFFFFFFu, own_weight, lane[a] & 31);
                if (lane[a] < 0 || !is_live) continue;
                float values[N];
                bf16_to_f32<N>(pairs[a], values);
#pragma unroll
                for (int i = 0; i < N; i++) {  // times 1.0 is exact
                    sums[i] = __fadd_rn(sums[i], __fmul_rn(values[i], weight));
                }
            }
        }
    }
    store_sums<WIRE, N>(sums, payload, scales, row, piece, hidden, is_live, scale_round);
}
