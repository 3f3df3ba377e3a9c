"""The drafts that can be trained, and the plain model that each becomes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import Head, check_head, last_hidden
from draftsmith.distill.making.cut import build, cut, speak_like, untied
from draftsmith.distill.making.lora import adapted, merged
from draftsmith.distill.making.pad_rows import with_rows
from draftsmith.distill.packing import apart
from draftsmith.specdec.models import blocks, output_rows


class CutDraft(nn.Module):
    """Some of the target's layers, trained, between its embedding and its head, which are shared with it and stay frozen.

    A square `map` turns the last hidden state into the target's own space before the head. It starts as the identity,
    or as a ridge regression (`warm_start`), and is multiplied into the head when the draft is saved. `model` takes the
    place of the cut layers: any model of the target's hidden size, such as `narrow(cut(target, layers), ...)`. `real` is how many
    ids the target can say, where rows beyond only pad its head.
    """

    target: PreTrainedModel
    head: Head
    body: Any
    config: Any

    def __init__(
        self, target: PreTrainedModel, layers: list[int], model: PreTrainedModel | None = None, real: int | None = None
    ) -> None:
        super().__init__()
        self.layers = layers
        model = (cut(target, layers) if model is None else model).train()
        width = target.config.get_text_config().hidden_size
        if (found := model.config.get_text_config().hidden_size) != width:
            raise ValueError(
                f"a draft of hidden size {found} cannot share the embedding and the head of a target of {width}; "
                "train it with its own, as WholeDraft"
            )
        self.config = model.config
        self._no_split_modules = sorted({type(one).__name__ for one in blocks(model)[1]})  # FSDP shards a block at a time
        self.body = getattr(model, model.base_model_prefix)
        self.map = nn.Linear(width, width, bias=False, device=target.device, dtype=target.dtype)
        nn.init.eye_(self.map.weight)
        # Kept out of this module's parameters and state: they are the target's, and frozen.
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "head", Head(target, real))
        self.body.set_input_embeddings(nn.Identity())

    def forward(self, embedded: Tensor, scored: Tensor, documents: Tensor | None = None) -> Tensor:
        """Embedded tokens [B, T, H] -> hidden states at the scored positions, in the target's space: [N, H]."""
        return self.map(self.features(embedded, scored, documents))

    def features(self, embedded: Tensor, scored: Tensor, documents: Tensor | None = None) -> Tensor:
        """The same before the map: [N, H]."""
        asked = apart(documents, self.body.config, embedded.dtype)
        return self.body(inputs_embeds=embedded, use_cache=False, **asked).last_hidden_state[scored]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.no_grad():
            embedding: Any = self.target.get_input_embeddings()
            return embedding(batch.ids), batch.scored, batch.documents

    @torch.no_grad()
    def whole(self, weights: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
        """The draft as a plain model of the target's class; its head is the target's times the map.

        `weights` are those of this module, in its place, where it has only parts of them itself (FSDP2, ZeRO-3).
        """
        weights = self.state_dict() if weights is None else weights
        across = weights["map.weight"].to(self.target.device)
        plain = bool(torch.equal(across, torch.eye(len(across), device=across.device)))
        model = build(copy.deepcopy(self.config) if plain else untied(self.config), self.target)
        body: Any = getattr(model, model.base_model_prefix)
        embedding, theirs = body.get_input_embeddings(), self.target.get_input_embeddings()
        own_body = {name.removeprefix("body."): one for name, one in weights.items() if name.startswith("body.")}
        missing = body.load_state_dict(own_body, strict=False)
        expected = [name for name, one in body.named_parameters() if one is embedding.weight]
        if missing.unexpected_keys or missing.missing_keys != expected:
            raise RuntimeError(f"the trained layers do not fit the draft: {missing}")
        embedding.load_state_dict(theirs.state_dict())
        own: Any = model.get_output_embeddings()
        if own.weight is not embedding.weight:
            own.load_state_dict(self.head.linear.state_dict())
            if not plain:
                own.weight.copy_(self.head.linear.weight.to(across.dtype) @ across)
        return model


class WholeDraft(nn.Module):
    """Any causal model that speaks the target's ids, trained as it is, head included; with adapters (`with_lora`), they alone.

    Its state is what is trained, so a checkpoint of adapters is small. Given the `target`, what is saved has the target's rows,
    special ids and generation settings. `real` is how many ids both can say, where rows beyond only pad a head: those are
    masked while it learns, and saved as rows that are never the likeliest.
    """

    head: Head
    target: PreTrainedModel | None

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel | None = None, real: int | None = None) -> None:
        super().__init__()
        self.model, self.real = model, real
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "head", Head(model, real))
        check_head(model, self.head)
        if not adapted(model):
            model.requires_grad_(True)  # a copy of a target that a teacher has frozen is frozen too
        self._frozen = [f"model.{name}" for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad]
        self.register_state_dict_post_hook(_without_frozen)
        self.register_load_state_dict_post_hook(_frozen_is_not_missing)

    def forward(self, ids: Tensor, scored: Tensor, documents: Tensor | None = None) -> Tensor:
        return last_hidden(self.model, ids, documents)[scored]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        return batch.ids, batch.scored, batch.documents

    def whole(self) -> PreTrainedModel:
        """The draft as a plain model, adapters merged; the trained one is left as it is."""
        model = merged(self.model) if adapted(self.model) else self.model
        if self.target is None:
            return model
        model = with_rows(model, output_rows(self.target), self.real)
        speak_like(model, self.target)
        return model


def in_float32(draft: nn.Module) -> None:
    """What is trained, in float32, where autocast runs it in less: the step of an optimizer is often less than a bfloat16 can change by."""
    for one in draft.parameters():
        if one.requires_grad:
            one.data = one.data.float()


def recomputed(draft: Any) -> None:
    """Keep what goes into each block for the backward, and not what is made in it, which is made again there: the same numbers."""
    model = draft.body if isinstance(draft, CutDraft) else draft.model if isinstance(draft, WholeDraft) else draft
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _without_frozen(draft: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in draft._frozen:
        state.pop(prefix + name, None)


def _frozen_is_not_missing(draft: Any, keys: Any) -> None:
    # Under a wrapper each name has its prefix before it.
    keys.missing_keys[:] = [one for one in keys.missing_keys if not one.endswith(tuple(draft._frozen or ["\n"]))]
