/*
arrived_route: one slot of the route that arrived.

After an exchange that was stopped, the route is whatever the memory held before; what is read of it
must not lead outside of other arrays.
*/
#pragma once

#include "routing.cuh"

struct Arrived {
    int expert;    // NO_KEY if there is none
    float weight;  // 1 where the route has none
};

DEVICE Arrived arrived(const u8* route, Slot slot, int num_topk, int route_bytes) {
    const u16* halves = reinterpret_cast<const u16*>(route + slot.row * route_bytes);
    const int expert = static_cast<short>(halves[slot.k]);
    float weight = 1.0f;
    if (route_bytes > 2 * num_topk) {
        const u32 low = halves[num_topk + 2 * slot.k], high = halves[num_topk + 2 * slot.k + 1];
        weight = bits_float(high << 16 | low);
    }
    return {expert < 0 ? NO_KEY : expert, weight};
}
