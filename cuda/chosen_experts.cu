/*
chosen_experts: a map of the experts of each token -> their numbers.

  chosen   [num_tokens, num_experts]  u8   not 0 where the token has the expert
  experts  [num_tokens, K]  i64            by ascending expert, -1 behind the last; num_experts,
                                           which is none, in the first slot of a token with more
  columns  [num_tokens, K]  i64            the same with 0 for none, and the first K of a token
                                           with more

A warp takes a token.

Launcher: fp4comm/routing/cuda.py
*/
#include "routing.cuh"

extern "C" __global__ void chosen_experts(const u8* __restrict__ chosen,
                                          i64* __restrict__ experts,
                                          i64* __restrict__ columns,
                                          i64 num_tokens,
                                          int num_topk,
                                          int num_experts) {
    const i64 token = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (token >= num_tokens) return;
    const u8* has = chosen + token * num_experts;
    i64* of_token = experts + token * num_topk;
    i64* columns_of_token = columns + token * num_topk;

    int num_before = 0;
    bool is_first = false;  // of the token's experts
    for (int first = 0; first < num_experts; first += 32) {
        const int expert = first + lane;
        const bool is_chosen = expert < num_experts && has[expert] != 0;
        const u32 lanes = __ballot_sync(ALL_LANES, is_chosen);
        const int slot = num_before + __popc(lanes & ((1u << lane) - 1));
        num_before += __popc(lanes);
        if (is_chosen && slot < num_topk) columns_of_token[slot] = of_token[slot] = expert;
        is_first |= is_chosen && slot == 0;
    }
    if (is_first && num_before > num_topk) of_token[0] = num_experts;
    for (int slot = num_before + lane; slot < num_topk; slot += 32) {
        of_token[slot] = -1;
        columns_of_token[slot] = 0;
    }
}
