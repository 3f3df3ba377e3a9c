"""A law by exact enumeration: every random choice of the decoder is branched on, and what each branch comes to is summed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import draftsmith.specdec.drafters.model  # noqa: F401
from draftsmith.specdec import Sampling, to_probs
from tiny import ScriptedLM

MODULES = ("draftsmith.specdec.verify", "draftsmith.specdec.drafters.model")


class Branches:
    """Replays a script of choices and notes how many there were at each, so that all scripts can be walked.

    The first choice, the prefill's own token, is not branched on but taken as its likeliest: no draft has a part in it.
    """

    def __init__(self, script: list[int], lazy: bool) -> None:
        self.script, self.sizes, self.chance, self.lazy = script, [], 1.0, lazy

    def choose(self, chances: list[float]) -> int:
        options = [i for i, chance in enumerate(chances) if chance > 0]
        place = len(self.sizes)
        if place == 0:
            options = [max(options, key=lambda i: chances[i])]
        pick = options[self.script[place] if place < len(self.script) else 0]
        self.sizes.append(len(options))
        self.chance *= chances[pick]
        return pick

    def draw(self, weights: Tensor, generator: object = None, *, noise: Tensor | None = None) -> Tensor:
        law = (weights.double() / weights.double().sum(-1, keepdim=True))[0].tolist()
        return torch.tensor([self.choose(law)])

    def flip(self, chance: Tensor, noise: Tensor) -> Tensor:
        out, refused = [], False
        for one in chance[0].double().clamp(0, 1).tolist():
            # Under the token rule what comes behind a refusal is never looked at: no need to branch on it.
            refused = (self.lazy and refused) or self.choose([one, 1 - one]) == 1
            out.append(not refused)
        return torch.tensor([out], dtype=torch.bool).reshape(1, -1)


def every_path(
    run: Callable[[], list[int]], lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[tuple[int, ...], float]]:
    script: list[int] = []
    while True:
        branches = Branches(script, lazy)
        for name in MODULES:
            monkeypatch.setattr(sys.modules[name], "draw", branches.draw)
        monkeypatch.setattr(sys.modules[MODULES[0]], "flip", branches.flip)
        yield tuple(run()), branches.chance
        script = [*script, *[0] * (len(branches.sizes) - len(script))]
        while script and script[-1] + 1 == branches.sizes[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def target_law(
    target: ScriptedLM, prompt: list[int], how: Sampling, length: int, every: bool = False
) -> dict[tuple[int, ...], float]:
    """The chance of each text of `length` tokens that begins with the likeliest (with `every`, of each text)."""
    law: dict[tuple[int, ...], float] = {}
    first = int(target.law(tuple(prompt)).argmax())
    for text in itertools.product(range(target.vocabulary), repeat=length):
        if text[0] != first and not every:
            continue
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(to_probs(target.law((*prompt, *text[:i])), how)[token])
        law[text] = chance
    return law
