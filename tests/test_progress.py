"""Progress: a bar on a terminal, lines where only standard output is one, else nothing."""

import io
import sys

import pytest

from fp4comm import progress

HIDE, SHOW, ERASE = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"  # of a terminal: cursor and line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def streams(monkeypatch):
    """Make standard output and standard error terminals or files."""

    def make(out, err):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return out, err

    return make


def tell_all(*, is_shown=True):
    with progress.shown(is_shown=is_shown) as tell:
        for text, share in (("first", 0.0), ("second", 0.5), ("second", 0.75)):
            tell(text, share)
        tell.pause()
        print("row")  # noqa: T201
        tell("third", 0.9)


def test_a_bar_makes_way_for_rows_and_is_gone_at_the_end(streams):
    out, err = streams(Terminal(), Terminal())
    tell_all()
    assert out.getvalue() == "row\n"
    for text in ("first", "second", "third"):
        assert text in err.getvalue()
    assert err.getvalue().rindex(SHOW) > err.getvalue().rindex(HIDE)
    assert err.getvalue().rindex(ERASE) > err.getvalue().rindex("third")


def test_the_cursor_is_back_after_an_error(streams):
    _, err = streams(Terminal(), Terminal())

    def fail():
        with progress.shown(is_shown=True) as tell:
            tell("first")
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert err.getvalue().rindex(SHOW) > err.getvalue().rindex(HIDE)


def test_lines_where_only_standard_output_is_a_terminal(streams):
    out, err = streams(Terminal(), io.StringIO())
    tell_all()
    assert out.getvalue() == "# first\n# second\nrow\n# third\n"
    assert err.getvalue() == ""


def test_nothing_where_there_is_no_terminal_and_on_other_ranks(streams):
    out, err = streams(io.StringIO(), io.StringIO())
    tell_all()
    assert (out.getvalue(), err.getvalue()) == ("row\n", "")
    out, err = streams(Terminal(), Terminal())
    tell_all(is_shown=False)
    assert (out.getvalue(), err.getvalue()) == ("row\n", "")
