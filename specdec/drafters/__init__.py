"""The table of drafters, and how one is found on disk: a new kind is one file here and one line of the table."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.drafters.combined import CombinedDrafter
from draftsmith.specdec.drafters.corpus import read_corpus
from draftsmith.specdec.drafters.early_exit import EarlyExitDrafter
from draftsmith.specdec.drafters.exit_files import read_exit
from draftsmith.specdec.drafters.model import ModelDrafter
from draftsmith.specdec.drafters.ngram import NgramDrafter
from draftsmith.specdec.drafters.trimmed import read_ids
from draftsmith.specdec.models import compatible, load_model, load_tokenizer, output_rows, pick, real_ids
from draftsmith.specdec.places import locate

__all__ = [
    "DRAFTERS", "CombinedDrafter", "Drafter", "EarlyExitDrafter", "ModelDrafter", "NgramDrafter", "Outcome", "Proposal", "load_drafter",
]  # fmt: skip


def _model(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> ModelDrafter:
    draft = load_model(folder, target.dtype, target.device)
    if tokenizer is not None:
        compatible(tokenizer, load_tokenizer(folder), target_rows=output_rows(target), draft_rows=output_rows(draft)).raise_if_not()
    known = min(real_ids(target, tokenizer), output_rows(draft))
    if "ids" in settings:
        settings = {**settings, "ids": read_ids(Path(locate(folder) or folder) / settings["ids"], known)}
    return ModelDrafter(draft, vocab_size=known, **settings)


def _ngram(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> NgramDrafter:
    if "corpus" in settings:
        path = Path(folder) / settings["corpus"]
        settings = {**settings, "corpus": read_corpus(path, tokenizer, output_rows(target))}
    return NgramDrafter(**settings)


def _early_exit(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> EarlyExitDrafter:
    return EarlyExitDrafter(target, **{"vocab_size": real_ids(target, tokenizer), **settings})


def _exits(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> EarlyExitDrafter:
    rest, place = dict(settings), Path(folder)
    listed, layer, ids = rest.pop("exits"), rest.pop("default"), rest.pop("ids", None)
    asked, head = read_exit(place, listed, rest.pop("layer", layer), target)
    known = real_ids(target, tokenizer)
    said = None if ids is None else read_ids(place / ids, known)
    return EarlyExitDrafter(target, asked.layer, head, known, ids=said, **rest)


def _combined(folder: str, settings: dict[str, Any], target: PreTrainedModel, tokenizer: Any) -> CombinedDrafter:
    rest = dict(settings)
    ngram = _ngram(folder, rest.pop("ngram", {}), target, tokenizer)
    return CombinedDrafter(ngram, _model(folder, rest.pop("model", {}), target, tokenizer), **rest)


DRAFTERS: dict[str, Callable[[str, dict[str, Any], PreTrainedModel, Any], Drafter]] = {
    "model": _model,
    "ngram": _ngram,
    "early_exit": _early_exit,
    "combined": _combined,
    "exits": _exits,
}


def load_drafter(name: str | Path, target: PreTrainedModel, tokenizer: Any = None) -> Drafter:
    """A drafter for `target` from `ngram`, `ngram:3` (its longest match), `exit:6` (after layer 6), or anything `load` takes,
    or a folder of trained exits, `FOLDER:6` for the one after layer 6 (without a number the one that it names its best);
    `ngram+exit:6` or `ngram+FOLDER` puts the lookup before another drafter.

    A folder's drafter.json says its kind and settings; without one it is a model. Given the target's `tokenizer`, a
    draft whose tokenizer differs is refused, naming an id.
    """
    word, colon, number = str(name).partition(":")
    here = Path(name).exists()
    if (of := exit_of(name)) is not None:
        return _from_folder(*of, target, tokenizer)
    if not here and (pair := re.fullmatch(r"(ngram(?::[^+/]*)?)\+(.*)", str(name))):
        return _pair(pair[1], pair[2], target, tokenizer)
    if word in ("ngram", "exit") and not here:
        if (colon and not number.isdigit()) or (word == "exit" and not colon):
            raise ValueError(f"{name}: {word} takes a whole number, as in {'exit:6' if word == 'exit' else 'ngram:4'}")
        if word == "exit":
            return _early_exit("", {"layer": int(number)}, target, tokenizer)
        return _ngram("", {"longest": int(number)} if number else {}, target, tokenizer)
    if not here and (near := difflib.get_close_matches(str(name).partition("+")[0], ("ngram", "exit"), n=1)):
        raise ValueError(f"{name} is no folder here; did you mean {near[0]!r}?")
    return _from_folder(str(name), None, target, tokenizer)


def exit_of(name: str | Path) -> tuple[str, int] | None:
    """The folder and the layer of `FOLDER:6`; None for any other name."""
    folder, _, number = str(name).rpartition(":")
    here = number.isdigit() and (Path(folder) / "drafter.json").is_file() and not Path(name).exists()
    return (folder, int(number)) if here else None


def _from_folder(name: str, layer: int | None, target: PreTrainedModel, tokenizer: Any) -> Drafter:
    place = locate(name)
    described = place / "drafter.json" if place else None
    about: dict[str, Any] = {"kind": "model"}
    if described is not None and described.is_file():
        about = _about(described)
    build = pick(DRAFTERS, str(about.get("kind")), f"the kind of drafter in {described}")
    settings = about.get("settings", {})
    if layer is not None:
        if build is not _exits:
            raise ValueError(f"{name}:{layer}: a layer is named of a folder of exits, and this one holds a {about.get('kind')}")
        settings = {**settings, "layer": layer}
    try:
        return build(name, settings, target, tokenizer)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{described}: its settings do not fit a drafter of kind {about.get('kind')}: {error}") from error


def _about(described: Path) -> dict[str, Any]:
    try:
        about = json.loads(described.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{described} is not JSON ({error.msg} at line {error.lineno})") from error
    if not isinstance(about, dict):
        raise ValueError(f'{described} must say {{"kind": ..., "settings": {{...}}}}, found {type(about).__name__}')
    return about


def _pair(lookup: str, other: str, target: PreTrainedModel, tokenizer: Any) -> CombinedDrafter:
    if not other:
        raise ValueError(f"{lookup}+: name what drafts beside the lookup, as in {lookup}+exit:6 or {lookup}+FOLDER")
    ngram, model = (load_drafter(one, target, tokenizer) for one in (lookup, other))
    if not isinstance(model, ModelDrafter) or not isinstance(ngram, NgramDrafter):
        raise ValueError(
            f"{lookup}+{other}: a lookup goes before a model or an early exit, and {other} is a {type(model).__name__}; "
            "name a draft model's folder or exit:N behind the +"
        )
    return CombinedDrafter(ngram, model)
