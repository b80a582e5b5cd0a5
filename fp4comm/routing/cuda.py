"""Routing on a GPU: two passes over the slots, and the counts read by the host in between.

What the kernels take stands in their files.  Launches go to torch's current stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp4comm import check, cuda_kernels
from fp4comm.routing import Placement, RoutePlan, route_slot_bytes

CHUNK_TOKENS = 32  # of a warp that plans; cuda/experts.cuh
CHUNK_SLOTS = 128  # of a warp that finds what arrived; cuda/routing.cuh
WARPS = 8  # of a thread block
INDICES = {torch.int32: ("-DINDEX=int",), torch.int64: ("-DINDEX=i64",)}


def plan(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, placement: Placement
) -> RoutePlan:
    """Plan the wire rows.  See `routing.plan`."""
    num_tokens, num_topk = topk_idx.shape
    num_ranks, most = placement.num_ranks, placement.most_local_experts
    device, options = topk_idx.device, INDICES[topk_idx.dtype]
    num_chunks = -(-num_tokens // CHUNK_TOKENS)
    num_numbers, num_cells = 1 + num_ranks + num_ranks * most, num_ranks * num_chunks
    # The zero in front turns the running sum into where the rows of each token begin in places and,
    # past all of them, those of each cell.
    zeros = torch.zeros(
        2 * num_numbers + 1 + num_tokens + num_cells, dtype=torch.int32, device=device
    )
    words, counted = zeros.split([2 * num_numbers, 1 + num_tokens + num_cells])
    shape = (
        np.int64(num_tokens),
        *map(np.int32, (num_topk, placement.num_experts, num_ranks)),
        np.int64(num_chunks),
    )
    counts = words, counted[1 + num_tokens :], counted[1 : 1 + num_tokens]
    _launch("route_counts", options, num_chunks, topk_idx, *counts, *shape)
    copied = Copy(words)
    begins = torch.cumsum(counted, 0, dtype=torch.int32)
    numbers = copied.wait().numpy().view(np.int64)
    if numbers[0]:
        at = num_tokens * num_topk - int(numbers[0])
        raise check.wrong_expert(topk_idx, at, placement.num_experts)

    send_splits = numbers[1 : 1 + num_ranks]
    num_rows = int(send_splits.sum())
    places = torch.empty(num_rows, dtype=torch.int32, device=device)
    route_bytes = num_topk * route_slot_bytes(topk_weights is not None)
    route = torch.empty((num_rows, route_bytes), dtype=torch.uint8, device=device)
    place_offsets, cells = begins[: 1 + num_tokens], begins[num_tokens:]
    tables = cells, place_offsets, places, route
    rows = np.int32(num_rows)
    _launch("route_rows", options, num_chunks, topk_idx, topk_weights, *tables, *shape, rows)
    return RoutePlan(
        num_tokens=num_tokens,
        num_topk=num_topk,
        send_splits=send_splits,
        expert_counts=numbers[1 + num_ranks :].reshape(num_ranks, most),
        place_offsets=place_offsets,
        places=places,
        route=route,
    )


def fill_layout(
    route: torch.Tensor, num_topk: int, shifts: torch.Tensor, num_expert_rows: int
) -> dict[str, Any]:
    """Find the expert row of each slot, and what depends on it.  See `cpu.fill_layout`."""
    num_rows, route_bytes = route.shape
    num_experts, device = len(shifts), route.device
    num_chunks = -(-num_rows * num_topk // CHUNK_SLOTS)
    has_weights = route_bytes == num_topk * route_slot_bytes(weights=True)
    cells = torch.zeros(1 + num_experts * num_chunks, dtype=torch.int32, device=device)
    slots = torch.empty((num_rows, num_topk), dtype=torch.int32, device=device)
    weights = torch.empty(slots.shape, dtype=torch.float32, device=device) if has_weights else None
    row_weights = torch.empty(num_expert_rows, dtype=torch.float32, device=device)
    row_source = torch.empty(num_expert_rows, dtype=torch.int32, device=device)
    shape = (
        np.int64(num_rows),
        *map(np.int32, (num_topk, route_bytes, num_experts)),
        np.int64(num_chunks),
        np.int64(num_expert_rows),
    )
    _launch("slot_counts", (), num_chunks, route, cells[1:], row_weights, row_source, *shape)
    cells = torch.cumsum(cells, 0, dtype=torch.int32)
    outputs = slots, weights, row_weights, row_source
    _launch("slot_rows", (), num_chunks, route, cells, shifts, *outputs, *shape)
    return {
        "slot_rows": slots,
        "weights": weights,
        "row_weights": row_weights,
        "row_source": row_source,
    }


class Copy:
    """A copy to the host that is under way, ordered on the current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin to copy."""
        with torch.cuda.device(tensor.device):
            self._host = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> torch.Tensor:
        """Wait for it, and for nothing queued later; return memory that is the caller's."""
        self._done.synchronize()
        return self._host.clone()


def _launch(name: str, options: tuple[str, ...], num_chunks: int, *args: Any) -> None:
    grid = -(-num_chunks // WARPS)
    cuda_kernels.launch(name, options, grid, (32 * WARPS, 1), *args)


def variants() -> list[tuple[str, cuda_kernels.Options]]:
    """Every kernel with every set of options that it is launched with."""
    counted = [
        (name, index) for name in ("route_counts", "route_rows") for index in INDICES.values()
    ]
    return [*counted, ("slot_counts", ()), ("slot_rows", ())]
