"""Measuring dispatch and combine: times of the slowest rank, bytes of the busiest, rows checked.

As in nccl-tests: each timed call begins with a barrier and ends when its result is there; each
result of the last iteration is checked against the reference.  Wire formats take turns within an
iteration, so that their ratio does not depend on what else the machine does.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fp4comm import check
from fp4comm.all_to_all import ARRIVALS, AllToAll, Dispatched
from fp4comm.bench.check import SAMPLE_ELEMENTS, Checked, Checker, expert_outputs
from fp4comm.bench.rows import PARTS, Report, Row, check_counts, row_bytes, sqnr_db, timing, traffic
from fp4comm.bench.workload import Workload
from fp4comm.formats import WireFormat
from fp4comm.precision import Precision
from fp4comm.transport import Transport, run_local

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        wires: dispatch wire formats.
        combine: combine wire format, or ``"same"`` as dispatch.
        arrive: as `AllToAll` takes it.
        alignment: ``expert_alignment``.
        warmup: untimed calls first, at least 1: the first one compiles.
        iterations: timed calls.
        check_all: check the contents of all rows, not of a sample.
        timeout_s: as `AllToAll` takes it.
    """

    wires: tuple[str, ...]
    combine: str = "bf16"
    arrive: str = "fp8"
    alignment: int = 128
    warmup: int = 5
    iterations: int = 20
    check_all: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not self.wires:
            raise ValueError("wire: expected at least one wire format, got none")
        for wire in self.wires:
            WireFormat.of(wire)
            self.combine_of(wire)
        check.one_of("arrive", self.arrive, ARRIVALS)
        check.positive_int("alignment", self.alignment)
        check_counts(self.warmup, self.iterations)

    def combine_of(self, wire: str) -> WireFormat:
        """Combine wire format that goes with a dispatch wire format."""
        return WireFormat.of(wire if self.combine == "same" else self.combine)


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
    runs = [Run(transport, workload, settings, wire, checker) for wire in settings.wires]
    inputs = _inputs(workload, transport.rank)
    last = settings.warmup + settings.iterations - 1
    for i in range(last + 1):
        if i == settings.warmup:
            progress(f"timing {settings.iterations} calls of each operation and wire format")
        if i == last:
            progress("checking against the reference")
        for run in runs:
            run.once(inputs, check_result=i == last)
    return Report(
        rows=[row for run in runs for row in run.rows()],
        workload=workload.name,
        hidden=workload.hidden,
        num_experts=workload.num_experts,
        num_topk=workload.num_topk,
        num_tokens=workload.num_tokens,
        num_tokens_checked=checker.num_tokens_checked,
        compile_s=compile_s,
    )


def compile_first(transport: Transport, settings: Settings) -> float:
    """Let rank 0 compile the kernels into numba's cache, from which the others load them.

    Returns:
        The seconds that rank 0 took for it.
    """

    def once_alone(alone: Transport) -> None:
        idx = torch.tensor([[0, 1], [1, 0]])
        for wire in settings.wires:
            a2a = _all_to_all(alone, settings, wire, num_experts=2, hidden=128)
            d = a2a.dispatch(torch.ones(2, 128, dtype=torch.bfloat16), idx, torch.ones(2, 2))
            a2a.combine(expert_outputs(d, range(2)), d.handle)

    start = time.perf_counter_ns()
    if transport.rank == 0:
        run_local(1, once_alone)
    transport.phase = "compiling on rank 0"
    return int(gather(transport, [time.perf_counter_ns() - start])[0, 0]) / 1e9


def _all_to_all(
    transport: Transport, settings: Settings, wire: str, num_experts: int, hidden: int
) -> AllToAll:
    return AllToAll(
        transport,
        num_experts=num_experts,
        hidden=hidden,
        precision=Precision(dispatch=wire, combine=settings.combine_of(wire)),
        arrive=settings.arrive,
        expert_alignment=settings.alignment,
        timeout_s=settings.timeout_s,
    )


def _inputs(workload: Workload, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx, weights = workload.routing(rank)
    x = workload.rows(rank, np.arange(workload.num_tokens[rank]))
    return x, torch.from_numpy(idx), torch.from_numpy(weights)


class Run:
    """One wire format on one rank: its AllToAll and what was measured so far."""

    def __init__(
        self,
        transport: Transport,
        workload: Workload,
        settings: Settings,
        wire: str,
        checker: Checker,
    ) -> None:
        """Make the AllToAll; collective."""
        self._transport, self._workload, self._settings = transport, workload, settings
        self._checker = checker
        self._wires = {"dispatch": WireFormat.of(wire), "combine": settings.combine_of(wire)}
        self._a2a = _all_to_all(transport, settings, wire, workload.num_experts, workload.hidden)
        self._samples: dict[str, list[list[int]]] = {op: [] for op in PARTS}  # ns: call, its parts
        self._checked: dict[str, Checked] = {}
        self._recv_splits = np.zeros(transport.num_ranks, np.int64)

    def once(self, inputs: tuple[Any, ...], *, check_result: bool) -> None:
        """Dispatch, let the experts work untimed, combine."""
        d: Dispatched = self._timed("dispatch", lambda: self._a2a.dispatch(*inputs))
        self._recv_splits = d.handle.layout.recv_splits
        if check_result:
            self._checked["dispatch"] = self._checker.dispatch(d, self._wires["dispatch"])
        out = expert_outputs(d, self._checker.experts)
        y = self._timed("combine", lambda: self._a2a.combine(out, d.handle))
        if check_result:
            self._checked["combine"] = self._checker.combine(y, **self._wires)

    def _timed(self, op: str, call: Callable[[], Result]) -> Result:
        timings: dict[str, float] = {}
        self._a2a.timings = timings
        self._transport.phase = "benchmark barrier"
        gather(self._transport, [0])
        start = time.perf_counter_ns()
        result = call()
        sample = [time.perf_counter_ns() - start]
        sample += [round(timings[f"{op} {part}"] * 1e9) for part in PARTS[op]]
        self._samples[op].append(sample)
        return result

    def rows(self) -> list[Row]:
        """Gather from all ranks."""
        self._transport.phase = "benchmark results"
        return [self._row(op) for op in PARTS]

    def _row(self, op: str) -> Row:
        workload, wire = self._workload, self._wires[op]
        samples = np.array(self._samples[op], np.int64)
        ranks = gather(self._transport, samples.reshape(-1)).reshape(-1, *samples.shape)
        slowest_us = ranks.max(axis=0) / 1e3
        arrived = gather(self._transport, self._recv_splits)  # row d: what rank d got from each
        sent_rows = arrived.T if op == "dispatch" else arrived  # combine goes the way back
        route = workload.num_topk if op == "dispatch" else 0
        num_bytes = row_bytes(wire, workload.hidden, route)
        checked = self._gather_checked(op)
        rows = traffic(sent_rows)
        copy_bytes = row_bytes(wire, workload.hidden, 1 if op == "dispatch" else 0)
        return Row(
            op=op,
            format=wire.name,
            dispatch=self._wires["dispatch"].name,
            tokens=max(workload.num_tokens),
            wire_rows=rows,
            wire_bytes=traffic(sent_rows * num_bytes),
            bf16_bytes=rows.sent * row_bytes(WireFormat("bf16"), workload.hidden, route),
            expert_bytes=self._num_expert_rows * copy_bytes,
            time=timing(slowest_us[:, 0].tolist(), self._settings.warmup),
            parts_us=self._parts_us(op, slowest_us),
            num_checked=checked.num_rows,
            num_wrong=checked.num_wrong,
            sqnr_db=sqnr_db(checked.signal, checked.noise),
        )

    def _parts_us(self, op: str, slowest_us: npt.NDArray[Any]) -> dict[str, float]:
        medians = np.median(slowest_us[self._settings.warmup :, 1:], axis=0)
        return dict(zip(PARTS[op], medians.tolist(), strict=True))

    @functools.cached_property
    def _num_expert_rows(self) -> int:
        ranks = range(self._transport.num_ranks)
        return sum(int((self._workload.routing(rank)[0] >= 0).sum()) for rank in ranks)

    def _gather_checked(self, op: str) -> Checked:
        mine = self._checked[op]
        counts = gather(self._transport, [mine.num_rows, mine.num_wrong]).sum(axis=0)
        bits = np.array([mine.signal, mine.noise]).view(np.int64)
        signal, noise = gather(self._transport, bits).view(np.float64).sum(axis=0)
        return Checked(int(counts[0]), int(counts[1]), float(signal), float(noise))


def gather(transport: Transport, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Bring integers of all ranks to all, ``[num_ranks, len(values)]``; also a barrier."""
    row = np.asarray(values, np.int64)
    return transport.exchange_counts(np.tile(row, (transport.num_ranks, 1)))
