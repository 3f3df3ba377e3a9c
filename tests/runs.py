"""A whole run in small: a tiny target with a tokenizer, prompts and a recipe, on disk."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from draftsmith.cli import main
from draftsmith.recipes import runs
from tiny import tiny_folder

WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "islet",
    "jetty",
    "kelp",
    "lagoon",
    "mango",
    "nectar",
    "otter",
    "pearl",
    "quartz",
    "raven",
    "sedge",
    "tulip",
]


def write_run(place: Path, prompts: int = 24, **changes: object) -> Path:
    """Everything that `draftsmith run` needs -> the recipe's path; `changes` replace whole sections."""
    tiny_folder(place / "target", seed=2)  # the first seed whose target ends some of its answers by itself
    lines = [
        {
            "id": f"p{i}",
            "category": ("odd", "even")[i % 2],
            "prompt": f"{WORDS[i % 20]} {WORDS[(i * 7) % 20]} {WORDS[(i * 3) % 20]} {i}",
        }
        for i in range(prompts)
    ]
    for name, some in (
        ("train", lines),
        ("eval", [{**line, "id": f"e{line['id']}", "prompt": line["prompt"][::-1]} for line in lines[:4]]),
    ):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    recipe = {
        "name": "small", "seed": 3, "runs": str(place / "runs"), "target": {"model": str(place / "target")},
        "data": {"prompts": str(place / "train.jsonl"), "max_new_tokens": 24, "batch_size": 4, "held_out": 0.2},
        "draft": {"layers": [0, 1], "warm_start_tokens": 200},
        "train": {"epochs": 4, "batch_size": 3, "learning_rate": 1e-3, "evaluate_every": 4, "save_every": 4, "threads": 1},
        "eval": {
            "prompts": str(place / "eval.jsonl"), "max_new_tokens": 12, "bootstrap": 200,
            "candidates": [{"drafter": "ngram", "k": 3}] + [{"drafter": f"run:{one}", "k": 2} for one in ("untrained", "warm", "best")]
            + [{"drafter": "ngram+run:best", "k": "adaptive", "name": "both"}],
            "decoding": "prepared",
        },
    }  # fmt: skip
    path = place / "small.yaml"
    path.write_text(json.dumps({**recipe, **changes}))  # json is yaml
    return path


def chats(place: Path) -> Path:
    """A recipe over 40 chats of two turns, one of which is long."""
    recipe = write_run(place)
    lines = []
    for one in range(40):
        talk = [
            {"role": "user", "content": f"{WORDS[one % 20]} {one}"}, {"role": "assistant", "content": WORDS[(one * 7) % 20]},
            {"role": "user", "content": "more"}, {"role": "assistant", "content": WORDS[(one * 3) % 20] * (12 if one == 5 else 1)},
        ]  # fmt: skip
        lines.append(json.dumps({"messages": talk}) + "\n")
    (place / "chats.jsonl").write_text("".join(lines))
    return recipe


def options(place: Path, *more: str) -> list[str]:
    words = [f"data.prompts={place / 'chats.jsonl'}", "data.format=messages", "data.words=others", "data.max_length=64"]
    return [*words, "train.epochs=2", "data.held_out=0.2", *more]


def with_answers(recipe: Path, name: str) -> Path:
    """The folder of another run of that name, which has the answers of the recipe's own and no more."""
    whole = recipe.parent / "runs"
    (whole / name).mkdir()
    for one in ("answers.jsonl", "answers.jsonl.json"):
        shutil.copy(whole / "small" / one, whole / name / one)
    return whole / name


def weights(run: Path) -> dict[str, bytes]:
    last = runs.steps(run)[-1]
    return {name: one.numpy().tobytes() for name, one in load_file(last / "draft" / "model.safetensors").items()}


def told(run: Path) -> list[dict[str, object]]:
    """What a run recorded, but for its speed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def draftsmith(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment(), cwd=cwd, timeout=300)


def launched(processes: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A script, or -m and a module, with its words, in so many processes over gloo; that they end well is part of every test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *map(str, words)]
    env = environment() | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def inside(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, for commands that end soon: nothing is imported anew."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*map(str, words)])
        except SystemExit as ended:  # argparse's own
            code = int(ended.code or 0)
    return subprocess.CompletedProcess([*map(str, words)], code, out.getvalue(), err.getvalue())


def kill_when(ready: Callable[[], bool], *words: str | Path) -> None:
    """Start the command and SIGKILL it as soon as `ready`; it must not have ended before."""
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    deadline = time.monotonic() + 240
    while not ready():
        assert process.poll() is None, "the command ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "draftsmith.cli", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
