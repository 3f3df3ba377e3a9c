"""Which prompts are measured, and which of them are decoded together: none is drawn, so that two runs measure the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from draftsmith.recipes import Prompt


def sample(prompts: list[Prompt], per_kind: int) -> list[Prompt]:
    """The first `per_kind` prompts of each category, in the file's order; 0 takes all."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if not per_kind or taken[prompt.category] <= per_kind:
            chosen.append(prompt)
    return chosen


def digest(prompts: Prompt | Sequence[Any]) -> str:
    """A prompt, or several, by all that is said of it."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def text_digest(prompt: Prompt) -> str:
    """What is asked, whatever it is called: two prompts of one digest are the same conversation, to the letter."""
    return digest([prompt.history, prompt.turns])


def together(prompts: list[Prompt], batch: int) -> list[list[Prompt]]:
    """Groups of `batch` prompts, kind by kind; only those of as many turns can be played together, so some groups may be smaller.

    ValueError where not even one group is whole: its figures would be those of another batch.
    """
    if batch == 1:
        return [[prompt] for prompt in prompts]
    kinds = {kind: place for place, kind in enumerate(dict.fromkeys(prompt.category for prompt in prompts))}
    groups = []
    for turns in sorted({len(prompt.turns) for prompt in prompts}):
        alike = sorted((prompt for prompt in prompts if len(prompt.turns) == turns), key=lambda prompt: kinds[prompt.category])
        groups += [alike[start : start + batch] for start in range(0, len(alike), batch)]
    if max(map(len, groups)) < batch:
        raise ValueError(
            f"a batch of {batch} asked; there are {len(prompts)} prompts, and at most {max(map(len, groups))} of as many turns: "
            "take more prompts (eval.per_kind) or a smaller batch (eval.batches)"
        )
    return groups
