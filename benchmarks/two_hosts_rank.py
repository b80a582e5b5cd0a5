"""What a rank of two_hosts.py does: measure plain sockets, then each wire format, over the link.

Plain sockets are the yardstick: one TCP connection that sends both ways at once, as many bytes as a
BF16 dispatch.  They and the wire formats take turns within an iteration.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist

from fp4comm import machine, transport
from fp4comm.bench.check import Checker
from fp4comm.bench.clock import gather
from fp4comm.bench.operations import Run
from fp4comm.bench.rows import PARTS, Report, Row, bandwidth_gbs, row_bytes, verdict
from fp4comm.bench.run import compile_first, report_of
from fp4comm.bench.settings import Settings
from fp4comm.bench.workload import Synthetic
from fp4comm.files import write_json
from fp4comm.formats import FORMATS, WireFormat
from fp4comm.transport import Transport

ARRIVALS = ("packed", "fp8")
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 3.2  # targets
CHUNK = 1 << 20
PLAIN = "plain sockets"


class Sockets:
    """One plain TCP connection between the two ranks."""

    def __init__(self, group: Transport) -> None:
        """Connect; rank 0 listens."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
        self._group = group
        listening = socket.create_server((address, port)) if group.rank == 0 else None
        gather(group, [0], PLAIN)
        if listening is None:
            self._socket = socket.create_connection((address, port))
        else:
            self._socket, _ = listening.accept()
            listening.close()

    def both_ways_gbs(self, num_bytes: int) -> float:
        """Send num_bytes each way at once: GB/s a direction, by the slower rank."""
        gather(self._group, [0], PLAIN)
        ranks_ns = gather(self._group, [self._exchange_ns(num_bytes)], PLAIN)
        return num_bytes / int(ranks_ns.max())

    def congestion_control(self) -> str:
        """Name TCP's congestion control."""
        name = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return name.rstrip(b"\0").decode()

    def _exchange_ns(self, num_bytes: int) -> int:
        out, into = bytes(num_bytes), memoryview(bytearray(num_bytes))
        sender = threading.Thread(target=self._socket.sendall, args=(out,))
        start = time.perf_counter_ns()
        sender.start()
        while into:
            into = into[self._socket.recv_into(into[:CHUNK]) :]
        sender.join()
        return time.perf_counter_ns() - start


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that was measured.

    Attributes:
        reports: by arrival.
        sockets_gbs: each run of the yardstick, GB/s a direction.
        congestion_control: TCP's, of its connection.
    """

    reports: dict[str, Report]
    sockets_gbs: list[float]
    congestion_control: str

    @property
    def yardstick_gbs(self) -> float:
        """Median of the plain sockets."""
        return statistics.median(self.sockets_gbs)

    @property
    def num_wrong(self) -> int:
        """Wrong rows of all operations."""
        return sum(report.num_wrong for report in self.reports.values())

    def exchange_share(self, row: Row) -> float:
        """Speed of the row's exchange as a share of plain sockets."""
        speed = bandwidth_gbs(row.wire_bytes.sent_to_others, row.parts_us["exchange"])
        return speed / self.yardstick_gbs

    def call_share(self, row: Row) -> float:
        """Speed of the whole call as a share of plain sockets."""
        return row.busbw_gbs / self.yardstick_gbs

    def targets(self) -> dict[str, bool]:
        """Tell which targets are met."""
        rows = [row for row in self.reports["packed"].rows if row.op == "dispatch"]
        shares = {
            f"{row.format} exchange at least {LEAST_SHARE} of plain sockets": (
                self.exchange_share(row) >= LEAST_SHARE
            )
            for row in rows
        }
        speedup = next(row for row in rows if row.format == "mxfp4").speedup_in(rows) or 0.0
        return {f"mxfp4 at least {LEAST_SPEEDUP}x bf16": speedup >= LEAST_SPEEDUP, **shares}


def measure_all(group: Transport, workload: Synthetic, warmup: int, iterations: int) -> Result:
    """Measure plain sockets and each arrival; collective."""
    sockets = Sockets(group)
    speeds: list[float] = []
    reports = {}
    for arrive in ARRIVALS:
        settings = Settings(tuple(FORMATS), arrive=arrive, warmup=warmup, iterations=iterations)
        reports[arrive], own = measure_arrival(group, workload, settings, sockets)
        speeds += own
    return Result(reports, speeds, sockets.congestion_control())


def measure_arrival(
    group: Transport, workload: Synthetic, settings: Settings, sockets: Sockets
) -> tuple[Report, list[float]]:
    """Measure plain sockets and the wire formats in turn, as `measure_each` does."""
    compile_s = compile_first(group, settings)
    checker = Checker(workload, group.rank, settings.arrive, settings.alignment)
    runs = [Run(group, workload, settings, wire, checker) for wire in settings.wires]
    x = workload.rows(group.rank, np.arange(workload.tokens))
    inputs = x, *map(torch.from_numpy, workload.routing(group.rank))
    bf16_bytes = workload.tokens * row_bytes(WireFormat("bf16"), workload.hidden)
    last = settings.warmup + settings.iterations - 1
    speeds = []
    for i in range(last + 1):
        speeds.append(sockets.both_ways_gbs(bf16_bytes))
        for run in runs:
            run.once(inputs, check_result=i == last)
    rows = [row for run in runs for row in run.rows()]
    return report_of(workload, checker, rows, compile_s), speeds[settings.warmup :]


# Showing


def header_lines(result: Result, context: dict[str, Any]) -> list[str]:
    """Say how the rows came about."""
    version, machine_, arguments = context["versions"], context["machine"], context["arguments"]
    report = result.reports["packed"]
    low, high = min(result.sockets_gbs), max(result.sockets_gbs)
    lines = [
        f"fp4comm {version['fp4comm']}  two_hosts: 2 ranks in 2 network namespaces, transport torch"
        f" (gloo {version['torch']})",
        f"{machine_['cpu']}, {machine_['cores']} cores, {machine_['usable_cores']} of them and"
        f" {machine_['kernel_threads']} kernel threads a rank; python {version['python']}",
        f"link: veth, {arguments['qdisc']}; mtu {arguments['mtu']}; TCP"
        f" {result.congestion_control}",
        f"plain sockets, one TCP connection both ways at once: {result.yardstick_gbs:.4f} GB/s a"
        f" direction (median of {len(result.sockets_gbs)}, {low:.4f}..{high:.4f}), in turn with"
        " the formats",
        f"{report.workload}; {arguments['tokens']} tokens a rank, hidden {report.hidden}, top-"
        f"{report.num_topk} of {report.num_experts} experts, routing uniform",
        f"{arguments['warmup']} warm-up, {arguments['iterations']} timed, wire formats in turn;"
        " caches not flushed; time: slowest rank in each call, whole call",
        "sent B: payload, scales and route from the busiest rank to the other one; bf16 B: the"
        " same rows in bf16",
        "exch sh, call sh: sent B over the time of the exchange, of the call, as a share of plain"
        " sockets",
        "parts in ms, medians of the slowest rank; exchange includes the wait for the slower rank",
        "vs: times faster than the same op, arrival and all, of the bf16 dispatch",
        f"#wrong: rows unlike fp4comm.reference; contents of {report.num_tokens_checked} of"
        f" {sum(report.num_tokens)} tokens, places and weights of all",
    ]
    return [f"# {line}" for line in lines]


COLUMNS = (
    ("op", "", 8),
    ("arrive", "", 6),
    ("format", "", 6),
    ("of", "", 6),
    ("sent B", "(B)", 9),
    ("bf16 B", "(B)", 9),
    ("median", "(ms)", 7),
    ("p90", "(ms)", 7),
    ("plan", "", 5),
    ("counts", "", 6),
    ("quant", "", 6),
    ("exchange", "", 8),
    ("arrive", "", 6),
    ("reduce", "", 6),
    ("busbw", "(GB/s)", 6),
    ("exch sh", "(1)", 7),
    ("call sh", "(1)", 7),
    ("vs", "(x)", 5),
    ("#wrong", "(rows)", 6),
)
SHOWN_PARTS = tuple(dict.fromkeys(PARTS["dispatch"] + PARTS["combine"]))


def cells(result: Result, arrive: str, row: Row) -> list[str]:
    """Fill the columns."""
    others = row.wire_rows.sent_to_others * (row.bf16_bytes // max(row.wire_rows.sent, 1))
    parts = [f"{row.parts_us[p] / 1e3:.1f}" if p in row.parts_us else "-" for p in SHOWN_PARTS]
    return [
        row.op,
        arrive,
        row.format,
        row.dispatch if row.op == "combine" else "",
        str(row.wire_bytes.sent_to_others),
        str(others),
        f"{row.time.median_us / 1e3:.1f}",
        f"{row.time.p90_us / 1e3:.1f}",
        *parts,
        f"{row.busbw_gbs:.4f}",
        f"{result.exchange_share(row):.3f}",
        f"{result.call_share(row):.3f}",
        f"{row.speedup_in(result.reports[arrive].rows) or 0:.2f}",
        str(row.num_wrong),
    ]


def aligned(values: list[str]) -> str:
    """Write values under their columns."""
    return " ".join(
        f"{value:>{width}}" for value, (_, _, width) in zip(values, COLUMNS, strict=True)
    )


def row_lines(result: Result) -> list[str]:
    """Two header lines, a line for each row, and what is to be said about them."""
    lines = [f"# {aligned([name for name, _, _ in COLUMNS])}"]
    lines += [f"# {aligned([unit for _, unit, _ in COLUMNS])}"]
    for arrive, report in result.reports.items():
        lines += [f"  {aligned(cells(result, arrive, row))}" for row in report.rows]
    for text, holds in result.targets().items():
        lines.append(f"# {text}: {'yes' if holds else 'NO'}")
    return [*lines, f"# {verdict(result.num_wrong)}"]


def as_json(result: Result, context: dict[str, Any]) -> dict[str, Any]:
    """Everything about the run, for a file."""
    rows = [
        {
            "arrive": arrive,
            **dataclasses.asdict(row),
            "busbw_gbs": row.busbw_gbs,
            "exchange_share": result.exchange_share(row),
            "call_share": result.call_share(row),
            "vs_bf16": row.speedup_in(report.rows),
        }
        for arrive, report in result.reports.items()
        for row in report.rows
    ]
    return {
        "command": "two_hosts",
        **context,
        "ranks": 2,
        "transport": "torch (gloo)",
        "tcp_congestion_control": result.congestion_control,
        "sockets_gbs": result.sockets_gbs,
        "sockets_median_gbs": result.yardstick_gbs,
        "workload": result.reports["packed"].workload,
        "tokens_checked": result.reports["packed"].num_tokens_checked,
        "targets": result.targets(),
        "wrong_rows": result.num_wrong,
        "rows": rows,
    }


@click.command()
@click.option("--gbit", type=float, required=True)
@click.option("--mtu", type=int, required=True)
@click.option("--qdisc", required=True)
@click.option("--tokens", type=int, required=True)
@click.option("--hidden", type=int, required=True)
@click.option("--experts", type=int, required=True)
@click.option("--topk", type=int, required=True)
@click.option("--warmup", type=int, required=True)
@click.option("--iterations", type=int, required=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(json_file: Path | None, **arguments: Any) -> None:
    """Be one of the two ranks; two_hosts.py starts them."""
    cores = {int(core) for core in os.environ["CORES"].split(",")}
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        workload = Synthetic(2, *(arguments[n] for n in ("tokens", "hidden", "experts", "topk")))
        Settings(tuple(FORMATS), warmup=arguments["warmup"], iterations=arguments["iterations"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    dist.init_process_group("gloo")
    with transport.open("torch") as group:
        result = measure_all(group, workload, arguments["warmup"], arguments["iterations"])
        is_rank_0 = group.rank == 0
    dist.destroy_process_group()
    if is_rank_0:
        context = {"arguments": arguments, **machine.about()}
        click.echo("\n".join(header_lines(result, context) + row_lines(result)))
        if json_file is not None:
            write_json(json_file, as_json(result, context))
    raise SystemExit(result.num_wrong > 0)


if __name__ == "__main__":
    main()
