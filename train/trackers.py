"""Trackers, through accelerate: they are told what metrics.jsonl is told, and keep it in the run folder; metrics.jsonl is what counts.

Nothing that a tracker does ends a training that goes on: one that fails is named, and told no more. Each has each step once, whatever
was killed: tensorboard forgets what is done again, and every other begins anew and is told what went before.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator, tracking

from draftsmith.recipes import Recipe, runs

PACKAGES = {"comet_ml": "comet-ml"}  # what pip calls those whose name is another one


def check_trackers(names: Sequence[str]) -> None:
    """ValueError where one is not installed, before anything is loaded: accelerate itself would leave it out and say nothing."""
    known = {str(one) for one in tracking.get_available_trackers()}
    if missing := [name for name in names if name not in known]:
        packages = " ".join(PACKAGES.get(name, name) for name in missing)
        raise ValueError(
            f"train.trackers asks for {', '.join(missing)}, which accelerate does not find here (found: {', '.join(sorted(known)) or 'none'}). "
            f"pip install {packages}, or leave it out: metrics.jsonl in the run folder has the same figures"
        )


@contextmanager
def tracked(recipe: Recipe, accelerator: Accelerator, done: int) -> Iterator[None]:
    """The recipe's trackers on the main process while a block runs, `done` steps into the run."""
    if recipe.train.trackers and accelerator.is_main_process:
        _start(recipe, accelerator, done)
    try:
        yield
    finally:
        for one in accelerator.trackers:
            _guarded(one, "the end", one.finish)
        accelerator.trackers.clear()  # accelerate would finish them again, and let them fail


def _start(recipe: Recipe, accelerator: Accelerator, done: int) -> None:
    names, logs = recipe.train.trackers, recipe.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRACKIO_DIR", str(logs))
    if "wandb" in names and not wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")  # it would ask for a key, or wait for a network
    accelerator.project_configuration.logging_dir = str(logs)
    accelerator.log_with = tracking.filter_trackers(names, str(logs))
    try:
        accelerator.init_trackers(
            recipe.name,
            config=dict(flat(recipe.model_dump(mode="json"))),
            init_kwargs={"tensorboard": {"purge_step": done + 1}, "wandb": {"dir": str(logs)}, "dvclive": {"dir": str(logs)}},
        )
    except Exception as error:  # each has classes of its own
        accelerator.trackers.clear()  # accelerate would finish what never began
        raise RuntimeError(
            f"train.trackers: one of {', '.join(names)} did not start ({type(error).__name__}: {error}). Mend it, or leave it out "
            "(train.trackers=[...]), and repeat the command: metrics.jsonl in the run folder has the same figures"
        ) from error
    for line in runs.metrics(recipe.folder) if done else []:
        _tell(line, accelerator, [one for one in accelerator.trackers if one.name != "tensorboard"])


def track(record: dict[str, Any], accelerator: Accelerator) -> None:
    """Tell the trackers the numbers of a line of metrics.jsonl, under its step; those of an evaluation are held_out/NAME."""
    _tell(record, accelerator, accelerator.trackers)


def _tell(record: dict[str, Any], accelerator: Accelerator, whom: Sequence[Any]) -> None:
    numbers = {name: float(value) for name, value in flat(record, "/") if isinstance(value, (int, float)) and name != "step"}
    for one in [*whom] if numbers else []:
        if not _guarded(one, f"step {record['step']}", one.log, numbers, step=record["step"]):
            accelerator.trackers.remove(one)


def _guarded(one: Any, when: str, act: Callable[..., Any], *told: Any, **more: Any) -> bool:
    try:
        act(*told, **more)
    except Exception as error:
        print(
            f"train.trackers: {one.name} failed at {when} ({type(error).__name__}: {error}) and is told no more; the training goes on, and "
            "metrics.jsonl has it all",
            file=sys.stderr,
        )
        return False
    return True


def flat(tree: dict[str, Any], between: str = ".", before: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of dicts by their paths; lists and None as text, for trackers know numbers and strings only."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, between, f"{before}{name}{between}")
        else:
            yield before + name, value if isinstance(value, (bool, int, float, str)) else str(value)


def wandb_key() -> bool:
    """Is there a key to log in with, in the environment or where `wandb login` writes it?"""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        entry = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc")
    except (OSError, netrc.NetrcParseError, RuntimeError):  # no such file, or no home
        return False
    return any("wandb" in host for host in entry.hosts)
