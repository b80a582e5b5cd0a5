"""The command line: ``fp4comm info | demo | bench | plan | report``."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import torch
from click.core import ParameterSource
from rich.console import Console

from fp4comm import agreement, launch, machine, topology, transport
from fp4comm._version import __version__
from fp4comm.bench import calibration_file
from fp4comm.bench import report as bench_report
from fp4comm.bench.calibrate import Calibration, calibrate
from fp4comm.bench.report import Environment, Place
from fp4comm.bench.rows import Report
from fp4comm.bench.run import DEVICES, Settings, measure
from fp4comm.bench.wires import separated, wires_of
from fp4comm.bench.workload import MOST_SKEW, Recorded, Synthetic, Workload
from fp4comm.formats import FORMATS
from fp4comm.predict import plan as predicting
from fp4comm.predict import report as predict_report
from fp4comm.predict.loads import ROUTES
from fp4comm.report import page as report_page
from fp4comm.report.results import ReportError
from fp4comm.transport import Transport

DEMO_RANKS, BENCH_RANKS = 4, 2  # threads of this process, where no launcher started any
DEMO_FILES = [machine.CHECKOUT / "tests" / "data" / f"layer{n}.safetensors" for n in (0, 1, 7)]
SYNTHETIC = {"tokens": 1024, "hidden": 2048, "experts": 64, "topk": 8}  # defaults without --data
TABLE_COLUMNS = 110
PLAN_COLUMNS = 160

Option = Callable[[Callable[..., Any]], Callable[..., Any]]
Result = TypeVar("Result")


class UserError(click.ClickException):
    """A mistake of the user's, or a rank that is gone: one line, on one rank; exit code 2."""

    exit_code = 2

    def __init__(self, message: str, is_reporter: bool = True) -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.is_reporter = is_reporter

    def show(self, file: Any = None) -> None:
        """Print on the rank that reports."""
        if self.is_reporter:
            click.echo(f"Error: {self.message}", err=True, file=file)


def main() -> None:
    """Run the command line."""
    run_command(cli)


def run_command(command: click.Command) -> NoReturn:
    """Run a command and exit: errors are one line, on one rank."""
    try:
        code = command(standalone_mode=False)
    except UserError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:  # found before there are ranks, and by all of them
        UserError(error.format_message(), launch.launched_rank() == 0).show()
        code = UserError.exit_code
    except click.Abort:
        sys.stderr.flush()
        os._exit(130)  # ranks on threads may be inside kernels, which an orderly exit waits for
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fp4comm")
def cli() -> None:
    """Quantized all-to-all for Mixture-of-Experts models."""


class Finite(click.FloatRange):
    """A number in a range, and none of ``inf`` and ``nan``, which compare as if they were in it."""

    def convert(self, value: Any, parameter: Any, context: Any) -> float:
        """Refuse them."""
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value}", parameter, context)
        return number


def _writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Any:
    if value is None:
        return None
    if not value.name or not value.absolute().parent.is_dir():
        raise click.BadParameter(f"no such folder: {value.absolute().parent}")
    existed = value.exists()
    try:  # now, not after the whole measurement
        with value.open("a"):
            pass
    except OSError as error:
        raise click.BadParameter(f"cannot be written: {error.strerror}") from error
    if not existed:
        value.unlink(missing_ok=True)  # other ranks try it too
    return value


OUTPUT: dict[str, Any] = {
    "type": click.Path(dir_okay=False, writable=True, path_type=Path),
    "callback": _writable,
    "metavar": "FILE",
}
json_option = click.option(
    "--json", "json_file", help="Also write everything to this file.", **OUTPUT
)


def together(*options: Option) -> Option:
    """Make one of several, which the help shows in this order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


CALIBRATE_OPTIONS = ("topology_file", "transport_name", "device", "ranks", "timeout_s")
RUN_SETTINGS = ("warmup", "iterations", "timeout_s", "device")
run_options = together(  # of all that runs on ranks
    click.option(
        "--transport",
        "transport_name",
        type=click.Choice(("auto", *transport.NAMES)),
        default="auto",
        show_default=True,
        help="auto: mpi under mpirun (with CUDA: nccl), torch under torchrun, else local.",
    ),
    click.option(
        "--device",
        type=click.Choice(DEVICES),
        default="cpu",
        show_default=True,
        help="Where the rows are; cuda: GPU number local rank, modulo the GPUs.",
    ),
    click.option("--ranks", type=int, help="Of the local transport: threads of this process."),
    click.option("--timeout-s", type=float, default=300.0, show_default=True, help="For a peer."),
    json_option,
)
wire_options = together(  # of bench and plan
    click.option(
        "--wire",
        multiple=True,
        help="Wire formats of dispatch; repeat or separate by commas."
        f"  [default: {','.join(FORMATS)}]",
    ),
    click.option("--combine", default="bf16", show_default=True, help="Its wire format, or same."),
    click.option("--arrive", default="fp8", show_default=True, help="fp8, bf16 or packed."),
    click.option(
        "--alignment", type=int, default=128, show_default=True, help="Of expert segments."
    ),
)


def data_option(text: str) -> Option:
    """Add --data."""
    return click.option(
        "--data", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help=text
    )


def count_options(warmup: int, iterations: int) -> Option:
    """Add the numbers of calls."""
    shown: dict[str, Any] = {"type": int, "show_default": True}
    return together(
        click.option("--warmup", default=warmup, help="Untimed calls before, at least 1.", **shown),
        click.option("--iterations", default=iterations, help="Timed calls.", **shown),
    )


@cli.command()
@json_option
def info(json_file: Path | None) -> None:
    """Show versions, and which codecs and transports are usable here."""
    content = machine.everything()
    if launch.launched_rank() == 0:
        click.echo("\n".join(machine.as_lines(content, launch.launched_ranks())))
        if json_file is not None:
            bench_report.write_json(json_file, {"command": "info", **content})


@cli.command()
@click.option("--tokens", type=int, help="Tokens of a rank.  [default: 1024, or all of the data]")
@click.option("--hidden", type=int, help="Elements of a token.  [default: 2048]")
@click.option("--experts", type=int, help="On all ranks together.  [default: 64]")
@click.option("--topk", type=int, help="Experts of a token.  [default: 8]")
@wire_options
@click.option(
    "--skew",
    default="0",
    show_default=True,
    help="The n-th most popular expert is drawn in proportion to n^-SKEW, 0 to"
    f" {MOST_SKEW:g}; or: balanced.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@data_option("Take x, topk_idx and topk_weights from a safetensors file; repeat for several.")
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
@click.option(
    "--route",
    multiple=True,
    help="flat, two_hop or auto; repeat or separate by commas.  [default: flat]",
)
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

    Under mpirun or torchrun on their ranks; alone on --ranks threads of this process.
    """
    if options["topology_file"] is not None:
        _calibrate(context)
        return
    own = "combine", "arrive", "alignment", "check_all", "plain", "ranks_per_node"

    def settings() -> Settings:
        given = {name: options[name] for name in (*own, *RUN_SETTINGS)}
        routes = separated(options["route"]) or ("flat",)
        return Settings(wires_of(options["wire"]), routes=routes, **given)

    def show(environment: Environment, report: Report) -> None:
        lines = bench_report.header_lines(environment, report, settings())
        lines += bench_report.row_lines(report, options["link_gbs"])
        click.echo("\n".join([*lines, bench_report.verdict_line(report)]))

    _run(context, BENCH_RANKS, settings, lambda ranks: _bench_inputs(options, ranks), show)


def _calibrate(context: click.Context) -> None:
    """Measure links and kernels on all ranks, and write the topology on one."""
    options = context.params
    expect_without_others("calibrate", context, CALIBRATE_OPTIONS)

    def on_rank(group: Transport) -> tuple[Environment, Calibration]:
        environment = _environment(context, group)
        progress = _progress if group.rank == 0 else _no_progress
        device, timeout_s = options["device"], options["timeout_s"]
        return environment, calibrate(group, device, timeout_s, progress)

    (environment, found), prints = run_on_ranks(options, BENCH_RANKS, on_rank)
    if prints:
        file, machine_ = options["topology_file"], environment.machine
        devices = machine_["cuda_devices"] if options["device"] == "cuda" else [machine_["cpu"]]
        description = f"{environment.num_ranks} ranks, {devices[0]}, {environment.transport}"
        at = f"{datetime.date.today().isoformat()} with {environment.transport}"
        file.write_text(calibration_file.as_toml(found, file.stem, description, at))
        topology.load(file)
        click.echo("\n".join([*calibration_file.summary_lines(found), f"# written: {file}"]))
        sys.stdout.flush()


def _bench_inputs(options: dict[str, Any], num_ranks: int) -> Workload:
    """Make the inputs that the options name."""
    if not options["data"]:
        sizes = {n: v if options[n] is None else options[n] for n, v in SYNTHETIC.items()}
        tokens, hidden, num_experts, num_topk = sizes.values()
        skew, seed = options["skew"], options["seed"]
        return Synthetic(num_ranks, tokens, hidden, num_experts, num_topk, skew, seed)
    recorded = Recorded(options["data"], num_ranks, options["experts"], options["tokens"])
    for name, found, default in (
        ("hidden", recorded.hidden, None),
        ("topk", recorded.num_topk, None),
        ("skew", "none", "0"),
        ("seed", "none", 0),
    ):
        if options[name] not in (default, found):
            raise ValueError(f"{name}: expected {found} with this data, got {options[name]}")
    return recorded


@cli.command()
@data_option("Other recorded activations than those of the checkout; repeat for several.")
@count_options(warmup=2, iterations=10)
@run_options
@click.pass_context
def demo(context: click.Context, **options: Any) -> None:
    """Send real MoE activations in each wire format and compare: a preset of bench."""

    def settings() -> Settings:
        given = {name: options[name] for name in RUN_SETTINGS}
        return Settings(tuple(FORMATS), check_all=True, **given)

    def show(environment: Environment, report: Report) -> None:
        click.echo("\n".join(bench_report.demo_title(environment, report)))
        _console().print(bench_report.demo_table(report))
        click.echo("\n".join(bench_report.demo_notes(environment, report, settings())))

    _run(context, DEMO_RANKS, settings, lambda ranks: _demo_inputs(options, ranks), show)


def _demo_inputs(options: dict[str, Any], num_ranks: int) -> Workload:
    files = options["data"] or DEMO_FILES
    if not options["data"] and not all(file.is_file() for file in files):
        raise ValueError(
            f"data: expected the recorded activations in {DEMO_FILES[0].parent}, got none (they"
            " are in the repository, not in the installed package; clone it, or give --data FILE)"
        )
    return Recorded(files, num_ranks)


@cli.command()
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
@click.option(
    "--routing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Real routing instead: topk_idx [T, K] in a .npy or safetensors file.",
)
@json_option
def plan(**options: Any) -> None:
    """Predict dispatch and combine on a cluster: by wire format and route, and what limits them."""
    if launch.launched_rank() != 0:
        return
    try:
        predicted = predicting.plan_of(options)
    except ValueError as error:
        raise UserError(str(error)) from error
    rows = predicted.rows()
    click.echo("\n".join(predict_report.header_lines(predicted)))
    console = Console(width=PLAN_COLUMNS, color_system=None, highlight=False)
    console.print(predict_report.table(rows))
    click.echo("\n".join(predict_report.notes(predicted)))
    if options["json_file"] is not None:
        arguments = {n: v.name if isinstance(v, Path) else v for n, v in options.items()}
        arguments["topology_name"] = Path(options["topology_name"]).name
        bench_report.write_json(options["json_file"], predict_report.as_json(predicted, arguments))


@cli.command()
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
        for output in filter(None, outputs.values()):
            if output.resolve() in [file.resolve() for file in files]:
                raise ReportError(f"{output}: expected another file than the results to write to")
        made = report_page.make(files)
        if page or picture:
            report_page.check_libraries()
    except ReportError as error:
        raise UserError(str(error)) from error
    click.echo("\n".join(report_page.lines(made)))
    if page:
        report_page.write_html(made, page)
    if picture:
        report_page.write_png(made, picture)
    if content:
        bench_report.write_json(content, report_page.as_json(made))


def given_options(context: click.Context) -> Iterator[click.Parameter]:
    """Those that stand on the command line."""
    for option in context.command.params:
        if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            yield option


def expect_without_others(name: str, context: click.Context, allowed: Sequence[str]) -> None:
    """Refuse options that would do nothing beside the one named."""
    for option in given_options(context):
        if option.name not in allowed:
            raise click.UsageError(f"{name}: expected without {option.opts[0]}")


def run_on_ranks(
    options: dict[str, Any], default_ranks: int, on_rank: Callable[[Transport], Result]
) -> tuple[Result, bool]:
    """Run on the ranks that the options ask for; return the result, and whether this one prints."""
    try:
        return launch.run(
            options["transport_name"],
            options["ranks"],
            default_ranks,
            options["timeout_s"],
            on_rank,
            options["device"],
        )
    except launch.LaunchedRankError as error:
        raise UserError(str(error), error.is_reporter) from error


def _run(
    context: click.Context,
    default_ranks: int,
    settings_of: Callable[[], Settings],
    inputs_of: Callable[[int], Workload],
    show: Callable[[Environment, Report], None],
) -> None:
    """Measure on all ranks, show on one; exit code 1 on all if a row is wrong."""
    options = context.params

    def on_rank(group: Transport) -> tuple[Environment, Report]:
        settings, inputs = launch.agree(group, lambda: (settings_of(), inputs_of(group.num_ranks)))
        report = measure(group, inputs, settings, _progress if group.rank == 0 else _no_progress)
        return _environment(context, group), report

    (environment, report), prints = run_on_ranks(options, default_ranks, on_rank)
    if prints:
        show(environment, report)
        if options["json_file"] is not None:
            name = str(context.info_name)
            content = bench_report.as_json(name, options, environment, report)
            bench_report.write_json(options["json_file"], content)
        sys.stdout.flush()
    if report.num_wrong:
        launch.let_rank_0_print(prints)
        sys.exit(1)


def _environment(context: click.Context, group: Transport) -> Environment:
    """Describe this rank's machine, and where the ranks run."""
    options = context.params
    gpu = _gpu() if options["device"] == "cuda" else ""
    mine = Place(platform.node(), os.environ.get("NCCL_HOSTID", ""), gpu)
    places = zip(*(agreement.texts(group, text) for text in dataclasses.astuple(mine)), strict=True)
    return Environment(
        command=_command(context),
        num_ranks=group.num_ranks,
        transport=f"{group.name} ({_library(group.name, options['device'])})",
        places=[Place(*place) for place in places],
        **machine.about(),
    )


def _library(transport_name: str, device: str) -> str | None:
    """Name what moves the rows."""
    if transport_name == "local":
        return "threads of one process"
    if transport_name == "mpi":
        return machine.mpi_library()
    if device == "cpu":
        return "gloo"
    return f"NCCL {machine.nccl_library()}"


def _gpu() -> str:
    """Tell this rank's GPU from others of its machine."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _command(context: click.Context) -> str:
    """Write the command with the options that were given."""
    words = [str(context.info_name)]
    for option in given_options(context):
        value = context.params.get(str(option.name))
        values = value if isinstance(value, tuple) else (value,)
        words += [f"{option.opts[0]} {v}" if v is not True else option.opts[0] for v in values]
    return " ".join(words)


def _progress(text: str) -> None:
    """Say what comes next, in lines, since mpirun's terminal may be a log."""
    if sys.stdout.isatty():
        click.echo(f"# {text}")


def _no_progress(text: str) -> None:
    """Say nothing."""


def _console() -> Console:
    """Without colour where mpirun shows its ranks a terminal of its own, or there is none."""
    if launch.launched_ranks() > 1 or not sys.stdout.isatty():
        return Console(width=TABLE_COLUMNS, color_system=None, highlight=False)
    return Console(highlight=False)
