"""Several processes: a launch of another size than the recipe's is refused, and what one of them is asked for all of them do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from draftsmith.recipes import runs
from draftsmith.recipes.checksums import damage
from runs import environment, inside, told, write_run

WORDS = ["train.epochs=1", "train.processes=2", "train.batch_size=2"]


def test_a_launch_of_another_size_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    done = inside("train", write_run(tmp_path), "train.processes=2", "target.model=package:not_there/x.gguf")
    assert done.returncode == 2
    assert "train.processes=2 asked, 1 found" in done.stderr
    assert "accelerate launch --multi_gpu --num_processes 2" in done.stderr


def test_the_launch_that_silently_runs_one_process_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "draftsmith.train", str(write_run(tmp_path)), *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode != 0
    assert "train.processes=2 asked, 1 found" in done.stderr
    assert not (tmp_path / "runs" / "small" / "recipe.yaml").exists()


def two(script: Path, recipe: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        str(recipe),
        *WORDS,
    ]
    env = environment() | {"ACCELERATE_USE_CPU": "true"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def watched(script: Path, call: str, *words: str) -> Path:
    """`draftsmith train` as a script, with `words` behind its own, whose watch over each step is `call` (self, record; `inner` is the real one)."""
    script.write_text(f"""
import os, signal, sys
from draftsmith.cli import main
from draftsmith.train.launch import leave
from draftsmith.train.watch import Watch

inner = Watch.__call__

def call(self, record):{call}
Watch.__call__ = call
leave(main(["train", *sys.argv[1:], *{words!r}]))
""")
    return script


def test_one_of_two_processes_is_asked_to_end_and_both_do_with_one_checkpoint(tmp_path: Path) -> None:
    recipe, run = write_run(tmp_path), tmp_path / "runs" / "small"
    script = watched(
        tmp_path / "asked.py",
        """
    if record.step == 3 and self.accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(self, record)
""",
    )
    ended = two(script, recipe)
    assert ended.returncode != 0
    assert "exitcode  : 75" in ended.stderr
    assert "SIGTERM: " in ended.stderr
    assert f"{run / 'step-3'} is written, and the same command goes on from it (exit code 75)" in ended.stderr
    assert [one.name for one in runs.steps(run)] == ["step-3"]
    assert damage(run / "step-3") is None
    assert {path.name for path in (run / "step-3" / "trainer").glob("random_states_*")} == {
        "random_states_0.pkl",
        "random_states_1.pkl",
    }
    done = inside("train", recipe, *WORDS, "train.processes=1")
    assert done.returncode == 0, done.stderr
    assert "1 process, as train.processes says, on cpu" in done.stdout
    assert "going on from step 3" in done.stdout
    steps = [line["step"] for line in told(run) if "loss" in line]
    assert steps == list(range(1, runs.number(runs.steps(run)[-1]) + 1))
    scored = json.loads((run / "environment.json").read_text())["scored_tokens"]
    assert sum(line["scored"] for line in told(run) if "loss" in line) == scored, "each row once, whoever saw it"


def test_where_one_of_two_processes_is_killed_the_other_ends_with_its_name(tmp_path: Path) -> None:
    recipe, run = write_run(tmp_path), tmp_path / "runs" / "small"
    script = watched(
        tmp_path / "killed.py",
        """
    over = inner(self, record)
    if record.step == 2 and self.accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return over
""",
        "train.save_every=2",
    )
    ended = two(script, recipe)
    assert ended.returncode != 0
    assert "process 1 of 2 (host " in ended.stderr, ended.stderr
    assert "is gone: it was killed, or crashed, without a word" in ended.stderr
    assert f"The last good checkpoint is {run / 'step-2'}, and the same command goes on from it" in ended.stderr
    assert damage(run / "step-2") is None
