"""Measuring dispatch and combine: times of the slowest rank, bytes of the busiest, rows checked.

Wanted also: a round trip as one call, and a dispatch with a matrix product beside it.

As in nccl-tests: each timed call begins with a barrier and ends when its result is there, on a GPU
too; each result of the last iteration is checked against the reference.  Wire formats take turns
within an iteration, so that their ratio does not depend on what else the machine does.  On a CPU
the parts of a call are timed within it; on a GPU, where each part then waits for the device, in
further calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fp4comm import hops, progress
from fp4comm.bench.check import SAMPLE_ELEMENTS, Checker, expert_outputs
from fp4comm.bench.clock import gather
from fp4comm.bench.operations import Run, all_to_all, current_device
from fp4comm.bench.plain import Plain
from fp4comm.bench.rows import OVERLAP, Report, Row
from fp4comm.bench.settings import Settings
from fp4comm.bench.workload import Workload
from fp4comm.routing import Placement
from fp4comm.transport import Transport, run_local

COMPILE_S = 3600.0  # a busy machine takes many minutes
COMPILING = "compiling kernels, which takes a while in the first run after an install"


def measure_each(
    transport: Transport,
    workloads: Sequence[Workload],
    settings: Settings,
    tell: progress.Tell = progress.NOTHING,
) -> Iterator[Report]:
    """Measure and check, one set of inputs after the other; kernels are compiled once.

    Collective: all ranks go on to the next report together, and get the same.

    Args:
        transport: all of its ranks take part.
        workloads: the inputs, for as many ranks.
        settings: what to do.
        tell: told what comes next, on every rank.
    """
    tell(COMPILING)
    compile_s = compile_first(transport, settings)
    for number, workload in enumerate(workloads):
        of_case = OfCase(tell, number, len(workloads))
        yield _measure(transport, workload, settings, compile_s, of_case)


class OfCase(progress.Tell):
    """Says which case it is, and counts its share into that of all."""

    def __init__(self, tell: progress.Tell, number: int, num_cases: int) -> None:
        """Note whom to tell."""
        self._tell, self._number, self._num_cases = tell, number, num_cases

    def __call__(self, text: str, share: float = 0.0) -> None:
        """Tell it."""
        of_all = f"case {self._number + 1} of {self._num_cases}: " if self._num_cases > 1 else ""
        self._tell(f"{of_all}{text}", (self._number + share) / self._num_cases)


def _measure(
    transport: Transport,
    workload: Workload,
    settings: Settings,
    compile_s: float,
    tell: progress.Tell,
) -> Report:
    tell("making inputs")
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
    by_part = settings.iterations if settings.device == "cuda" else 0
    last = settings.warmup + settings.iterations - 1
    for i in range(last + 1):
        if i == settings.warmup and OVERLAP in settings.also:
            tell("sizing matrix products", i / (last + 1 + by_part))
            for run in runs:
                run.size_product(inputs)
        tell(_doing(i, settings), i / (last + 1 + by_part))
        for peer in peers:
            peer.once(inputs, check_result=i == last)
        for run in runs:
            run.once(inputs, check_result=i == last)
    for i in range(by_part):
        tell("timing the parts of calls", (last + 1 + i) / (last + 1 + by_part))
        for run in runs:
            run.once_by_part(inputs)
    rows = [peer.row(settings.warmup) for peer in peers]
    rows += [row for run in runs for row in run.rows()]
    return report_of(workload, checker, rows, compile_s)


def report_of(workload: Workload, checker: Checker, rows: list[Row], compile_s: float) -> Report:
    """Put rows together with the inputs that they are of."""
    return Report(
        rows=rows,
        workload=workload.name,
        hidden=workload.hidden,
        num_experts=workload.num_experts,
        num_topk=workload.num_topk,
        num_tokens=workload.num_tokens,
        num_tokens_checked=checker.num_tokens_checked,
        compile_s=compile_s,
    )


def _doing(i: int, settings: Settings) -> str:
    if i < settings.warmup:
        return "warming up"
    if i < settings.warmup + settings.iterations - 1:
        return f"timing {settings.iterations} calls of each operation and wire format"
    return "checking against the reference"


def compile_first(transport: Transport, settings: Settings) -> float:
    """Let rank 0 compile the kernels into the cache on disk, from which the others load them.

    Returns:
        The seconds that rank 0 took for it.
    """
    device = current_device(settings.device)
    patient = dataclasses.replace(settings, timeout_s=COMPILE_S)

    def on_rank(few: Transport) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        inputs = torch.ones(2, 128).bfloat16(), torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)
        x, idx, weights = (part.to(device) for part in inputs)
        for wire in settings.wires:
            a2a = all_to_all(few, patient, wire, 2, 128, route=route, ranks_per_node=1)
            d = a2a.dispatch(x, idx, weights)
            experts = Placement(2, few.num_ranks).experts(few.rank)
            a2a.combine(expert_outputs(d, experts), d.handle).cpu()

    num_ranks, route = (1, "flat") if settings.routes == ("flat",) else (2, "two_hop")
    start = time.perf_counter_ns()
    if transport.rank == 0:
        run_local(num_ranks, on_rank, COMPILE_S)
    took = time.perf_counter_ns() - start
    limit_s = transport.timeout_s if transport.rank == 0 else max(transport.timeout_s, COMPILE_S)
    return int(gather(transport, [took], "compiling on rank 0", limit_s)[0, 0]) / 1e9


def _inputs(
    workload: Workload, rank: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    idx, weights = map(torch.from_numpy, workload.routing(rank))
    x = workload.rows(rank, np.arange(workload.num_tokens[rank]))
    return x.to(device), idx.to(device), weights.to(device)
