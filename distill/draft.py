"""The objective that teaches a draft its target's laws, and the plain folder that it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.chunked import Asked, columns, judged, scored_loss, sums
from draftsmith.distill.head import Head, Logits
from draftsmith.distill.losses import loss_named
from draftsmith.distill.making.drafts import CutDraft, WholeDraft
from draftsmith.distill.objective import Loss
from draftsmith.distill.teacher import LiveTeacher, Teacher
from draftsmith.specdec.drafters.trimmed import check_ids, write_ids
from draftsmith.specdec.places import quiet

JUDGED = 32  # positions of a training batch whose acceptance is measured: the heads run once more for each


class Origin(NamedTuple):
    """Where a draft comes from, to be written beside it: its target's name and revision, and the tokenizer of both."""

    target: str
    revision: str
    tokenizer: Any


class Narrow(NamedTuple):
    """The ids that the losses see, and the heads of draft and target over them; None where a teacher needs no head."""

    ids: Tensor
    ours: Logits
    theirs: Logits | None


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
        self._narrow = None if support is None else _narrowed(support, self.draft.head, getattr(self.teacher, "head", None))
        self._frozen: Logits = self.draft.head if ids is None or self._learned else self.draft.head.over(ids)

    def loss(self, batch: Batch) -> Loss:
        signal = self.teacher.signal(batch)  # first: what the target's forward takes is given back before the draft's is kept
        # Autocast is over here, and accelerate makes float32 of what comes out of it. The head reads what its weights are in; the losses
        # are computed in float32 whatever that is.
        hidden = self.trainable(*self.draft.inputs(batch)).to(self.draft.head.linear.weight.dtype)
        narrow = self._narrow if self.draft.training else None  # DeepSpeed's wrapper does not know its own
        (head, learned), asked, taught = self._head(), self.asked, signal
        total_head = head
        if narrow is not None:
            total_head, learned, asked, taught = narrow.ours, [], asked._replace(ids=None), signal.within(narrow.ids, narrow.theirs)
        said = columns(batch.ids.roll(-1, 1)[batch.scored], asked.ids if narrow is None else narrow.ids)
        total = scored_loss(hidden, total_head, taught, asked, learned, said)
        each = judged(hidden, head, signal, self.asked, JUDGED if self.draft.training else None)
        metrics = sums(each) | {"scored": torch.tensor(float(len(hidden)))}
        return Loss(total, metrics, None if self.draft.training else each)

    def _head(self) -> tuple[Logits, Sequence[Tensor]]:
        """What makes logits of the draft's hidden states, and which tensors of it are taught."""
        if self.asked.ids is not None and self._learned:
            return self.draft.head.rows_of(self.asked.ids)
        return self._frozen, self._learned

    def save(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """A plain transformers folder plus drafter.json; of `weights`, where they were gathered from processes that have parts of them."""
        model = self.draft.whole() if weights is None else self.draft.whole(weights)
        save_draft(model, folder, self.origin, self.asked.ids)


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


def _narrowed(support: Tensor, ours: Head, theirs: Head | None) -> Narrow:
    """Rows of both heads gathered once for all steps, and once for both where draft and target have one head."""
    over = ours.over(support)
    if theirs is None:
        return Narrow(support, over, None)
    return Narrow(support, over, over if theirs.linear is ours.linear else theirs.over(support))


def _shared(draft: nn.Module, teacher: Teacher) -> bool:
    """Whether a module of the draft is one of the teacher's: its weights, or a place where an adapter would change both."""
    target = getattr(teacher, "target", None)
    return isinstance(target, nn.Module) and not {*map(id, draft.modules())}.isdisjoint(map(id, target.modules()))
