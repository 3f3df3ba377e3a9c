"""The table of drafters, and how one is found on disk: a new kind is one file here and one line of the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.drafters.early_exit import EarlyExitDrafter
from draftsmith.specdec.drafters.model import ModelDrafter
from draftsmith.specdec.drafters.ngram import NgramDrafter
from draftsmith.specdec.models import compatible, load_model, load_tokenizer, output_rows, pick

__all__ = ["DRAFTERS", "Drafter", "EarlyExitDrafter", "ModelDrafter", "NgramDrafter", "Outcome", "Proposal", "load_drafter"]


def _model(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> Drafter:
    draft = load_model(folder, target.dtype, target.device)
    if tokenizer is not None:
        compatible(tokenizer, load_tokenizer(folder), target_rows=output_rows(target), draft_rows=output_rows(draft)).raise_if_not()
    return ModelDrafter(draft, vocab_size=output_rows(target))


def _ngram(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> Drafter:
    return NgramDrafter(**settings)


def _early_exit(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> Drafter:
    return EarlyExitDrafter(target, **settings)


DRAFTERS: dict[str, Callable[[str, dict[str, Any], PreTrainedModel, Any], Drafter]] = {
    "model": _model,
    "ngram": _ngram,
    "early_exit": _early_exit,
}


def load_drafter(name: str | Path, target: PreTrainedModel, tokenizer: Any = None) -> Drafter:
    """A drafter for `target` from `ngram`, `ngram:3` (its longest match), `exit:6` (after layer 6), or anything `load` takes.

    A folder's drafter.json says its kind and settings; without one it is a model. Given the target's `tokenizer`, a
    draft whose tokenizer differs is refused, naming an id.
    """
    word, _, number = str(name).partition(":")
    if word in ("ngram", "exit") and (number.isdigit() or not number):
        if word == "exit":
            if not number:
                raise ValueError("exit needs its layer, as in exit:6")
            return _early_exit("", {"layer": int(number)}, target, tokenizer)
        return _ngram("", {"longest": int(number)} if number else {}, target, tokenizer)
    described = Path(name) / "drafter.json"
    about: dict[str, Any] = json.loads(described.read_text()) if described.is_file() else {"kind": "model"}
    build = pick(DRAFTERS, about["kind"], f"the kind of drafter in {described}")
    return build(str(name), about.get("settings", {}), target, tokenizer)
