"""How measurements are shown: rows as nccl-tests prints them, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp4comm.bench.cases import SWEPT, Case, varying
from fp4comm.bench.environment import Environment
from fp4comm.bench.rows import OVERLAP, ROUND_TRIP, Report, Row, verdict
from fp4comm.bench.settings import Settings

TIMED = {
    "cpu": ("time: slowest rank in each call, whole call",),
    "cuda": (
        "time: wall time of the slowest rank in each call, from a barrier behind a synchronized"
        " device until",
        "  the device is synchronized again; parts (in --json): as many further calls, with a"
        " synchronize around",
        "  each part, so that their sum is more than the time",
    ),
}


def header_lines(
    environment: Environment, settings: Settings, cases: Sequence[Case] = ()
) -> list[str]:
    """Say how the rows come about."""
    version, machine_ = environment.versions, environment.machine
    devices = ", ".join(machine_["cuda_devices"]) or "none"
    named = ("python", "torch", "numba") if settings.device == "cpu" else ("python", "torch")
    libraries = ", ".join(f"{name} {version[name]}" for name in named)
    lines = [
        f"fp4comm {version['fp4comm']}  {environment.command}",
        f"ranks {environment.num_ranks}, {environment.where}, transport {environment.transport}",
        f"{machine_['cpu']}, {machine_['usable_cores']} of {machine_['cores']} cores,"
        f" {machine_['kernel_threads']} kernel threads a rank, CUDA devices {devices}; {libraries}",
        _inputs_line(cases),
        f"arrive {settings.arrive}, expert_alignment {settings.alignment}; {settings.warmup}"
        f" warm-up, {settings.iterations} timed, wire formats in turn; caches not flushed",
        "plain: all-to-all of BF16 rows, one copy per expert, in the order that they come; rows"
        " below a dispatch",
        "  row belong to it",
        *_also_lines(settings),
        *TIMED[settings.device],
        "busiest rank: sends most to others; wire rows, wire B: all it sends, to itself and route"
        " included",
        "between B, inside B: most that a rank sends to other nodes, and to others of its node; by"
        " both hops",
        "bf16 B: the same rows in bf16; algbw: wire B / median; busbw: its bytes to other ranks /"
        " median",
        "GB/s = 10^9 B/s; vs bf16: times faster than the same op of the bf16 dispatch; vs plain:"
        " than plain",
        "#wrong: rows unlike fp4comm.reference, of all ranks",
    ]
    return [f"# {line}" for line in lines]


def _inputs_line(cases: Sequence[Case]) -> str:
    """Describe the inputs; where cases differ, by all their values."""
    workloads = [case.workload for case in cases]
    names = " / ".join(dict.fromkeys(workload.name for workload in workloads))
    hidden, topk, experts = (
        "/".join(dict.fromkeys(str(getattr(workload, name)) for workload in workloads))
        for name in ("hidden", "num_topk", "num_experts")
    )
    each = f"; {len(cases)} cases, one after the other" if len(cases) > 1 else ""
    return f"{names}; hidden {hidden}, top-{topk} of {experts} experts{each}"


def _also_lines(settings: Settings) -> list[str]:
    lines = []
    if ROUND_TRIP in settings.also:
        lines.append(
            "round_trip: dispatch, then combine of expert outputs made before, timed as one call"
        )
    if OVERLAP in settings.also:
        lines += [
            "overlap: dispatch(async_op=True), a BF16 matrix product about as long as the dispatch"
            " alone, wait, all on one stream of the caller's",
            "  overlap %: what the product hides of the dispatch, (dispatch alone + product alone"
            " - overlap) / dispatch alone",
        ]
    return lines


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}..{high}"


Cell = Callable[[Row, Report, Case], str]
Column = tuple[str, str, int, Cell]  # name, unit, width, cell
COLUMNS: tuple[Column, ...] = (
    ("op", "", 10, lambda row, *_: row.op),
    ("format", "", 6, lambda row, *_: row.format),
    ("route", "", 7, lambda row, *_: row.route),
    ("tokens", "(/rank)", 8, lambda row, report, _: _range(report.num_tokens)),
    ("hidden", "", 6, lambda row, report, _: str(report.hidden)),
    ("experts", "", 7, lambda row, report, _: str(report.num_experts)),
    ("topk", "", 4, lambda row, report, _: str(report.num_topk)),
    ("skew", "", 8, lambda row, report, case: case.written("skew")),
    ("wire rows", "(rows)", 9, lambda row, *_: str(row.wire_rows.sent)),
    ("wire B", "(B)", 11, lambda row, *_: str(row.wire_bytes.sent)),
    ("between B", "(B)", 11, lambda row, *_: str(row.between_bytes)),
    ("inside B", "(B)", 11, lambda row, *_: str(row.inside_bytes)),
    ("bf16 B", "(B)", 11, lambda row, *_: str(row.bf16_bytes)),
    ("median", "(us)", 9, lambda row, *_: f"{row.time.median_us:.1f}"),
    ("p90", "(us)", 9, lambda row, *_: f"{row.time.p90_us:.1f}"),
    ("algbw", "(GB/s)", 7, lambda row, *_: f"{row.algbw_gbs:.3f}"),
    ("busbw", "(GB/s)", 7, lambda row, *_: f"{row.busbw_gbs:.3f}"),
    ("overlap", "(%)", 7, lambda row, *_: _percent(row)),
    ("vs bf16", "(x)", 7, lambda row, report, _: or_dash(row.speedup_in(report.rows), ".2f")),
    ("vs plain", "(x)", 8, lambda row, report, _: or_dash(_vs_plain(row, report), ".2f")),
    ("#wrong", "(rows)", 6, lambda row, *_: str(row.num_wrong)),
)


def _vs_plain(row: Row, report: Report) -> float | None:
    return row.speedup_over_plain(report.rows)


def _percent(row: Row) -> str:
    return or_dash(None if row.beside is None else 100 * row.beside.hidden_share, ".1f")


def or_dash(value: float | None, spec: str) -> str:
    """Write a number, or a dash for none."""
    return "-" if value is None else format(value, spec)


class Table:
    """Lines of a run, case by case: all that stands above the rows, the rows, and notes below.

    Args:
        environment: what it takes place on.
        settings: what is measured.
        cases: all of them; sizes in which they differ are columns.
        link_gbs: peak of the link in GB/s; a row above it is marked.
    """

    def __init__(
        self,
        environment: Environment,
        settings: Settings,
        cases: Sequence[Case],
        link_gbs: float | None = None,
    ) -> None:
        """Choose the columns."""
        self._environment, self._settings, self._cases = environment, settings, cases
        self._link_gbs = link_gbs
        unwanted = {name for name in SWEPT if name not in (*varying(cases), "tokens")}
        if OVERLAP not in settings.also:
            unwanted.add(OVERLAP)
        self._columns = [column for column in COLUMNS if column[0] not in unwanted]

    def head(self) -> list[str]:
        """What is measured, and two lines of column heads."""
        names = " ".join(f"{name:>{width}}" for name, _, width, _ in self._columns)
        units = " ".join(f"{unit:>{width}}" for _, unit, width, _ in self._columns)
        above = header_lines(self._environment, self._settings, self._cases)
        return [*above, f"# {names}", f"# {units}"]

    def rows(self, case: Case, report: Report) -> list[str]:
        """A line for each row of a case."""
        lines = []
        for row in report.rows:
            cells = (f"{cell(row, report, case):>{width}}" for _, _, width, cell in self._columns)
            mark = " !" if self._is_above_link(row) else ""
            lines.append(f"  {' '.join(cells)}{mark}")
        return lines

    def foot(self, reports: Sequence[Report]) -> list[str]:
        """What is to be said about the rows of all cases, and how many are wrong."""
        lines = [*_checked_lines(reports), *_first_call_lines(reports)]
        for case, report in zip(self._cases, reports, strict=True):
            lines += [_overlap_line(row, self._name(case)) for row in report.rows if row.beside]
        rows = [row for report in reports for row in report.rows]
        if "two_hop" in self._settings.routes and all(row.route == "flat" for row in rows):
            lines.append("route: on one node every route is the flat one; see --ranks-per-node")
        if too_fast := sum(map(self._is_above_link, rows)):
            lines.append(
                f"! {too_fast} rows above the stated link peak of {self._link_gbs} GB/s: do not"
                " believe them"
            )
        lines.append(verdict(sum(report.num_wrong for report in reports)))
        return [f"# {line}" for line in lines]

    def _is_above_link(self, row: Row) -> bool:
        """Tell whether a row claims more than the link can carry."""
        return self._link_gbs is not None and row.busbw_gbs > self._link_gbs

    def _name(self, case: Case) -> str:
        """Say what tells a case from the others."""
        return "".join(f", {name} {case.written(name)}" for name in varying(self._cases))


def _checked_lines(reports: Sequence[Report]) -> list[str]:
    num_checked = sum(report.num_tokens_checked for report in reports)
    num_tokens = sum(sum(report.num_tokens) for report in reports)
    return [
        f"contents of {num_checked} of {num_tokens} tokens are compared byte for byte; counts,"
        " places, weights and padding of all"
    ]


def _first_call_lines(reports: Sequence[Report]) -> list[str]:
    """Of the first case: what its calls take longer, those of the others do not."""
    report = reports[0]
    lines = [
        f"rank 0 compiled kernels, or loaded them, in {report.compile_s:.1f} s before all calls;"
        " other processes load them in their first"
    ]
    of_case = " of the first case" if len(reports) > 1 else ""
    for op in dict.fromkeys(row.op for row in report.rows):
        first = [f"{r.dispatch} {r.time.first_us / 1e3:.1f}" for r in report.rows if r.op == op]
        lines.append(f"first {op} calls{of_case}, not in the rows (ms): {', '.join(first)}")
    return lines


def _overlap_line(row: Row, case: str) -> str:
    assert row.beside is not None
    size, times = row.beside.size, f", {row.beside.repeats} times" * (row.beside.repeats > 1)
    alone = ", ".join(f"{name} alone {us / 1e3:.3f} ms" for name, us in row.parts_us.items())
    return (
        f"overlap {row.format}, {row.route}{case}: {alone} ({size}x{size} by {size}x{size}{times}),"
        f" together {row.time.median_us / 1e3:.3f} ms: {_percent(row)} % of the dispatch hidden"
    )


# JSON


def as_json(
    command: str,
    options: dict[str, Any],
    environment: Environment,
    cases: Sequence[Case],
    reports: Sequence[Report],
) -> dict[str, Any] | list[dict[str, Any]]:
    """Everything about a run, for a file: one result, or a list of those there are of the cases."""
    contents = [
        _result(command, {**options, **case.sizes}, environment, report)
        for case, report in zip(cases, reports, strict=False)
    ]
    return contents if len(cases) > 1 else contents[0]


def _result(
    command: str, arguments: dict[str, Any], environment: Environment, report: Report
) -> dict[str, Any]:
    rows = [
        {
            **dataclasses.asdict(row),
            "algbw_gbs": row.algbw_gbs,
            "busbw_gbs": row.busbw_gbs,
            "vs_bf16": row.speedup_in(report.rows),
            "vs_plain": row.speedup_over_plain(report.rows),
        }
        for row in report.rows
    ]
    return {
        "command": command,
        "arguments": {name: _without_folder(value) for name, value in arguments.items()},
        "machine": environment.machine,
        "versions": environment.versions,
        "git": environment.git,
        "ranks": environment.num_ranks,
        "hosts": environment.num_hosts,
        "nodes": environment.num_nodes,
        "gpus": environment.num_gpus,
        "transport": environment.transport,
        "workload": report.workload,
        "hidden": report.hidden,
        "experts": report.num_experts,
        "topk": report.num_topk,
        "tokens": report.num_tokens,
        "tokens_checked": report.num_tokens_checked,
        "compile_s": report.compile_s,
        "wrong_rows": report.num_wrong,
        "rows": rows,
    }


def _without_folder(value: Any) -> Any:
    """Name files without their folder: results are shared, and the folder is this machine's."""
    if isinstance(value, Path):
        return value.name
    return [_without_folder(v) for v in value] if isinstance(value, (list, tuple)) else value
