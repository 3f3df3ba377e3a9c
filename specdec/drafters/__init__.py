"""The table of drafters, and how one is found on disk: a new kind is one file here and one line of the table."""

from __future__ import annotations

import difflib
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
from draftsmith.specdec.places import locate

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
    word, colon, number = str(name).partition(":")
    if word in ("ngram", "exit") and not Path(name).exists():
        if (colon and not number.isdigit()) or (word == "exit" and not colon):
            raise ValueError(f"{name}: {word} takes a whole number, as in {'exit:6' if word == 'exit' else 'ngram:4'}")
        if word == "exit":
            return _early_exit("", {"layer": int(number)}, target, tokenizer)
        return _ngram("", {"longest": int(number)} if number else {}, target, tokenizer)
    if (near := difflib.get_close_matches(str(name), ("ngram", "exit"), n=1)) and not Path(name).exists():
        raise ValueError(f"{name} is no folder here; did you mean {near[0]!r}?")
    place = locate(name)
    described = place / "drafter.json" if place else None
    about: dict[str, Any] = {"kind": "model"}
    if described is not None and described.is_file():
        about = json.loads(described.read_text(encoding="utf-8"))
    build = pick(DRAFTERS, str(about.get("kind")), f"the kind of drafter in {described}")
    try:
        return build(str(name), about.get("settings", {}), target, tokenizer)
    except TypeError as error:
        raise ValueError(f"{described}: its settings do not fit a drafter of kind {about.get('kind')}: {error}") from error
