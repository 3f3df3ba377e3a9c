"""What any engine asks of a draft beside its target, checked on the two before a file is written: rows, ids, ends, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.distill.rollout import ends
from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.cache import positions
from draftsmith.specdec.drafters.trimmed import FILE as IDS
from draftsmith.specdec.models import compatible, load_tokenizer, output_rows
from draftsmith.specdec.places import quiet, resolve
from draftsmith.train.export.exits_folder import OneExit, as_model
from draftsmith.train.export.proof import safe


class Fit(NamedTuple):
    """A run's best draft with the ends of its target set, the target's tokenizer and config; `notes` are what a user should know.

    Of a draft of kind exits it is one `exit` as a model, and `source` holds heads.
    """

    draft: PreTrainedModel
    tokenizer: Any
    target: Any
    source: Path
    notes: list[str]
    exit: OneExit | None

    @property
    def layer(self) -> int | None:
        return self.exit.layer if self.exit is not None else None


def fit(recipe: Recipe) -> Fit:
    """The draft to be exported; ValueError where an engine would refuse it, abort, or accept nothing of it."""
    source = runs.find_draft(recipe.folder, "best")
    safe(source)
    exit_ = as_model(recipe, source) if isinstance(recipe.draft, ExitsDraft) else None
    draft = exit_.model if exit_ is not None else _plain(source)
    tokenizer = load_tokenizer(recipe.target.model)
    target = config_of(recipe.target.model)
    rows(draft, target)
    if (source / "tokenizer.json").is_file():
        compatible(tokenizer, load_tokenizer(source)).raise_if_not()
    same_ends(draft, tokenizer, target, ends(recipe.target.model, tokenizer))
    notes = [context(draft.config, target)]
    if (source / IDS).is_file():
        notes.append(
            "this draft says some ids only, which Draftsmith's decoder alone knows of: an engine drafts from all of its rows"
        )
    return Fit(draft, tokenizer, target, source, [one for one in notes if one], exit_)


def _plain(source: Path) -> PreTrainedModel:
    with quiet():
        draft: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
    return draft


def config_of(name: str) -> Any:
    """The target's text config; no weights are read."""
    with quiet():
        return AutoConfig.from_pretrained(resolve(name)).get_text_config()


def rows(draft: PreTrainedModel, target: Any) -> None:
    """The heads give logits to the same number of ids, rows that only pad them included."""
    ours, theirs = output_rows(draft), int(target.vocab_size)
    if ours != theirs or int(draft.config.vocab_size) != theirs:
        raise ValueError(
            f"the draft has {ours} output rows (its config says {draft.config.vocab_size}) and the target {theirs}. transformers, vLLM and "
            "SGLang want vocab_size equal, padding included, and llama.cpp aborts at the first token beyond the smaller: train it again, drafts "
            "get the target's rows when they are made"
        )


def same_ends(draft: PreTrainedModel, tokenizer: Any, target: Any, eos: list[int]) -> None:
    """Give the draft the target's bos, eos and pad, in both configs: an engine may read either."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    bos = target.bos_token_id if target.bos_token_id is not None else tokenizer.bos_token_id
    for settings in (draft.config, draft.generation_config):
        settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = bos, eos[0] if len(eos) == 1 else eos, pad


def context(draft: Any, target: Any) -> str:
    """A note where the draft reads fewer positions than the target: past them engines stop drafting, or stop."""
    ours, theirs = positions(draft), positions(target)
    if ours is None or (theirs is not None and ours >= theirs):
        return ""
    return f"the draft reads {ours} positions, the target {theirs or 'any number of them'}: serve the pair with at most {ours}"


def shared_positions(draft: Any, target: Any) -> int | None:
    """How long a text the pair can serve."""
    return min((one for one in (positions(draft), positions(target)) if one), default=None)
