"""The target's own first layers draft: an early exit is a shorter model of the same class, so the model drafter drives it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.drafters.exit_heads import BlockExit, ExitHead, LoraExit, is_exit_head
from draftsmith.specdec.drafters.model import ModelDrafter
from draftsmith.specdec.models import blocks, final_norm, output_rows, shell
from draftsmith.specdec.split import ReadsAhead, SplitLM, cannot_split


def exit_view(target: PreTrainedModel, layer: int, norm: nn.Module | None = None, head: nn.Module | None = None) -> PreTrainedModel:
    """A shallow copy of `target` that stops after `layer` layers (1..L): every module is shared, none is copied or changed.

    `norm` takes the place of the final norm and `head` that of the output head; what is not given is the target's own.
    """
    name, layers = blocks(target)
    body = getattr(target, target.base_model_prefix)
    if any("forward" in vars(one) for one in (target, body)):
        raise ValueError(
            f"{type(target).__name__} has a wrapped forward (compiled, or with hooks), which would run all its layers; exit it before"
        )
    if not 1 <= layer <= len(layers):
        raise ValueError(f"exit after layer {layer} asked; {type(target).__name__} has layers 1..{len(layers)}")
    view, short = shell(target), shell(body)
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layer]
    text.num_hidden_layers = layer
    view.config = short.config = config
    setattr(short, name, nn.ModuleList(layers[:layer]))
    if norm is not None:
        setattr(short, final_norm(target)[0], norm)
    setattr(view, target.base_model_prefix, short)
    if head is not None:
        view.set_output_embeddings(head)
    return view


def exit_model(target: PreTrainedModel, layer: int, head: ExitHead) -> PreTrainedModel:
    """The exit after `layer` with a trained head, as a model: all of it is the target's but for the head's own modules."""
    name, layers = blocks(target)
    if isinstance(head, BlockExit):  # one layer more, and that is the head's
        view = exit_view(target, layer + 1, norm=head.out)
        own = [*layers[:layer], head.block]
    elif isinstance(head, LoraExit):
        view, own = exit_view(target, layer, norm=head.out), list(head.layers)
    else:
        return exit_view(target, layer, norm=head)
    setattr(getattr(view, target.base_model_prefix), name, nn.ModuleList(own))
    return view


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first `layer` layers of the target and its own norm and head.

    `head` is one of `exit_heads`, or any module to stand in the place of the output head. `ids` are all that it says (`ModelDrafter`).

    The decoder's target reads on from what drafting computed, in one cache, where the target can be cut in two after `layer`; `shared=False`,
    a target of another make and a head that changes these layers keep a cache of their own, and `notes` says why.
    """

    def __init__(
        self, target: PreTrainedModel, layer: int, head: Any = None, vocab_size: int | None = None, ids: Tensor | None = None,
        shared: bool = True,
    ) -> None:  # fmt: skip
        view = exit_model(target, layer, head) if is_exit_head(head) else exit_view(target, layer, head=head)
        super().__init__(view, vocab_size=vocab_size or output_rows(target), ids=ids)
        self.target, self.layer, self.head, self.shared = target, layer, head, shared
        self._why_not: str | None = None  # why this batch is not shared
        self._cannot: str | None = UNTRIED
        self._split: weakref.ref[SplitLM] | None = None  # the decoder's, whose cache is not to outlive its call

    def share(self, lm: CachedLM) -> CachedLM | SplitLM:
        self._split = self._why_not = None
        if not self.shared:
            return lm
        if lm.model is not self.target:
            self._why_not = "it was made from another model than the one that it drafts for"
            return lm
        try:
            split = SplitLM(self.target, self.model, self.layer, lm.batch_size)
        except ValueError as error:
            self._why_not = str(error)
            return lm
        if self._cannot == UNTRIED:
            self._cannot = cannot_split(self.target, self.model, self.layer)
        self._why_not = self._cannot
        if self._why_not:
            return lm
        self._split = weakref.ref(split)
        return split

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        super().begin(ids, valid, last, hidden)
        self._leave_what_the_target_reads()

    def observe(self, outcome: Outcome, said: Proposal | None = None) -> None:
        super().observe(outcome, said)
        self._leave_what_the_target_reads()

    def notes(self) -> list[str]:
        kept = [f"the exit after layer {self.layer} keeps a cache of its own: {self._why_not}"] if self._why_not else []
        return [*kept, *super().notes()]

    def _reader(self, ids: Tensor, valid: Tensor) -> Any:
        split = self._split() if self._split is not None else None
        self._split = None
        if split is not None and split.lengths.tolist() == valid.sum(-1).tolist():  # else it is not of this batch
            return ReadsAhead(weakref.proxy(split))
        return super()._reader(ids, valid)

    def _leave_what_the_target_reads(self) -> None:
        if isinstance(self._lm, ReadsAhead):
            self._pending = [text[-1:] for text in self._pending]


UNTRIED = "not tried yet"
