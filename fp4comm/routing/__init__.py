"""Routing: topk_idx -> RoutePlan (what I send) and ExpertLayout (where what I receive goes).

Experts stand on ranks in contiguous ranges, the first ``num_experts % num_ranks`` ranks hold one
more.  No rows move here.  The device of topk_idx chooses the implementation: `cpu` or `cuda`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import torch

from fp4comm.check import MAX_INT32
from fp4comm.formats import TILE_ROWS

NO_EXPERT = -1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which rank holds which experts."""

    num_experts: int
    num_ranks: int

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """First expert of each rank, ``[num_ranks + 1]`` int64: 10 experts, 4 ranks: 0 3 6 8 10."""
        base, extra = divmod(self.num_experts, self.num_ranks)
        held = base + (np.arange(self.num_ranks) < extra)
        return np.concatenate([[0], np.cumsum(held)]).astype(np.int64)

    @property
    def most_local_experts(self) -> int:
        """Experts on the rank that holds most."""
        return -(-self.num_experts // self.num_ranks)

    def experts(self, rank: int) -> range:
        """Experts on a rank."""
        return range(*self.offsets[rank : rank + 2].tolist())

    def num_local_experts(self, rank: int) -> int:
        """How many they are."""
        return len(self.experts(rank))

    @functools.cached_property
    def owners(self) -> np.ndarray:
        """Rank of each expert, ``[num_experts]`` uint16: the width that sorts fastest."""
        held = np.diff(self.offsets)
        return np.repeat(np.arange(self.num_ranks, dtype=np.uint16), held)


@dataclasses.dataclass(frozen=True, eq=False)
class RoutePlan:
    """What this rank sends: its wire rows by destination rank, then by token.

    NumPy arrays are on the host, tensors on the device of topk_idx.

    Attributes:
        num_tokens: T.
        num_topk: K.
        send_splits: ``[num_ranks]`` int64, wire rows for each rank.
        expert_counts: ``[num_ranks, most_local_experts]`` int64, expert rows for each expert there.
        place_offsets: ``[T + 1]`` int32; the wire rows of token t are
            ``places[place_offsets[t] : place_offsets[t + 1]]``, by ascending rank.
        places: ``[n]`` int32.
        route: ``[n, K * 6]`` uint8, or ``[n, K * 2]`` without weights: K int16 local experts of the
            destination, or -1 for a slot that goes elsewhere, then K float32 weights.
    """

    num_tokens: int
    num_topk: int
    send_splits: np.ndarray
    expert_counts: np.ndarray
    place_offsets: torch.Tensor
    places: torch.Tensor
    route: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Wire rows that this rank sends."""
        return self.places.shape[0]

    @property
    def counts(self) -> np.ndarray:
        """What each rank is told: wire rows, then rows of each expert there, int64."""
        return np.concatenate([self.send_splits[:, None], self.expert_counts], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class RelayPlan:
    """What a relay hands on: for the rows that came to it what a `RoutePlan` is for tokens.

    Attributes:
        num_tokens: rows that came.
        place_offsets: ``[num_tokens + 1]`` int32, as in `RoutePlan`.
        places: ``[n]`` int32.
        row_tokens: ``[n]`` int32, which of the rows that came each wire row is a copy of.
    """

    num_tokens: int
    place_offsets: torch.Tensor
    places: torch.Tensor
    row_tokens: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Where the rows that arrived go: expert-major, by source rank, token, slot within an expert.

    Lists and NumPy arrays are on the host, tensors on the device of the rows.

    Attributes:
        num_rows_list: live expert rows of each local expert.
        num_rows: the same, ``[local experts]`` int64.
        expert_offsets_array: ``[local experts + 1]`` int64, multiples of the alignment.
        expert_offsets: the same, a tensor.
        padding: ``[2, local experts]`` int64, first padding row of each expert and the row behind
            its last.
        tiles: ``[2 * tiles + 1]`` int64: first row of each tile of `tile_table`, M, then live rows
            of each tile.
        slot_rows: ``[n, K]`` int32, expert row of each slot of each wire row, or -1.
        weights: ``[n, K]`` float32, or None where the call had none.
        row_weights: ``[M]`` float32, the weight of each expert row; 0 in padding.
        row_source: ``[M]`` int32, wire row of each expert row, or -1 in padding.
    """

    num_rows_list: list[int]
    num_rows: torch.Tensor
    expert_offsets_array: np.ndarray
    expert_offsets: torch.Tensor
    padding: torch.Tensor
    tiles: torch.Tensor
    slot_rows: torch.Tensor
    weights: torch.Tensor | None
    row_weights: torch.Tensor
    row_source: torch.Tensor

    @property
    def num_expert_rows(self) -> int:
        """Expert rows with padding: M."""
        return int(self.expert_offsets_array[-1])


def plan(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, placement: Placement
) -> RoutePlan:
    """Plan the wire rows: one for each (token, rank that holds one of its experts).

    On a GPU it waits for the counts, and for nothing else.

    Args:
        topk_idx: ``[T, K]`` int32 or int64, -1 for none, contiguous.
        topk_weights: ``[T, K]`` float32, contiguous, or None.
        placement: where the experts are.

    Raises:
        ValueError: an index beyond -1..num_experts - 1.

    Example: 2 ranks, 4 experts.  ``[[0, 2], [2, 3]]`` makes 3 wire rows: token 0 to rank 0; tokens
    0 and 1 to rank 1 (token 1 once, though both its experts live there).
    """
    return _of(topk_idx.device).plan(topk_idx, topk_weights, placement)


def count(topk_idx: torch.Tensor, placement: Placement) -> np.ndarray:
    """Count what `plan` would: its ``counts``, ``[num_ranks, 1 + most_local_experts]`` int64.

    Args:
        topk_idx: as for `plan`.
        placement: where the experts are.

    Raises:
        ValueError: an index beyond -1..num_experts - 1.
    """
    return _of(topk_idx.device).count(topk_idx, placement)


def chosen_experts(chosen: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a map of each token's experts into their numbers.  Waits for nothing on a GPU.

    Args:
        chosen: ``[T, num_experts]`` bool, contiguous.
        num_topk: K.

    Returns:
        experts ``[T, K]`` int64 by ascending expert, -1 behind the last; a token with more than K
        has num_experts in its first slot, which `plan` refuses; and columns ``[T, K]`` int64, the
        same with 0 for none, and the first K of a token with more.

    Example: ``[[0, 1, 0, 1], [0, 0, 1, 0]]`` with K = 2 gives ``[[1, 3], [2, -1]]``.
    """
    return _of(chosen.device).chosen_experts(chosen, num_topk)


def relay(
    route: torch.Tensor, num_topk: int, placement: Placement, send_splits: np.ndarray
) -> tuple[RelayPlan, torch.Tensor]:
    """Plan what a relay hands on of the rows that came to it.  Waits for nothing on a GPU.

    Args:
        route: ``[n, K * 6]`` or ``[n, K * 2]`` uint8, the route stream as it came, its experts
            numbered within this node.
        num_topk: K.
        placement: where those stand, on the ranks of this node.
        send_splits: ``[ranks of the node]`` int64, rows for each of them, from the counts.

    Returns:
        the plan, and the route stream to hand on.

    Example: 2 ranks with 2 experts each.  A row that came with experts ``[1, 3]`` goes to both, as
    ``[1, -1]`` and ``[-1, 1]``.
    """
    slots = len(route), num_topk
    experts = torch.empty(slots, dtype=torch.int16, device=route.device)
    experts.view(torch.uint8).copy_(route[:, : 2 * num_topk])
    weights = None
    if route.shape[1] == num_topk * route_slot_bytes(weights=True):
        weights = torch.empty(slots, dtype=torch.float32, device=route.device)
        weights.view(torch.uint8).copy_(route[:, 2 * num_topk :])  # which may be between words
    return _of(route.device).relay(experts.int(), weights, placement, send_splits)


def expert_layout(
    route: torch.Tensor, num_topk: int, num_rows: np.ndarray, alignment: int
) -> ExpertLayout:
    """Lay out the rows that arrived.

    Args:
        route: ``[n, K * 6]`` or ``[n, K * 2]`` uint8, the route stream as it arrived.
        num_topk: K.
        num_rows: ``[local experts]`` int64, from the counts.
        alignment: rows that each expert's segment starts at a multiple of.

    Raises:
        ValueError: 2**31 expert rows or more, with padding.

    Example: wire rows with local experts ``[[1, 0], [1, -1], [0, -1]]`` and alignment 4 have
    slot_rows ``[[4, 0], [5, -1], [1, -1]]``; expert 1 starts at row 4.
    """
    offsets = expert_offsets(num_rows, alignment)
    if offsets[-1] > MAX_INT32:
        raise ValueError(
            "expert_alignment: expected fewer than 2**31 expert rows with padding, got"
            f" {offsets[-1]}"
        )
    ends = num_rows.cumsum()
    shifts = offsets[:-1] - (ends - num_rows)  # from a live row's number to its expert row
    padding = np.concatenate([offsets[:-1] + num_rows, offsets[1:]])
    tables = shifts, num_rows, offsets, padding, tile_table(num_rows, offsets)
    shifts, *uploaded = upload(route.device, *tables)
    filled = _of(route.device).fill_layout(route, num_topk, shifts, int(offsets[-1]))
    return ExpertLayout(
        num_rows_list=num_rows.tolist(),
        num_rows=uploaded[0],
        expert_offsets_array=offsets,
        expert_offsets=uploaded[1],
        padding=uploaded[2].view(2, -1),
        tiles=uploaded[3],
        **filled,
    )


def expert_offsets(num_rows: np.ndarray, alignment: int) -> np.ndarray:
    """Start of each expert's segment, a multiple of alignment: ``[local experts + 1]`` int64."""
    offsets = np.zeros(len(num_rows) + 1, np.int64)
    (-(-num_rows // alignment) * alignment).cumsum(out=offsets[1:])
    return offsets


def tile_table(num_rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Tiles of 128 expert rows, which restart at each expert: ``ceil(n_e / 128)`` each.

    Returns:
        int64: first expert row of each tile, the end of the last one, then live rows of each tile.
    """
    tiles = -(-num_rows // TILE_ROWS)
    in_front = tiles.cumsum() - tiles
    starts = (offsets[:-1] - in_front * TILE_ROWS).repeat(tiles)
    starts += np.arange(0, len(starts) * TILE_ROWS, TILE_ROWS)
    live = (offsets[:-1] + num_rows).repeat(tiles) - starts
    return np.concatenate([starts, offsets[-1:], np.minimum(live, TILE_ROWS)])


def upload(device: torch.device, *tables: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Put int64 tables on the device, in one copy that the host does not wait for."""
    sizes = [len(table) for table in tables]
    whole = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(tables, out=whole.numpy())
    return torch.split_with_sizes(whole.to(device, non_blocking=True), sizes)


def route_slot_bytes(weights: bool) -> int:
    """Bytes of the route a top-k slot: int16 local expert and, if there are any, its weight."""
    return 6 if weights else 2


def _of(device: torch.device) -> Any:
    """The implementation for a device."""
    return _load(device.type)


@functools.cache
def _load(name: str) -> Any:
    return importlib.import_module(f"fp4comm.routing.{name}")
