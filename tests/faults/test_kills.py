"""Killed at a seeded random moment of preparation, of the storing of states or of training, a run that is started again ends with the
bits of one that nobody killed. KILLS=N takes N moments (`make test-faults` 20)."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from draftsmith.recipes import runs
from draftsmith.recipes.checksums import damage
from forks import Forks
from runs import told, write_run

WORDS = [
    "runs=runs",
    "target.model=target",
    "data.prompts=train.jsonl",
    "eval.prompts=eval.jsonl",
    "train.epochs=1",
    "train.teacher=states",
    "train.save_every=2",
    "train.evaluate_every=2",
    "train.keep=1",
]
RUN = Path("runs") / "small"
# A phase is known by what it writes; "" is any moment of the run, the start in closed form among them.
PHASES = {
    "preparation": ("answers.jsonl", "rows/"),
    "states": ("teacher/",),
    "training": ("step-", "metrics", "best"),
    "any": ("",),
}
KILLS = int(os.environ.get("KILLS", "4"))


@pytest.fixture(scope="module")
def undisturbed(forked: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that nobody killed, and its events."""
    place = tmp_path_factory.mktemp("undisturbed")
    done = forked.run(place, "train", str(write_run(place)), *WORDS)
    assert done.code == 0, done.stderr
    return place, done.events


def kept(place: Path) -> dict[str, bytes]:
    """Everything that a run keeps, but for what tells of its time, its place and its process."""
    told_elsewhere = {"metrics.jsonl", "environment.json", "fit.json", "SHA256SUMS"}
    files = {path.relative_to(place): path for path in (place / RUN).rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in files.items()
        if name.name not in told_elsewhere and "trainer" not in name.parts
    }


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_any_moment_it_ends_with_the_same_bits(
    forked: Forks, undisturbed: tuple[Path, list[str]], tmp_path: Path, number: int
) -> None:
    whole, events = undisturbed
    chance = random.Random(f"kill {number}")
    phase = list(PHASES)[number % len(PHASES)]
    moments = [at for at, event in enumerate(events, 1) if any(part in event for part in PHASES[phase])]
    at = chance.choice(moments)
    later = chance.choice((0.0, chance.uniform(0.0005, 0.02)))  # CPU seconds: in the midst of what no event tells of
    command = ["train", str(write_run(tmp_path)), *WORDS]
    how = signal.SIGPROF if later else signal.SIGKILL  # nobody catches either
    killed = forked.run(tmp_path, *command, signals=((how, "", at, later),))
    assert killed.code == -how or (later and not killed.code), f"{phase}, event {at} of {len(events)}, {later} s later: {killed}"
    for one in runs.named(tmp_path / RUN):
        assert damage(one) is None, "what has its name is whole"
    done = forked.run(tmp_path, *command)
    assert done.code == 0, f"killed in {phase} at {events[at - 1]}: {done.stderr}"
    assert kept(tmp_path) == kept(whole)
    assert told(tmp_path / RUN) == told(whole / RUN)
    assert not list((tmp_path / RUN).rglob(".*")), "nothing half-written stays"


@pytest.mark.parametrize(
    "event", ["os.rename runs/small/.step-4.writing", "os.rename runs/small/step-2", "os.rmdir runs/small/.step-2.old"]
)
def test_killed_inside_a_checkpoint_it_ends_with_the_same_bits(
    forked: Forks, undisturbed: tuple[Path, list[str]], tmp_path: Path, event: str
) -> None:
    """Before it has its name, before the one that is no longer kept loses its own, and when that is half gone."""
    whole, events = undisturbed
    assert [one for one in events if event in one], "\n".join(events)
    shutil.copytree(whole / RUN / "teacher", tmp_path / RUN / "teacher")
    for name in ("answers.jsonl", "answers.jsonl.json"):
        shutil.copy(whole / RUN / name, tmp_path / RUN / name)
    command = ["train", str(write_run(tmp_path)), *WORDS]
    assert forked.run(tmp_path, *command, signals=((signal.SIGKILL, event, 1),)).code == -signal.SIGKILL
    done = forked.run(tmp_path, *command)
    assert done.code == 0, done.stderr
    assert kept(tmp_path) == kept(whole)
