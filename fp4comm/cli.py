"""The command line: ``fp4comm info | demo | bench | plan | report``."""

from __future__ import annotations

import datetime
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console

from fp4comm import agreement, launch, machine, progress, topology
from fp4comm._version import __version__
from fp4comm.bench import calibration_file, environment
from fp4comm.bench import demo as demo_page
from fp4comm.bench import report as bench_report
from fp4comm.bench.calibrate import Calibration, calibrate
from fp4comm.bench.cases import Case, cases_of
from fp4comm.bench.environment import Environment
from fp4comm.bench.recorded import Recorded
from fp4comm.bench.rows import OVERLAP, Report
from fp4comm.bench.run import measure_each
from fp4comm.bench.settings import Settings
from fp4comm.bench.wires import separated, wires_of
from fp4comm.bench.workload import MOST_SKEW
from fp4comm.files import write_json, writing
from fp4comm.formats import FORMATS
from fp4comm.launch import UserError
from fp4comm.options import (
    OUTPUT,
    FileCommand,
    Finite,
    count_options,
    data_option,
    expect_without_others,
    given_options,
    json_option,
    routing_option,
    run_options,
    several_option,
    wire_options,
)
from fp4comm.predict import plan as predicting
from fp4comm.predict import report as predict_report
from fp4comm.predict.loads import ROUTES
from fp4comm.report import page as report_page
from fp4comm.report.results import ReportError
from fp4comm.running import run_command, run_on_ranks
from fp4comm.transport import Transport

DEMO_RANKS, BENCH_RANKS = 4, 2  # threads of this process, where no launcher started any
DEMO_FILES = [machine.CHECKOUT / "tests" / "data" / f"layer{n}.safetensors" for n in (0, 1, 7)]
PLAN_COLUMNS = 160
MAY_DIFFER = ("json_file", "link_gbs", "timeout_s", "transport_name")  # between ranks of a run


def main() -> None:
    """Run the command line."""
    run_command(cli)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fp4comm")
def cli() -> None:
    """Quantized all-to-all for Mixture-of-Experts models."""


CALIBRATE_OPTIONS = ("topology_file", "transport_name", "device", "ranks", "timeout_s")
RUN_SETTINGS = ("warmup", "iterations", "timeout_s", "device")


@cli.command()
@json_option
def info(json_file: Path | None) -> None:
    """Show versions, and which codecs and transports are usable here."""
    content = machine.everything()
    if launch.launched_rank() == 0:
        click.echo("\n".join(machine.as_lines(content, launch.launched_ranks())))
        if json_file is not None:
            write_json(json_file, {"command": "info", **content})


@cli.command(cls=FileCommand)
@several_option("tokens", "Tokens of a rank.  [default: 1024, or all of the data]")
@several_option("hidden", "Elements of a token.  [default: 2048]")
@several_option("experts", "On all ranks together.  [default: 64, or as --routing has]")
@several_option("topk", "Experts of a token.  [default: 8, or as --routing has]")
@wire_options
@several_option(
    "skew",
    "The n-th most popular expert is drawn in proportion to n^-SKEW, 0 to"
    f" {MOST_SKEW:g}; or: balanced.  [default: 0]",
)
@click.option("--seed", type=int, default=0, show_default=True)
@data_option("Take x, topk_idx and topk_weights from a safetensors file; repeat for several.")
@routing_option
@click.option(
    "--link-gbs",
    type=Finite(min=0, min_open=True),
    help="Peak of the link in 10^9 B/s; marks rows above it.",
)
@click.option(
    "--plain/--no-plain",
    default=True,
    show_default=True,
    help="Also measure a plain all-to-all of BF16 rows, one copy per expert.",
)
@several_option(
    "also", "Measure these, too: round_trip; with --device cuda overlap (with a matrix product)."
)
@several_option("route", "flat, two_hop or auto.  [default: flat]")
@click.option(
    "--ranks-per-node",
    type=int,
    help="Consecutive ranks that are a node.  [default: those of a host, or of an NCCL_HOSTID]",
)
@click.option("--check-all", is_flag=True, help="Check the contents of all rows, not of a sample.")
@click.option(
    "--calibrate",
    "topology_file",
    help="Measure links and kernels instead, and write them here as a topology for plan.",
    **OUTPUT,
)
@count_options(warmup=5, iterations=20)
@run_options
@click.pass_context
def bench(context: click.Context, **options: Any) -> None:
    """Measure dispatch and combine, and check the rows.

    Under mpirun, torchrun or srun on their ranks; alone on --ranks threads of this process.  Every
    combination of tokens, hidden, experts, topk and skew is a case; cases run one after the other.
    """
    if options["topology_file"] is not None:
        _calibrate(context)
        return
    own = "combine", "arrive", "alignment", "check_all", "plain", "ranks_per_node"

    def settings() -> Settings:
        given = {name: options[name] for name in (*own, *RUN_SETTINGS)}
        routes = separated(options["route"], str) or ("flat",)
        also = separated(options["also"], str)
        if OVERLAP in also and options["device"] == "cpu":
            raise ValueError(
                "also: expected overlap with device cuda alone, got cpu (there the exchange is over"
                " before a product beside it begins)"
            )
        return Settings(wires_of(options["wire"]), routes=routes, also=also, **given)

    def view(where: Environment, settings: Settings, cases: Sequence[Case]) -> View:
        return bench_report.Table(where, settings, cases, options["link_gbs"])

    _run(context, BENCH_RANKS, settings, lambda ranks: cases_of(options, ranks), view)


def _calibrate(context: click.Context) -> None:
    """Measure links and kernels on all ranks, and write the topology on one."""
    options, command = context.params, _command(context)
    expect_without_others("calibrate", context, CALIBRATE_OPTIONS)
    file = options["topology_file"]
    if file.suffix != ".toml" or not file.stem.isprintable():
        raise click.UsageError(f"calibrate: expected a file NAME.toml, got {file}")

    def on_rank(group: Transport) -> tuple[Environment, Calibration]:
        device, timeout_s = options["device"], options["timeout_s"]
        agreement.same_on_all(group, {"command": "bench --calibrate"})
        where = environment.of_run(command, group, device)
        with progress.shown(is_shown=group.rank == 0) as tell:
            return where, calibrate(group, device, timeout_s, tell)

    (where, found), prints = run_on_ranks(options, BENCH_RANKS, on_rank)
    if prints:
        machine_ = where.machine
        devices = machine_["cuda_devices"] if options["device"] == "cuda" else [machine_["cpu"]]
        description = f"{where.num_ranks} ranks, {devices[0]}, {where.transport}"
        at = f"{datetime.date.today().isoformat()} with {where.transport}"
        with writing("calibrate", file):
            file.write_text(calibration_file.as_toml(found, file.stem, description, at))
        try:
            topology.load(file)
        except topology.TopologyError as error:
            raise UserError(f"calibrate: measured what no link or kernel does: {error}") from error
        click.echo("\n".join([*calibration_file.summary_lines(found), f"# written: {file}"]))
        sys.stdout.flush()


@cli.command(cls=FileCommand)
@data_option("Other recorded activations than those of the checkout; repeat for several.")
@count_options(warmup=2, iterations=10)
@run_options
@click.pass_context
def demo(context: click.Context, **options: Any) -> None:
    """Send real MoE activations in each wire format and compare: a preset of bench."""

    def settings() -> Settings:
        given = {name: options[name] for name in RUN_SETTINGS}
        return Settings(tuple(FORMATS), check_all=True, **given)

    def view(where: Environment, settings: Settings, _: Sequence[Case]) -> View:
        return demo_page.Page(where, settings)

    _run(context, DEMO_RANKS, settings, lambda ranks: _demo_cases(options, ranks), view)


def _demo_cases(options: dict[str, Any], num_ranks: int) -> list[Case]:
    files = options["data"] or DEMO_FILES
    if not options["data"] and not all(file.is_file() for file in files):
        raise ValueError(
            f"data: expected the recorded activations in {DEMO_FILES[0].parent}, got none (they"
            " are in the repository, not in the installed package; clone it, or give --data FILE)"
        )
    return [Case({}, Recorded(files, num_ranks))]


@cli.command(cls=FileCommand)
@click.option(
    "--topology",
    "topology_name",
    required=True,
    metavar="NAME|FILE",
    help=f"A preset ({', '.join(topology.presets())}) or a TOML file.",
)
@click.option("--nodes", type=int, help="[default: 1, or all that the file lists]")
@click.option("--ranks-per-node", type=int, help="Fewer than the topology has.")
@click.option(
    "--tokens", type=click.IntRange(1), default=4096, show_default=True, help="Of a rank."
)
@click.option("--hidden", type=int, default=7168, show_default=True, help="Elements of a token.")
@click.option("--experts", type=int, help="Of all ranks.  [default: 256, or as --routing has]")
@click.option("--topk", type=int, help="Experts of a token.  [default: 8, or as --routing has]")
@wire_options
@click.option(
    "--route",
    type=click.Choice(("both", *ROUTES)),
    default="both",
    show_default=True,
    help="two_hop: once to each node, there once to each rank.",
)
@click.option("--skew", default="0", show_default=True, help="As bench takes it.")
@click.option(
    "--node-limit",
    type=click.IntRange(1),
    help="Most nodes that a token's experts are on (DeepSeek-V3: 4).",
)
@click.option("--seed", type=int, default=0, show_default=True)
@routing_option
@json_option
def plan(**options: Any) -> None:
    """Predict dispatch and combine on a cluster: by wire format and route, and what limits them."""
    if launch.launched_rank() != 0:
        return
    try:
        predicted = predicting.plan_of(options)
    except ValueError as error:
        raise UserError(error) from error
    rows = predicted.rows()
    click.echo("\n".join(predict_report.header_lines(predicted)))
    console = Console(width=PLAN_COLUMNS, color_system=None, highlight=False)
    console.print(predict_report.table(rows))
    click.echo("\n".join(predict_report.notes(predicted)))
    if options["json_file"] is not None:
        arguments = {n: v.name if isinstance(v, Path) else v for n, v in options.items()}
        arguments["topology_name"] = Path(options["topology_name"]).name
        write_json(options["json_file"], predict_report.as_json(predicted, arguments))


@cli.command(cls=FileCommand)
@click.argument(
    "files",
    type=click.Path(dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
    metavar="FILE...",
)
@click.option("--html", "html_file", help="A page that needs nothing else.", **OUTPUT)
@click.option("--png", "png_file", help="All pictures as one.", **OUTPUT)
@json_option
def report(files: tuple[Path, ...], **outputs: Path | None) -> None:
    """Show results of bench, demo and plan together; FILE may be a topology, to predict with."""
    if launch.launched_rank() != 0:
        return
    page, picture, content = (outputs[f"{name}_file"] for name in ("html", "png", "json"))
    try:
        made = report_page.make(files)
        if page or picture:
            report_page.check_libraries()
    except ReportError as error:
        raise UserError(error) from error
    click.echo("\n".join(report_page.lines(made)))
    if page:
        with writing("html", page):
            report_page.write_html(made, page)
    if picture:
        with writing("png", picture):
            report_page.write_png(made, picture)
    if content:
        write_json(content, report_page.as_json(made))


class View(Protocol):
    """How a run is shown: lines before its cases, of each, and after them."""

    def head(self) -> list[str]:
        """Lines before anything is measured."""
        ...

    def rows(self, case: Case, report: Report) -> list[str]:
        """Lines of a case."""
        ...

    def foot(self, reports: Sequence[Report]) -> list[str]:
        """Lines after all cases."""
        ...


def comparable(options: dict[str, Any]) -> dict[str, Any]:
    """Options that have to be the same on all ranks, by name, files by their content."""
    return {name: _content(options[name]) for name in sorted(options) if name not in MAY_DIFFER}


def _content(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(str(_content(part)) for part in value)
    if not isinstance(value, Path):
        return value
    return f"a file with CRC-32 {zlib.crc32(value.read_bytes()):08x}"


def _run(
    context: click.Context,
    default_ranks: int,
    settings_of: Callable[[], Settings],
    cases_of: Callable[[int], list[Case]],
    view_of: Callable[[Environment, Settings, Sequence[Case]], View],
) -> None:
    """Measure on all ranks, show on one; exit code 1 on all if a row is wrong."""
    options, command = context.params, _command(context)
    name = str(context.info_name)

    def on_rank(group: Transport) -> list[Report]:
        agreement.same_on_all(group, {"command": name})
        settings, cases = agreement.make_on_all(
            group, lambda: (settings_of(), cases_of(group.num_ranks))
        )
        agreement.same_on_all(group, comparable(options))
        where = environment.of_run(command, group, options["device"])
        view = view_of(where, settings, cases)
        reports: list[Report] = []
        with progress.shown(is_shown=group.rank == 0) as tell:
            for report in measure_each(group, [case.workload for case in cases], settings, tell):
                reports.append(report)
                if group.rank == 0:
                    tell.pause()
                    if len(reports) == 1:
                        _print(view.head())
                    _print(view.rows(cases[len(reports) - 1], report))
                    if options["json_file"] is not None:  # after each, since a run is long
                        content = bench_report.as_json(name, options, where, cases, reports)
                        write_json(options["json_file"], content)
        if group.rank == 0:
            _print(view.foot(reports))
        return reports

    reports, prints = run_on_ranks(options, default_ranks, on_rank)
    if any(report.num_wrong for report in reports):
        launch.let_reporter_print(prints)
        sys.exit(1)


def _print(lines: Sequence[str]) -> None:
    """Print lines at once, also into a pipe."""
    for line in lines:
        click.echo(line)
    sys.stdout.flush()


def _command(context: click.Context) -> str:
    """Write the command with the options that were given."""
    words = [str(context.info_name)]
    for option in given_options(context):
        value = context.params.get(str(option.name))
        values = value if isinstance(value, tuple) else (value,)
        words += [f"{option.opts[0]} {v}" if v is not True else option.opts[0] for v in values]
    return " ".join(words)
