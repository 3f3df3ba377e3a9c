"""Exports, one file a format; each reloads what it wrote in a fresh process and compares before it takes its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draftsmith.recipes import Recipe
from draftsmith.train.export import exits_folder, transformers_folder

EXPORTS: dict[str, Callable[[Recipe, bool], Path]] = {
    "transformers": transformers_folder.export,
    "exits": exits_folder.export,
}
