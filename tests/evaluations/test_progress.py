"""The progress line: for people only, on one line however narrow the terminal, in whatever it can show."""

import io

import pytest

from attnlab_evaluations.frame.progress import Progress

pytestmark = pytest.mark.no_torch


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


def test_nothing_is_written_where_nobody_looks():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.say("text")
    progress.done()
    assert stream.getvalue() == ""


def test_a_missing_stderr_is_nobody(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    progress = Progress()
    progress.say("text")
    progress.done()
    assert not progress.shown


@pytest.mark.parametrize("columns", [1, 2, 20, 80])
def test_a_line_never_wraps(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    progress = Progress(stream, lambda: 0.0)
    progress.say("sweep: length 1024, causal: linearised: memory and error")
    progress.say("short")
    progress.done()
    assert all(len(line) < max(2, columns) for line in stream.getvalue().split("\r"))


def test_a_shorter_line_leaves_nothing_of_the_longer_one():
    stream = Terminal()
    progress = Progress(stream, lambda: 0.0)
    progress.say("a long text")
    progress.say("b")
    assert stream.getvalue() == "\r[   0 s] a long text\r[   0 s] b" + " " * 10


def test_what_the_terminal_cannot_show_does_not_stop_the_run():
    stream = Terminal()
    Progress(stream, lambda: 0.0).say("日本")
    assert stream.getvalue().isascii()
