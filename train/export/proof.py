"""What an export needs before it takes its name: a free place, text and tensors alone, and a look by a process that knows nothing of the one that wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.recipes import Recipe
from draftsmith.train.run import same_run


def free_place(recipe: Recipe, force: bool, name: str) -> Path:
    """runs/NAME/export/`name`; FileExistsError where it is there and not to be replaced."""
    same_run(recipe)
    place = recipe.folder / "export" / name
    if place.exists() and not force:
        raise FileExistsError(f"{place} exists; --force replaces it")
    return place


def in_a_fresh_process(module: str, *words: str) -> dict[str, Any]:
    """What `python -m draftsmith.train.export.MODULE` prints as its last line; RuntimeError where it fails."""
    done = subprocess.run([sys.executable, "-m", f"draftsmith.train.export.{module}", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the export does not load in a fresh process; nothing was exported:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def proved(module: str, folder: Path, target: str, wanted: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What a fresh process finds in a folder; RuntimeError where it is not what is `wanted`, or greedy answers with it are not the target's."""
    found = in_a_fresh_process(module, str(folder), target)
    if different := [f"{what} {found[what]} for {value}" for what, value in wanted.items() if found[what] != value]:
        raise RuntimeError(
            f"a fresh process finds another draft in the folder than was written ({', '.join(different)}); nothing was exported"
        )
    if found["equal"] != found["compared"]:
        raise RuntimeError(
            f"with this draft only {found['equal']} of {found['compared']} greedy answers equal the target's own; nothing was exported"
        )
    return found


PLAIN = {".json", ".safetensors", ".jinja", ".md", ".sh", ".txt", ".gguf", ".yaml", ".model"}


def safe(folder: Path) -> None:
    """ValueError where a folder holds anything but text and tensors: a pickle runs what it likes when it is loaded."""
    if strange := sorted(one.name for one in folder.rglob("*") if one.is_file() and one.suffix not in PLAIN):
        raise ValueError(
            f"{folder} holds {', '.join(strange[:5])}; a draft is text and safetensors, and pickles are never loaded or written"
        )
