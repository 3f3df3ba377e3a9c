"""What a quantisation costs in acceptance: the draft as it was trained and as its file keeps it, judged side by side on held-out rows."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch, Example, in_batches
from draftsmith.distill.block_length import block_sums
from draftsmith.distill.chunked import Asked, judged
from draftsmith.distill.head import Head, last_hidden
from draftsmith.distill.signal import Overlap, Signal
from draftsmith.distill.teacher import LiveTeacher
from draftsmith.recipes import Recipe
from draftsmith.specdec.models import load_model, real_ids
from draftsmith.specdec.places import revision
from draftsmith.train.rows import ANSWERS, ordered

SAMPLE = 2048  # held-out tokens that are judged: a quantisation moves a token's acceptance little, so the difference needs few
WHOLE_LAWS = Asked({})


class Cost(NamedTuple):
    """Figures of one draft `before` and `after`, means over `scored` of `held_out` tokens, and the 95 % interval of the change in
    acceptance, whose unit is a row: tokens of one text err together."""

    before: dict[str, float]
    after: dict[str, float]
    low: float
    high: float
    scored: int
    held_out: int


def told(recipe: Recipe, tokenizer: Any, before: PreTrainedModel, after: PreTrainedModel) -> str:
    """A sentence for the card and the screen. Where the run's rows cannot be had any more, it says that nothing was measured, and why."""
    name = recipe.export.quantization
    try:
        found = cost(recipe, tokenizer, before, after)
    except (OSError, ValueError) as error:
        return f"what {name} costs in acceptance was not measured: {error}"
    pairs = {what: (found.before[what], found.after[what]) for what in found.before}
    said = "{} costs in acceptance: sum min(p, q) {:.4f} -> {:.4f} (change {:+.4f}, 95 % {:+.4f}..{:+.4f})".format(
        name, *pairs["acceptance"], pairs["acceptance"][1] - pairs["acceptance"][0], found.low, found.high
    )
    said += ", argmax agreement {:.4f} -> {:.4f}".format(*pairs["agreement"])
    said += ", greedy tokens a call {:.3f} -> {:.3f} (k = {})".format(*pairs["greedy_block_length"], recipe.train.k)
    return f"{said}; {found.scored} of {found.held_out} held-out tokens, drafts from all rows of the head"


@torch.no_grad()
def cost(recipe: Recipe, tokenizer: Any, before: PreTrainedModel, after: PreTrainedModel) -> Cost:
    """Judge two drafts as training judges one (`train.loop.evaluate`), on a seeded sample of the run's held-out rows.

    The laws are over all rows that the target can say, for an engine drafts from all of them. FileNotFoundError where the run's answers are
    gone: they would be made anew, and could be others than the draft was kept from.
    """
    target = load_model(recipe.target.model, recipe.target.dtype)
    rows = _held_out(recipe, target, tokenizer)
    some = _sample(rows, recipe.seed)
    real = real_ids(target, tokenizer)
    teacher, heads = LiveTeacher(target, real), [Head(one, real) for one in (before, after)]
    sums: list[dict[str, float]] = [{}, {}]
    changes: list[tuple[float, int]] = []
    for batch in in_batches(some, torch.device("cpu")):
        signal = teacher.signal(batch)
        found = [_judged(one, head, signal, batch) for one, head in zip((before, after), heads, strict=True)]
        for own, each in zip(sums, found, strict=True):
            _add(own, batch.scored, each, recipe.train.k)
        counts = batch.scored.sum(-1).tolist()
        changes += [(float(one.sum()), len(one)) for one in (found[1].low - found[0].low).double().split(counts)]
    scored = sum(count for _, count in changes)
    means = [{what: total / scored for what, total in own.items()} for own in sums]
    low, high = interval(changes)
    return Cost(means[0], means[1], low, high, scored, sum(row.scored for row in rows))


def interval(changes: list[tuple[float, int]]) -> tuple[float, float]:
    """95 % about sum(change) / sum(count), the units being independent: the error of a ratio, linearised (Cochran 1977, 6.3)."""
    units, count = len(changes), sum(n for _, n in changes)
    mean = sum(change for change, _ in changes) / count
    if units < 2:
        return -math.inf, math.inf
    error = math.sqrt(sum((change - mean * n) ** 2 for change, n in changes) * units / (units - 1)) / count
    return mean - 1.96 * error, mean + 1.96 * error


def _held_out(recipe: Recipe, target: Any, tokenizer: Any) -> list[Example]:
    data, made = recipe.data, recipe.folder / ANSWERS
    if data.format == "prompts" and not data.answer_files and not made.is_file():
        raise FileNotFoundError(f"{made}, the answers that the draft was trained on, is not there")
    rows, _ = ordered(recipe, target, tokenizer, revision(recipe.target.model), recipe.train.batch_size)
    return [row for row in rows.held_out if row.scored]


def _sample(rows: list[Example], seed: int) -> list[Example]:
    """Rows in a shuffled order, until they hold SAMPLE tokens: data files often keep like by like."""
    some, held = [], 0
    for row in random.Random(f"cost {seed}").sample(rows, len(rows)):
        if held >= SAMPLE:
            break
        some.append(row)
        held += row.scored
    return some


def _judged(draft: PreTrainedModel, head: Head, signal: Signal, batch: Batch) -> Overlap:
    return judged(last_hidden(draft, batch.ids, batch.documents)[batch.scored], head, signal, WHOLE_LAWS)


def _add(sums: dict[str, float], scored: Tensor, each: Overlap, k: int) -> None:
    found = {"acceptance": float(each.low.sum()), "agreement": float(each.agrees.sum())} | block_sums(scored, each, k)
    for what, value in found.items():
        sums[what] = sums.get(what, 0.0) + value
