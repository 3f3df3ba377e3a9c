"""From a kind and its settings to a draft that can be trained: one function a kind, and all of them are told of the same things."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.making.cut import cut
from draftsmith.distill.making.drafts import CutDraft, WholeDraft
from draftsmith.distill.making.layers import TOKENS, Tried, choose_layers, up_to
from draftsmith.distill.making.lora import with_lora
from draftsmith.distill.making.transplant import transplant as transplanted
from draftsmith.distill.making.width import narrow
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.specdec.models import blocks, compatible, load_model, load_tokenizer, output_rows, pick


class Made(NamedTuple):
    """A draft, which of the target's layers it is made of (none: another model), and what was tried for them."""

    draft: CutDraft | WholeDraft
    layers: list[int]
    tried: list[Tried]


class Around(NamedTuple):
    """What a draft is made among: its target and teacher, `real` ids, rows to calibrate on and to judge by, where to talk, and how
    processes come to `agree`."""

    target: PreTrainedModel
    teacher: HiddenTeacher
    tokenizer: Any
    real: int | None
    batches: list[Batch]
    held_out: list[Batch]
    say: Callable[[str], None]
    agree: Callable[[Any], Any]


def make_draft(
    kind: str, target: PreTrainedModel, teacher: HiddenTeacher, *, tokenizer: Any = None, real: int | None = None,
    batches: Iterable[Batch] = (), held_out: Iterable[Batch] = (), say: Callable[[str], None] = print,
    agree: Callable[[Any], Any] = lambda found: found, **settings: Any,
) -> Made:  # fmt: skip
    """A draft of `kind`: `layers`, `width` or `checkpoint`, with the settings of that kind's function below.

    `real` is how many ids the target can say (`specdec.models.real_ids`). Only `auto` layers and `width` read the batches. For `agree` see
    `choose_layers`.
    """
    around = Around(target, teacher, tokenizer, real, up_to(batches, TOKENS), list(held_out), say, agree)
    return pick(KINDS, kind, "draft.kind")(around, **settings)


def from_layers(around: Around, layers: list[int] | str, steps: int = 0) -> Made:
    """Layers of the target between its own embedding and head; for `layers` see `choose_layers`."""
    choice = _choice(around, layers, steps)
    return Made(CutDraft(around.target, choice.layers, real=around.real), *choice)


def from_width(
    around: Around, layers: list[int] | str | None = None, steps: int = 0,
    intermediate: int | None = None, heads: int | None = None, hidden: int | None = None,
) -> Made:  # fmt: skip
    """Narrower layers (`narrow`), all of them or those of `layers`; with the target's embedding and head, unless `hidden` is another."""
    if intermediate is None and heads is None and hidden is None:
        raise ValueError(
            "a draft of kind width needs at least one of intermediate, heads and hidden; for fewer layers alone use kind layers"
        )
    choice = _choice(around, layers if layers is not None else list(range(len(blocks(around.target)[1]))), steps)
    model = narrow(cut(around.target, choice.layers), around.batches, hidden, intermediate, heads)
    if hidden is None:
        return Made(CutDraft(around.target, choice.layers, model, around.real), *choice)
    return Made(WholeDraft(model, around.target, around.real), *choice)


def from_checkpoint(
    around: Around, model: str, transplant: Literal["never", "where_needed"] = "never", lora: Mapping[str, Any] | None = None
) -> Made:
    """A model of its own (a hub id, a folder, a .gguf file), whole or through adapters (`with_lora`). It speaks the target's ids
    already, or gets them where `transplant` says so."""
    target, say = around.target, around.say
    draft = load_model(model, target.dtype, target.device)
    if around.tokenizer is not None:
        theirs = load_tokenizer(model)
        pair = compatible(around.tokenizer, theirs, output_rows(target), output_rows(draft))
        if pair.problem and transplant == "where_needed":
            draft, report = transplanted(draft, theirs, around.tokenizer, output_rows(target))
            say(f"{model} gets the target's vocabulary: {report}")
        else:
            pair.raise_if_not()
    ours, theirs = (getattr(one.config.get_text_config(), "max_position_embeddings", None) for one in (target, draft))
    if ours is not None and theirs is not None and theirs < ours:
        say(
            f"{model} reads at most {theirs} tokens, the target {ours}: a text that outgrows the draft is decoded plainly from there"
        )
    if lora is not None:
        draft = with_lora(draft, **lora)
    return Made(WholeDraft(draft, target, around.real), [], [])


KINDS: dict[str, Callable[..., Made]] = {"layers": from_layers, "width": from_width, "checkpoint": from_checkpoint}


def _choice(around: Around, layers: list[int] | str, steps: int) -> Any:
    return choose_layers(
        around.target, around.teacher, layers, around.batches, around.held_out, steps=steps, say=around.say, agree=around.agree
    )
