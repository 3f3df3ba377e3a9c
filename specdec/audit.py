"""Is a greedy text the target's own? Its tokens are fed to the target again, and near ties are told from faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.models import output_rows

NEAR = 0.25  # nats; in bf16 a forward of one token and one of several differ by this much at most where nothing is wrong
STEP = 64  # tokens a forward, so that no [T, V] tensor of a long text exists


@dataclass(frozen=True)
class Audit:
    """`tokens` of the text, of which all but `ties` and `faults` are the target's argmax.

    A tie is (place, gap): at that place the text holds another token, `gap` nats below the argmax and within `near`, which
    is what rounding does between a call of one token and one of several. A fault is farther below: no rounding explains it.
    """

    tokens: int
    near: float
    ties: tuple[tuple[int, float], ...]
    faults: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        argmax = self.tokens - len(self.ties) - len(self.faults)
        said = f"{argmax} of {self.tokens} tokens are the target's argmax, {len(self.ties)} near ties (within {self.near} nats)"
        if self.ties:
            said += ", the widest " + "{1:.3f} at token {0}".format(*max(self.ties, key=lambda one: one[1]))
        worst = max(self.faults, key=lambda one: one[1], default=None)
        return said + (
            f"; {len(self.faults)} FAULTS, the worst {worst[1]:.2f} nats at token {worst[0]}" if worst else ", no faults"
        )


@torch.inference_mode()
def audit(
    target: PreTrainedModel, prompt: list[int], tokens: list[int], near: float = NEAR, vocab_size: int | None = None
) -> Audit:
    """Teacher-force `tokens` behind `prompt` through the target (one row, no processors) and compare each with the argmax."""
    gaps = []
    for scores, said in _scored(target, prompt, tokens, vocab_size):
        gaps += (scores.amax(-1) - scores.gather(-1, said[:, None])[:, 0]).tolist()
    off = [(place, gap) for place, gap in enumerate(gaps) if gap > 0]
    return Audit(len(tokens), near, tuple(one for one in off if one[1] <= near), tuple(one for one in off if one[1] > near))


@torch.inference_mode()
def first_difference(
    target: PreTrainedModel, prompt: list[int], ours: Sequence[int], theirs: Sequence[int], vocab_size: int | None = None
) -> tuple[int, float] | None:
    """Where two greedy texts part, and by how many nats the target's first choice leads its second there; None where they do not."""
    place = parting(ours, theirs)
    if place == len(ours) == len(theirs):
        return None
    if place == min(len(ours), len(theirs)):
        return place, float("inf")  # one text goes on where the other ends: no tie of two tokens
    *_, (scores, _) = _scored(target, prompt, list(ours[: place + 1]), vocab_size)
    first, second = scores[-1].topk(2).values.tolist()
    return place, first - second


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts share before they part."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _scored(
    target: PreTrainedModel, prompt: list[int], tokens: list[int], vocab_size: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's log-probabilities at each place of `tokens`, [n, V] fp32, and the tokens there, [n], a stretch at a time."""
    rows = min(output_rows(target), vocab_size or output_rows(target))
    if tokens and not 0 <= min(tokens) <= max(tokens) < rows:
        raise ValueError(f"the text holds ids {min(tokens)}..{max(tokens)}, the target says 0..{rows - 1}")
    if not prompt:
        raise ValueError("an audit needs the prompt that the text was written behind; found none")
    lm, fed = CachedLM(target, 1), [*prompt, *tokens][:-1]
    ids = torch.tensor([fed], device=target.device)
    if len(prompt) > 1:
        lm.extend(ids[:, : len(prompt) - 1], torch.ones_like(ids[:, : len(prompt) - 1], dtype=torch.bool), keep=1)
    for start in range(len(prompt) - 1, len(fed), STEP):
        part = ids[:, start : start + STEP]
        logits, _ = lm.extend(part, torch.ones_like(part, dtype=torch.bool))
        first = start - len(prompt) + 1
        said = torch.tensor(tokens[first : first + part.shape[1]], device=logits.device)
        yield logits[0, :, :vocab_size].float().log_softmax(-1), said
