"""Processes that are gone are named: killed ones by their locks, silent machines by the clock, and those that ended by their own word."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.train import company
from draftsmith.train.company import Missing, Others, Presence

TWO = "process 1 of 2 (host"


def other(act: Callable[[Presence], object], place: Path) -> int:
    """Process 1 of 2, which is there and then does `act` -> its pid, once it is there."""
    ready, tell = os.pipe()
    if (child := os.fork()) == 0:
        own = Presence(place, 1, "launch")
        os.write(tell, b"x")
        act(own)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return child


def waits(own: Presence) -> None:
    time.sleep(60)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def looks(place: Path, lost_after: float = 0.0) -> Others:
    return Others(place, 0, 2, "launch", lost_after)


def test_a_killed_one_is_missed_at_once_and_not_while_it_lives(tmp_path: Path) -> None:
    child = other(waits, tmp_path)
    others = looks(tmp_path, 1e-9)
    assert not others.missing()
    time.sleep(0.01)
    assert not others.missing(), "its own kernel says that it lives, whatever it is kept from"
    kill(child)
    (one,) = others.missing()
    assert one.told == f"{TWO} {socket.gethostname()}, pid {child}) is gone: it was killed, or crashed, without a word"
    assert not Others(tmp_path, 0, 2, "another launch", 0).missing(), "what an earlier launch left tells nothing of this one"


def test_a_worker_that_outlives_it_does_not_stand_for_it(tmp_path: Path) -> None:
    ready, tell = os.pipe()

    def forks(own: Presence) -> None:
        if (worker := os.fork()) == 0:
            time.sleep(60)
        os.write(tell, worker.to_bytes(4, "big"))
        time.sleep(60)

    child = other(forks, tmp_path)
    worker = int.from_bytes(os.read(ready, 4), "big")
    kill(child)
    missing = looks(tmp_path).missing()
    os.kill(worker, signal.SIGKILL)
    assert [one.why for one in missing] == [company.KILLED]


def test_one_that_ends_by_itself_is_quoted_and_one_that_is_done_is_not_missed(tmp_path: Path) -> None:
    os.waitpid(other(lambda own: own.end("ValueError: no such loss"), tmp_path), 0)
    (one,) = looks(tmp_path).missing()
    assert one.told.endswith("ended with ValueError: no such loss")
    os.waitpid(other(lambda own: own.end(""), tmp_path), 0)
    assert not looks(tmp_path).missing()
    os.waitpid(other(lambda own: own.leave(), tmp_path / "processes"), 0)
    assert not (tmp_path / "processes").exists()


def test_a_silent_machine_is_missed_after_a_while_and_one_that_breathes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    child = other(waits, tmp_path)
    monkeypatch.setattr(company.socket, "gethostname", lambda: "elsewhere")  # the child's machine is another one then
    monkeypatch.setattr(company.time, "monotonic", lambda: now[0])
    others, never = looks(tmp_path, 45), looks(tmp_path, 0)
    assert not others.missing()
    assert not never.missing()
    now[0] += 46
    (one,) = others.missing()
    assert one.why == company.SILENT
    assert "gave no sign of life for 46 s" in one.told
    assert not never.missing()
    path = tmp_path / "1.json"
    path.write_bytes(path.read_bytes().replace(b'"signs": 1', b'"signs": 2'))
    assert not others.missing()
    kill(child)


def test_where_the_main_thread_waits_for_ever_the_process_ends_with_the_name_and_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(company, "GRACE", 0.0)
    monkeypatch.setattr(company, "LOOK", 0.01)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "state.json").write_text("{}")
    kill(other(waits, tmp_path / "processes"))
    if (watching := os.fork()) == 0:
        own = Presence(tmp_path / "processes", 0, "launch")
        company._watch(own, looks(tmp_path / "processes"), tmp_path, company.threading.Event())
    assert os.waitstatus_to_exitcode(os.waitpid(watching, 0)[1]) == 2
    said = capfd.readouterr().err
    assert f"draftsmith train: {TWO}" in said
    assert f"The last good checkpoint is {tmp_path / 'step-4'}, and the same command goes on from it" in said


class Told:
    """Others of whom this is known."""

    def __init__(self, *missing: Missing) -> None:
        self._missing = list(missing)

    def missing(self) -> list[Missing]:
        return self._missing


KILLED = Missing(company.KILLED, 1, "process 1 is gone")
ENDED = Missing(company.ENDED, 2, "process 2 ended with RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    "error, missing, cause",
    [
        (RuntimeError("Connection reset"), (KILLED, ENDED), KILLED),
        (RuntimeError("Connection reset"), (ENDED,), ENDED),
        (RuntimeError("Connection closed by peer"), (ENDED,), None),  # all ran into the same: each says it itself
        (RuntimeError("out of memory"), (), None),
        (ValueError("no such loss"), (KILLED,), None),  # not what comes of a missing process
        (KeyboardInterrupt("SIGTERM"), (KILLED,), KILLED),  # the launcher ends those that are left
        (KeyboardInterrupt("SIGTERM"), (ENDED,), None),  # all were asked to end
    ],
)
def test_an_error_is_put_down_to_a_missing_process_where_it_comes_of_it(
    error: BaseException, missing: tuple[Missing, ...], cause: Missing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(company, "LOOK", 0.001)
    assert company._cause(error, Told(*missing)) == cause  # type: ignore[arg-type]
