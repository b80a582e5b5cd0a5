"""Runs ``fp4comm`` in this process."""

from click.testing import CliRunner

from fp4comm.cli import cli


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def passed(*arguments):
    """Return what it printed, after exit code 0."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output
