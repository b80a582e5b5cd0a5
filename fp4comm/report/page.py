"""What ``fp4comm report`` writes: lines, JSON, and the page that page.html lays out."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp4comm._version import __version__
from fp4comm.bench.rows import verdict
from fp4comm.report import charts
from fp4comm.report.compare import Comparison, comparisons, gaps
from fp4comm.report.results import ReportError, Result, Row, read

LIBRARIES = ("matplotlib", "jinja2")  # of the extra `report`


@dataclasses.dataclass(frozen=True)
class Report:
    """All that is shown.

    Attributes:
        not_measured: sentences.
    """

    results: list[Result]
    comparisons: list[Comparison]
    not_measured: list[str]

    @property
    def title(self) -> str:
        """Names of the results."""
        return f"fp4comm {__version__}: {', '.join(result.name for result in self.results)}"

    @property
    def num_wrong(self) -> int:
        """Wrong rows of all measured results."""
        return sum(row.num_wrong or 0 for result in self.results for row in result.rows)

    @property
    def num_checked(self) -> int:
        """Rows whose contents were compared, of all measured results."""
        return sum(row.num_checked or 0 for result in self.results for row in result.rows)


def make(files: Sequence[Path]) -> Report:
    """Read files and put them together.

    Raises:
        ReportError: naming the files that are no results.
    """
    results, topologies = read(files)
    compared, unused = comparisons(results, topologies)
    return Report(results, compared, [*gaps(results, compared), *unused])


def check_libraries() -> None:
    """Refuse to draw where the extra is not installed.

    Raises:
        ReportError: naming the extra.
    """
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ReportError(
                f"report needs {name} for pages and pictures; pip install 'fp4comm[report]'"
            ) from error


# In words


def lines(report: Report) -> list[str]:
    """Say what each result is and shows, and what was not measured."""
    told = [
        f"{result.name}: {about(result)}. {'; '.join(findings(result))}"
        for result in report.results
    ]
    for one in report.comparisons:
        worst = max(one.pairs, key=lambda pair: abs(pair.error))
        told.append(
            f"{one.measured.name} against {one.predicted.machine}: {len(one.pairs)} rows, largest"
            f" error {100 * worst.error:+.0f} % ({worst.measured.name})"
        )
    return [*told, "not measured:", *(f"  {text}" for text in report.not_measured)]


def about(result: Result) -> str:
    """What was measured or predicted, and on what."""
    setup = result.setup
    tokens = "mixed numbers of" if setup.tokens is None else f"{setup.tokens:,}"
    nodes = "" if setup.nodes is None else f" on {_counted(setup.nodes, 'node')}"
    where = result.machine
    if result.is_measured:
        where = f"{where}, {result.content['transport']}, commit {result.commit}"
    routing = result.content["workload" if result.is_measured else "routing"]
    return (
        f"{_counted(setup.ranks, 'rank')}{nodes}, {where}; {tokens} tokens a rank, hidden"
        f" {setup.hidden}, top-{setup.topk} of {setup.experts} experts, arrive {setup.arrive};"
        f" {routing}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def findings(result: Result) -> list[str]:
    """How much faster each dispatch is, and how many rows were wrong."""
    told = []
    for row in (row for row in result.rows if row.op == "dispatch"):
        ratios = (("bf16", result.vs_bf16(row)), ("plain", result.vs_plain(row)))
        over = [f"{ratio:.2f}x {base}" for base, ratio in ratios if ratio is not None]
        if row.dispatch != "bf16" and over:
            told.append(f"{row.name}: {', '.join(over)}")
    if result.is_measured:
        told.append(verdict(sum(row.num_wrong or 0 for row in result.rows)))
    return told


# JSON


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "command": "report",
        "results": [
            {"name": result.name, "machine": result.machine, "commit": result.commit}
            | {"setup": dataclasses.asdict(result.setup), "rows": _json_rows(result)}
            for result in report.results
        ],
        "comparisons": [
            {
                "measured": one.measured.name,
                "predicted": one.predicted.name,
                "rows": [
                    {
                        "row": pair.measured.name,
                        "measured_us": pair.measured.us,
                        "predicted_us": pair.predicted.us,
                        "error": pair.error,
                    }
                    for pair in one.pairs
                ],
            }
            for one in report.comparisons
        ],
        "not_measured": report.not_measured,
        "wrong_rows": report.num_wrong,
    }


def _json_rows(result: Result) -> list[dict[str, Any]]:
    return [
        {**row.content, "vs_bf16": result.vs_bf16(row), "vs_plain": result.vs_plain(row)}
        for row in result.rows
    ]


# The page

Cell = Callable[[Result, Row], Any]
COLUMNS: tuple[tuple[str, str, str, Cell], ...] = (  # name, unit, format, value
    ("result", "", "s", lambda result, row: result.name),
    ("operation", "", "s", lambda result, row: row.name),
    ("median", "us", ",.1f", lambda result, row: row.us),
    ("p90", "us", ",.1f", lambda result, row: row.p90_us),
    ("vs bf16", "x", ".2f", lambda result, row: result.vs_bf16(row)),
    ("vs plain", "x", ".2f", lambda result, row: result.vs_plain(row)),
    ("#wrong", "rows", ",d", lambda result, row: row.num_wrong),
    ("checked", "rows", ",d", lambda result, row: row.num_checked),
    ("busbw", "GB/s", ".3f", lambda result, row: row.busbw_gbs),
    ("algbw", "GB/s", ".3f", lambda result, row: row.algbw_gbs),
    ("bf16 eq.", "GB/s", ".3f", lambda result, row: row.bf16_gbs),
    ("wire", "B", ",d", lambda result, row: _bytes(row, "sent")),
    ("to others", "B", ",d", lambda result, row: _bytes(row, "sent_to_others")),
    ("between nodes", "B", ",d", lambda result, row: row.content.get("between_bytes")),
    ("bottleneck", "", "s", lambda result, row: row.content.get("bottleneck")),
    ("machine", "", "s", lambda result, row: result.machine),
    ("commit", "", "s", lambda result, row: result.commit if result.is_measured else None),
)


def _bytes(row: Row, name: str) -> Any:
    return row.content.get("wire_bytes", {}).get(name)


@dataclasses.dataclass(frozen=True)
class Table:
    """Heads with unit and whether numbers stand below, and cells.

    A cell is a text, and the number as the file has it or None.
    """

    heads: list[tuple[str, str, bool]]
    rows: list[list[tuple[str, Any]]]


def all_rows(results: Sequence[Result]) -> Table:
    """Rows of all results; columns that none of them has are left out."""
    pairs = [(result, row) for result in results for row in result.rows]
    columns = [c for c in COLUMNS if any(c[3](*pair) is not None for pair in pairs)]
    rows = [[_cell(form, value(*pair)) for _, _, form, value in columns] for pair in pairs]
    return Table([(name, unit, form != "s") for name, unit, form, _ in columns], rows)


def _cell(form: str, value: Any) -> tuple[str, Any]:
    if value is None:
        return "-", None
    return (str(value), None) if form == "s" else (format(value, form), value)


def every_number(result: Result) -> Table:
    """Rows as the file has them, nested names joined by dots."""
    rows = [dict(_flat(row.content)) for row in result.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[(row[name], None) if name in row else ("-", None) for name in names] for row in rows]
    return Table([(name, "", False) for name in names], cells)


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [pair for key, v in items for pair in _flat(v, f"{name}.{key}".lstrip("."))]
    return [(name, value if isinstance(value, str) else json.dumps(value))]


def write_html(report: Report, file: Path) -> None:
    """Write a page that needs nothing else: styles and pictures are in it."""
    import jinja2
    import markupsafe

    loader = jinja2.PackageLoader("fp4comm.report", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    made = charts.charts(report.results, report.comparisons)
    page = environment.get_template("page.html").render(
        report=report,
        charts=[(c, markupsafe.Markup(charts.as_svg(c, n))) for n, c in enumerate(made)],
        colours=charts.COLOURS,
        about=about,
        findings=findings,
        all_rows=all_rows(report.results),
        every_number=every_number,
    )
    file.write_text(page, encoding="utf-8")


def write_png(report: Report, file: Path) -> None:
    """Write all pictures as one."""
    places = dict.fromkeys(
        f"{result.machine}, commit {result.commit}" if result.is_measured else result.machine
        for result in report.results
    )
    title = f"{report.title}\n{'; '.join(places)}"
    charts.write_png(charts.charts(report.results, report.comparisons), title, file)
