"""Options that several commands of the command line share, and how they are checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fp4comm import transport
from fp4comm.formats import FORMATS
from fp4comm.topology import DEVICES

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


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
    file = value.resolve()  # behind a link
    existed = file.exists()
    try:  # now, not after the whole measurement
        with file.open("a"):
            pass
    except OSError as error:
        raise click.BadParameter(f"cannot be written: {error.strerror}") from error
    if not existed:
        file.unlink(missing_ok=True)  # other ranks try it too
    return value


class FileCommand(click.Command):
    """A command that writes no file over one that it reads, or over another that it writes."""

    def invoke(self, context: click.Context) -> Any:
        """Refuse that, then run."""
        named = [
            (parameter, file)
            for parameter in self.params
            for file in _files(parameter, context.params.get(str(parameter.name)))
        ]
        for output, other in itertools.permutations(named, 2):
            if output[0].callback is _writable and _are_same(output[1], other[1]):
                written, read = (parameter.opts[0].lstrip("-") for parameter, _ in (output, other))
                raise click.UsageError(
                    f"{written}: expected another file than that of {read}, got {output[1]}"
                )
        return super().invoke(context)


def _files(parameter: click.Parameter, value: Any) -> list[Path]:
    """What of a value is a file: all paths, and a topology that is no preset."""
    if isinstance(value, str) and "FILE" in (parameter.metavar or ""):
        path = Path(value)  # of a preset the name alone
        return [path] if path.suffix == ".toml" or path.name != value else []
    values = value if isinstance(value, tuple) else (value,)
    return [value for value in values if isinstance(value, Path)]


def _are_same(one: Path, other: Path) -> bool:
    """Whether they are one file, by links too, there or not."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


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


def several_option(name: str, text: str) -> Option:
    """Add an option that may hold several values, as `bench.wires.separated` takes them."""
    return click.option(f"--{name}", multiple=True, help=text, metavar=f"{name.upper()}[,...]")


run_options = together(  # of all that runs on ranks
    click.option(
        "--transport",
        "transport_name",
        type=click.Choice(("auto", *transport.NAMES)),
        default="auto",
        show_default=True,
        help="One for the whole job.  auto: mpi under mpirun (with CUDA: nccl), torch under"
        " torchrun, either under srun (torch if MASTER_ADDR and MASTER_PORT are set), else local.",
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
    several_option("wire", f"Wire formats of dispatch.  [default: {','.join(FORMATS)}]"),
    click.option("--combine", default="bf16", show_default=True, help="Its wire format, or same."),
    click.option("--arrive", default="fp8", show_default=True, help="fp8, bf16 or packed."),
    click.option(
        "--alignment", type=int, default=128, show_default=True, help="Of expert segments."
    ),
)
routing_option = click.option(  # likewise
    "--routing",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recorded routing instead: topk_idx [T, K] in a .npy or safetensors file.",
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
