"""The drafts that can be trained, the objective that teaches them, and the plain folder that either becomes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.chunked import Asked, columns, judged, scored_loss, sums
from draftsmith.distill.head import Head, Logits, check_head, last_hidden
from draftsmith.distill.losses import loss_named
from draftsmith.distill.making.cut import build, check_layers, cut, speak_like, untied
from draftsmith.distill.making.lora import adapted, merged
from draftsmith.distill.making.pad_rows import with_rows
from draftsmith.distill.objective import Loss
from draftsmith.distill.packing import apart
from draftsmith.distill.teacher import LiveTeacher, Teacher
from draftsmith.specdec.drafters.trimmed import check_ids, write_ids
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.places import quiet

__all__ = ["CutDraft", "DistillDraft", "Origin", "WholeDraft", "check_layers", "cut", "save_draft"]

JUDGED = 32  # positions of a training batch whose acceptance is measured: the heads run once more for each


class Origin(NamedTuple):
    """Where a draft comes from, to be written beside it: its target's name and revision, and the tokenizer of both."""

    target: str
    revision: str
    tokenizer: Any


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
    def whole(self) -> PreTrainedModel:
        """The draft as a plain model of the target's class; its head is the target's times the map."""
        plain = bool(torch.equal(self.map.weight, torch.eye(len(self.map.weight), device=self.map.weight.device)))
        model = build(copy.deepcopy(self.config) if plain else untied(self.config), self.target)
        body: Any = getattr(model, model.base_model_prefix)
        embedding, theirs = body.get_input_embeddings(), self.target.get_input_embeddings()
        missing = body.load_state_dict(self.body.state_dict(), strict=False)
        expected = [name for name, one in body.named_parameters() if one is embedding.weight]
        if missing.unexpected_keys or missing.missing_keys != expected:
            raise RuntimeError(f"the trained layers do not fit the draft: {missing}")
        embedding.load_state_dict(theirs.state_dict())
        own: Any = model.get_output_embeddings()
        if own.weight is not embedding.weight:
            own.load_state_dict(self.head.linear.state_dict())
            if not plain:
                own.weight.copy_(self.head.linear.weight @ self.map.weight)
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


def _without_frozen(draft: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in draft._frozen:
        state.pop(prefix + name, None)


def _frozen_is_not_missing(draft: Any, keys: Any) -> None:
    # Under a wrapper each name has its prefix before it.
    keys.missing_keys[:] = [one for one in keys.missing_keys if not one.endswith(tuple(draft._frozen or ["\n"]))]


class DistillDraft:
    """Teach a draft the target's laws at the scored positions: `loss` is a weighted sum over `LOSSES` (by name, as in `lk_lambda:10`), of both laws
    at `temperature`, which has nothing to do with the temperature that any text was sampled at.

    `support` (sorted ids, for a draft whose head is frozen) makes the losses compare the two laws given that the token
    is one of these ids. It cuts the cost of the head, which is most of a step, by its share of the vocabulary; ids
    outside keep the target's own rows of the head. Acceptance and agreement always see the whole laws, in training for 32
    positions of a batch. In eval mode everything is whole.

    `ids` (ascending, as `vocabulary.frequent` gives them) are all that the draft will ever say. Its head is those rows then, in
    training, in the figures and in our decoder; the losses set it against the whole law, with all other ids as one outcome
    that it cannot say. A support lies within them.
    """

    def __init__(
        self, draft: CutDraft | WholeDraft | PreTrainedModel, teacher: Teacher | PreTrainedModel,
        loss: Mapping[str, float] | str = "forward_kl", chunk: int = 128, support: Tensor | None = None, origin: Origin | None = None,
        temperature: float = 1.0, ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        weights = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        for name in weights:
            loss_named(name)
        self.trainable: nn.Module = WholeDraft(draft) if isinstance(draft, PreTrainedModel) else draft
        self.draft: Any = self.trainable  # stays the bare module when a loop wraps `trainable` for several processes
        self.teacher: Teacher = LiveTeacher(teacher) if isinstance(teacher, nn.Module) else teacher
        self.origin = origin
        rows = self.draft.head.rows, self.teacher.rows
        if rows[0] != rows[1]:
            raise ValueError(
                f"the draft has {rows[0]} output rows, the target {rows[1]}; their laws must be over the same ids. Where the rest only "
                "pads a head, give both the number of ids that are real: WholeDraft(..., real=N), LiveTeacher(..., real=N)"
            )
        if _shared(self.trainable, self.teacher):
            raise ValueError(
                "the draft and the teacher are one model, so teaching would move the teacher; give one of them a copy "
                "(copy.deepcopy), before adapters are put on it"
            )
        if ids is not None:
            ids = check_ids(ids, rows[1], "the draft's ids").to(self.draft.head.linear.weight.device)
        self.asked = Asked(weights, chunk, temperature, ids)
        self._learned = [one for one in self.draft.head.parameters() if one.requires_grad]
        if support is not None and self._learned:
            raise ValueError("a support needs a draft whose head is frozen: ids outside it would never be taught")
        if support is not None and ids is not None and not bool(torch.isin(support, ids).all()):
            raise ValueError("a support holds ids that the draft cannot say; leave them out of it")
        self.support = support
        self._narrow = None if support is None else (self.draft.head.over(support), support)
        self._frozen: Logits = self.draft.head if ids is None or self._learned else self.draft.head.over(ids)

    def loss(self, batch: Batch) -> Loss:
        signal = self.teacher.signal(batch)  # first: what the target's forward takes is given back before the draft's is kept
        hidden = self.trainable(*self.draft.inputs(batch))
        narrow = self._narrow if self.trainable.training else None
        (head, learned), asked, taught = self._head(), self.asked, signal
        total_head = head
        if narrow is not None:
            total_head, learned, asked, taught = narrow[0], [], asked._replace(ids=None), signal.within(narrow[1])
        said = columns(batch.ids.roll(-1, 1)[batch.scored], asked.ids if narrow is None else narrow[1])
        total = scored_loss(hidden, total_head, taught, asked, learned, said)
        each = judged(hidden, head, signal, self.asked, JUDGED if self.trainable.training else None)
        metrics = sums(each) | {"scored": torch.tensor(float(len(hidden)))}
        return Loss(total, metrics, None if self.trainable.training else each)

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


def _shared(draft: nn.Module, teacher: Teacher) -> bool:
    """Whether a module of the draft is one of the teacher's: its weights, or a place where an adapter would change both."""
    target = getattr(teacher, "target", None)
    return isinstance(target, nn.Module) and not {*map(id, draft.modules())}.isdisjoint(map(id, target.modules()))
