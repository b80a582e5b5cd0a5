/*
arrived_route: one slot of the route that arrived.

After an exchange that was stopped, the route is whatever the memory held before; what is read of it
must not lead outside of other arrays.
*/
#pragma once

#include "routing.cuh"

struct Slot {
    i64 row;
    int expert;    // NO_KEY if there is none
    float weight;  // 1 where the route has none
};

DEVICE Slot arrived(const u8* route, i64 slot, int num_topk, int route_bytes) {
    const i64 row = slot / num_topk;
    const int k = static_cast<int>(slot - row * num_topk);
    const u16* halves = reinterpret_cast<const u16*>(route + row * route_bytes);
    const int expert = static_cast<short>(halves[k]);
    float weight = 1.0f;
    if (route_bytes > 2 * num_topk) {
        const u32 low = halves[num_topk + 2 * k], high = halves[num_topk + 2 * k + 1];
        weight = __uint_as_float(high << 16 | low);
    }
    return {row, expert < 0 ? NO_KEY : expert, weight};
}
