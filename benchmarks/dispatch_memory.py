"""Peak memory of a dispatch against what has to be there: its result and the packed rows it sent.

    python benchmarks/dispatch_memory.py [--tokens 8192] [--hidden 7168] [--json FILE]
    mpirun -n 2 python benchmarks/dispatch_memory.py

Linux: the high-water mark of the resident set (VmHWM), set back through /proc/self/clear_refs
before the call and at the end of each of its parts.  One small dispatch of the same kind comes
first, so that compiled code and threads are no part of the peak.  `needed` is what Dispatched holds
(rows, scales, row_weights, packed rows) and the packed rows sent; the handle (route, slots,
weights) is beside.  Under mpirun or torchrun every rank measures itself, and the one with the
highest ratio is shown; mpirun's ranks on one host share memory, which counts in each.  Results are
checked.

By default blocks from 128 KiB on are mapped one by one and given back when freed, as glibc begins.
glibc moves that limit up to 32 MiB as a process frees such blocks, and keeps smaller ones: what is
resident then depends on what ran before.  --mmap-kib 0 leaves it to that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from fp4comm import AllToAll, Precision, machine
from fp4comm.all_to_all import ARRIVALS
from fp4comm.bench.check import Checker
from fp4comm.bench.clock import gather
from fp4comm.bench.rows import PARTS, RELAY, verdict
from fp4comm.bench.workload import Synthetic
from fp4comm.dispatched import Dispatched
from fp4comm.files import write_json
from fp4comm.formats import FORMATS, WireFormat
from fp4comm.options import json_option
from fp4comm.running import run_command, run_on_ranks
from fp4comm.transport import Transport

ALIGNMENT = 128
MOST = 1.05  # peak over needed that is still fine
M_MMAP_THRESHOLD = -3  # of mallopt
SETTLE_S, SAME_BYTES = 0.1, 1 << 16
TIMEOUT_S = 300.0
SHOWN_PARTS = *(part for part in PARTS["dispatch"] if part != RELAY), "return"


def resident_bytes(name: str) -> int:
    """Read VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise click.ClickException(f"{name}: not in /proc/self/status; this needs Linux")


def reset_peak() -> None:
    """Set the high-water mark back to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def fix_allocator(mmap_kib: int) -> None:
    """Map blocks from this size on one by one; 0 leaves the allocator alone."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if mmap_kib and set_option is not None:  # glibc, musl
        set_option(M_MMAP_THRESHOLD, mmap_kib << 10)


def rest() -> int:
    """Give back what is free, and return the resident bytes once they stay the same.

    A thread of the codec's pool may let go of a kernel's arguments a little after the call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    resident = -1
    while True:
        gc.collect()
        if trim is not None:  # glibc
            trim(0)
        before, resident = resident, resident_bytes("VmRSS")
        if abs(resident - before) < SAME_BYTES:
            return resident
        time.sleep(SETTLE_S)


class PeakOfParts(dict[str, float]):
    """Stands where `AllToAll.timings` does: at the end of each part it reads the peak."""

    def __init__(self) -> None:
        """Start from what is resident."""
        super().__init__()
        self.peaks: dict[str, int] = {}
        reset_peak()

    def __setitem__(self, part: str, seconds: float) -> None:
        """End a part."""
        super().__setitem__(part, seconds)
        self.end(part.split()[-1])

    def end(self, part: str) -> None:
        """Note the peak of a part and begin the next one."""
        self.peaks[part] = max(self.peaks.get(part, 0), resident_bytes("VmHWM"))
        reset_peak()


@dataclasses.dataclass(frozen=True)
class Row:
    """What one dispatch took, on the rank with the highest ratio.

    Attributes:
        wire: dispatch wire format.
        arrive: as `AllToAll` takes it.
        expert_rows: M, padding included.
        result_bytes: rows, scales, row_weights, packed rows received.
        sent_bytes: packed rows sent.
        handle_bytes: what the handle holds beside.
        peak_bytes: above the resting level.
        parts_bytes: the peak within each part, above the resting level.
        num_wrong: rows unlike the reference, on all ranks.
    """

    wire: str
    arrive: str
    expert_rows: int
    result_bytes: int
    sent_bytes: int
    handle_bytes: int
    peak_bytes: int
    parts_bytes: dict[str, int]
    num_wrong: int = 0

    @property
    def needed_bytes(self) -> int:
        """What has to be there at once."""
        return self.result_bytes + self.sent_bytes

    @property
    def ratio(self) -> float:
        """Peak over needed."""
        return self.peak_bytes / self.needed_bytes


def tensors_bytes(*tensors: Any) -> int:
    """Bytes of those that are there."""
    return sum(t.nbytes for t in tensors if t is not None)


def handle_bytes(d: Dispatched) -> int:
    """Bytes of the handle that are not the result's."""
    layout, plan = d.handle.layout, d.handle._plan
    return tensors_bytes(
        layout.slot_rows, layout.weights, plan.place_offsets, plan.places, plan.route
    )


def measure_row(
    group: Transport, workload: Synthetic, wire: str, arrive: str
) -> tuple[Row, Dispatched]:
    """Dispatch once small and once in full, and look at the memory; collective."""
    a2a = AllToAll(
        group,
        num_experts=workload.num_experts,
        hidden=workload.hidden,
        precision=Precision(dispatch=wire),
        arrive=arrive,
        expert_alignment=ALIGNMENT,
    )
    x = workload.rows(group.rank, np.arange(workload.tokens))
    idx, weights = (torch.from_numpy(array) for array in workload.routing(group.rank))
    few = slice(0, max(1, workload.tokens // 64))
    a2a.dispatch(x[few], idx[few], weights[few])
    resting = rest()
    a2a.timings = peaks = PeakOfParts()
    d = a2a.dispatch(x, idx, weights)
    peaks.end("return")
    sent_rows = int(d.handle._plan.send_splits.sum())
    parts = {part: peak - resting for part, peak in peaks.peaks.items()}
    row = Row(
        wire=wire,
        arrive=arrive,
        expert_rows=len(d.row_weights),
        result_bytes=tensors_bytes(
            d.rows, d.scales, d.row_weights, d.packed.payload, d.packed.scales
        ),
        sent_bytes=sent_rows * WireFormat(wire).row_bytes(workload.hidden),
        handle_bytes=handle_bytes(d),
        peak_bytes=max(parts.values()),
        parts_bytes=parts,
    )
    return row, d


def highest(group: Transport, row: Row, num_wrong: int) -> Row:
    """Take the row of the rank with the highest ratio; wrong rows of all."""
    numbers = ("expert_rows", "result_bytes", "sent_bytes", "handle_bytes", "peak_bytes")
    mine = [getattr(row, name) for name in numbers]
    ranks = gather(group, [num_wrong, *mine, *row.parts_bytes.values()])
    own = max(ranks.tolist(), key=lambda r: r[5] / (r[2] + r[3]))
    return dataclasses.replace(
        row,
        **dict(zip(numbers, own[1:6], strict=True)),
        parts_bytes=dict(zip(row.parts_bytes, own[6:], strict=True)),
        num_wrong=int(ranks[:, 0].sum()),
    )


def measure(group: Transport, workload: Synthetic, wires: tuple[str, ...]) -> list[Row]:
    """Measure and check every wire format and arrival; collective."""
    rows = []
    for arrive in ARRIVALS:
        checker = Checker(workload, group.rank, arrive, ALIGNMENT)
        for wire in wires:
            row, d = measure_row(group, workload, wire, arrive)
            num_wrong = checker.dispatch(d, WireFormat(wire)).num_wrong
            rows.append(highest(group, row, num_wrong))
            del d
    return rows


# Showing

COLUMNS = (
    ("format", 6),
    ("arrive", 6),
    ("rows", 7),
    ("result", 8),
    ("sent", 7),
    ("handle", 6),
    ("needed", 8),
    ("peak", 8),
    *((part, 8) for part in SHOWN_PARTS),
    ("ratio", 6),
    ("#wrong", 6),
)


def header_lines(workload: Synthetic, context: dict[str, Any]) -> list[str]:
    """Say how the rows came about."""
    machine_, version = context["machine"], context["versions"]
    lines = [
        f"fp4comm {version['fp4comm']}  dispatch_memory: {context['ranks']} ranks, transport"
        f" {context['transport']}",
        f"{machine_['cpu']}, {machine_['memory_gib']} GiB, {machine_['system']};"
        f" python {version['python']}, torch {version['torch']}, numpy {version['numpy']}",
        f"{workload.name}; {workload.tokens} tokens a rank, hidden {workload.hidden}, top-"
        f"{workload.num_topk} of {workload.num_experts} experts, expert_alignment {ALIGNMENT}",
        f"blocks from {context['arguments']['mmap_kib'] or 'the size glibc chose, in'} KiB on are"
        " mapped one by one",
        "MB = 10^6 bytes, above the resting level; rows: expert rows, padding included",
        "needed: result (rows, scales, row_weights, packed rows received) and packed rows sent",
        "peak of the whole call, then of each part (VmHWM, set back between); ratio: peak / needed",
    ]
    return [f"# {line}" for line in lines]


def row_line(row: Row) -> str:
    """Write a row under the columns."""
    sizes = (row.result_bytes, row.sent_bytes, row.handle_bytes, row.needed_bytes, row.peak_bytes)
    parts = [row.parts_bytes[part] for part in SHOWN_PARTS]
    cells = [row.wire, row.arrive, str(row.expert_rows)]
    cells += [f"{size / 1e6:.1f}" for size in (*sizes, *parts)]
    cells += [f"{row.ratio:.3f}", str(row.num_wrong)]
    aligned = [f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)]
    return f"  {' '.join(aligned)}{' !' if row.ratio > MOST else ''}"


def as_json(rows: list[Row], context: dict[str, Any]) -> dict[str, Any]:
    """Everything about the run, for a file."""
    return {
        "command": "dispatch_memory",
        **context,
        "most_allowed": MOST,
        "wrong_rows": sum(row.num_wrong for row in rows),
        "rows": [
            {**dataclasses.asdict(row), "needed_bytes": row.needed_bytes, "ratio": row.ratio}
            for row in rows
        ],
    }


@click.command()
@click.option("--tokens", default=8192, show_default=True, help="Of a rank.")
@click.option("--hidden", default=7168, show_default=True, help="Elements of a token.")
@click.option("--experts", default=64, show_default=True, help="On all ranks together.")
@click.option("--topk", default=8, show_default=True, help="Experts of a token.")
@click.option("--wire", default=",".join(FORMATS), show_default=True, help="Separated by commas.")
@click.option("--mmap-kib", default=128, show_default=True, help="See above; 0: as it comes.")
@json_option
def main(wire: str, mmap_kib: int, json_file: Path | None, **sizes: int) -> int:
    """Measure the peak memory of dispatch; alone, or on the ranks of mpirun or torchrun."""
    fix_allocator(mmap_kib)

    def on_rank(group: Transport) -> tuple[list[Row], Synthetic, str]:
        shape = [sizes[name] for name in ("tokens", "hidden", "experts", "topk")]
        workload = Synthetic(group.num_ranks, *shape)
        return measure(group, workload, tuple(wire.split(","))), workload, group.name

    how = {"transport_name": "auto", "ranks": None, "timeout_s": TIMEOUT_S, "device": "cpu"}
    (rows, workload, name), prints = run_on_ranks(how, 1, on_rank)
    num_wrong = sum(row.num_wrong for row in rows)
    if prints:
        context = {
            "arguments": {**sizes, "wire": wire, "mmap_kib": mmap_kib},
            **machine.about(),
            "ranks": workload.num_ranks,
            "transport": name,
        }
        names = " ".join(f"{name:>{width}}" for name, width in COLUMNS)
        lines = [*header_lines(workload, context), f"# {names}", *map(row_line, rows)]
        above = sum(row.ratio > MOST for row in rows)
        lines.append(f"# ! above {MOST}: {above} of {len(rows)} rows")
        lines.append(f"# {verdict(num_wrong)}")
        click.echo("\n".join(lines))
        if json_file is not None:
            write_json(json_file, as_json(rows, context))
    return int(num_wrong > 0)


if __name__ == "__main__":
    run_command(main)
