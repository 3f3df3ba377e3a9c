"""Trackers, through accelerate: they are told what metrics.jsonl is told, and keep it in the run folder; metrics.jsonl is what counts.

What a run did again after a resume, a tracker may have twice: only tensorboard can be told to forget.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator, tracking

from draftsmith.recipes import Recipe

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


def begin(recipe: Recipe, accelerator: Accelerator, done: int) -> None:
    """Start the recipe's trackers on the main process, `done` steps into the run; `accelerator.end_training` finishes them."""
    names, logs = recipe.train.trackers, recipe.folder / "logs"
    if not names or not accelerator.is_main_process:
        return
    logs.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRACKIO_DIR", str(logs))
    if "wandb" in names and not wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")  # it would ask for a key, or wait for a network
    accelerator.project_configuration.logging_dir = str(logs)
    accelerator.log_with = tracking.filter_trackers(names, str(logs))
    accelerator.init_trackers(
        recipe.name,
        config=dict(flat(recipe.model_dump(mode="json"))),
        init_kwargs={"tensorboard": {"purge_step": done + 1}, "wandb": {"dir": str(logs)}, "dvclive": {"dir": str(logs)}},
    )


def track(record: dict[str, Any], accelerator: Accelerator) -> None:
    """Tell the trackers the numbers of a line of metrics.jsonl, under its step; those of an evaluation are held_out/NAME."""
    numbers = {name: float(value) for name, value in flat(record, "/") if isinstance(value, (int, float)) and name != "step"}
    if numbers:
        accelerator.log(numbers, step=record["step"])


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
