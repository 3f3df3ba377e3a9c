"""From a candidate's name to what can be measured: where it lies, whom it was made for, and how it is made ready."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.measurement import Arm
from draftsmith.recipes.runs import find_draft
from draftsmith.specdec.drafters import CombinedDrafter, ModelDrafter
from draftsmith.specdec.prepare import prepare_for_decoding, report


def place_of(folder: Path, drafter: str) -> str:
    """A candidate's name with the run's own draft in the place of `run:...`; the layer of an exit stays behind it."""
    lookup, plus, model = drafter.rpartition("+")
    which, colon, layer = model[4:].partition(":")
    return f"{lookup}{plus}{find_draft(folder, which)}{colon}{layer}" if model.startswith("run:") else drafter


def layer_of(name: str) -> tuple[str, int] | None:
    """`FOLDER:6` -> (FOLDER, 6), `exit:6` -> (exit, 6); None for a drafter that is no exit."""
    found = re.fullmatch(r"(.*):(\d+)", name)
    return (found[1], int(found[2])) if found and found[1] != "ngram" and not Path(name).exists() else None


def folder_of(name: str) -> str:
    """Where a drafter's files lie: its name without a lookup before it and a layer behind it."""
    if Path(name).exists():
        return name
    last = name.rpartition("+")[2]
    layer = layer_of(last)
    return layer[0] if layer else last


def refuse_another_target(draft: Path, revision: str) -> None:
    """ValueError where a draft's drafter.json says that it was made from another target."""
    described = draft / "drafter.json"
    if not described.is_file():
        return
    made_for = json.loads(described.read_text(encoding="utf-8")).get("revision", revision)
    if made_for != revision:
        raise ValueError(
            f"{draft} was made from a target of revision {made_for}; this one has {revision}. Measure it with its own target"
        )


def prepare_all(target: Any, arms: Sequence[Arm]) -> str:
    """Baseline and candidates alike go through prepare_for_decoding; how that went."""
    drafters: list[Any] = [arm.drafter for arm in arms]
    for model in (target, *(one.model for one in drafters if hasattr(one, "model"))):
        prepare_for_decoding(model)
    done = report(target)
    return (
        f"prepared for decoding ({done.linears} linears, {done.norms} norms{'; ' + done.why_not if done.why_not else ''})"
        if done
        else ""
    )


def kind_of(drafter: Any) -> str:
    """model: its laws can be had from one pass, and it drafts all that it is asked for; combined: its model's can; lookup: it has none."""
    if isinstance(drafter, ModelDrafter):
        return "model"
    return "combined" if isinstance(drafter, CombinedDrafter) else "lookup"


def read_bytes(model: Any) -> int:
    """What a step of it reads of weights: all of them, but of an input embedding apart from the head one row. 0 of no model."""
    if model is None:
        return 0
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    table = None if head is not None and getattr(head, "weight", None) is embedding.weight else embedding.weight
    return sum(one.numel() * one.element_size() for one in model.parameters() if one is not table)
