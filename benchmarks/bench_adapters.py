"""What an adapter adds to the time of AllToAll, and to its memory: the same rows by both.

    torchrun --nproc-per-node 2 benchmarks/bench_adapters.py [--device cpu] [--json FILE]

Each adapter whose framework is installed sends the same tokens as `AllToAll` called directly does,
to experts that change nothing (Transformers': the model's own, on both sides), forward, and forward
and backward.  `added` is the time through the adapter less the direct one, measured in turns, as a
share of what dispatch and combine take.  `peak` is memory of torch's allocator beyond what was
there before; one that copied the rows would add `rows` to it.

Exit code: 0; 1 if results differ; 2 where nothing can be measured.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from adapter_pairs import ADAPTERS, NUM_TRANSFORMERS_EXPERTS, Inputs, Pair, inputs_of

from fp4comm import Precision, launch, machine
from fp4comm.bench import environment
from fp4comm.bench import report as bench_report
from fp4comm.bench.clock import Stopwatch, gather
from fp4comm.files import write_json
from fp4comm.formats import FORMATS
from fp4comm.options import json_option
from fp4comm.running import run_command, run_on_ranks
from fp4comm.topology import DEVICES
from fp4comm.transport import Transport

WARMUP = 5
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of an adapter.

    Times are medians over the iterations, of the slowest rank in each; peaks are of the highest
    rank, None where there is no such measure; wrong rows are of all ranks, gradients included.
    """

    adapter: str
    release: str
    passes: str
    dispatch_combine_us: float
    direct_us: float
    through_us: float
    added_share: float
    direct_peak_bytes: int | None
    through_peak_bytes: int | None
    rows_bytes: int
    num_wrong: int


def measure(pair: Pair, transport: Transport, trains: bool, iterations: int) -> Row:
    """Compare the results of both ways, and measure both; collective."""
    x, weights = pair.inputs.x, pair.inputs.topk_weights

    def step(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        with torch.set_grad_enabled(trains):
            leaves = [t.detach().requires_grad_(trains) for t in (x, weights)]
            y = call(*leaves)
            if not trains:
                return [y]
            y.backward(torch.ones_like(y))
            return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def dispatch_combine(*leaves: torch.Tensor) -> torch.Tensor:
        d = pair.a2a.dispatch(leaves[0], pair.inputs.topk_idx, leaves[1])
        return pair.a2a.combine(d.rows, d.handle)

    calls = {"direct": pair.direct, "through": pair.through, "dispatch_combine": dispatch_combine}
    steps = {name: functools.partial(step, call) for name, call in calls.items()}
    num_wrong = wrong_rows(steps["through"](), steps["direct"]())
    peaks = {name: highest_peak(steps[name], transport, x.device) for name in ("direct", "through")}
    us = times_in_turns(steps, Stopwatch(transport, x.device.type), transport, iterations)
    return Row(
        adapter=pair.adapter,
        release=importlib.metadata.version(pair.package),
        passes="forward and backward" if trains else "forward",
        dispatch_combine_us=us["dispatch_combine"],
        direct_us=us["direct"],
        through_us=us["through"],
        added_share=(us["through"] - us["direct"]) / us["dispatch_combine"],
        direct_peak_bytes=peaks["direct"],
        through_peak_bytes=peaks["through"],
        rows_bytes=x.numel() * x.element_size(),
        num_wrong=int(gather(transport, [num_wrong]).sum()),
    )


def wrong_rows(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> int:
    """Count rows in which tensors differ, on this rank."""
    return sum(int((a != b).flatten(1).any(1).sum()) for a, b in zip(got, wanted, strict=True))


def highest_peak(call: Callable[[], Any], transport: Transport, device: torch.device) -> int | None:
    """Most bytes that a rank takes in a call beyond what it had before; None on the CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(gather(transport, [torch.cuda.max_memory_allocated() - before]).max())


def times_in_turns(
    steps: Mapping[str, Callable[[], Any]], watch: Stopwatch, transport: Transport, iterations: int
) -> dict[str, float]:
    """Median of the slowest rank in each iteration, us; another step is the first in each turn."""
    samples: dict[str, list[int]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(WARMUP + iterations):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            _, ns = watch.time(steps[name])
            if i >= WARMUP:
                samples[name].append(ns)
    return {
        name: float(np.median(gather(transport, ns).max(axis=0))) / 1e3
        for name, ns in samples.items()
    }


@dataclasses.dataclass(frozen=True)
class Result:
    """Of all adapters.

    Attributes:
        transport: its name, and the library below it.
        missing: for each that cannot be measured here, why.
    """

    num_ranks: int
    transport: str
    rows: list[Row]
    missing: list[str]


def measure_all(transport: Transport, options: dict[str, Any]) -> Result:
    """Measure each adapter whose framework is here; collective."""
    tokens, hidden, experts, topk, device = (
        options[name] for name in ("tokens", "hidden", "experts", "topk", "device")
    )
    drawn = inputs_of(transport.rank, tokens, hidden, experts, topk)
    x, idx, weights = (t.to(device) for t in (drawn.x, drawn.topk_idx, drawn.topk_weights))
    inputs, precision = Inputs(x, idx, weights, experts), Precision(dispatch=options["wire"])
    rows, missing = [], []
    for name, make in ADAPTERS.items():
        try:
            pair = make(
                dist.group.WORLD, inputs, num_experts=experts, hidden=hidden, precision=precision
            )
        except ImportError as error:
            missing.append(f"{name}: not measured: {error}")
            continue
        for trains in (False, True):
            rows.append(measure(pair, transport, trains, options["iterations"]))
        pair.a2a.close()
    where = environment.of_run("bench_adapters", transport, device)
    return Result(transport.num_ranks, where.transport, rows, missing)


def lines(result: Result, options: dict[str, Any]) -> Iterator[str]:
    """Write how the rows come about, the rows, and what is missing."""
    yield (
        f"# bench_adapters: {result.num_ranks} ranks, device {options['device']}, transport"
        f" {result.transport}; dispatch in {options['wire']}, combine in bf16"
    )
    yield (
        f"# x ~ N(0,1) bf16, {options['tokens']} tokens a rank, hidden {options['hidden']},"
        f" top-{options['topk']} of {options['experts']} experts, all as likely (Transformers: of"
        f" {NUM_TRANSFORMERS_EXPERTS} a rank)"
    )
    yield (
        f"# {WARMUP} warm-up, {options['iterations']} timed, in turns; time: median of the slowest"
        " rank in each; added: through less direct, of disp+comb; #wrong: rows of all ranks"
    )
    names = "adapter", "passes", "disp+comb us", "direct us", "through us"
    widths = 14, 20, 12, 10, 10
    head = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    yield f"#{head}   added  peak MB direct  through    rows  #wrong"
    for row in result.rows:
        us = row.dispatch_combine_us, row.direct_us, row.through_us
        times = " ".join(f"{t:{width}.0f}" for t, width in zip(us, widths[2:], strict=True))
        sizes = map(as_mb, (row.direct_peak_bytes, row.through_peak_bytes, row.rows_bytes))
        memory = "{:>15} {:>8} {:>7}".format(*sizes)
        yield (
            f" {row.adapter:>14} {row.passes:>20} {times} {row.added_share:7.2%} {memory}"
            f" {row.num_wrong:7}"
        )
    yield from (f"# {text}" for text in result.missing)


def as_mb(num_bytes: int | None) -> str:
    """Write MB, or a dash for none."""
    return bench_report.or_dash(None if num_bytes is None else num_bytes / 1e6, ".1f")


@click.command()
@click.option("--device", type=click.Choice(DEVICES), default="cuda", show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--hidden", type=click.IntRange(min=32), default=7168, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--topk", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--wire",
    type=click.Choice(list(FORMATS)),
    default="mxfp4",
    show_default=True,
    help="Of dispatch.",
)
@click.option("--iterations", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
def main(json_file: Path | None, **options: Any) -> int:
    """Measure what adapters add; return the exit code."""
    of_ranks = {"transport_name": "torch", "ranks": None, "timeout_s": TIMEOUT_S}
    result, prints = run_on_ranks(
        {**of_ranks, "device": options["device"]},
        1,
        lambda transport: measure_all(transport, options),
    )
    if prints:
        click.echo("\n".join(lines(result, options)))
        if json_file is not None:
            content = {
                "command": "bench_adapters",
                "arguments": options,
                **machine.about(),
                "ranks": result.num_ranks,
                "transport": result.transport,
                "rows": [dataclasses.asdict(row) for row in result.rows],
                "not_measured": result.missing,
            }
            write_json(json_file, content)
    code = 2 if not result.rows else int(any(row.num_wrong for row in result.rows))
    if code != 0:
        launch.let_reporter_print(prints)
    return code


if __name__ == "__main__":
    run_command(main)
