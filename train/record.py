"""What a run says about itself: its banner, its environment and the figures of its steps."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.distill import CutDraft, WholeDraft
from draftsmith.distill.early_exit import Exits
from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.files import append_lines, sync, write_whole
from draftsmith.train import exits
from draftsmith.train.data.plan import Order, Rows
from draftsmith.train.engines import LAUNCHED, engine, size


class Log:
    """metrics.jsonl: a line a step; after a resume the lines behind the checkpoint are dropped, not doubled. `also` is told each line too."""

    def __init__(self, path: Path, main: bool, also: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
        self._path, self._main, self._also = path, main, also

    def goes_on_from(self, step: int) -> None:
        """Drop what stands behind `step`: it will be done again."""
        if self._main and self._path.is_file():
            kept = [line for line in runs.metrics(self._path.parent) if line["step"] <= step]
            write_whole(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        if self._main:
            append_lines(self._path, [json.dumps(record)], synced=False)  # a sync a step takes longer than many a step
            self._also(record)

    def sync(self) -> None:
        """To be called before a checkpoint: a run that goes on from it has the lines before it, whatever became of the machine."""
        if self._main and self._path.is_file():
            sync(self._path)


def banner(rows: Rows, plan: Order, start: int, accelerator: Accelerator, folder: Path, processes: int = 0) -> None:
    scored = sum(row.scored for row in rows.train)
    left_out = ", ".join(f"{count} {why}" for why, count in rows.left_out.items() if count) or "none"
    how = f", {LAUNCHED[name]}" if (name := engine(accelerator)) in LAUNCHED else ""
    counted = "".join(f"{count} {what}; " for what, count in rows.counted.items())
    print(
        f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''}{', as train.processes says,' if processes else ''} on {accelerator.device}{how}, {torch.get_num_threads()} threads each; "
        f"{len(rows.train)} rows ({scored} scored tokens), {len(rows.held_out)} held out, left out: {left_out}; "
        f"{counted}{plan.steps} steps{f', going on from step {start}' if start else ''}; results in {folder}"
    )


def describe(draft: CutDraft | WholeDraft | Exits) -> str:
    """What a draft is made of, in a line."""
    if isinstance(draft, Exits):
        return exits.describe(draft)
    text: Any = (draft.config if isinstance(draft, CutDraft) else draft.model.config).get_text_config()
    shape = f"{text.num_hidden_layers} layers, {text.num_attention_heads} heads, hidden size {text.hidden_size}"
    if isinstance(draft, WholeDraft):
        return f"{shape}, with an embedding and a head of its own"
    return f"layers {draft.layers} of the target ({shape}), its embedding, and its head times a trained square matrix"


def reach(draft: CutDraft | WholeDraft, rows: Rows) -> str | None:
    """How far in a text the draft will be asked beyond all that it learned from, where that is so."""
    text: Any = (draft.config if isinstance(draft, CutDraft) else draft.model.config).get_text_config()
    longest, reads = longest_row(rows), getattr(text, "max_position_embeddings", None)
    if reads is None or longest >= reads:
        return None
    return (
        f"the longest row has {longest} tokens, the draft reads {reads}: what it is worth further in is not known. "
        "Where texts will be longer, give longer rows (data.max_length, data.max_new_tokens)"
    )


def longest_row(rows: Rows) -> int:
    return max((len(row.ids) for row in rows.train), default=0)


def environment(
    accelerator: Accelerator, identity: str, recipe: Recipe, rows: Rows, draft: CutDraft | WholeDraft | Exits
) -> dict[str, Any]:
    try:
        commit = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        commit = ""
    packages = ("draftsmith", "torch", "transformers", "datasets", "accelerate", "peft", "numpy")
    return {
        "target": recipe.target.model, "target_revision": identity, "argv": sys.argv, "commit": commit or "unknown",
        "python": platform.python_version(), "machine": platform.processor() or platform.machine(), "device": str(accelerator.device),
        "processes": accelerator.num_processes, "engine": engine(accelerator), "threads": torch.get_num_threads(), "precision": recipe.train.precision,
        "versions": {name: metadata.version(name) for name in packages},
        "draft": describe(draft), "trainable_parameters": sum(size(one) for one in draft.parameters() if one.requires_grad),
        "rows": len(rows.train), "held_out_rows": len(rows.held_out), "left_out": rows.left_out,
        "longest_row": longest_row(rows), "scored_tokens": sum(row.scored for row in rows.train), "counted": rows.counted,
    }  # fmt: skip
