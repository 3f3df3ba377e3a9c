"""Teacher-forced acceptance: how far draft and target agree along the target's own answer, from one pass of each and no decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from draftsmith.eval.prediction.chances import said_chances
from draftsmith.eval.prediction.predicted import Rounds, rounds
from draftsmith.specdec import Drafter, Sampling, to_probs
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters import CombinedDrafter, ModelDrafter
from draftsmith.specdec.drafters.model import STRETCH


class Forced(NamedTuple):
    """One drafter on one answer: sum min(p, q) summed over the `positions` behind the prefill's token, and for each k the rounds
    that this text is expected to take."""

    overlap: float
    positions: int
    rounds: dict[int, Rounds]


def lawful(drafter: Drafter | None) -> ModelDrafter | None:
    """Whose laws can be had from one pass: a model or an exit, of lookup and model combined the model; None for a lookup alone."""
    one = drafter.drafter if isinstance(drafter, CombinedDrafter) else drafter
    return one if isinstance(one, ModelDrafter) else None


@torch.inference_mode()
def forced(
    target: PreTrainedModel,
    drafters: Mapping[str, tuple[ModelDrafter, Sequence[int]]],
    text: list[int],
    n: int,
    how: Sampling,
    vocabulary: int,
) -> dict[str, Forced]:
    """Each drafter with its k's on the last `n` tokens of `text`, which the target wrote; one that cannot read the text is left out.

    `rounds` rest on min(1, q(x) / p(x)) for the token x that was written: given the text, that is the chance that its draft stays.
    """
    if n < 2 or not drafters:  # a single token is the prefill's
        return {name: Forced(0.0, 0, {k: rounds([0.0] * n, k) for k in ks}) for name, (_, ks) in drafters.items()}
    p = None  # at temperature 0 the text itself is the law: one-hot
    if how.temperature > 0:
        logits, _ = CachedLM(target, 1).extend(torch.tensor([text[:-1]]), None, keep=n)
        p = [to_probs(some, how) for some in logits[0, :, :vocabulary].split(STRETCH)]
    said = [text[-n:][at : at + STRETCH] for at in range(0, n, STRETCH)]
    found = {}
    for name, (drafter, ks) in drafters.items():
        laws = drafter.laws(text, n, how)
        if laws is None:
            continue
        overlaps: list[float] = []
        stays: list[float] = []
        for place, q in enumerate(laws):
            chance = said_chances(q, said[place])
            if p is None:
                overlaps += chance.tolist()
                stays += chance.tolist()
                continue
            law = p[place].to(q.device)
            both = min(q.shape[-1], vocabulary)
            overlaps += torch.minimum(law[:, :both], q[:, :both]).sum(-1).tolist()
            stays += (chance / said_chances(law, said[place])).clamp(max=1.0).tolist()
        found[name] = Forced(sum(overlaps[1:]), n - 1, {k: rounds(stays, k) for k in ks})
    return found
