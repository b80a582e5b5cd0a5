"""Routing on the CPU: nothing loops over tokens in Python.

Slots are put in order by stable sorts of 16-bit keys, which NumPy does as a radix sort.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fp4comm import check
from fp4comm.routing import NO_EXPERT, Placement, RelayPlan, RoutePlan, route_slot_bytes


def plan(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, placement: Placement
) -> RoutePlan:
    """Plan the wire rows.  See `routing.plan`."""
    check.expert_range(topk_idx, placement.num_experts)
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


def chosen_experts(chosen: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a map into numbers.  See `routing.chosen_experts`."""
    num_experts = chosen.shape[1]
    backwards = torch.arange(num_experts, 0, -1, dtype=torch.int32)  # keys: no two are the same
    keys, columns = (chosen * backwards).topk(min(num_topk, num_experts), dim=1)
    missing = num_topk - columns.shape[1]
    keys, columns = (torch.nn.functional.pad(part, (0, missing)) for part in (keys, columns))
    is_none = keys == 0
    experts, columns = (columns.masked_fill(is_none, filler) for filler in (NO_EXPERT, 0))
    experts[chosen.sum(1) > num_topk, 0] = num_experts
    return experts, columns


def count(topk_idx: torch.Tensor, placement: Placement) -> np.ndarray:
    """Count wire rows and expert rows.  See `routing.count`."""
    check.expert_range(topk_idx, placement.num_experts)
    num_ranks, experts = placement.num_ranks, topk_idx.numpy()
    owners = np.append(placement.owners, np.uint16(num_ranks))  # the last is what -1 stands for
    by_token = np.sort(owners[experts], axis=1)  # a rank once, however many experts there
    is_new = np.ones(by_token.shape, bool)
    np.not_equal(by_token[:, 1:], by_token[:, :-1], out=is_new[:, 1:])
    held = np.bincount(experts[experts != NO_EXPERT], minlength=placement.num_experts)
    counts = np.zeros((num_ranks, 1 + placement.most_local_experts), np.int64)
    counts[:, 0] = np.bincount(by_token[is_new], minlength=num_ranks + 1)[:num_ranks]
    for rank, (first, last) in enumerate(pairwise(placement.offsets.tolist())):
        counts[rank, 1 : 1 + last - first] = held[first:last]
    return counts


def relay(
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    placement: Placement,
    send_splits: np.ndarray,
) -> tuple[RelayPlan, torch.Tensor]:
    """Plan what a relay hands on.  See `routing.relay`."""
    made = plan(experts, weights, placement)
    assert (made.send_splits == send_splits).all(), (made.send_splits, send_splits)
    row_tokens = np.empty(made.num_rows, np.int32)
    num_copies = np.diff(made.place_offsets.numpy())
    row_tokens[made.places.numpy()] = np.repeat(np.arange(len(experts)), num_copies)
    tables = made.num_tokens, made.place_offsets, made.places, torch.from_numpy(row_tokens)
    return RelayPlan(*tables), made.route


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


def fill_layout(
    route: torch.Tensor, num_topk: int, shifts: torch.Tensor, num_expert_rows: int
) -> dict[str, Any]:
    """Find the expert row of each slot, and what depends on it.

    Args:
        route: as for `routing.expert_layout`.
        num_topk: K.
        shifts: ``[local experts]`` int64, from the number of an expert's live row among all live
            rows to its expert row.
        num_expert_rows: M.

    Returns:
        slot_rows, weights, row_weights and row_source of `ExpertLayout`.
    """
    experts, route_weights = (part.copy() for part in _route_columns(route.numpy(), num_topk))
    flat = experts.reshape(-1)
    slots = np.flatnonzero(flat != NO_EXPERT)
    order = slots[np.argsort(flat[slots], kind="stable")]  # by expert, then wire row, then slot
    rows = np.arange(len(order)) + shifts.numpy()[flat[order]]
    slot_rows = np.full(len(flat), NO_EXPERT, np.int32)
    slot_rows[order] = rows
    row_source = np.full(num_expert_rows, -1, np.int32)
    row_source[rows] = order // num_topk
    has_weights = route_weights.shape == experts.shape
    row_weights = np.zeros(num_expert_rows, np.float32)
    row_weights[rows] = route_weights.reshape(-1)[order] if has_weights else 1.0
    return {
        "slot_rows": torch.from_numpy(slot_rows.reshape(experts.shape)),
        "weights": torch.from_numpy(route_weights) if has_weights else None,
        "row_weights": torch.from_numpy(row_weights),
        "row_source": torch.from_numpy(row_source),
    }
