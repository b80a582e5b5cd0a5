"""Results of train_moe.py: files that can be put together, paired differences, table, picture."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

FORWARD, BACKWARD = ("dispatch", "combine"), ("dispatch_grad", "combine_grad")
BASELINE = ("bf16", "plain")  # policy and cache that the others are compared with
COLOURS = 10  # of matplotlib's cycle


@dataclasses.dataclass(frozen=True)
class Run:
    """One model, trained from its first step to its last.

    Attributes:
        policy, cache: names of the wire formats, and of what the experts keep for backward.
        sitting: which of `Results.sittings` it belongs to.
        train_s: of all steps together, compilation included, evaluation not.
        step_ms: median over all steps but the first few; tokens_per_s follows from it.
        peak_bytes: of the process that took most: allocated on its GPU, else resident.
        sent_bytes: by pass, of all ranks in a mean step, what a rank sends itself included.
        sent_to_others_bytes: the same without that.
        train_loss: means of `train_every` steps each, nats a byte.
        validation: pairs of steps done and loss on the held-out text.
    """

    seed: int
    policy: str
    cache: str
    ranks: int
    sitting: int
    steps: int
    train_s: float
    step_ms: float
    tokens_per_s: float
    peak_bytes: int
    sent_bytes: dict[str, float]
    sent_to_others_bytes: dict[str, float]
    train_every: int
    train_loss: list[float]
    validation: list[tuple[int, float]]

    @property
    def name(self) -> str:
        """What tells it from others of its setup."""
        return f"{self.policy}, cache {self.cache}, {_ranks(self.ranks)}, seed {self.seed}"

    @property
    def final_loss(self) -> float:
        """On the held-out text, after the last step."""
        return self.validation[-1][1]


@dataclasses.dataclass(frozen=True)
class Results:
    """Runs that can be compared: all of the same setup, made in one or more sittings.

    Attributes:
        setup: model, text, batches and steps.
        sittings: arguments, ranks, machine, versions and commit of each.
    """

    setup: dict[str, Any]
    sittings: list[dict[str, Any]]
    runs: list[Run]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "command": "train_moe",
            **dataclasses.asdict(self),
            "comparisons": [dataclasses.asdict(row) for row in compare(self.runs)],
        }


def read(files: Sequence[Path]) -> Results:
    """Read result files and put them together.

    Raises:
        ValueError: a file is none of train_moe's, the setups differ, or a run is there twice.
    """
    parts = [_read_one(file) for file in files]
    for file, part in zip(files, parts, strict=True):
        for name, value in parts[0].setup.items():
            if part.setup.get(name) != value:
                raise ValueError(
                    f"{file}: expected {name} {value} as in {files[0]}, got {part.setup.get(name)}"
                )
    runs: list[Run] = []
    sittings: list[dict[str, Any]] = []
    of_run: dict[tuple[str, str, int, int], Path] = {}
    for file, part in zip(files, parts, strict=True):
        for run in part.runs:
            case = run.policy, run.cache, run.ranks, run.seed
            if case in of_run:
                raise ValueError(
                    f"{file}: expected other runs than {of_run[case]} has, got {run.name} again"
                )
            of_run[case] = file
        first = len(sittings)
        runs += [dataclasses.replace(run, sitting=first + run.sitting) for run in part.runs]
        sittings += part.sittings
    return Results(parts[0].setup, sittings, runs)


def _read_one(file: Path) -> Results:
    try:
        content = json.loads(file.read_text())
        runs = [Run(**run) for run in content["runs"]]
        return Results(content["setup"], content["sittings"], runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected a result of train_moe ({error!r})") from error


# Comparing


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs that differ in the seed alone, beside the bf16 runs of the same seeds.

    Attributes:
        differences_percent: final loss of each run over that of its baseline, less 1.
        mean_percent, spread_percent: mean and sample standard deviation of these; None where
            there are too few.
    """

    policy: str
    cache: str
    ranks: int
    seeds: list[int]
    validation_loss: float
    differences_percent: list[float]
    mean_percent: float | None
    spread_percent: float | None
    step_ms: float
    tokens_per_s: float
    peak_bytes: int
    forward_bytes: float
    backward_bytes: float


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Summarize the runs of each policy, cache and number of ranks."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.policy, run.cache, run.ranks), []).append(run)
    return [_comparison(group, runs) for group in groups.values()]


def _comparison(group: list[Run], runs: Sequence[Run]) -> Comparison:
    percent = [curve[-1][1] for run in group if (curve := difference_curve(run, runs))]
    return Comparison(
        policy=group[0].policy,
        cache=group[0].cache,
        ranks=group[0].ranks,
        seeds=[run.seed for run in group],
        validation_loss=statistics.mean(run.final_loss for run in group),
        differences_percent=percent,
        mean_percent=statistics.mean(percent) if percent else None,
        spread_percent=statistics.stdev(percent) if len(percent) > 1 else None,
        step_ms=statistics.median(run.step_ms for run in group),
        tokens_per_s=statistics.median(run.tokens_per_s for run in group),
        peak_bytes=max(run.peak_bytes for run in group),
        forward_bytes=statistics.mean(_sum_of(run, FORWARD) for run in group),
        backward_bytes=statistics.mean(_sum_of(run, BACKWARD) for run in group),
    )


def difference_curve(run: Run, runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Validation loss over the baseline's, less 1, in percent; empty for a baseline.

    The baseline is the first bf16 run with the same seed: a later one, perhaps on another number of
    ranks, shows how far apart runs are that differ in the order of their sums.
    """
    base = next((r for r in runs if (r.policy, r.cache) == BASELINE and r.seed == run.seed), None)
    if base is None or base is run:
        return []
    pairs = zip(run.validation, base.validation, strict=True)
    return [(step, 100 * (loss / other - 1)) for (step, loss), (_, other) in pairs]


def _sum_of(run: Run, passes: Sequence[str]) -> float:
    return sum(run.sent_bytes[name] for name in passes)


# Showing

COLUMNS = (
    "wires", "cache", "ranks", "runs", "validation loss", "to bf16", "spread", "step",
    "tokens/s", "peak", "forward", "backward",
)  # fmt: skip
UNITS = ("", "", "", "", "nats/byte", "%", "%", "ms", "", "MB", "MB/step", "MB/step")


def table(results: Results) -> Table:
    """Lay out the comparisons, for rich."""
    made = Table(box=None, padding=(0, 1))
    for name, unit in zip(COLUMNS, UNITS, strict=True):
        made.add_column(f"{name}\n{unit}", justify="left" if not unit else "right")
    for row in compare(results.runs):
        made.add_row(
            row.policy,
            row.cache,
            str(row.ranks),
            str(len(row.seeds)),
            f"{row.validation_loss:.4f}",
            _or_dash(row.mean_percent, "+.3f"),
            _or_dash(row.spread_percent, ".3f"),
            f"{row.step_ms:.1f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.peak_bytes / 1e6:,.0f}",
            f"{row.forward_bytes / 1e6:.2f}",
            f"{row.backward_bytes / 1e6:.2f}",
        )
    return made


def title(results: Results) -> str:
    """Say what was trained."""
    setup = results.setup
    shape = setup["shape"]
    return (
        f"{setup['parameters'] / 1e6:.1f} M parameters, {shape['layers']} layers, hidden"
        f" {shape['hidden']}, top-{shape['topk']} of {shape['experts']} experts; {setup['steps']}"
        f" steps of {setup['batch'] * shape['length']} bytes of {setup['text']}"
    )


def place(results: Results) -> str:
    """Say on what, and at which commit."""
    words = []
    for sitting in results.sittings:
        machine = sitting["machine"]
        device = ", ".join(machine["cuda_devices"]) or machine["cpu"]
        if sitting["arguments"]["device"] == "cpu":
            device = machine["cpu"]
        commit = (sitting["git"] or {}).get("commit") or "unknown"
        words.append(
            f"{_ranks(sitting['ranks'])} ({sitting['transport']}) on {device}, commit {commit[:10]}"
        )
    return "; ".join(dict.fromkeys(words))


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def draw(results: Results, file: Path) -> None:
    """Draw the loss curves, and their difference from bf16 with the range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    groups: dict[str, list[Run]] = {}
    for run in results.runs:
        of_ranks = f" on {_ranks(run.ranks)}" if len({r.ranks for r in results.runs}) > 1 else ""
        of_cache = f", {run.cache}" if run.cache != BASELINE[1] else ""
        groups.setdefault(f"{run.policy}{of_cache}{of_ranks}", []).append(run)
    for number, (name, runs) in enumerate(groups.items()):
        colour = f"C{number % COLOURS}"
        for run in runs:
            middles = [run.train_every * (i + 0.5) for i in range(len(run.train_loss))]
            losses.plot(middles, run.train_loss, color=colour, alpha=0.3, linewidth=0.8)
        steps, means, _, _ = _over_runs([run.validation for run in runs])
        losses.plot(steps, means, color=colour, marker="o", markersize=3, label=name)
        curves = [c for run in runs if (c := difference_curve(run, results.runs))]
        if curves:
            steps, means, lows, highs = _over_runs(curves)
            differences.plot(steps, means, color=colour, marker="o", markersize=3, label=name)
            differences.fill_between(steps, lows, highs, color=colour, alpha=0.15, linewidth=0)
    losses.set(xlabel="step", ylabel="loss (nats per byte)")
    losses.set_title("held-out text (dots) and training text (thin)")
    differences.axhline(0, color="black", linewidth=0.8)
    differences.set(xlabel="step", ylabel="difference from bf16 (%)")
    differences.set_title("held-out loss over that of bf16 with the same seed: mean and range")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    figure.suptitle(f"{title(results)}\n{place(results)}", fontsize=9)
    figure.savefig(file, dpi=110)


def _over_runs(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and mean, lowest and highest value of the curves there."""
    steps = [step for step, _ in curves[0]]
    values = list(zip(*([value for _, value in curve] for curve in curves), strict=True))
    means = [statistics.mean(at_step) for at_step in values]
    return steps, means, [min(v) for v in values], [max(v) for v in values]
