"""A run that is asked to end writes a checkpoint within a step, says how to go on, and goes on to the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from draftsmith.recipes import runs
from draftsmith.train.interrupt import Signals
from forks import Forks
from runs import told, weights, write_run

WORDS = ["runs=runs", "train.epochs=2", "train.on_policy={share: 0.5, refresh_every: 6, rows: 4, max_new_tokens: 4}"]


@pytest.fixture(scope="module")
def undisturbed(forked: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("undisturbed")
    done = forked.run(place, "train", str(write_run(place)), *WORDS)
    assert done.code == 0, done.stderr
    return place


def again(undisturbed: Path, place: Path) -> list[str]:
    """The command that trains in `place` what was trained undisturbed, on the answers of then."""
    return ["train", str(write_run(place)), *WORDS, f"data.answers={undisturbed / 'runs' / 'small' / 'answers.jsonl'}"]


def same(place: Path, undisturbed: Path) -> None:
    one, other = place / "runs" / "small", undisturbed / "runs" / "small"
    assert weights(one) == weights(other)
    assert told(one) == told(other)
    assert [step.name for step in runs.steps(one)] == [step.name for step in runs.steps(other)]
    assert (one / "best.json").read_text() == (other / "best.json").read_text()


@pytest.mark.parametrize("name, step", [("SIGTERM", 3), ("SIGINT", 4), ("SIGTERM", 14)])
def test_asked_to_end_it_does_so_within_a_step_and_goes_on_to_the_same_bits(
    forked: Forks, undisturbed: Path, tmp_path: Path, name: str, step: int
) -> None:
    command, run = again(undisturbed, tmp_path), tmp_path / "runs" / "small"
    line = 1 + sum(
        one["step"] < step or (one["step"] == step and "written_by_the_draft" in one)
        for one in told(undisturbed / "runs" / "small")
    )
    # Where the line of a step is written, the step is over; so the signal came in it.
    ended = forked.run(tmp_path, *command, signals=((signal.Signals[name], "metrics.jsonl", line),))
    assert ended.code == 75, ended.stderr
    assert f"{name}: runs/small/step-{step} is written, and the same command goes on from it (exit code 75)" in ended.stderr
    assert "Traceback" not in ended.stderr
    last = runs.steps(run)[-1]
    assert last.name == f"step-{step}"
    assert runs.judged(last) == (step in (4, 14)), "a checkpoint that was due anyway is judged, and is not written twice"
    done = forked.run(tmp_path, *command)
    assert done.code == 0, done.stderr
    same(tmp_path, undisturbed)


def test_usr1_writes_one_on_demand_and_goes_on(forked: Forks, undisturbed: Path, tmp_path: Path) -> None:
    done = forked.run(tmp_path, *again(undisturbed, tmp_path), signals=((signal.SIGUSR1, "metrics.jsonl", 2),))
    assert done.code == 0, done.stderr
    assert "SIGUSR1: a checkpoint comes after this step" in done.stderr
    made = [one for one in done.events if one.startswith("os.rename") and ".step-" in one and "writing" in one]
    assert len(made) == len(set(made)) == 5, made
    same(tmp_path, undisturbed)


@pytest.mark.parametrize("event", ["answers.jsonl.partial", "start/.untrained.writing"])
def test_before_the_first_step_it_ends_at_once_and_the_same_command_goes_on(
    event: str, forked: Forks, undisturbed: Path, tmp_path: Path
) -> None:
    command = ["train", str(write_run(tmp_path)), *WORDS]
    ended = forked.run(tmp_path, *command, signals=((signal.SIGTERM, event, 3),))
    assert ended.code == 75, ended.stderr
    assert "draftsmith train: SIGTERM: ended; the same command goes on where it was" in ended.stderr
    assert (tmp_path / "runs" / "small" / "answers.jsonl.partial").is_file() == ("answers" in event)
    assert not (tmp_path / "runs" / "small" / "start" / "untrained").exists()
    assert forked.run(tmp_path, *command).code == 0
    same(tmp_path, undisturbed)


EVAL = ["eval.candidates=[{drafter: ngram, k: 2}, {drafter: run:best, k: 2}]", "eval.max_new_tokens=2", "eval.bootstrap=10"]


@pytest.mark.parametrize(
    "words, event, over",
    [(["prepare"], "answers.jsonl.partial", "answers.jsonl"), (["eval", *EVAL], "measurements.jsonl", "report.json")],
)
def test_answers_and_an_evaluation_end_at_once_and_go_on(
    words: list[str], event: str, over: str, forked: Forks, undisturbed: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    if words[0] == "eval":
        shutil.copytree(undisturbed / "runs" / "small", tmp_path / "runs" / "small")
    command, run = [words[0], str(write_run(tmp_path)), *WORDS, *words[1:]], tmp_path / "runs" / "small"
    asked = ((signal.SIGUSR1, event, 2), (signal.SIGTERM, event, 4))
    ended = forked.run(tmp_path, *command, signals=asked)
    assert ended.code == 75, ended.stderr
    assert "SIGUSR1: nothing is trained now, so there is no checkpoint to write" in ended.stderr
    assert f"draftsmith {words[0]}: SIGTERM: ended; the same command goes on where it was" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (run / event).is_file()
    assert not (run / over).exists()
    found = (run / event).read_bytes()
    done = forked.run(tmp_path, *command)
    assert done.code == 0, done.stderr
    if words[0] == "prepare":
        assert (run / over).read_bytes() == (undisturbed / "runs" / "small" / over).read_bytes()
    else:
        assert (run / event).read_bytes().startswith(found), "what was measured is not measured again"
        assert (run / over).is_file()


def test_a_second_signal_leaves_at_once_and_one_that_came_twice_does_not(forked: Forks, undisturbed: Path, tmp_path: Path) -> None:
    twice = ((signal.SIGTERM, "metrics.jsonl", 1), (signal.SIGTERM, ".step-1.writing", 1))  # the second comes inside the checkpoint
    assert forked.run(tmp_path, *again(undisturbed, tmp_path), signals=twice).code == 75
    for seconds, code in ((0.0, 7), (2.0, -signal.SIGTERM)):
        if (child := os.fork()) == 0:
            with Signals() as signals, signals.steps():
                os.kill(os.getpid(), signal.SIGTERM)
                signals._at -= seconds
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_forked_worker_and_another_thread_have_signals_as_ever() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        if (child := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert signals.wishes() == (False, False)
    assert signal.getsignal(signal.SIGTERM) == before

    def elsewhere() -> None:
        with Signals():
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[object] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
