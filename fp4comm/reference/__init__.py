"""The oracle: every operation in plain NumPy, correct before fast, all ranks in one process.

The CPU and CUDA codecs must give the same bytes as the functions of the same name here.  Nothing is
shared with them but the facts in formats.py; nothing is shared with routing.py at all.  Casts stand
in casts.py, operations on rows in rows.py, dispatch and combine of all ranks below.

BF16 arrays are uint16 bit patterns, element codes and scales uint8.  T tokens, n wire rows, M
expert rows (padding included), H hidden, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4comm.formats import WireFormat
from fp4comm.reference.casts import (
    Array,
    bf16_to_float32,
    e2m1_to_float32,
    e4m3_to_float32,
    e8m0_to_float32,
    float32_to_bf16,
    float32_to_e2m1,
    float32_to_e4m3,
)
from fp4comm.reference.rows import (
    Rows,
    dequantize,
    final_reduce,
    load,
    quantize_rows,
    relay_reduce,
    row_dots,
    scale_from_amax,
    to_bf16_rows,
    to_fp8_columns,
    to_fp8_rows,
    weighted_reduce,
)

__all__ = [
    "Arrived",
    "bf16_to_float32",
    "combine",
    "dequantize",
    "dispatch",
    "e2m1_to_float32",
    "e4m3_to_float32",
    "e8m0_to_float32",
    "expert_range",
    "final_reduce",
    "float32_to_bf16",
    "float32_to_e2m1",
    "float32_to_e4m3",
    "load",
    "quantize_rows",
    "relay_reduce",
    "row_dots",
    "scale_from_amax",
    "to_bf16_rows",
    "to_fp8_columns",
    "to_fp8_rows",
    "weighted_reduce",
]


@dataclasses.dataclass(frozen=True)
class Arrived:
    """What one rank holds after dispatch: n wire rows, M expert rows for its E_l experts."""

    payload: Array  # uint8 [n, payload_bytes], by source rank, then token
    scales: Array  # uint8 [n, scale_bytes]
    origins: Array  # int64 [n, 2]: source rank, token
    slot_rows: Array  # int64 [n, K]: expert row of each slot, -1 if its expert is not here
    weights: Array  # float32 [n, K], of all slots of the token; ones if dispatch had none
    row_source: Array  # int64 [M]: wire row, -1 in padding
    row_origins: Array  # int64 [M, 3]: source rank, token, slot; -1 in padding
    row_weights: Array  # float32 [M], 0 in padding
    num_rows: Array  # int64 [E_l]: live rows of each expert
    expert_offsets: Array  # int64 [E_l + 1], multiples of expert_alignment; the last is M
    rows: Array | None = None  # uint8 E4M3 codes or uint16 BF16 bits [M, H]; None if left packed
    row_scales: Array | None = None  # float32 [M, ceil(H/128)] beside E4M3 codes


def expert_range(rank: int, num_ranks: int, num_experts: int) -> range:
    """Experts of a rank: contiguous, the first num_experts % num_ranks ranks hold one more.

    >>> [list(expert_range(rank, 4, 10)) for rank in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    each, more = divmod(num_experts, num_ranks)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def dispatch(
    xs: Sequence[Rows],
    topk_idxs: Sequence[Array],
    topk_weights: Sequence[Array | None],
    num_experts: int,
    wire: WireFormat,
    arrive: str,
    expert_alignment: int = 1,
) -> list[Arrived]:
    """Send each token once to every rank that holds one of its experts.

    Args:
        xs: for each rank, rows [T, H] as `load` takes them; T may differ and be 0.
        topk_idxs: for each rank, int [T, K], global expert or -1.
        topk_weights: for each rank, float [T, K] or None for ones.
        num_experts: over all ranks.
        wire: the dispatch wire.
        arrive: ``"fp8"``, ``"bf16"`` or ``"packed"``.
        expert_alignment: each expert's segment starts at a multiple of this many rows.

    Returns:
        What each rank holds afterwards.  Rows of an expert are ordered by source rank, token, slot.
    """
    first = xs[0][0] if isinstance(xs[0], tuple) else xs[0]
    hidden, num_topk = first.shape[1], topk_idxs[0].shape[1]
    sent = [quantize_rows(x, wire) for x in xs]
    experts_of = [np.asarray(idx).tolist() for idx in topk_idxs]
    arrived = []
    for rank in range(len(xs)):
        local = expert_range(rank, len(xs), num_experts)
        wire_rows = [
            (source, token)
            for source, tokens in enumerate(experts_of)
            for token, experts in enumerate(tokens)
            if any(expert in local for expert in experts)
        ]
        payload = [sent[source][0][token] for source, token in wire_rows]
        scales = [sent[source][1][token] for source, token in wire_rows]
        slots = [experts_of[source][token] for source, token in wire_rows]
        origins = _matrix(wire_rows, np.int64, 2)
        weights = np.ones((len(origins), num_topk), np.float32)
        for i, (source, token) in enumerate(wire_rows):
            source_weights = topk_weights[source]
            if source_weights is not None:
                weights[i] = source_weights[token]
        row_slots, num_rows, expert_offsets = _expert_rows(slots, local, expert_alignment)

        row_source = row_slots[:, 0]
        live = row_source >= 0
        wire_row, slot = row_slots[live].T
        slot_rows = np.full((len(origins), num_topk), -1, np.int64)
        slot_rows[wire_row, slot] = np.flatnonzero(live)
        row_origins = np.full((len(row_slots), 3), -1, np.int64)
        row_origins[live] = np.column_stack([origins[wire_row], slot])
        row_weights = np.zeros(len(row_slots), np.float32)
        row_weights[live] = weights[wire_row, slot]

        packed = Arrived(
            payload=_matrix(payload, np.uint8, wire.payload_bytes(hidden)),
            scales=_matrix(scales, np.uint8, wire.scale_bytes(hidden)),
            origins=origins,
            slot_rows=slot_rows,
            weights=weights,
            row_source=row_source,
            row_origins=row_origins,
            row_weights=row_weights,
            num_rows=num_rows,
            expert_offsets=expert_offsets,
        )
        arrived.append(_convert(packed, wire, hidden, arrive))
    return arrived


def _expert_rows(
    slots: list[list[int]], local: range, alignment: int
) -> tuple[Array, Array, Array]:
    """Order the slots of the wire rows by expert.

    Returns:
        (wire row, slot) of each expert row int64 [M, 2], -1 in padding; num_rows; expert_offsets.
    """
    row_slots: list[tuple[int, int]] = []
    num_rows, offsets = [], [0]
    for local_expert in local:
        for wire_row, experts in enumerate(slots):
            for slot, expert in enumerate(experts):
                if expert == local_expert:
                    row_slots.append((wire_row, slot))
        num_rows.append(len(row_slots) - offsets[-1])
        row_slots += (-len(row_slots) % alignment) * [(-1, -1)]
        offsets.append(len(row_slots))
    return _matrix(row_slots, np.int64, 2), np.array(num_rows, np.int64), np.array(offsets)


def _matrix(rows: Sequence[Any], dtype: Any, num_columns: int) -> Array:
    """Stack rows, of which there may be none."""
    return np.array(rows, dtype).reshape(len(rows), num_columns)


def _convert(packed: Arrived, wire: WireFormat, hidden: int, arrive: str) -> Arrived:
    """Add the expert rows in the form asked for."""
    arrays = packed.payload, packed.scales, wire, hidden, packed.row_source
    if arrive == "fp8":
        rows, row_scales = to_fp8_rows(*arrays)
        return dataclasses.replace(packed, rows=rows, row_scales=row_scales)
    if arrive == "bf16":
        return dataclasses.replace(packed, rows=to_bf16_rows(*arrays))
    return packed


def combine(
    expert_outs: Sequence[Array],
    arrived: Sequence[Arrived],
    num_tokens: Sequence[int],
    wire: WireFormat,
    weighted: bool = True,
    node_sizes: Sequence[int] = (),
) -> list[Array]:
    """Send expert outputs back and sum them to one row a token.

    By the two-hop route the rows of one node, by ascending rank, are summed to a wire row first;
    those rows are then summed by ascending node.

    Args:
        expert_outs: for each rank, BF16 bits [M, H]; padding rows are not read.
        arrived: what `dispatch` returned.
        num_tokens: for each rank, T.
        wire: the combine wire.
        weighted: multiply by the weights that came with dispatch.
        node_sizes: ranks of each node, by the two-hop route over several nodes; () by the flat one.

    Returns:
        For each rank, BF16 bits [T, H]; +0 for a token without experts.
    """
    hidden = expert_outs[0].shape[1]
    packed = [
        weighted_reduce(out, a.slot_rows, a.weights if weighted else None, wire)
        for out, a in zip(expert_outs, arrived, strict=True)
    ]
    payload = np.concatenate([p for p, _ in packed])
    scales = np.concatenate([s for _, s in packed])
    origins = np.concatenate([a.origins for a in arrived])
    if len(node_sizes) > 1:
        ranks = np.repeat(np.arange(len(arrived)), [len(a.origins) for a in arrived])
        nodes = np.repeat(np.arange(len(node_sizes)), node_sizes)[ranks]
        payload, scales, origins = _sum_in_nodes(payload, scales, origins, nodes, wire, hidden)
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, (source, token) in enumerate(origins.tolist()):
        rows_of.setdefault((source, token), []).append(row)  # ascending rank, or node
    ys = []
    for source, count in enumerate(num_tokens):
        lists = [rows_of.get((source, token), []) for token in range(count)]
        offsets = np.cumsum([0] + [len(rows) for rows in lists])
        token_rows = np.array([row for rows in lists for row in rows], np.int64)
        ys.append(final_reduce(payload, scales, wire, hidden, offsets, token_rows))
    return ys


def _sum_in_nodes(
    payload: Array, scales: Array, origins: Array, nodes: Array, wire: WireFormat, hidden: int
) -> tuple[Array, Array, Array]:
    """Sum the wire rows of each token in each node: payload, scales and origins, by node."""
    rows_of: dict[tuple[int, int, int], list[int]] = {}
    for row, (node, origin) in enumerate(zip(nodes.tolist(), origins.tolist(), strict=True)):
        rows_of.setdefault((node, *origin), []).append(row)  # ascending rank
    offsets = np.cumsum([0] + [len(rows) for rows in rows_of.values()])
    token_rows = np.array([row for rows in rows_of.values() for row in rows], np.int64)
    sums = relay_reduce(payload, scales, wire, hidden, offsets, token_rows)
    return *sums, _matrix([key[1:] for key in rows_of], np.int64, 2)
