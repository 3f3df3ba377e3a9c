"""Progress: a bar on a terminal only, which is given back however the work ends, and plain lines everywhere else."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from draftsmith.cli import main
from draftsmith.commands import COMMANDS
from draftsmith.recipes import progress
from draftsmith.recipes.progress import Progress, give_back

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


def _all_of(shown: int) -> str:
    """A terminal hands on what was written in its own time."""
    text = b""
    while select.select([shown], [], [], 0.3)[0]:
        text += os.read(shown, 100_000)
    return text.decode()


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """While a block runs stderr is a terminal; what it showed. (No fixture: pytest puts its own stderr back before the test.)"""
    shown, behind = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with os.fdopen(behind, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        try:
            yield lambda: _all_of(shown)
        finally:
            give_back()  # a test that fails here must not leave its bar to another
    os.close(shown)


def test_a_terminal_has_a_bar_and_has_its_cursor_back_when_the_work_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        one = Progress("training", 10)
        one.at(3, "loss 1.5")
        give_back()
        text = shown()
    assert HIDDEN in text
    assert "loss 1.5" in text
    assert text.rindex(SHOWN) > text.rindex(HIDDEN)


def test_a_command_that_ends_with_an_error_gives_the_terminal_back_to_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        Progress("training", 10).at(3)
        raise ValueError("no such row")

    monkeypatch.setitem(COMMANDS, "compare", COMMANDS["compare"]._replace(run=breaks))
    with terminal(monkeypatch) as shown:
        assert main(["compare", "a", "b"]) == 2
        assert not progress.LIVE
        text = shown()
    assert "draftsmith compare: no such row" in text
    assert text.rindex(SHOWN) > text.rindex(HIDDEN)


def test_a_terminal_that_is_gone_keeps_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def then_gone(stop: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            stop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return act

    with terminal(monkeypatch):
        bars = [Progress("training", 10)._bar for _ in range(2)]
        for one in bars:
            one.stop = then_gone(one.stop)
        give_back()
        assert not progress.LIVE
        assert not any(one.live.is_started for one in bars)


def test_what_is_printed_stays_on_stdout_where_only_stderr_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with terminal(monkeypatch):
        Progress("training", 10).at(3)
        print("best draft")
    assert out.getvalue() == "best draft\n"


def test_a_dumb_terminal_and_a_quiet_process_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as shown:
        Progress("training", 10, quiet=True).at(3)
        monkeypatch.setenv("TERM", "dumb")
        Progress("training", 10).at(4)
        assert not progress.LIVE
        assert shown().strip() == "training: 4/10 steps"


def test_elsewhere_there_are_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in many a CI
    one, quiet = Progress("training", 100), Progress("of another process", 100, quiet=True)
    for step in range(1, 101):
        now[0] += 1
        one.at(step, "loss 1.5")
        quiet.at(step)
    one.done()
    quiet.done()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[1] == "training: 11/100 steps, 1:29 left; loss 1.5"
    assert lines[-1] == "training: 100 steps in 1:40"
