"""What fp4comm plan predicts after a calibration, against what fp4comm bench then measures.

    sudo .venv/bin/python benchmarks/plan_against_measured.py [--gbit 1] [--hosts 4] [--ranks 1]
    .venv/bin/python benchmarks/plan_against_measured.py --gbit 0 --ranks 4

Hosts are network namespaces on a switch with shaped links, over torch.distributed's gloo; with
--gbit 0 there is one host, and ranks are processes under mpirun.  The calibration measures hidden
2048, top-8 of 8 experts a rank, uniform; the cases differ from that in every number.  Error is
predicted over measured less 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from one_gpu import ROOT_VARIABLES, mpirun_ranks
from switched_hosts import run_on_hosts, switched_hosts
from two_hosts import Link, check_usable, stop

from fp4comm import machine, topology
from fp4comm.files import read_json, write_json
from fp4comm.options import json_option
from fp4comm.predict.plan import Plan, plan_of

WIRES = "bf16,fp8,mxfp4"
ITERATIONS = {"warmup": 1, "iterations": 7}
AIM = 0.2  # error that is aimed at


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured: none of it as the calibration has it."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    skew: str
    arrive: str

    def scaled(self, share: float) -> Case:
        """The same with a share of the tokens, for slow links."""
        return dataclasses.replace(self, tokens=max(1, round(share * self.tokens)))

    @property
    def options(self) -> list[str]:
        """As fp4comm bench takes them."""
        fields = dataclasses.asdict(self) | ITERATIONS | {"wire": WIRES}
        return [text for name, value in fields.items() for text in (f"--{name}", str(value))]


CASES = (
    Case(1536, 4096, 64, 4, "0", "packed"),
    Case(1536, 4096, 64, 4, "0", "fp8"),
    Case(768, 2880, 48, 6, "1.0", "packed"),
    Case(3072, 1024, 128, 2, "0.5", "fp8"),
    Case(512, 7168, 256, 16, "0", "packed"),
)


def predictions(case: Case, file: Path) -> Plan:
    """Predict a case on a calibrated topology."""
    given = dataclasses.asdict(case)
    defaults = {
        "topology_name": str(file),
        "nodes": topology.load(file).most_nodes,
        "ranks_per_node": None,
        "combine": "bf16",
        "alignment": 128,
        "route": "flat",
        "seed": 0,
        "node_limit": None,
        "routing": None,
    }
    return plan_of({**defaults, **given, "wire": [WIRES]})


def compared(case: Case, plan: Plan, measured: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Put each measured row beside its prediction."""
    rows = {(row.op, row.format): row for row in plan.rows()}
    for row in measured:
        said = rows[row["op"], row["format"]]
        median = row["time"]["median_us"]
        yield {
            **dataclasses.asdict(case),
            "op": row["op"],
            "format": row["format"],
            "of": row["dispatch"],
            "predicted_us": said.us,
            "measured_us": median,
            "p90_us": row["time"]["p90_us"],
            "error": said.us / median - 1,
            "predicted_parts_us": said.parts_us,
            "measured_parts_us": row["parts_us"],
        }


def under_mpirun(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run a Python command on ranks of this machine."""
    environment = {**os.environ, **ROOT_VARIABLES, "OMP_NUM_THREADS": "1"}
    command = [*mpirun_ranks(num_ranks), sys.executable, *arguments]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def line(row: dict[str, Any]) -> str:
    """Show one comparison."""
    shape = f"{row['tokens']}x{row['hidden']} top-{row['topk']} of {row['experts']}"
    name = row["op"] if row["op"] != "combine" else f"combine of {row['of']}"
    return (
        f"  {shape:28} {row['skew']:>5} {row['arrive']:>6} {name:>16} {row['format']:>6}"
        f" {row['predicted_us'] / 1e3:10.2f} {row['measured_us'] / 1e3:10.2f}"
        f" {100 * row['error']:+7.1f} %{'' if abs(row['error']) <= AIM else ' !'}"
    )


@click.command()
@click.option("--gbit", default=1.0, show_default=True, help="Rate of a link; 0: no network.")
@click.option("--hosts", default=4, show_default=True, help="Network namespaces.")
@click.option("--ranks", default=1, show_default=True, help="Of a host.")
@click.option("--mtu", default=1500, show_default=True)
@click.option("--burst-kib", default=256, show_default=True, help="Of the token bucket.")
@click.option("--cases", default=len(CASES), show_default=True, help="The first so many.")
@click.option("--share", default=1.0, show_default=True, help="Of the tokens, for slow links.")
@json_option
def main(
    gbit: float,
    hosts: int,
    ranks: int,
    mtu: int,
    burst_kib: int,
    cases: int,
    share: float,
    json_file: Path | None,
) -> None:
    """Calibrate, measure the cases and compare."""
    link = Link(gbit, burst_kib, mtu, None)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = []
        if gbit:
            check_usable()
            signal.signal(signal.SIGTERM, stop)
            names = stack.enter_context(switched_hosts(hosts, link))

        def run(*arguments: str) -> None:
            command = ["-m", "fp4comm", "bench", *arguments]
            if gbit:
                run_on_hosts(names, ranks, command)
            else:
                under_mpirun(ranks, command)

        calibrated = folder / "calibrated.toml"
        run("--calibrate", str(calibrated))
        for case in [case.scaled(share) for case in CASES[:cases]]:
            result = folder / "result.json"
            run(*case.options, "--json", str(result))
            (content,) = read_json(result)
            for row in compared(case, predictions(case, calibrated), content["rows"]):
                rows.append(row)
                click.echo(line(row))
            if json_file is not None:  # after each, since a run is long
                arguments = {"gbit": gbit, "hosts": hosts if gbit else 1, "ranks": ranks}
                of_run = {"mtu": mtu, "burst_kib": burst_kib, "cases": cases, "share": share}
                content = {
                    "command": "plan_against_measured",
                    "arguments": {**arguments, **of_run, **ITERATIONS},
                    "qdisc": link.qdisc if gbit else None,
                    "transport": "torch (gloo)" if gbit else "mpi",
                    **as_json(rows, calibrated),
                }
                write_json(json_file, content)
    click.echo(summary(rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Say how far predictions are off."""
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= AIM for error in errors)
    return (
        f"# {within} of {len(rows)} within {100 * AIM:.0f} %; median error"
        f" {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %"
    )


def as_json(rows: Sequence[dict[str, Any]], calibrated: Path) -> dict[str, Any]:
    """What was found, and where."""
    return {
        **machine.about(),
        "load": os.getloadavg(),
        "calibration": calibrated.read_text().splitlines(),
        "summary": summary(rows),
        "rows": list(rows),
    }


if __name__ == "__main__":
    main()
