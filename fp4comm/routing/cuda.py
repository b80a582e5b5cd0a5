"""Routing on a GPU: two passes over the slots, and the counts read by the host in between.

What the kernels take stands in their files.  Launches go to torch's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fp4comm import check, cuda_kernels
from fp4comm.routing import Placement, RelayPlan, RoutePlan, route_slot_bytes

CHUNK_TOKENS = 32  # of a warp that plans; cuda/experts.cuh
CHUNK_SLOTS = 128  # of a warp that finds what arrived; cuda/routing.cuh
WARPS = 8  # of a thread block
INDICES = {torch.int32: ("-DINDEX=int",), torch.int64: ("-DINDEX=i64",)}


def plan(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, placement: Placement
) -> RoutePlan:
    """Plan the wire rows.  See `routing.plan`."""
    num_tokens = topk_idx.shape[0]
    counted, words = _count(topk_idx, placement)
    copied = Copy(words)
    begins = torch.cumsum(counted, 0, dtype=torch.int32)
    counts = _counts(copied, topk_idx, placement)
    num_rows = int(counts[:, 0].sum())
    place_offsets, cells = begins[: 1 + num_tokens], begins[num_tokens:]
    places = torch.empty(num_rows, dtype=torch.int32, device=topk_idx.device)
    tables = cells, place_offsets, places, None
    return RoutePlan(
        num_tokens=num_tokens,
        num_topk=topk_idx.shape[1],
        send_splits=counts[:, 0],
        expert_counts=counts[:, 1:],
        place_offsets=place_offsets,
        places=places,
        route=_route_rows(topk_idx, topk_weights, placement, *tables),
    )


def count(topk_idx: torch.Tensor, placement: Placement) -> np.ndarray:
    """Count wire rows and expert rows.  See `routing.count`."""
    _, words = _count(topk_idx, placement)
    return _counts(Copy(words), topk_idx, placement)


def chosen_experts(chosen: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a map into numbers.  See `routing.chosen_experts`."""
    num_tokens, num_experts = chosen.shape
    shape = 2, num_tokens, num_topk
    experts, columns = torch.empty(shape, dtype=torch.int64, device=chosen.device)
    tensors, numbers = (chosen, experts, columns), (num_tokens, num_topk, num_experts)
    _launch("chosen_experts", (), num_tokens, tensors, "qii", *numbers)
    return experts, columns


def relay(
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    placement: Placement,
    send_splits: np.ndarray,
) -> tuple[RelayPlan, torch.Tensor]:
    """Plan what a relay hands on.  See `routing.relay`.

    After a stopped exchange the experts are garbage: tables still lead to rows that there are.
    """
    num_tokens, num_rows, device = len(experts), int(send_splits.sum()), experts.device
    counted, _ = _count(experts, placement)
    begins = torch.cumsum(counted, 0, dtype=torch.int32)
    place_offsets, cells = begins[: 1 + num_tokens].clamp(max=num_rows), begins[num_tokens:]
    places, row_tokens = torch.zeros((2, num_rows), dtype=torch.int32, device=device)
    tables = cells, place_offsets, places, row_tokens
    route = _route_rows(experts, weights, placement, *tables)
    return RelayPlan(num_tokens, place_offsets, places, row_tokens), route


def _count(topk_idx: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
    """Count on the device.

    Returns:
        ``[1 + T + num_ranks * num_chunks]`` int32: 0, wire rows of each token and of each cell.
        Their running sum is where the rows of each token begin in places and, past all of them,
        those of each cell; and the words of the numbers that `_counts` reads.
    """
    num_tokens = topk_idx.shape[0]
    num_ranks, most = placement.num_ranks, placement.most_local_experts
    num_chunks = -(-num_tokens // CHUNK_TOKENS)
    num_numbers, num_cells = 1 + num_ranks + num_ranks * most, num_ranks * num_chunks
    sizes = [2 * num_numbers, 1 + num_tokens + num_cells]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=topk_idx.device)
    words, counted = zeros.split(sizes)
    tensors = topk_idx, words, counted[1 + num_tokens :], counted[1 : 1 + num_tokens]
    numbers = _numbers(topk_idx, placement)
    _launch("route_counts", INDICES[topk_idx.dtype], num_chunks, tensors, "qiiiq", *numbers)
    return counted, words


def _counts(copied: Copy, topk_idx: torch.Tensor, placement: Placement) -> np.ndarray:
    """Wait for the counts of each rank, wire rows and then its experts', ``[num_ranks, 1 + E]``."""
    num_ranks, most = placement.num_ranks, placement.most_local_experts
    numbers = copied.wait().numpy().view(np.int64)
    if numbers[0]:
        at = topk_idx.numel() - int(numbers[0])
        raise check.wrong_expert(topk_idx, at, placement.num_experts)
    rows, experts = numbers[1 : 1 + num_ranks], numbers[1 + num_ranks :]
    return np.concatenate([rows[:, None], experts.reshape(num_ranks, most)], axis=1)


def _route_rows(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    placement: Placement,
    cells: torch.Tensor,
    place_offsets: torch.Tensor,
    places: torch.Tensor,
    row_tokens: torch.Tensor | None,
) -> torch.Tensor:
    """Fill the tables that depend on where rows begin, and return the route stream."""
    num_rows, (num_tokens, num_topk) = places.shape[0], topk_idx.shape
    route_bytes = num_topk * route_slot_bytes(topk_weights is not None)
    route = torch.empty((num_rows, route_bytes), dtype=torch.uint8, device=topk_idx.device)
    tensors = topk_idx, topk_weights, cells, place_offsets, places, row_tokens, route
    options, num_chunks = INDICES[topk_idx.dtype], -(-num_tokens // CHUNK_TOKENS)
    numbers = *_numbers(topk_idx, placement), num_rows
    _launch("route_rows", options, num_chunks, tensors, "qiiiqi", *numbers)
    return route


def _numbers(topk_idx: torch.Tensor, placement: Placement) -> tuple[int, ...]:
    """What both kernels are told: T, K, experts, ranks, chunks."""
    num_tokens, num_topk = topk_idx.shape
    num_chunks = -(-num_tokens // CHUNK_TOKENS)
    return num_tokens, num_topk, placement.num_experts, placement.num_ranks, num_chunks


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
    numbers = num_rows, num_topk, route_bytes, num_experts, num_chunks, num_expert_rows
    filled = row_weights, row_source
    _launch("slot_counts", (), num_chunks, (route, cells[1:], *filled), "qiiiqq", *numbers)
    cells = torch.cumsum(cells, 0, dtype=torch.int32)
    tensors = route, cells, shifts, slots, weights, *filled
    _launch("slot_rows", (), num_chunks, tensors, "qiiiqq", *numbers)
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
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Wait for it, and for nothing queued later; return memory that is the caller's."""
        self._done.synchronize()
        return self._host.clone()


def _launch(
    name: str,
    options: tuple[str, ...],
    num_warps: int,
    tensors: Sequence[torch.Tensor | None],
    fields: str,
    *numbers: int,
) -> None:
    grid = -(-num_warps // WARPS)
    cuda_kernels.launch(name, options, grid, (32 * WARPS, 1), tensors, fields, *numbers)


def variants() -> list[tuple[str, cuda_kernels.Options]]:
    """Every kernel with every set of options that it is launched with."""
    counted = [
        (name, index) for name in ("route_counts", "route_rows") for index in INDICES.values()
    ]
    return [*counted, *((name, ()) for name in ("slot_counts", "slot_rows", "chosen_experts"))]
