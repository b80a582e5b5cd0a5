"""Routing: topk_idx -> RoutePlan (what I send) and ExpertLayout (where what I receive goes).

Experts stand on ranks in contiguous ranges, the first ``num_experts % num_ranks`` ranks hold one
more.  No data moves here, and nothing loops over tokens in Python: slots are put in order by stable
sorts of 16-bit keys, which NumPy does as a radix sort.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

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

    def num_local_experts(self, rank: int) -> int:
        """Experts on a rank."""
        return int(self.offsets[rank + 1] - self.offsets[rank])

    @functools.cached_property
    def owners(self) -> np.ndarray:
        """Rank of each expert, ``[num_experts]`` uint16: the width that sorts fastest."""
        held = np.diff(self.offsets)
        return np.repeat(np.arange(self.num_ranks, dtype=np.uint16), held)


@dataclasses.dataclass(frozen=True, eq=False)
class RoutePlan:
    """What this rank sends: its wire rows by destination rank, then by token.

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
        return len(self.places)

    @property
    def counts(self) -> np.ndarray:
        """What each rank is told: wire rows, then rows of each expert there, int64."""
        return np.concatenate([self.send_splits[:, None], self.expert_counts], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Where the rows that arrived go: expert-major, by source rank, token, slot within an expert.

    Attributes:
        recv_splits: ``[num_ranks]`` int64, wire rows from each rank.
        num_rows_list: live expert rows of each local expert.
        expert_offsets_array: ``[local experts + 1]`` int64, multiples of the alignment.
        slot_rows: ``[n, K]`` int32, expert row of each slot of each wire row, or -1.
        weights: ``[n, K]`` float32, or None where the call had none.
        row_weights: ``[M]`` float32, the weight of each expert row; 0 in padding.
    """

    recv_splits: np.ndarray
    num_rows_list: list[int]
    expert_offsets_array: np.ndarray
    slot_rows: torch.Tensor
    weights: torch.Tensor | None
    row_weights: torch.Tensor

    @property
    def num_expert_rows(self) -> int:
        """Expert rows with padding: M."""
        return int(self.expert_offsets_array[-1])

    def row_source(self) -> torch.Tensor:
        """Wire row of each expert row, ``[M]`` int32, -1 in padding."""
        source = torch.full((self.num_expert_rows,), -1, dtype=torch.int32)
        wire_row, slot = torch.nonzero(self.slot_rows >= 0, as_tuple=True)
        source[self.slot_rows[wire_row, slot].long()] = wire_row.int()
        return source


def plan(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, placement: Placement
) -> RoutePlan:
    """Plan the wire rows: one for each (token, rank that holds one of its experts).

    Args:
        topk_idx: ``[T, K]`` int32 or int64 on the CPU, checked: values in -1..num_experts - 1.
        topk_weights: ``[T, K]`` float32, or None.
        placement: where the experts are.

    Example: 2 ranks, 4 experts.  ``[[0, 2], [2, 3]]`` makes 3 wire rows: token 0 to rank 0; tokens
    0 and 1 to rank 1 (token 1 once, though both its experts live there).
    """
    num_tokens, num_topk = topk_idx.shape
    experts = topk_idx.numpy().reshape(-1)
    narrow = np.int32 if len(experts) < 1 << 31 else np.int64  # sorts, divides and keeps less
    slots = np.flatnonzero(experts != NO_EXPERT).astype(narrow)
    owners = placement.owners[experts[slots]]
    order = np.argsort(owners, kind="stable")  # by rank, then token, then slot
    slots, owners = slots[order], owners[order]
    del order
    local = experts[slots].astype(np.int32) - placement.offsets[owners].astype(np.int32)
    tokens = slots // num_topk
    slots -= tokens * num_topk  # from here on the slot in its token
    is_new_row = np.empty(len(slots), bool)  # else: another expert of its token on that rank
    is_new_row[:1] = True
    np.not_equal(tokens[1:], tokens[:-1], out=is_new_row[1:])
    is_new_row[1:] |= owners[1:] != owners[:-1]
    rows = np.cumsum(is_new_row, dtype=narrow) - 1

    row_tokens, row_owners = tokens[is_new_row], owners[is_new_row]
    num_rows = len(row_tokens)
    route = np.zeros((num_rows, num_topk * route_slot_bytes(topk_weights is not None)), np.uint8)
    route_experts, route_weights = _route_columns(route, num_topk)
    route_experts[:] = NO_EXPERT
    route_experts[rows, slots] = local
    if topk_weights is not None:
        route_weights[rows, slots] = topk_weights.numpy()[tokens, slots]
    del rows, slots, tokens

    most = placement.most_local_experts
    cells = owners.astype(np.int32) * most + local  # num_ranks * 32767 experts at most
    place_offsets = np.zeros(num_tokens + 1, np.int32)
    np.cumsum(np.bincount(row_tokens, minlength=num_tokens), out=place_offsets[1:])
    return RoutePlan(
        num_tokens=num_tokens,
        num_topk=num_topk,
        send_splits=np.bincount(row_owners, minlength=placement.num_ranks).astype(np.int64),
        expert_counts=np.bincount(cells, minlength=placement.num_ranks * most)
        .reshape(placement.num_ranks, most)
        .astype(np.int64),
        place_offsets=torch.from_numpy(place_offsets),
        places=torch.from_numpy(_by_token(row_tokens, num_tokens)),
        route=torch.from_numpy(route),
    )


def route_slot_bytes(weights: bool) -> int:
    """Bytes of the route a top-k slot: int16 local expert and, if there are any, its weight."""
    return 6 if weights else 2


def _route_columns(route: np.ndarray, num_topk: int) -> tuple[np.ndarray, np.ndarray]:
    """View the route stream as its int16 experts and its float32 weights (no columns without)."""
    return (
        route[:, : 2 * num_topk].view(np.int16),
        route[:, 2 * num_topk :].view(np.float32),
    )


def _by_token(row_tokens: np.ndarray, num_tokens: int) -> np.ndarray:
    """Wire rows in the order of their tokens, those of one token ascending."""
    if num_tokens < 1 << 16:
        row_tokens = row_tokens.astype(np.uint16)
    return np.argsort(row_tokens, kind="stable").astype(np.int32)


def empty_plan(placement: Placement) -> RoutePlan:
    """Plan nothing: what a rank that found a mistake sends along with its status word."""
    return plan(torch.empty((0, 1), dtype=torch.int64), None, placement)


def expert_offsets(num_rows: np.ndarray, alignment: int) -> np.ndarray:
    """Start of each expert's segment, a multiple of alignment: ``[local experts + 1]`` int64."""
    aligned = -(-num_rows // alignment) * alignment
    return np.concatenate([[0], np.cumsum(aligned)]).astype(np.int64)


def expert_layout(
    route: torch.Tensor,
    num_topk: int,
    recv_splits: np.ndarray,
    num_rows: np.ndarray,
    alignment: int,
) -> ExpertLayout:
    """Lay out the rows that arrived.

    Args:
        route: ``[n, K * 6]`` or ``[n, K * 2]`` uint8, the route stream as it arrived.
        num_topk: K.
        recv_splits: ``[num_ranks]`` int64.
        num_rows: ``[local experts]`` int64, from the counts.
        alignment: rows that each expert's segment starts at a multiple of.

    Example: wire rows with local experts ``[[1, 0], [1, -1], [0, -1]]`` and alignment 4 have
    slot_rows ``[[4, 0], [5, -1], [1, -1]]``; expert 1 starts at row 4.
    """
    experts, route_weights = (part.copy() for part in _route_columns(route.numpy(), num_topk))
    offsets = expert_offsets(num_rows, alignment)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            "expert_alignment: expected fewer than 2**31 expert rows with padding, got"
            f" {offsets[-1]}"
        )
    flat = experts.reshape(-1)
    slots = np.flatnonzero(flat != NO_EXPERT)
    order = slots[np.argsort(flat[slots], kind="stable")]  # by expert, then wire row, then slot
    ends = np.cumsum(num_rows)
    rows = np.arange(len(order)) + np.repeat(offsets[:-1] - (ends - num_rows), num_rows)
    slot_rows = np.full(len(flat), NO_EXPERT, np.int32)
    slot_rows[order] = rows
    row_weights = np.zeros(int(offsets[-1]), np.float32)
    row_weights[rows] = 1.0
    has_weights = route_weights.shape == experts.shape
    if has_weights:
        row_weights[rows] = route_weights.reshape(-1)[order]
    return ExpertLayout(
        recv_splits=recv_splits,
        num_rows_list=[int(n) for n in num_rows],
        expert_offsets_array=offsets,
        slot_rows=torch.from_numpy(slot_rows.reshape(experts.shape)),
        weights=torch.from_numpy(route_weights) if has_weights else None,
        row_weights=torch.from_numpy(row_weights),
    )
