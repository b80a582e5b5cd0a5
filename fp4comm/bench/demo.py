"""The table of ``fp4comm demo``: one column for each wire format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from fp4comm import launch
from fp4comm.bench.cases import Case
from fp4comm.bench.environment import Environment
from fp4comm.bench.report import or_dash
from fp4comm.bench.rows import Report, Row
from fp4comm.bench.settings import Settings
from fp4comm.formats import WireFormat

LOOPBACK = """\
On one machine the wire is a memory copy, so that fewer bytes save little time and FP4 need not win
here: its gain is in the bytes.  On a network, see `fp4comm bench` under mpirun on several hosts."""


COLUMNS = 110  # where the terminal's width is not known


class Page:
    """Lines of the demo; all of them come with its one case.

    Args:
        environment: what it takes place on.
        settings: what is measured.
    """

    def __init__(self, environment: Environment, settings: Settings) -> None:
        """Note them."""
        self._environment, self._settings = environment, settings

    def head(self) -> list[str]:
        """Nothing before the case."""
        return []

    def rows(self, _: Case, report: Report) -> list[str]:
        """Title, table and notes."""
        page = console(COLUMNS)
        with page.capture() as captured:
            page.print(table(report))
        return [
            *title(self._environment, report),
            captured.get().rstrip(),
            *notes(self._environment, report, self._settings),
        ]

    def foot(self, _: Sequence[Report]) -> list[str]:
        """Nothing after the case."""
        return []


def console(columns: int) -> Console:
    """Plain, of so many columns, without a terminal or where mpirun shows ranks one of its own."""
    if launch.launched_ranks() > 1 or not sys.stdout.isatty():
        return Console(width=columns, color_system=None, highlight=False)
    return Console(highlight=False)


def title(environment: Environment, report: Report) -> list[str]:
    """Say what was sent where."""
    return [
        f"fp4comm {environment.versions['fp4comm']}: {environment.num_ranks} ranks on"
        f" {environment.num_hosts} host{'s' * (environment.num_hosts > 1)}, transport"
        f" {environment.transport}",
        f"{report.workload}: {sum(report.num_tokens)} tokens, hidden {report.hidden}, top-"
        f"{report.num_topk} of {report.num_experts} experts",
    ]


def notes(environment: Environment, report: Report, settings: Settings) -> list[str]:
    """Say how to read the table, and whether all was right."""
    lines = [
        f"MB = 10^6 bytes, to the own rank included.  Times: slowest rank, median of"
        f" {settings.iterations} calls; exchange includes",
        "the wait for slower ranks.  Experts got FP8 rows, also from the bf16 wire.",
    ]
    if settings.device == "cuda":
        lines.append("On a GPU parts are timed one by one, in further calls, and add up to more.")
    if environment.num_hosts == 1:
        lines.append(LOOPBACK)
    num_checked = sum(row.num_checked for row in report.rows)
    verdict = "OK" if report.num_wrong == 0 else "FAILED"
    lines.append(
        f"{verdict}: {report.num_wrong} wrong of {num_checked:,} rows, compared byte for byte with"
        " fp4comm.reference"
    )
    return lines


def table(report: Report) -> Table:
    """One column for each wire format."""
    dispatches = [row for row in report.rows if row.op == "dispatch"]
    combines = [row for row in report.rows if row.op == "combine"]
    made = Table(box=box.ASCII, pad_edge=True)
    made.add_column("wire format", no_wrap=True)
    for row in dispatches:
        made.add_column(row.format, justify="right", no_wrap=True)

    def add(label: str, rows: Sequence[Row], cell: Callable[[Row], str], *, end: bool) -> None:
        made.add_row(label, *map(cell, rows), end_section=end)

    add("wire rows sent, all ranks", dispatches, lambda r: f"{r.wire_rows.total:,}", end=False)
    add("  to other ranks", dispatches, lambda r: f"{r.wire_rows.total_to_others:,}", end=True)
    add("bytes on the wire, MB", dispatches, lambda r: _mb(r.wire_bytes.total), end=False)
    add("  rows", dispatches, lambda r: _mb(_payload_bytes(r, report)), end=False)
    add(
        "  route (experts, weights)",
        dispatches,
        lambda r: _mb(r.wire_bytes.total - _payload_bytes(r, report)),
        end=False,
    )
    add(
        "  of these to other ranks",
        dispatches,
        lambda r: _mb(r.wire_bytes.total_to_others),
        end=False,
    )
    add("  times smaller than bf16", dispatches, lambda r: _smaller(r, dispatches), end=False)
    add("one copy per expert instead, MB", dispatches, lambda r: _mb(r.expert_bytes), end=True)
    for op, rows in (("dispatch", dispatches), ("combine", combines)):
        wires = "/".join(dict.fromkeys(row.format for row in rows))
        label = op if op == "dispatch" else f"{op} ({wires} wire)"
        add(f"{label}, ms", rows, lambda r: _ms(r.time.median_us), end=False)
        for part in rows[0].parts_us:
            add(
                f"  {part}",
                rows,
                lambda r, part=part: _ms(r.parts_us[part]),  # type: ignore[misc]
                end=part == list(rows[0].parts_us)[-1],
            )
    add("SQNR of what experts got, dB", dispatches, lambda r: or_dash(r.sqnr_db, ".1f"), end=False)
    add("wrong rows, dispatch", dispatches, _wrong, end=False)
    add("wrong rows, combine", combines, _wrong, end=False)
    return made


def _payload_bytes(row: Row, report: Report) -> int:
    return row.wire_rows.total * WireFormat(row.format).row_bytes(report.hidden)


def _smaller(row: Row, rows: Sequence[Row]) -> str:
    base = next((r.wire_bytes.total for r in rows if r.format == "bf16"), None)
    return "-" if base is None else f"{base / max(row.wire_bytes.total, 1):.2f}x"


def _wrong(row: Row) -> str:
    return f"{row.num_wrong} of {row.num_checked:,}"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f}"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.2f}"
