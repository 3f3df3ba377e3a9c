"""How likely each token of the target's own answer is to be accepted from a draft: one pass of the draft along that text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec import Drafter, Sampling, to_probs
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters import ModelDrafter, Outcome
from draftsmith.specdec.drafters.model import STRETCH

Chances = list[float] | list[list[float]]  # [n], or a row a block, [n, k], where a draft's words hang on where its block began


@torch.inference_mode()
def target_chances(target: PreTrainedModel, text: list[int], n: int, how: Sampling, vocabulary: int) -> Tensor | None:
    """p of each of the last `n` tokens of `text`, [n]; None at temperature 0, where the target's own text is certain."""
    if how.temperature == 0:
        return None
    logits, _ = CachedLM(target, 1).extend(torch.tensor([text[:-1]]), None, keep=n)
    said = torch.tensor(text[-n:], device=logits.device)
    return to_probs(logits[0, :, :vocabulary], how).gather(-1, said[:, None])[:, 0]


@torch.inference_mode()
def said_by(drafter: ModelDrafter, text: list[int], n: int, how: Sampling) -> Tensor | None:
    """The chance that it drafts each of the last `n` tokens of `text` behind all those before it, [n]; None where it has no `laws`."""
    laws = drafter.laws(text, n, how)
    if laws is None:
        return None
    said = text[-n:]
    return torch.cat([said_chances(some, said[STRETCH * place :][: len(some)]) for place, some in enumerate(laws)])


def said_chances(laws: Tensor, said: list[int]) -> Tensor:
    """What each of the laws [m, V] gives to the token said there: [m]; 0 for one that it cannot say."""
    tokens = torch.tensor(said, device=laws.device)
    sayable = tokens < laws.shape[-1]
    return laws.gather(-1, tokens.where(sayable, 0)[:, None])[:, 0] * sayable


def chances(drafter: Drafter, text: list[int], n: int, k: int, how: Sampling, p: Tensor | None) -> Chances:
    """The chance that a draft of each of the last `n` tokens of `text` stays, given that the text goes on so.

    A token x comes from an accepted draft with chance min(p, q)(x), and at all with chance p(x): given x it is min(1, q(x) / p(x)).
    Over a text drawn from p these chances average to sum min(p, q); at temperature 0 each is 1 or 0.
    """
    q = said_by(drafter, text, n, how) if isinstance(drafter, ModelDrafter) else None
    if q is None:
        return _walk(drafter, text, n, k, how)
    return [min(1.0, one) for one in (q if p is None else q / p.to(q.device)).tolist()]


def _walk(drafter: Drafter, text: list[int], n: int, k: int, how: Sampling) -> list[list[float]]:
    """Blocks of `k` drafts from behind every token of the text, told of one token at a time. The first token is the prefill's."""
    start = len(text) - n
    ids = torch.tensor([text[:start]])
    drafter.begin(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([text[start]]), ())
    out = [[0.0] * k]
    for place in range(start + 1, len(text)):
        tokens, probs, count, _ = drafter.propose(min(k, len(text) - place), how, None)
        if probs is not None:
            raise ValueError(
                f"a {type(drafter).__name__} draws its drafts, and what it says behind them cannot be had from one text: "
                "sweep it at temperature 0, or an exit or a model in its place"
            )
        said = tokens[0, : int(count[0])].tolist()
        stays = np.cumprod([one == there for one, there in zip(said, text[place:], strict=False)])
        out.append([*stays.astype(float).tolist(), *[0.0] * (k - len(stays))])
        drafter.observe(Outcome(torch.tensor([0]), torch.tensor([text[place]])))
    return out
