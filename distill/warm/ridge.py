"""A start without gradient descent: the closed-form map from a draft's or an exit's hidden states to the target's final ones.

What it finds is kept only where held-out tokens say that it is better than what was there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import Head
from draftsmith.distill.making.drafts import CutDraft, WholeDraft
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.distill.warm.fitting import Fit, Fitting
from draftsmith.distill.warm.trunk import states


class Exit(NamedTuple):
    """The map [H, H] from the target's states after a layer, through its final norm, to its final states; its fit; and the second
    moments [H, H] of what it reads, in which a map of low rank is near it."""

    map: Tensor
    fit: Fit
    moments: Tensor


@torch.no_grad()
def ridge(draft: CutDraft | WholeDraft, teacher: HiddenTeacher, batches: Iterable[Batch], held_out: Iterable[Batch]) -> Fit:
    """Give the draft the map A = argmin ||X A' - Y||^2 + s ||A - A0||^2 over the scored tokens of `batches`.

    X are its hidden states [N, F], Y the teacher's [N, H]. Only X'X and X'Y are kept, in float64, so the data may be any length.
    A0 is 0 or the map as it was; A0 and s are those with the best acceptance on `held_out`, and where that is no better than the
    draft as it was, it stays so. A `CutDraft` takes A as its map; a `WholeDraft` takes the target's head times A as its own head,
    which may not be tied (`cut(model, all its layers, tied=False)` gives it one), and whose width may differ from the target's.
    """
    draft.eval()
    if isinstance(draft, WholeDraft):
        _check_own_head(draft, teacher.head)
    fitting = Fitting(teacher.head)
    for batch in batches:
        fitting.add(_features(draft, batch), teacher.hidden(batch))
    pairs = [(_features(draft, batch), teacher.hidden(batch)) for batch in held_out]
    if isinstance(draft, CutDraft):
        solved, fit = fitting.fit(pairs, lambda x: draft.head(draft.map(x)), draft.map.weight)
        if solved is not None:
            draft.map.weight.copy_(solved)
        return fit
    solved, fit = fitting.fit(pairs, draft.head)
    if solved is not None:
        target: Tensor = teacher.head.linear.weight
        draft.head.linear.weight.copy_(target @ solved.to(target))
    return fit


@torch.no_grad()
def exits(target: PreTrainedModel, layers: list[int], batches: Iterable[Batch], held_out: Iterable[Batch]) -> dict[int, Exit]:
    """A map for an exit after each of `layers` (1..L), all from one forward of the target over each batch. `exit_head` takes it."""
    head = Head(target)
    fittings = {layer: Fitting(head) for layer in layers}
    for batch in batches:
        last, after = states(target, layers, batch)
        for layer, fitting in fittings.items():
            fitting.add(after[layer], last)
    seen = [states(target, layers, batch) for batch in held_out]
    found = {}
    unchanged = torch.eye(head.linear.weight.shape[1], device=target.device)
    for layer, fitting in fittings.items():
        solved, fit = fitting.fit([(after[layer], last) for last, after in seen], head, unchanged)
        found[layer] = Exit(unchanged if solved is None else solved, fit, fitting.moments)
    return found


def exit_head(target: PreTrainedModel, map_: Tensor) -> nn.Module:
    """The head of an exit, to stand behind the target's final norm: the map, then the target's own head, shared and not copied."""
    head = target.get_output_embeddings()
    first = nn.Linear(map_.shape[1], map_.shape[0], bias=False, device=head.weight.device, dtype=head.weight.dtype)
    first.weight = nn.Parameter(map_.to(head.weight), requires_grad=False)
    return nn.Sequential(first, head)


def _features(draft: CutDraft | WholeDraft, batch: Batch) -> Tensor:
    return (draft.features if isinstance(draft, CutDraft) else draft)(*draft.inputs(batch))


def _check_own_head(draft: WholeDraft, target: Head) -> None:
    """ValueError where the target's head times a map cannot become the draft's own."""
    ours, theirs = draft.head.linear, target.linear
    if ours.weight is draft.model.get_input_embeddings().weight:
        raise ValueError(
            "the draft's head is its embedding; give it one of its own first: cut(model, [all its layers], tied=False)"
        )
    if draft.head.rows != target.rows:
        raise ValueError(
            f"the draft has {draft.head.rows} output rows, the target {target.rows}; their laws must be over the same ids"
        )
    if draft.head.cap != target.cap or (ours.bias is None) != (theirs.bias is None):
        raise ValueError(
            f"the target's head has a soft cap of {target.cap} and {'no' if theirs.bias is None else 'a'} bias, the draft's {draft.head.cap} and "
            f"{'no' if ours.bias is None else 'a'} bias; a head can be handed over only where they are alike"
        )
