"""Train a small MoE language model with one wire policy after another, from the same start.

    python benchmarks/train_moe.py [--ranks 2]                      (ranks on threads)
    mpirun -n 4 python benchmarks/train_moe.py --json FILE --picture FILE
    torchrun --nproc-per-node 2 benchmarks/train_moe.py --preset h200 --device cuda
    python benchmarks/train_moe.py FILE FILE ... --picture FILE     (show results together)

Experts are spread over the ranks and reached by fp4comm alone; all else is replicated, and its
gradients are summed over the ranks.  Runs with the same seed have the same initial weights and see
the same batches, whatever the number of ranks; all runs have equally many steps.  "to bf16" is the
loss on held-out text over that of the first bf16 run with the same seed.  "bf16-again" shows how
far apart runs are that differ in the order of their sums: it has the sequences of each batch in
reverse order, so that other ranks hold them.

Losses are means over bytes, in nats; the last twentieth of each file is held out.  Times are those
of training steps alone.  Bytes are of wire rows with their routes and weights' gradients, of all
ranks together.  The JSON file is written after each run.  Files of several sittings go together if
model, text, batches and steps are the same.  Linux; PyTorch 2.10 or newer (grouped_mm).
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import click
import moe_report
from moe_model import CACHES
from moe_report import Results
from moe_text import Text, check_same_text
from moe_training import POLICIES, PRESETS, Settings, train_all
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fp4comm import agreement, launch
from fp4comm.bench import demo
from fp4comm.files import write_json
from fp4comm.launch import UserError
from fp4comm.options import OUTPUT, FileCommand, Finite, expect_without_others, run_options
from fp4comm.running import run_command, run_on_ranks
from fp4comm.transport import Transport

TABLE_COLUMNS = 130
FILE = click.Path(dir_okay=False, path_type=Path)


def settings_of(options: dict[str, Any]) -> Settings:
    """Read the options that say what to train."""
    if options["steps"] is not None and options["seconds"] is not None:
        raise ValueError("steps: expected without seconds, got both")
    steps = options["steps"]
    if steps is None and options["seconds"] is None:
        steps = PRESETS[options["preset"]].steps
    return Settings(
        preset=options["preset"],
        policies=tuple(options["policies"].split(",")),
        caches=tuple(options["cache"].split(",")),
        seeds=tuple(map(seed_of, options["seeds"].split(","))),
        steps=steps,
        seconds=options["seconds"],
        device=options["device"],
    )


def seed_of(text: str) -> int:
    """Read a seed."""
    if not text.isdecimal():
        raise ValueError(f"seeds: expected whole numbers from 0 on, got {text!r}")
    return int(text)


def train(options: dict[str, Any], json_file: Path | None) -> tuple[Results, bool]:
    """Train on all ranks; return the results and whether this process shows them."""
    arguments = {name: value for name, value in options.items() if name != "text"}

    def on_rank(group: Transport) -> Results:
        def prepared() -> tuple[Settings, Text]:
            settings = settings_of(options)
            settings.check_ranks(group)
            return settings, Text(options["text"], 2 * PRESETS[settings.preset].shape.length)

        def finished(results: Results) -> None:
            if group.rank == 0 and json_file is not None:
                write_json(json_file, results.as_json())

        settings, text = agreement.make_on_all(group, prepared)
        check_same_text(group, text)
        with progress_bar(group.rank == 0) as bar:
            return train_all(group, settings, text, arguments, bar, finished)

    return run_on_ranks(options, 1, on_rank)


def progress_bar(is_shown: bool) -> Progress:
    """Make one, on stderr, with a console for lines; rich draws the bar in a terminal only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False, quiet=not is_shown),
        disable=not is_shown,
    )


def show(results: Results) -> None:
    """Print the table."""
    console = demo.console(TABLE_COLUMNS)
    console.print(moe_report.title(results), moe_report.place(results), sep="\n")
    console.print(moe_report.table(results))


def check_picture(file: Path) -> None:
    """Refuse before the training what would fail after it: draw something in this format."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("picture: needs matplotlib; pip install 'fp4comm[bench]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.suptitle("loss")
    known = figure.canvas.get_supported_filetypes()
    ending = file.suffix[1:].lower()
    if ending not in known:
        raise ValueError(f"picture: expected a file that ends in {', '.join(known)}, got {file}")
    try:
        figure.savefig(io.BytesIO(), format=ending)
    except Exception as error:  # a program or package that this format needs
        raise ValueError(f"picture: cannot be drawn as {ending}: {error}") from error


@click.command(cls=FileCommand)
@click.argument("files", nargs=-1, type=FILE)
@click.option("--preset", type=click.Choice(list(PRESETS)), default="cpu", show_default=True)
@click.option(
    "--policies",
    default="bf16,bf16-again,fp8,mxfp4",
    show_default=True,
    help=f"Separated by commas: {', '.join(POLICIES)}.",
)
@click.option("--seeds", default="0", show_default=True, help="Separated by commas.")
@click.option("--steps", type=click.IntRange(min=1), help="Of each run.  [default: the preset's]")
@click.option("--seconds", type=Finite(min=0.1), help="Of the first run, instead.")
@click.option(
    "--cache",
    default="plain",
    show_default=True,
    help=f"What experts keep for backward, separated by commas: {', '.join(CACHES)}.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the text.  [default: the standard library's sources]",
)
@click.option("--picture", help="Draw the curves here, with matplotlib.", **OUTPUT)
@run_options
@click.pass_context
def main(
    context: click.Context,
    files: tuple[Path, ...],
    picture: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Train, or show FILES of earlier trainings together."""
    try:
        if picture is not None:
            check_picture(picture)
        if files:
            expect_without_others("FILES", context, ("files", "picture", "json_file"))
            results, shows = moe_report.read(files), launch.launched_rank() == 0
        else:
            results, shows = train(options, json_file)
    except ValueError as error:
        raise UserError(error, launch.launched_rank() == 0) from error
    if shows:
        show(results)
        if json_file is not None:
            write_json(json_file, results.as_json())
        if picture is not None:
            moe_report.draw(results, picture)


if __name__ == "__main__":
    run_command(main)
