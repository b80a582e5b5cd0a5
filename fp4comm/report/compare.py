"""What results say together: measured against predicted, series, and what was not measured."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp4comm.formats import FORMATS
from fp4comm.predict import report as predict_report
from fp4comm.predict.plan import plan_of
from fp4comm.report.results import Result, Row, Setup, of_content, shown
from fp4comm.topology import load

AXES = ("tokens", "skew")  # that speed-ups are drawn over


# Measured against predicted


@dataclasses.dataclass(frozen=True)
class Pair:
    """A measured row and its prediction."""

    measured: Row
    predicted: Row

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted.us / self.measured.us - 1


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A measured result and a prediction that fits it."""

    measured: Result
    predicted: Result

    @property
    def pairs(self) -> list[Pair]:
        """Rows that both have.  A combine is the same after every dispatch."""
        found = {(r.op, r.format, r.route): r for r in self.predicted.rows}
        keys = [(row, (row.op, row.format, row.route)) for row in self.measured.rows]
        return [Pair(row, found[key]) for row, key in keys if key in found]


def misfits(measured: Setup, predicted: Setup) -> list[str]:
    """Say in what a prediction differs; empty if it fits."""
    ours, theirs = dataclasses.asdict(measured), dataclasses.asdict(predicted)
    return [
        f"{name} {shown(ours[name])}, not {shown(theirs[name])}"
        for name in ours
        if ours[name] is None or ours[name] != theirs[name]
    ]


def predict(result: Result, file: Path) -> Result:
    """Predict a measured result on a topology.

    Raises:
        ValueError: the topology has no such ranks, or the routing is not one that has a model.
    """
    topology = load(file)
    setup, arguments = result.setup, result.content["arguments"]
    if result.device != topology.device:
        raise ValueError(f"device: expected {topology.device}, got {result.device}")
    if setup.tokens is None or setup.skew is None or setup.nodes is None:
        raise ValueError("expected drawn routing and as many tokens on each rank")
    fields = dataclasses.asdict(setup)
    options = {
        **{name: fields[name] for name in ("nodes", "tokens", "hidden", "experts", "topk")},
        **{name: fields[name] for name in ("arrive", "alignment")},
        "topology_name": str(file),
        "skew": str(setup.skew),
        "seed": arguments.get("seed", 0),
        "wire": list(dict.fromkeys(row.dispatch for row in result.rows)),
        "combine": arguments.get("combine", "bf16"),
        "route": "both",
        "ranks_per_node": setup.ranks // setup.nodes if len(topology.ranks) == 1 else None,
        "node_limit": None,
        "routing": None,
    }
    content = predict_report.as_json(plan_of(options), {**options, "topology_name": file.name})
    return of_content(f"{result.name} on {topology.name}", content)


def comparisons(
    results: Sequence[Result], topologies: Sequence[Path]
) -> tuple[list[Comparison], list[str]]:
    """Put predictions beside measured results; say which fit nothing, and why."""
    measured = [result for result in results if result.is_measured]
    found: list[Comparison] = []
    unused: list[str] = []
    for plan in (result for result in results if not result.is_measured):
        fitting = [result for result in measured if not misfits(result.setup, plan.setup)]
        found += [Comparison(result, plan) for result in fitting]
        if measured and not fitting:
            nearest = min(measured, key=lambda r: len(misfits(r.setup, plan.setup)))
            unused.append(_misfit(plan.name, nearest, misfits(nearest.setup, plan.setup)))
    for file, result in itertools.product(topologies, measured):
        try:
            plan = predict(result, file)
        except ValueError as error:
            unused.append(_misfit(file.name, result, [str(error)]))
            continue
        if why := misfits(result.setup, plan.setup):
            unused.append(_misfit(file.name, result, why))
        else:
            found.append(Comparison(result, plan))
    return [comparison for comparison in found if comparison.pairs], unused


def _misfit(name: str, result: Result, why: Sequence[str]) -> str:
    return f"{name} does not predict {result.name}: {'; '.join(why)}."


# Series


@dataclasses.dataclass(frozen=True)
class Series:
    """Results that differ in one number alone, by that number."""

    axis: str
    results: list[Result]

    @property
    def positions(self) -> list[float]:
        """The numbers."""
        return [getattr(result.setup, self.axis) for result in self.results]


def series(results: Sequence[Result], axis: str) -> list[Series]:
    """Find the series along an axis: two different numbers at least."""
    groups: dict[Any, list[Result]] = {}
    for result in results:
        if isinstance(getattr(result.setup, axis), (int, float)):
            fixed = {**dataclasses.asdict(result.setup), axis: None}
            of_content = [result.content.get(name) for name in ("transport", "hosts", "gpus")]
            where = (result.is_measured, result.machine, result.device, *of_content)
            groups.setdefault((*fixed.values(), *where), []).append(result)
    ordered = (sorted(g, key=lambda r: getattr(r.setup, axis)) for g in groups.values())
    return [s for group in ordered if len(set((s := Series(axis, group)).positions)) > 1]


# What was not measured


def gaps(results: Sequence[Result], comparisons_: Sequence[Comparison]) -> list[str]:
    """Say what the results do not show."""
    of_text: dict[str, list[str]] = {}
    for result in results:
        for text in _gaps_of(result):
            of_text.setdefault(text, []).append(result.name)
    lines = [f"{', '.join(names)}: {text}." for text, names in of_text.items()]
    for axis in AXES:
        found = series(results, axis)
        if not found:
            lines.append(f"Speed-up over {axis}: no two results differ in {axis} alone.")
        for one in found:
            commits = {result.commit for result in one.results if result.is_measured}
            if len(commits) > 1:
                names = ", ".join(result.name for result in one.results)
                lines.append(f"Speed-up over {axis}: {names} are of different commits.")
    if not comparisons_:
        lines.append("Measured against predicted: no plan or topology here fits a measured result.")
    return lines


def _gaps_of(result: Result) -> Iterator[str]:
    if not result.is_measured:
        yield "predicted, not measured"
        return
    content, rows = result.content, result.rows
    missing = [name for name in FORMATS if name not in {row.dispatch for row in rows}]
    if missing:
        yield f"wire formats not measured: {', '.join(missing)}"
    if all(row.op != "plain" for row in rows):
        yield "no plain all-to-all measured, so no speed-up over it"
    if all(row.format != "bf16" for row in rows if row.op == "dispatch"):
        yield "no bf16 dispatch measured, so no speed-up over it"
    if result.setup.nodes != 1 and {row.route for row in rows} == {"flat"}:
        yield "the two-hop route was not measured"
    yield from _gaps_of_place(result)
    num_tokens = sum(content["tokens"])
    if content["tokens_checked"] < num_tokens:
        checked = f"{content['tokens_checked']:,} of {num_tokens:,}"
        yield f"rows of {checked} tokens were compared byte for byte, the others by count and place"
    if result.commit == "unknown" or "changes" in result.commit:
        yield f"the commit is {result.commit}"


def _gaps_of_place(result: Result) -> Iterator[str]:
    """What the machine could not show."""
    content, ranks = result.content, result.setup.ranks
    hosts, nodes = content.get("hosts"), result.setup.nodes
    if ranks == 1:
        yield "one rank: nothing left it, so that its times say nothing of an exchange"
    elif hosts == 1 and nodes == 1:
        yield "one node: the wire is its memory or local link, no network was measured"
    elif hosts == 1 and nodes:
        yield f"{nodes} virtual nodes of one host: what is between them is no real network"
    elif hosts is None:
        yield "the file does not say on how many hosts the ranks were"
    if sharing := shared_gpus(result):
        yield sharing


def shared_gpus(result: Result) -> str | None:
    """Say that ranks shared GPUs, if they did."""
    ranks, gpus = result.setup.ranks, result.content.get("gpus")
    if not gpus or gpus >= ranks:
        return None
    return f"{ranks} ranks shared {gpus} GPU{'s' * (gpus > 1)}, which adds up their kernels"
