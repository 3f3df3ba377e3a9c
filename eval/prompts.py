"""Which prompts are measured: all of a file, or the first few of each kind, and how a sample says that it is one."""

from __future__ import annotations

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
