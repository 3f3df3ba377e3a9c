"""Making a draft from its target, and the objective that teaches it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.chunked import Asked, judged, scored_loss
from draftsmith.distill.head import Head, Logits, check_head, last_hidden
from draftsmith.distill.losses import LOSSES
from draftsmith.distill.objective import Loss
from draftsmith.distill.teacher import LiveTeacher, Teacher
from draftsmith.specdec.drafters.trimmed import check_ids, write_ids
from draftsmith.specdec.models import blocks, pick
from draftsmith.specdec.places import quiet


class Origin(NamedTuple):
    """Where a draft comes from, to be written beside it: its target's name and revision, and the tokenizer of both."""

    target: str
    revision: str
    tokenizer: Any


def check_layers(target: PreTrainedModel, layers: list[int]) -> None:
    """ValueError where `target` cannot be cut to `layers`."""
    _, stack = blocks(target)
    if not layers or any(not 0 <= one < len(stack) for one in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"layers {layers} asked; {type(target).__name__} has layers 0..{len(stack) - 1}, each at most once")


def cut(target: PreTrainedModel, layers: list[int], tied: bool = True) -> PreTrainedModel:
    """A model of the target's class that has only its `layers` (from 0), with copies of everything else.

    `tied=False` gives it an output head of its own where the target's is its embedding.
    """
    check_layers(target, layers)
    name, _ = blocks(target)
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[one] for one in layers]
    text.num_hidden_layers = len(layers)
    if not tied:
        config.tie_word_embeddings = text.tie_word_embeddings = False
    draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    state, prefix = {}, f"{target.base_model_prefix}.{name}."
    new = {str(old): str(place) for place, old in enumerate(layers)}
    for key, value in target.state_dict().items():
        if key.startswith(prefix):
            number, _, rest = key[len(prefix) :].partition(".")
            if number in new:
                state[f"{prefix}{new[number]}.{rest}"] = value
        else:
            state[key] = value
    draft.load_state_dict(state, strict=True)
    return draft.to(target.device).eval()


class CutDraft(nn.Module):
    """Some of the target's layers, trained, between its embedding and its head, which are shared with it and stay frozen.

    A square `map` turns the last hidden state into the target's own space before the head. It starts as the identity,
    or as a ridge regression (`warm_start`), and is multiplied into the head when the draft is saved.
    """

    target: PreTrainedModel
    head: Head
    body: Any

    def __init__(self, target: PreTrainedModel, layers: list[int]) -> None:
        super().__init__()
        self.layers = layers
        model = cut(target, layers).train()
        self.body = getattr(model, model.base_model_prefix)
        width = model.config.get_text_config().hidden_size
        self.map = nn.Linear(width, width, bias=False, device=target.device, dtype=target.dtype)
        nn.init.eye_(self.map.weight)
        # Kept out of this module's parameters and state: they are the target's, and frozen.
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "head", Head(target))
        self.body.set_input_embeddings(nn.Identity())

    def forward(self, embedded: Tensor, scored: Tensor) -> Tensor:
        """Embedded tokens [B, T, H] -> hidden states at the scored positions, in the target's space: [N, H]."""
        return self.map(self.features(embedded, scored))

    def features(self, embedded: Tensor, scored: Tensor) -> Tensor:
        """The same before the map: [N, H]."""
        return self.body(inputs_embeds=embedded, use_cache=False).last_hidden_state[scored]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            embedding: Any = self.target.get_input_embeddings()
            return embedding(batch.ids), batch.scored

    @torch.no_grad()
    def whole(self) -> PreTrainedModel:
        """The draft as a plain model of the target's class; its head is the target's times the map."""
        plain = bool(torch.equal(self.map.weight, torch.eye(len(self.map.weight), device=self.map.weight.device)))
        model = cut(self.target, self.layers, tied=plain)
        body = getattr(model, model.base_model_prefix)
        missing = body.load_state_dict(self.body.state_dict(), strict=False)
        if missing.unexpected_keys or any("embed" not in key and "wte" not in key for key in missing.missing_keys):
            raise RuntimeError(f"the trained layers do not fit the draft: {missing}")
        if not plain:
            own: Any = model.get_output_embeddings()
            own.weight.copy_(self.head.linear.weight @ self.map.weight)
        return model


class WholeDraft(nn.Module):
    """Any causal model that speaks the target's ids, trained as it is, head included."""

    head: Head

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "head", Head(model))
        check_head(model, self.head)

    def forward(self, ids: Tensor, scored: Tensor) -> Tensor:
        return last_hidden(self.model, ids)[scored]

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return batch.ids, batch.scored

    def whole(self) -> PreTrainedModel:
        return self.model


class DistillDraft:
    """Teach a draft the target's laws at the scored positions: `loss` is a weighted sum over `LOSSES`.

    `support` (sorted ids, for a draft whose head is frozen) makes the losses compare the two laws given that the token
    is one of these ids. It cuts the cost of the head, which is most of a step, by its share of the vocabulary; ids
    outside keep the target's own rows of the head. Acceptance and agreement always see the whole laws, for 32 positions
    of a batch then. In eval mode everything is whole.

    `ids` (ascending, as `vocabulary.frequent` gives them) are all that the draft will ever say. Its head is those rows then, in
    training, in the figures and in our decoder; the losses set it against the whole law, with all other ids as one outcome
    that it cannot say. A support lies within them.
    """

    def __init__(
        self, draft: CutDraft | WholeDraft | PreTrainedModel, teacher: Teacher | PreTrainedModel,
        loss: Mapping[str, float] | str = "forward_kl", chunk: int = 128, support: Tensor | None = None, origin: Origin | None = None,
        ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        weights = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        for name in weights:
            pick(LOSSES, name, "loss")
        self.trainable: nn.Module = WholeDraft(draft) if isinstance(draft, PreTrainedModel) else draft
        self.draft: Any = self.trainable  # stays the bare module when a loop wraps `trainable` for several processes
        self.teacher: Teacher = LiveTeacher(teacher) if isinstance(teacher, PreTrainedModel) else teacher
        self.origin = origin
        rows = self.draft.head.rows, self.teacher.rows
        if rows[0] != rows[1]:
            raise ValueError(f"the draft has {rows[0]} output rows, the target {rows[1]}; their laws must be over the same ids")
        if ids is not None:
            ids = check_ids(ids, rows[1], "the draft's ids").to(self.draft.head.linear.weight.device)
        self.asked = Asked(weights, chunk, ids=ids)
        self._learned = [one for one in self.draft.head.parameters() if one.requires_grad]
        if support is not None and self._learned:
            raise ValueError("a support needs a draft whose head is frozen: ids outside it would never be taught")
        if support is not None and ids is not None and not bool(torch.isin(support, ids).all()):
            raise ValueError("a support holds ids that the draft cannot say; leave them out of it")
        self._narrow = None if support is None else (self.draft.head.over(support), support)
        self._frozen: Logits = self.draft.head if ids is None or self._learned else self.draft.head.over(ids)

    def loss(self, batch: Batch) -> Loss:
        hidden = self.trainable(*self.draft.inputs(batch))
        signal = self.teacher.signal(batch)
        narrow = self._narrow if self.trainable.training else None
        head, learned = self._head()
        if narrow is None:
            total = scored_loss(hidden, head, signal, self.asked, learned)
        else:
            total = scored_loss(hidden, narrow[0], signal.within(narrow[1]), self.asked._replace(ids=None))
        metrics = judged(hidden, head, signal, self.asked, 32 if narrow else None)
        return Loss(total, metrics | {"scored": torch.tensor(float(len(hidden)))})

    def _head(self) -> tuple[Logits, Sequence[Tensor]]:
        """What makes logits of the draft's hidden states, and which tensors of it are taught."""
        if self.asked.ids is not None and self._learned:
            return self.draft.head.rows_of(self.asked.ids)
        return self._frozen, self._learned

    def save(self, folder: Path) -> None:
        """A plain transformers folder plus drafter.json."""
        save_draft(self.draft.whole(), folder, self.origin, self.asked.ids)


def save_draft(model: PreTrainedModel, folder: Path, origin: Origin | None = None, ids: Tensor | None = None) -> None:
    """A plain transformers folder (with the target's tokenizer, where the origin is known) plus drafter.json.

    A draft that says `ids` alone is saved with the whole head, for engines that know no other; `load_drafter` cuts it to them.
    """
    with quiet():
        model.save_pretrained(folder)
    about: dict[str, Any] = {"kind": "model", "settings": {} if ids is None else write_ids(folder, ids)}
    if origin is not None:
        origin.tokenizer.save_pretrained(folder)
        about |= {"target": origin.target, "revision": origin.revision}
    (folder / "drafter.json").write_text(json.dumps(about) + "\n")
