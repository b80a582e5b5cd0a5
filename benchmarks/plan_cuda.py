"""GPU time of planning a dispatch: route plan with its counts, and layout of what arrives.

    python benchmarks/plan_cuda.py [--tokens 32768] [--experts 256] [--topk 8] [--json FILE]

`busy` is the time in which the GPU did anything for the call: its kernels and copies added up, as
the profiler sees them.  `elapsed` is from the first to the last of them by events, with the GPU
kept busy before so that no launch is waited for; it holds the host's turn, which reads the counts
and asks for memory.  `wall` is what a caller sees who waits for the result.  Medians; each result
is compared with that of the CPU.

Exit code: 0; 1 if a result is wrong; 2 where CUDA cannot be used.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.autograd import DeviceType

from fp4comm import launch, machine, routing
from fp4comm.bench.workload import Synthetic
from fp4comm.files import write_json
from fp4comm.launch import UserError
from fp4comm.options import json_option
from fp4comm.routing import Placement, RoutePlan
from fp4comm.running import run_command

HIDDEN = 32  # of a workload whose rows are not used
ALIGNMENT = 128
BUSY_CYCLES = 1_000_000  # about 0.5 ms: longer than the host takes to launch a plan
WARMUP = 5


@dataclasses.dataclass(frozen=True)
class Timed:
    """What one call takes, in us, and which kernels and copies it consists of."""

    op: str
    num_ranks: int
    busy_us: float
    elapsed_us: float
    wall_us: float
    kernels_us: dict[str, float]
    num_wrong: int


def busy_us(call: Callable[[], Any], iterations: int) -> dict[str, float]:
    """Mean time of each kernel and copy of a call, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(iterations):
            call()
        torch.cuda.synchronize()
    total: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name[:60]] += event.time_range.elapsed_us()
    return {name: us / iterations for name, us in total.most_common()}


def elapsed_us(call: Callable[[], Any], iterations: int) -> float:
    """Median of a call by events, launched while the GPU is still busy with something else."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(iterations):
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def wall_us(call: Callable[[], Any], iterations: int) -> float:
    """Median of a call on the host, from an idle GPU to an idle GPU."""
    samples = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(samples)


def timed(op: str, num_ranks: int, call: Callable[[], Any], wanted: Any, iterations: int) -> Timed:
    """Compare the result of a call with the wanted one, and time it."""
    num_wrong = num_different(call(), wanted)
    for _ in range(WARMUP):
        call()
    kernels = busy_us(call, iterations)
    return Timed(
        op=op,
        num_ranks=num_ranks,
        busy_us=sum(kernels.values()),
        elapsed_us=elapsed_us(call, iterations),
        wall_us=wall_us(call, iterations),
        kernels_us=kernels,
        num_wrong=num_wrong,
    )


def num_different(got: Any, wanted: Any) -> int:
    """Count the fields of two dataclasses that differ."""
    names = [field.name for field in dataclasses.fields(wanted)]
    pairs = [(as_array(getattr(got, n)), as_array(getattr(wanted, n))) for n in names]
    return sum(not np.array_equal(a, b) for a, b in pairs)


def as_array(value: Any) -> np.ndarray:
    """Bring a field to the host."""
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def arriving(plans: list[RoutePlan]) -> tuple[torch.Tensor, np.ndarray]:
    """Route stream that rank 0 gets of all ranks' plans, and rows of each of its experts."""
    parts = [plan.route[: int(plan.send_splits[0])] for plan in plans]
    return torch.cat(parts), sum(plan.expert_counts[0] for plan in plans)


def measure(workload: Synthetic, iterations: int) -> list[Timed]:
    """Time the plan of rank 0, and the layout of what it gets."""
    placement = Placement(workload.num_experts, workload.num_ranks)
    arrays = [workload.routing(rank) for rank in range(workload.num_ranks)]
    tensors = [(torch.from_numpy(idx), torch.from_numpy(weights)) for idx, weights in arrays]
    plans = [routing.plan(idx, weights, placement) for idx, weights in tensors]
    idx, weights = (part.cuda() for part in tensors[0])
    route, num_rows = arriving(plans)
    on_gpu, rest = route.cuda(), (workload.num_topk, num_rows, ALIGNMENT)
    layout = routing.expert_layout(route, *rest)
    calls: list[tuple[str, Callable[[], Any], Any]] = [
        ("plan", lambda: routing.plan(idx, weights, placement), plans[0]),
        ("expert_layout", lambda: routing.expert_layout(on_gpu, *rest), layout),
    ]
    num_ranks = workload.num_ranks
    return [timed(op, num_ranks, call, wanted, iterations) for op, call, wanted in calls]


def row_lines(rows: list[Timed]) -> list[str]:
    """Write the rows, each with its kernels."""
    lines = [
        f"#{'op':>15} {'ranks':>6} {'busy us':>9} {'elapsed us':>11} {'wall us':>9} {'#wrong':>7}"
    ]
    for row in rows:
        times = f"{row.busy_us:9.1f} {row.elapsed_us:11.1f} {row.wall_us:9.1f}"
        lines.append(f" {row.op:>15} {row.num_ranks:6} {times} {row.num_wrong:7}")
        lines += [f"#      {us:7.2f} us  {name}" for name, us in row.kernels_us.items()]
    return lines


@click.command()
@click.option("--tokens", default=32768, show_default=True)
@click.option("--experts", default=256, show_default=True)
@click.option("--topk", default=8, show_default=True)
@click.option("--ranks", default=(8, 64), multiple=True, show_default=True)
@click.option("--iterations", default=50, show_default=True)
@json_option
def main(
    tokens: int,
    experts: int,
    topk: int,
    ranks: tuple[int, ...],
    iterations: int,
    json_file: Path | None,
) -> int:
    """Measure the GPU time of plan and layout."""
    try:
        launch.use_device("cuda", 0)
    except RuntimeError as error:
        raise UserError(error) from error
    sizes = [Synthetic(n, tokens, HIDDEN, experts, topk) for n in ranks]
    rows = [row for workload in sizes for row in measure(workload, iterations)]
    click.echo(
        f"# {tokens} tokens, top-{topk} of {experts} experts, {torch.cuda.get_device_name()}"
    )
    click.echo("\n".join(row_lines(rows)))
    if json_file is not None:
        content = {
            "command": "plan_cuda",
            "arguments": {"tokens": tokens, "experts": experts, "topk": topk},
            **machine.about(),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        write_json(json_file, content)
    return int(any(row.num_wrong for row in rows))


if __name__ == "__main__":
    run_command(main)
