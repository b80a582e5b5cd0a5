"""How measurements are shown: rows as nccl-tests prints them, the table of the demo, JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fp4comm.bench.rows import Report, Row
from fp4comm.bench.run import Settings
from fp4comm.formats import WireFormat

LOOPBACK = """\
On one machine the wire is a memory copy, so that fewer bytes save little time and FP4 need not win
here: its gain is in the bytes.  On a network, see `fp4comm bench` under mpirun on several hosts."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: its name; not written to JSON.
        nccl_host: the name that NCCL_HOSTID gives it instead, for ranks of one host that are to
            talk as if they were on several; empty without.
        gpu: what identifies the GPU; empty on a CPU.
    """

    host: str
    nccl_host: str = ""
    gpu: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a run took place on.

    Attributes:
        command: name and the options that were given.
        transport: its name, and the library below it.
        places: where each rank runs.
        git: commit of the code, and whether files differ from it; None if unknown.
    """

    command: str
    num_ranks: int
    transport: str
    places: list[Place]
    machine: dict[str, Any]
    versions: dict[str, str | None]
    git: dict[str, Any] | None = None

    @property
    def num_hosts(self) -> int:
        """Different hosts."""
        return len({place.host for place in self.places})

    @property
    def num_nodes(self) -> int:
        """What NCCL takes for different hosts."""
        return len({(place.host, place.nccl_host) for place in self.places})

    @property
    def num_gpus(self) -> int:
        """Different GPUs that ranks work on; 0 on CPUs."""
        return len({(place.host, place.gpu) for place in self.places if place.gpu})


def header_lines(environment: Environment, report: Report, settings: Settings) -> list[str]:
    """Say how the rows came about."""
    version, machine_ = environment.versions, environment.machine
    devices = ", ".join(machine_["cuda_devices"]) or "none"
    named = ("python", "torch", "numba") if settings.device == "cpu" else ("python", "torch")
    libraries = ", ".join(f"{name} {version[name]}" for name in named)
    lines = [
        f"fp4comm {version['fp4comm']}  {environment.command}",
        f"ranks {environment.num_ranks}, {_where(environment)}, transport {environment.transport}",
        f"{machine_['cpu']}, {machine_['usable_cores']} of {machine_['cores']} cores,"
        f" {machine_['kernel_threads']} kernel threads a rank, CUDA devices {devices}; {libraries}",
        f"{report.workload}; hidden {report.hidden}, top-{report.num_topk} of"
        f" {report.num_experts} experts",
        f"arrive {settings.arrive}, expert_alignment {settings.alignment}; {settings.warmup}"
        f" warm-up, {settings.iterations} timed, wire formats in turn; caches not flushed",
        "plain: all-to-all of BF16 rows, one copy per expert, in the order that they come; a"
        " combine row",
        "  belongs to the dispatch row above it",
        *TIMED[settings.device],
        "busiest rank: sends most to others; wire rows, wire B: all it sends, to itself and route"
        " included",
        "between B, inside B: most that a rank sends to other nodes, and to others of its node; by"
        " both hops",
        "bf16 B: the same rows in bf16; algbw: wire B / median; busbw: its bytes to other ranks /"
        " median",
        "GB/s = 10^9 B/s; vs bf16: times faster than the same op of the bf16 dispatch; vs plain:"
        " than plain",
        f"#wrong: rows unlike fp4comm.reference, of all ranks; contents of"
        f" {report.num_tokens_checked} of {sum(report.num_tokens)} tokens are",
        "  compared byte for byte; counts, places, weights and padding of all",
    ]
    if "two_hop" in settings.routes and all(row.route == "flat" for row in report.rows):
        lines.append("route: on one node every route is the flat one; see --ranks-per-node")
    return [f"# {line}" for line in lines]


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


def _where(environment: Environment) -> str:
    """Name the hosts, and the virtual nodes and GPUs on them if that says more."""
    hosts = _counted(place.host for place in environment.places)
    lines = [f"hosts {hosts}"]
    if environment.num_nodes > environment.num_hosts:
        lines.append(f"virtual nodes {_counted(p.nccl_host for p in environment.places)}")
    if environment.num_gpus:
        lines.append(f"{environment.num_gpus} GPU{'s' * (environment.num_gpus > 1)}")
    return ", ".join(lines)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} x{n}" for name, n in collections.Counter(names).items())


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}..{high}"


Cell = Callable[[Row, Report], str]
COLUMNS: tuple[tuple[str, str, int, Cell], ...] = (
    ("op", "", 8, lambda row, _: row.op),
    ("format", "", 6, lambda row, _: row.format),
    ("route", "", 7, lambda row, _: row.route),
    ("tokens", "(/rank)", 8, lambda row, report: _range(report.num_tokens)),
    ("wire rows", "(rows)", 9, lambda row, _: str(row.wire_rows.sent)),
    ("wire B", "(B)", 11, lambda row, _: str(row.wire_bytes.sent)),
    ("between B", "(B)", 11, lambda row, _: str(row.between_bytes)),
    ("inside B", "(B)", 11, lambda row, _: str(row.inside_bytes)),
    ("bf16 B", "(B)", 11, lambda row, _: str(row.bf16_bytes)),
    ("median", "(us)", 9, lambda row, _: f"{row.time.median_us:.1f}"),
    ("p90", "(us)", 9, lambda row, _: f"{row.time.p90_us:.1f}"),
    ("algbw", "(GB/s)", 7, lambda row, _: f"{row.algbw_gbs:.3f}"),
    ("busbw", "(GB/s)", 7, lambda row, _: f"{row.busbw_gbs:.3f}"),
    ("vs bf16", "(x)", 7, lambda row, report: _or_dash(row.speedup_in(report.rows), ".2f")),
    ("vs plain", "(x)", 8, lambda row, report: _or_dash(_vs_plain(row, report), ".2f")),
    ("#wrong", "(rows)", 6, lambda row, _: str(row.num_wrong)),
)


def _vs_plain(row: Row, report: Report) -> float | None:
    return row.speedup_over_plain(report.rows)


def row_lines(report: Report, link_gbs: float | None = None) -> list[str]:
    """Two header lines, a line for each row, and what is to be said about them.

    Args:
        report: what was measured.
        link_gbs: peak of the link in GB/s; a row above it is marked.
    """
    names = " ".join(f"{name:>{width}}" for name, _, width, _ in COLUMNS)
    units = " ".join(f"{unit:>{width}}" for _, unit, width, _ in COLUMNS)
    lines = [f"# {names}", f"# {units}"]
    too_fast = 0
    for row in report.rows:
        cells = " ".join(f"{cell(row, report):>{width}}" for _, _, width, cell in COLUMNS)
        is_above = is_above_link(row, link_gbs)
        too_fast += is_above
        lines.append(f"  {cells}{' !' if is_above else ''}")
    lines.append(
        f"# rank 0 compiled kernels, or loaded them, in {report.compile_s:.1f} s before all calls;"
        " other processes load them in their first"
    )
    for op in dict.fromkeys(row.op for row in report.rows):
        first = [f"{r.dispatch} {r.time.first_us / 1e3:.1f}" for r in report.rows if r.op == op]
        lines.append(f"# first {op} calls, not in the rows (ms): {', '.join(first)}")
    if too_fast:
        lines.append(
            f"# ! {too_fast} rows above the stated link peak of {link_gbs} GB/s: do not believe"
            " them"
        )
    return lines


def is_above_link(row: Row, link_gbs: float | None) -> bool:
    """Tell whether a row claims more than the link can carry."""
    return link_gbs is not None and row.busbw_gbs > link_gbs


def verdict_line(report: Report) -> str:
    """Say how many rows were wrong."""
    verdict = "OK" if report.num_wrong == 0 else "FAILED"
    return f"# wrong rows: {report.num_wrong} {verdict}"


# Demo


def demo_title(environment: Environment, report: Report) -> list[str]:
    """Say what was sent where."""
    return [
        f"fp4comm {environment.versions['fp4comm']}: {environment.num_ranks} ranks on"
        f" {environment.num_hosts} host{'s' * (environment.num_hosts > 1)}, transport"
        f" {environment.transport}",
        f"{report.workload}: {sum(report.num_tokens)} tokens, hidden {report.hidden}, top-"
        f"{report.num_topk} of {report.num_experts} experts",
    ]


def demo_notes(environment: Environment, report: Report, settings: Settings) -> list[str]:
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


def demo_table(report: Report) -> Table:
    """One column for each wire format."""
    dispatches = [row for row in report.rows if row.op == "dispatch"]
    combines = [row for row in report.rows if row.op == "combine"]
    table = Table(box=box.ASCII, pad_edge=True)
    table.add_column("wire format", no_wrap=True)
    for row in dispatches:
        table.add_column(row.format, justify="right", no_wrap=True)

    def add(label: str, rows: Sequence[Row], cell: Callable[[Row], str], *, end: bool) -> None:
        table.add_row(label, *map(cell, rows), end_section=end)

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
    add("SQNR of what experts got, dB", dispatches, lambda r: _or_dash(r.sqnr_db, ".1f"), end=False)
    add("wrong rows, dispatch", dispatches, _wrong, end=False)
    add("wrong rows, combine", combines, _wrong, end=False)
    return table


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


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# JSON


def as_json(
    command: str, arguments: dict[str, Any], environment: Environment, report: Report
) -> dict[str, Any]:
    """Everything about a run, for a file."""
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write strict JSON: null where a number is not finite."""
    text = json.dumps(_finite(content), indent=1, allow_nan=False, default=str)
    path.write_text(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
