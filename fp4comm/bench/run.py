"""Measuring dispatch and combine: times of the slowest rank, bytes of the busiest, rows checked.

As in nccl-tests: each timed call begins with a barrier and ends when its result is there, on a GPU
too; each result of the last iteration is checked against the reference.  Wire formats take turns
within an iteration, so that their ratio does not depend on what else the machine does.  On a CPU
the parts of a call are timed within it; on a GPU, where each part then waits for the device, in
further calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from fp4comm import check, hops
from fp4comm.all_to_all import AllToAll
from fp4comm.bench.check import SAMPLE_ELEMENTS, Checked, Checker, expert_outputs
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.bench.plain import Plain
from fp4comm.bench.rows import (
    PARTS,
    RELAY,
    Report,
    Row,
    across_nodes,
    check_counts,
    row_bytes,
    sqnr_db,
    timing,
    traffic,
)
from fp4comm.bench.wires import Wires
from fp4comm.bench.workload import Workload
from fp4comm.dispatched import Dispatched
from fp4comm.formats import WireFormat
from fp4comm.precision import Precision
from fp4comm.transport import Transport, run_local

Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")
WHOLE, BY_PART = "whole", "by part"  # how a call is timed


@dataclasses.dataclass(frozen=True)
class Settings(Wires):
    """What to measure.

    Args:
        alignment: ``expert_alignment``.
        warmup: untimed calls first, at least 1: the first one compiles.
        iterations: timed calls.
        check_all: check the contents of all rows, not of a sample.
        timeout_s: as `AllToAll` takes it.
        device: ``"cpu"``, or ``"cuda"``: the device that is current on each rank.
        plain: also measure the plain all-to-all of BF16 rows.
        routes: as `AllToAll` takes them, in turn.
        ranks_per_node: likewise; for the bytes across nodes too.
    """

    alignment: int = 128
    warmup: int = 5
    iterations: int = 20
    check_all: bool = False
    timeout_s: float = 300.0
    device: str = "cpu"
    plain: bool = False
    routes: tuple[str, ...] = ("flat",)
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if not self.routes:
            raise ValueError("route: expected at least one route, got none")
        for route in self.routes:
            check.one_of("route", route, hops.ROUTES)
        check.positive_int("alignment", self.alignment)
        check.one_of("device", self.device, DEVICES)
        check_counts(self.warmup, self.iterations)


def measure(
    transport: Transport,
    workload: Workload,
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measure and check; collective, and every rank returns the same.

    Args:
        transport: all of its ranks take part.
        workload: the inputs, for as many ranks.
        settings: what to do.
        progress: told what comes next, on every rank.
    """
    progress("compiling kernels, which takes a while in the first run after an install")
    compile_s = compile_first(transport, settings)
    progress("making inputs")
    limit = None if settings.check_all else SAMPLE_ELEMENTS
    checker = Checker(workload, transport.rank, settings.arrive, settings.alignment, limit)
    inputs = _inputs(workload, transport.rank, settings.device)
    sizes = hops.check_ranks_per_node(settings.ranks_per_node, transport.num_ranks)
    sizes = hops.find_nodes(transport) if sizes is None else sizes
    runs = [
        Run(transport, workload, settings, wire, checker, route, sizes)
        for wire in settings.wires
        for route in settings.routes
    ]
    of_plain = transport, workload, settings.device, checker, sizes
    peers = [Plain(*of_plain)] if settings.plain else []
    last = settings.warmup + settings.iterations - 1
    progress("warming up")
    for i in range(last + 1):
        if i == settings.warmup:
            progress(f"timing {settings.iterations} calls of each operation and wire format")
        if i == last:
            progress("checking against the reference")
        for peer in peers:
            peer.once(inputs, check_result=i == last)
        for run in runs:
            run.once(inputs, check_result=i == last)
    if settings.device == "cuda":
        progress("timing the parts of calls")
        for run in runs * settings.iterations:
            run.once_by_part(inputs)
    rows = [peer.row(settings.warmup) for peer in peers]
    return Report(
        rows=rows + [row for run in runs for row in run.rows()],
        workload=workload.name,
        hidden=workload.hidden,
        num_experts=workload.num_experts,
        num_topk=workload.num_topk,
        num_tokens=workload.num_tokens,
        num_tokens_checked=checker.num_tokens_checked,
        compile_s=compile_s,
    )


def compile_first(transport: Transport, settings: Settings) -> float:
    """Let rank 0 compile the kernels into the cache on disk, from which the others load them.

    Returns:
        The seconds that rank 0 took for it.
    """
    device = current_device(settings.device)

    def once_alone(alone: Transport) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        inputs = torch.ones(2, 128).bfloat16(), torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)
        x, idx, weights = (part.to(device) for part in inputs)
        for wire in settings.wires:
            a2a = _all_to_all(alone, settings, wire, num_experts=2, hidden=128)
            d = a2a.dispatch(x, idx, weights)
            a2a.combine(expert_outputs(d, range(2)), d.handle).cpu()

    start = time.perf_counter_ns()
    if transport.rank == 0:
        run_local(1, once_alone)
    transport.phase = "compiling on rank 0"
    return int(gather(transport, [time.perf_counter_ns() - start])[0, 0]) / 1e9


def current_device(kind: str) -> torch.device:
    """Name the device of this kind that is current in this thread."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _all_to_all(
    transport: Transport,
    settings: Settings,
    wire: str,
    num_experts: int,
    hidden: int,
    **route: Any,
) -> AllToAll:
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


def _inputs(
    workload: Workload, rank: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx, weights = map(torch.from_numpy, workload.routing(rank))
    x = workload.rows(rank, np.arange(workload.num_tokens[rank]))
    return x.to(device), idx.to(device), weights.to(device)


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
        self._a2a = _all_to_all(transport, settings, wire, *sizes, **by)
        self._samples: dict[str, list[int]] = {op: [] for op in PARTS}  # ns of whole calls
        self._parts: dict[str, list[list[int]]] = {op: [] for op in PARTS}  # ns of the parts
        self._checked: dict[str, Checked] = {}
        self._hops: list[tuple[np.ndarray, np.ndarray]] = []  # of the last call

    def once(self, inputs: tuple[Any, ...], *, check_result: bool) -> None:
        """Dispatch, let the experts work untimed, combine; on a CPU also time the parts."""
        kinds = (WHOLE,) if self._settings.device == "cuda" else (WHOLE, BY_PART)
        d, y = self._round(inputs, kinds)
        self._hops = d.handle._way.hops
        if check_result:
            self._checked["dispatch"] = self._checker.dispatch(d, self._wires["dispatch"])
            sizes = self._node_sizes if len(self._hops) > 1 else ()
            self._checked["combine"] = self._checker.combine(y, **self._wires, node_sizes=sizes)

    def once_by_part(self, inputs: tuple[Any, ...]) -> None:
        """Do the same and time the parts alone: on a GPU each waits for the device."""
        self._round(inputs, (BY_PART,))

    def _round(
        self, inputs: tuple[Any, ...], kinds: tuple[str, ...]
    ) -> tuple[Dispatched, torch.Tensor]:
        d = self._timed("dispatch", kinds, lambda: self._a2a.dispatch(*inputs))
        out = expert_outputs(d, self._checker.experts)
        return d, self._timed("combine", kinds, lambda: self._a2a.combine(out, d.handle))

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
        self._transport.phase = "benchmark results"
        return [self._row(op) for op in PARTS]

    def _row(self, op: str) -> Row:
        workload, wire = self._workload, self._wires[op]
        slowest_us = gather(self._transport, self._samples[op]).max(axis=0) / 1e3
        forth, back = (sum(of_hops) for of_hops in zip(*self._hops, strict=True))
        sent_rows = gather(self._transport, forth if op == "dispatch" else back)
        route = workload.num_topk if op == "dispatch" else 0
        num_bytes = row_bytes(wire, workload.hidden, route)
        checked = self._gather_checked(op)
        rows = traffic(sent_rows)
        between, inside = across_nodes(sent_rows * num_bytes, self._node_sizes)
        copy_bytes = row_bytes(wire, workload.hidden, 1 if op == "dispatch" else 0)
        return Row(
            op=op,
            format=wire.name,
            dispatch=self._wires["dispatch"].name,
            tokens=max(workload.num_tokens),
            wire_rows=rows,
            wire_bytes=traffic(sent_rows * num_bytes),
            bf16_bytes=rows.sent * row_bytes(WireFormat("bf16"), workload.hidden, route),
            expert_bytes=self._checker.num_expert_rows * copy_bytes,
            time=timing(slowest_us.tolist(), self._settings.warmup),
            parts_us=self._parts_us(op),
            num_checked=checked.num_rows,
            num_wrong=checked.num_wrong,
            sqnr_db=sqnr_db(checked.signal, checked.noise),
            route="flat" if len(self._hops) == 1 else "two_hop",
            between_bytes=between,
            inside_bytes=inside,
        )

    def _parts_us(self, op: str) -> dict[str, float]:
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
