"""Dispatch, combine and what is measured also, with one wire format and route: calls and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from fp4comm.all_to_all import AllToAll
from fp4comm.bench import product
from fp4comm.bench.check import Checked, Checker, expert_outputs
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.bench.rows import (
    OVERLAP,
    PARTS,
    RELAY,
    ROUND_TRIP,
    Beside,
    Row,
    across_nodes,
    busiest,
    hidden_share,
    row_bytes,
    sqnr_db,
    timing,
    traffic,
)
from fp4comm.bench.settings import Settings
from fp4comm.bench.workload import Workload
from fp4comm.dispatched import Dispatched
from fp4comm.formats import WireFormat
from fp4comm.precision import Precision
from fp4comm.transport import Transport

Result = TypeVar("Result")

WHOLE, BY_PART = "whole", "by part"  # how a call is timed
PRODUCT = "product"  # alone, for an overlap
WAYS = {  # what an operation sends
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    ROUND_TRIP: ("dispatch", "combine"),
    OVERLAP: ("dispatch",),
}


def current_device(kind: str) -> torch.device:
    """Name the device of this kind that is current in this thread."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def all_to_all(
    transport: Transport,
    settings: Settings,
    wire: str,
    num_experts: int,
    hidden: int,
    **route: Any,
) -> AllToAll:
    """Make what the settings ask for; collective.  Route as `AllToAll` takes it."""
    return AllToAll(
        transport,
        num_experts=num_experts,
        hidden=hidden,
        precision=Precision(dispatch=wire, combine=settings.combine_of(wire)),
        arrive=settings.arrive,
        expert_alignment=settings.alignment,
        timeout_s=settings.timeout_s,
        **route,
    )


class Run:
    """One wire format and route on one rank: its AllToAll and what was measured so far."""

    def __init__(
        self,
        transport: Transport,
        workload: Workload,
        settings: Settings,
        wire: str,
        checker: Checker,
        route: str = "flat",
        node_sizes: Sequence[int] = (),
    ) -> None:
        """Make the AllToAll; collective.  Without node_sizes all ranks are on one node."""
        self._transport, self._workload, self._settings = transport, workload, settings
        self._checker, self._stopwatch = checker, Stopwatch(transport, settings.device)
        self._wires = {"dispatch": WireFormat.of(wire), "combine": settings.combine_of(wire)}
        self._node_sizes = node_sizes or (transport.num_ranks,)
        sizes = workload.num_experts, workload.hidden
        by: dict[str, Any] = {"route": route, "ranks_per_node": self._node_sizes}
        self._a2a = all_to_all(transport, settings, wire, *sizes, **by)
        self._ops = (*PARTS, *settings.also)
        self._product: product.Product | None = None
        # ns of whole calls, and of the parts
        self._samples: dict[str, list[int]] = {op: [] for op in (*self._ops, PRODUCT)}
        self._parts: dict[str, list[list[int]]] = {op: [] for op in PARTS}
        self._slowest_us: dict[str, np.ndarray] = {}  # of each call, once gathered
        self._checked: dict[str, Checked] = {}
        self._hops: list[tuple[np.ndarray, np.ndarray]] = []  # of the last call

    def size_product(self, inputs: tuple[Any, ...]) -> None:
        """Make the product for the overlap, as long as the dispatch alone, and warm both up."""
        self._a2a.timings = None
        alone_us = product.slowest_us(self._stopwatch, lambda: self._a2a.dispatch(*inputs))
        device = current_device(self._settings.device)
        self._product = product.sized(self._stopwatch, device, alone_us)
        self._overlapped(inputs, self._product)

    def once(self, inputs: tuple[Any, ...], *, check_result: bool) -> None:
        """Dispatch, let the experts work untimed, combine; on a CPU also time the parts.

        Then what is wanted also: an overlap once there is a product for it.
        """
        kinds = (WHOLE,) if self._settings.device == "cuda" else (WHOLE, BY_PART)
        d, out, y = self._round(inputs, kinds)
        self._hops = d.handle._way.hops
        if check_result:
            self._checked["dispatch"] = self._check_dispatch(d)
            self._checked["combine"] = self._check_combine(y)
        del d, y  # what comes next may need their memory
        if ROUND_TRIP in self._ops:
            d, y = self._timed(ROUND_TRIP, (WHOLE,), lambda: self._round_trip(inputs, out))
            if check_result:
                self._checked[ROUND_TRIP] = self._check_dispatch(d) + self._check_combine(y)
            del d, y
        if self._product is not None:
            d = self._overlapped(inputs, self._product)
            if check_result:
                self._checked[OVERLAP] = self._check_dispatch(d)

    def _check_dispatch(self, d: Dispatched) -> Checked:
        return self._checker.dispatch(d, self._wires["dispatch"])

    def _check_combine(self, y: torch.Tensor) -> Checked:
        sizes = self._node_sizes if len(self._hops) > 1 else ()
        return self._checker.combine(y, **self._wires, node_sizes=sizes)

    def _round_trip(
        self, inputs: tuple[Any, ...], out: torch.Tensor
    ) -> tuple[Dispatched, torch.Tensor]:
        """Dispatch, and combine what the experts made of the same rows before."""
        d = self._a2a.dispatch(*inputs)
        return d, self._a2a.combine(out, d.handle)

    def _overlapped(self, inputs: tuple[Any, ...], beside: product.Product) -> Dispatched:
        """Time the product alone, then a dispatch with it beside; return what arrived."""

        def call() -> Dispatched:
            pending = self._a2a.dispatch(*inputs, async_op=True)
            beside.run()
            return pending.wait()

        self._timed(PRODUCT, (WHOLE,), beside.run)
        return self._timed(OVERLAP, (WHOLE,), call)

    def once_by_part(self, inputs: tuple[Any, ...]) -> None:
        """Do the same and time the parts alone: on a GPU each waits for the device."""
        self._round(inputs, (BY_PART,))

    def _round(
        self, inputs: tuple[Any, ...], kinds: tuple[str, ...]
    ) -> tuple[Dispatched, torch.Tensor, torch.Tensor]:
        """Return what arrived, what the experts made of it, and what came home."""
        d = self._timed("dispatch", kinds, lambda: self._a2a.dispatch(*inputs))
        out = expert_outputs(d, self._checker.experts)
        return d, out, self._timed("combine", kinds, lambda: self._a2a.combine(out, d.handle))

    def _timed(self, op: str, kinds: tuple[str, ...], call: Callable[[], Result]) -> Result:
        timings: dict[str, float] = {}
        self._a2a.timings = timings if BY_PART in kinds else None
        result, took = self._stopwatch.time(call)
        if WHOLE in kinds:
            self._samples[op].append(took)
        if BY_PART in kinds:
            self._parts[op].append(
                [round(timings.get(f"{op} {part}", 0.0) * 1e9) for part in PARTS[op]]
            )
        return result

    def rows(self) -> list[Row]:
        """Gather from all ranks."""
        self._slowest_us = {
            op: gather(self._transport, samples).max(axis=0) / 1e3
            for op, samples in self._samples.items()
            if samples
        }
        return [self._row(op) for op in self._ops]

    def _row(self, op: str) -> Row:
        workload, slowest_us = self._workload, self._slowest_us[op].tolist()
        wire = self._wires[WAYS[op][0]]
        sent_rows, sent_bytes, bf16_bytes = self._sent(op)
        copies = [row_bytes(self._wires[w], workload.hidden, w == "dispatch") for w in WAYS[op]]
        checked = self._gather_checked(op)
        between, inside = across_nodes(sent_bytes, self._node_sizes)
        return Row(
            op=op,
            format=wire.name,
            dispatch=self._wires["dispatch"].name,
            tokens=max(workload.num_tokens),
            wire_rows=traffic(sent_rows),
            wire_bytes=traffic(sent_bytes),
            bf16_bytes=int(bf16_bytes[busiest(sent_bytes)].sum()),
            expert_bytes=self._checker.num_expert_rows * sum(copies),
            time=timing(slowest_us, len(slowest_us) - self._settings.iterations),
            parts_us=self._parts_us(op),
            num_checked=checked.num_rows,
            num_wrong=checked.num_wrong,
            sqnr_db=sqnr_db(checked.signal, checked.noise),
            route="flat" if len(self._hops) == 1 else "two_hop",
            between_bytes=between,
            inside_bytes=inside,
            beside=self._beside() if op == OVERLAP else None,
        )

    def _sent(self, op: str) -> np.ndarray:
        """What rank i sends to rank j, ``[3, i, j]``: rows, bytes with the route, bytes in bf16."""
        forth, back = (sum(of_hops) for of_hops in zip(*self._hops, strict=True))
        hidden, num_ranks = self._workload.hidden, self._transport.num_ranks
        total = np.zeros((3, num_ranks, num_ranks), np.int64)
        for way in WAYS[op]:
            rows = gather(self._transport, forth if way == "dispatch" else back)
            route = self._workload.num_topk if way == "dispatch" else 0
            wires = self._wires[way], WireFormat("bf16")
            sizes = 1, *(row_bytes(wire, hidden, route) for wire in wires)
            total += np.multiply.outer(sizes, rows)
        return total

    def _median_us(self, op: str) -> float:
        return float(np.median(self._slowest_us[op][-self._settings.iterations :]))

    def _beside(self) -> Beside:
        assert self._product is not None
        share = hidden_share(*map(self._median_us, ("dispatch", PRODUCT, OVERLAP)))
        return Beside(self._product.size, self._product.repeats, share)

    def _parts_us(self, op: str) -> dict[str, float]:
        if op == OVERLAP:
            return {alone: self._median_us(alone) for alone in ("dispatch", PRODUCT)}
        if op not in PARTS:
            return {}
        samples = np.array(self._parts[op][-self._settings.iterations :], np.int64)
        ranks = gather(self._transport, samples.reshape(-1)).reshape(-1, *samples.shape)
        medians = np.median(ranks.max(axis=0) / 1e3, axis=0)
        parts = dict(zip(PARTS[op], medians.tolist(), strict=True))
        if len(self._hops) == 1:
            del parts[RELAY]
        return parts

    def _gather_checked(self, op: str) -> Checked:
        mine = self._checked[op]
        counts = gather(self._transport, [mine.num_rows, mine.num_wrong]).sum(axis=0)
        bits = np.array([mine.signal, mine.noise]).view(np.int64)
        signal, noise = gather(self._transport, bits).view(np.float64).sum(axis=0)
        return Checked(int(counts[0]), int(counts[1]), float(signal), float(noise))
