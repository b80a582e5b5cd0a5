"""Running a command and its ranks: a mistake is a line of the rank that reports; exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from fp4comm import launch, progress
from fp4comm.launch import UserError
from fp4comm.transport import Transport

Result = TypeVar("Result")


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
        progress.show_cursor()
        sys.stderr.flush()
        os._exit(130)  # ranks on threads may be inside kernels, which an orderly exit waits for
    sys.exit(code)


def run_on_ranks(
    options: dict[str, Any], default_ranks: int, on_rank: Callable[[Transport], Result]
) -> tuple[Result, bool]:
    """Run on the ranks that the options ask for; return the result, and whether this one prints."""
    return launch.run(
        options["transport_name"],
        options["ranks"],
        default_ranks,
        options["timeout_s"],
        on_rank,
        options["device"],
    )
