"""How far a measurement is: a bar where standard error is a terminal, else lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

REFRESH_S = 0.1  # between two drawings of the bar


class Tell:
    """Takes what comes next and shows nothing of it; others do."""

    def __call__(self, text: str, share: float = 0.0) -> None:
        """Take what comes next, and the share of all that is done, 0 to 1."""

    def pause(self) -> None:
        """Get out of the way of what is printed, until told more."""


class Lines(Tell):
    """Prints what is new: a terminal of mpirun's may be a log."""

    def __init__(self) -> None:
        """Start with nothing said."""
        self._said = ""

    def __call__(self, text: str, share: float = 0.0) -> None:
        """Print it."""
        if text != self._said:
            click.echo(f"# {text}")
            self._said = text


class Bar(Tell):
    """Draws a bar on standard error; when told, and not from a thread beside what is timed."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._drawn_at = 0.0
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("", total=1.0)

    def __call__(self, text: str, share: float = 0.0) -> None:
        """Draw it, unless it is the same text again after a moment."""
        is_new = text != self._progress.tasks[0].description
        self._progress.update(self._task, description=text, completed=share)
        if is_new or time.monotonic() > self._drawn_at + REFRESH_S:
            self._progress.start()
            self._progress.refresh()
            self._drawn_at = time.monotonic()

    def pause(self) -> None:
        """Take it off the screen."""
        self._progress.stop()


NOTHING = Tell()


@contextlib.contextmanager
def shown(*, is_shown: bool) -> Iterator[Tell]:
    """Lend what shows progress; a bar is gone at the end.

    mpirun hands standard error on through a pipe, and may give standard output a terminal: lines
    go there then.
    """
    tell = NOTHING
    if is_shown and sys.stderr.isatty():
        tell = Bar()
    elif is_shown and sys.stdout.isatty():
        tell = Lines()
    try:
        yield tell
    finally:
        tell.pause()


def show_cursor() -> None:
    """Undo what a bar did to the terminal, where the process ends at once."""
    Console(stderr=True).show_cursor()
