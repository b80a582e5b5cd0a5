"""The check inside a benchmark: what a rank holds against `fp4comm.reference`, byte for byte.

Every rank makes the inputs of all ranks and runs the reference for the rows it holds.  Where a
dispatched row has to stand is worked out from topk_idx alone, by a search for each expert, and not
with `fp4comm.routing`.  Counts, weights and padding are checked for all rows; contents for a sample
of the tokens if there are many, since the reference is slow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fp4comm import reference
from fp4comm.bench.workload import Workload
from fp4comm.dispatched import Dispatched
from fp4comm.formats import FP8_BLOCK, WireFormat
from fp4comm.reference import Arrived
from fp4comm.reference.casts import Array

SAMPLE_ELEMENTS = 1 << 23  # of expert rows on all ranks: about 2 s of reference a wire format


@dataclasses.dataclass(frozen=True)
class Checked:
    """How many rows were compared on this rank, and the error of what arrived."""

    num_rows: int
    num_wrong: int
    signal: float = 0.0  # sum of squares of the input
    noise: float = 0.0  # sum of squares of what arrived less the input

    def __add__(self, other: Checked) -> Checked:
        """Both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Checked(*(mine + theirs for mine, theirs in pairs))


def expert_factor(expert: int) -> float:
    """What expert e multiplies by: each does something else, so that a misrouted row shows."""
    return expert + 1.0


def expert_outputs(d: Dispatched, experts: range) -> torch.Tensor:
    """Let each expert multiply its rows by its factor, ``[M, hidden]`` bfloat16; 0 in padding."""
    rows = d.packed.to_bf16(d.handle.layout) if d.rows is None else d.rows
    out = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
    starts = d.expert_offsets.tolist()
    for expert, start, count in zip(experts, starts, d.num_rows_list, strict=False):
        live = slice(start, start + count)
        values = _values(rows[live], None if d.scales is None else d.scales[live])
        out[live] = (values * expert_factor(expert)).to(torch.bfloat16)
    return out


class Checker:
    """Knows what one rank has to hold after dispatch and combine.

    Args:
        workload: the inputs.
        rank: this rank.
        arrive: as `AllToAll` takes it.
        alignment: ``expert_alignment``.
        max_elements: of expert rows on all ranks; more tokens are sampled.  None: check all.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        arrive: str,
        alignment: int,
        max_elements: int | None = SAMPLE_ELEMENTS,
    ) -> None:
        """Make the routing of all ranks and the rows of the sample."""
        num_tokens = workload.num_tokens
        self._rank, self._arrive, self._alignment = rank, arrive, alignment
        self._num_experts, self._num_topk = workload.num_experts, workload.num_topk
        self._hidden = workload.hidden
        self.experts = reference.expert_range(rank, len(num_tokens), workload.num_experts)
        self._routing = [workload.routing(source) for source in range(len(num_tokens))]
        share = max(num_tokens, default=0)
        if max_elements is not None:
            token_elements = self._hidden * self._num_topk * len(num_tokens)
            share = max(1, max_elements // token_elements)
        self._tokens = [sample(count, share) for count in num_tokens]
        self._xs = [_bits(workload.rows(r, tokens)) for r, tokens in enumerate(self._tokens)]
        self._num_tokens = num_tokens
        self._converted: tuple[WireFormat, TokenRows] | None = None
        self.num_tokens_checked = sum(map(len, self._tokens))

    def dispatch(self, d: Dispatched, wire: WireFormat) -> Checked:
        """Compare what arrived with the reference."""
        places, slots, num_rows, offsets = self._layout
        positions = self._positions[slots // self._num_topk]  # in the sample, -1 outside
        sampled = positions >= 0
        num_checked = int(sampled.sum())
        if not (
            d.num_rows_list == num_rows.tolist()
            and np.array_equal(d.expert_offsets.cpu().numpy(), offsets)
            and len(d.row_weights) == offsets[-1]
            and len(d.packed) == self._num_wire_rows
        ):
            return Checked(num_checked, max(num_checked, 1))
        tokens = self._token_rows(wire)
        weights = self._weights[slots[sampled], None]
        wanted = _side_by_side(tokens.held[positions[sampled]], weights)
        num_wrong = int((_held_bytes(d, places[sampled]) != wanted).any(axis=1).sum())
        num_wrong += self._wrong_outside(d, places[~sampled], slots[~sampled])
        signal, noise = (tokens.squares[:, positions[sampled]]).sum(axis=1)
        return Checked(num_checked, num_wrong, float(signal), float(noise))

    def combine(
        self,
        y: torch.Tensor,
        dispatch: WireFormat,
        combine: WireFormat,
        node_sizes: Sequence[int] = (),
    ) -> Checked:
        """Compare the sums that came back with the reference: all ranks, the tokens of this one.

        By the two-hop route node_sizes are the ranks of each node.
        """
        tokens, rank = self._tokens[self._rank], self._rank
        got = _bits(y.cpu())
        if got.shape != (self._num_tokens[rank], self._hidden):
            return Checked(len(tokens), max(len(tokens), 1))
        values = self._token_rows(dispatch).values[self._firsts[rank] : self._firsts[rank + 1]]
        arrived = self._arrivals_of_my_tokens(dispatch)
        outs = [self._reference_outputs(values, a, r) for r, a in enumerate(arrived)]
        counts = [len(tokens) * (source == rank) for source in range(len(self._xs))]
        wanted = reference.combine(outs, arrived, counts, combine, node_sizes=node_sizes)[rank]
        return Checked(len(tokens), int((got[tokens] != wanted).any(axis=1).sum()))

    def plain(self, rows: torch.Tensor) -> Checked:
        """Compare copies of tokens as `bench.plain` receives them: by source, expert, slot."""
        slots = np.concatenate([*self._slots_by_source, np.zeros(0, np.int64)])
        positions = self._positions[slots // self._num_topk]
        sampled = np.flatnonzero(positions >= 0)
        if rows.shape != (len(slots), self._hidden):
            return Checked(len(sampled), max(len(sampled), 1))
        got = _bits(rows[torch.from_numpy(sampled).to(rows.device)].cpu())
        wanted = np.concatenate(self._xs)[positions[sampled]]
        return Checked(len(sampled), int((got != wanted).any(axis=1).sum()))

    @functools.cached_property
    def num_expert_rows(self) -> int:
        """Copies of tokens that go to experts, of all ranks."""
        return sum(int((idx >= 0).sum()) for idx, _ in self._routing)

    # What has to be where

    @property
    def _slots_by_source(self) -> Iterator[Array]:
        """Slots that go to this rank, numbered through all ranks: by source, then expert."""
        first = 0
        for idx, _ in self._routing:
            flat = idx.reshape(-1)
            yield from (first + np.flatnonzero(flat == expert) for expert in self.experts)
            first += len(flat)

    @functools.cached_property
    def _layout(self) -> tuple[Array, Array, Array, Array]:
        """Expert rows of this rank: place, slot (numbered through all ranks); counts, offsets."""
        flat = np.concatenate([idx for idx, _ in self._routing]).reshape(-1)
        slots = [np.flatnonzero(flat == expert) for expert in self.experts]
        num_rows = np.array([len(s) for s in slots], np.int64)
        aligned = -(-num_rows // self._alignment) * self._alignment
        offsets = np.concatenate([[0], np.cumsum(aligned)]).astype(np.int64)
        places = [start + np.arange(len(s)) for start, s in zip(offsets, slots, strict=False)]
        nothing = [np.zeros(0, np.int64)]
        return np.concatenate(places + nothing), np.concatenate(slots + nothing), num_rows, offsets

    @functools.cached_property
    def _num_wire_rows(self) -> int:
        first, last = self.experts.start, self.experts.stop
        return sum(
            int(((idx >= first) & (idx < last)).any(axis=1).sum()) for idx, _ in self._routing
        )

    @functools.cached_property
    def _firsts(self) -> Array:
        """First of each rank's tokens in the sample, then the end."""
        return np.concatenate([[0], np.cumsum([len(x) for x in self._xs])])

    @functools.cached_property
    def _positions(self) -> Array:
        """Where each token, numbered through all ranks, stands in the sample, or -1."""
        firsts = np.concatenate([[0], np.cumsum(self._num_tokens)])
        sampled = [first + tokens for first, tokens in zip(firsts, self._tokens, strict=False)]
        positions = np.full(firsts[-1], -1, np.int64)
        positions[np.concatenate(sampled)] = np.arange(self.num_tokens_checked)
        return positions

    @functools.cached_property
    def _weights(self) -> Array:
        """Weight of each slot, numbered through all ranks."""
        return np.concatenate([weights for _, weights in self._routing]).reshape(-1)

    def _wrong_outside(self, d: Dispatched, places: Array, slots: Array) -> int:
        """Count rows outside the sample with a wrong weight, and padding that is not empty."""
        row_weights = d.row_weights.cpu().numpy()
        num_wrong = int((row_weights[places] != self._weights[slots]).sum())
        is_padding = np.ones(len(row_weights), bool)
        is_padding[self._layout[0]] = False
        padding = np.flatnonzero(is_padding)
        if d.rows is None:
            return num_wrong + int((row_weights[padding] != 0).sum())
        empty = [np.zeros((1, self._hidden * d.rows.element_size()), np.uint8)]
        if d.scales is not None:
            empty.append(np.ones(d.scales.shape[1], np.float32).view(np.uint8)[None])
        empty.append(np.zeros((1, 4), np.uint8))
        wrong = _held_bytes(d, padding) != np.concatenate(empty, axis=1)
        return num_wrong + int(wrong.any(axis=1).sum())

    # The reference, for the sample

    def _token_rows(self, wire: WireFormat) -> TokenRows:
        """Quantize and convert each token once: its rows are the same on all ranks."""
        if self._converted is None or self._converted[0] != wire:
            x = np.concatenate(self._xs)
            packed = (*reference.quantize_rows(x, wire), wire, self._hidden)
            self._converted = wire, token_rows(packed, x, self._arrive)
        return self._converted[1]

    def _arrivals_of_my_tokens(self, wire: WireFormat) -> list[Arrived]:
        """Run the reference for the tokens of this rank: what each rank holds of them."""
        mine = [t if r == self._rank else t[:0] for r, t in enumerate(self._tokens)]
        return reference.dispatch(
            [x[: len(t)] for x, t in zip(self._xs, mine, strict=True)],
            [idx[t] for (idx, _), t in zip(self._routing, mine, strict=True)],
            [weights[t] for (_, weights), t in zip(self._routing, mine, strict=True)],
            self._num_experts,
            wire,
            "packed",
        )

    def _reference_outputs(self, values: Array, arrived: Arrived, rank: int) -> Array:
        """Expert outputs on a rank, BF16 bits, for tokens of this rank with these values."""
        experts = reference.expert_range(rank, len(self._xs), self._num_experts)
        factors = np.array([expert_factor(e) for e in experts], np.float32)
        rows = values[arrived.row_origins[:, 1]]
        return reference.float32_to_bf16(rows * np.repeat(factors, arrived.num_rows)[:, None])


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Reference rows of the sampled tokens, as every expert has to get them."""

    held: Array  # uint8 [n, bytes]: codes and scales side by side
    values: Array  # float32 [n, hidden]: what an expert reads from them
    squares: Array  # float64 [2, n]: sums of squares of x, and of values less x


def token_rows(packed: tuple[Array, Array, WireFormat, int], x: Array, arrive: str) -> TokenRows:
    """Convert packed rows of x as they arrive."""
    payload, scales, wire, hidden = packed
    if arrive == "fp8":
        codes, fp8_scales = reference.to_fp8_rows(*packed)
        held = _side_by_side(codes, fp8_scales)
        values = reference.e4m3_to_float32(codes)
        values *= np.repeat(fp8_scales, FP8_BLOCK, axis=1)[:, :hidden]
    else:
        rows = reference.to_bf16_rows(*packed)
        held = _side_by_side(rows) if arrive == "bf16" else _side_by_side(payload, scales)
        values = reference.bf16_to_float32(rows)
    wanted = reference.bf16_to_float32(x)
    squares = [np.square(v, dtype=np.float64).sum(axis=1) for v in (wanted, values - wanted)]
    return TokenRows(held, values, np.array(squares))


def sample(num_tokens: int, most: int) -> Array:
    """Choose tokens to check, ascending: all, or ``most`` drawn at random, always the same."""
    if num_tokens <= most:
        return np.arange(num_tokens)
    return np.sort(np.random.default_rng(num_tokens).choice(num_tokens, most, replace=False))


def _bits(x: torch.Tensor) -> Array:
    """BF16 as the reference takes it: uint16."""
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@functools.cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _values(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Decode BF16 rows, or E4M3 rows with a scale per 128, to float32."""
    if scales is None:
        return rows.float()
    values = _e4m3_values(rows.device)[rows.view(torch.uint8).int()]  # faster than its float()
    return values * scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : rows.shape[1]]


def _held_bytes(d: Dispatched, places: Array) -> Array:
    """Expert rows that arrived, ``[n, bytes]``: codes, scales and weight of a row side by side."""
    index = torch.from_numpy(places).to(d.row_weights.device)
    weights = d.row_weights[index].unsqueeze(1)
    if d.rows is None:
        index = d.handle.layout.row_source[index].long()
        return _on_host(d.packed.payload[index], d.packed.scales[index], weights)
    scales = weights[:, :0] if d.scales is None else d.scales[index]
    return _on_host(d.rows.view(torch.uint8)[index], scales, weights)


def _on_host(*parts: torch.Tensor) -> Array:
    return _side_by_side(*(part.cpu().numpy() for part in parts))


def _side_by_side(*parts: Array) -> Array:
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
