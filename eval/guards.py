"""What keeps the figures of a report from meaning what they seem to: sentences with counts, and none where nothing is amiss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.recipes import Prompt
from draftsmith.recipes.seen import prompt_hash, read_seen

FEW = 10  # prompts of a kind; a bootstrap of fewer is too narrow, and of two or less there is none
SHOWN = 5  # names in a sentence


def guards(report: Mapping[str, Any], prompts: Mapping[str, Sequence[Prompt]], *folders: Path) -> list[str]:
    """The sentences for a report of schema 2; `prompts` holds each measured file's prompts, `folders` are the runs whose drafts were measured."""
    said = []
    for name, some in prompts.items():
        mine = [one for one in report["measurements"] if _file(one, report) == name]
        asked = {one["prompt"] for one in mine}
        head = f"{Path(name).name}: " if len(prompts) > 1 else ""
        limit = report["how"]["max_new_tokens"]
        found = [
            _few(mine),
            _cut_off(mine, limit),
            _short(mine),
            _twice(some),
            _seen([one for one in some if one.id in asked], folders),
        ]
        said += [head + one for one in found if one]
    return said


def _file(measurement: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    return str(measurement.get("prompts") or report["parts"][0]["setting"]["prompts"])


def _few(measured: Sequence[Mapping[str, Any]]) -> str:
    kinds: dict[str, set[str]] = {}
    for one in measured:
        kinds.setdefault(one["category"], set()).add(one["prompt"])
    few = [f"{kind} {len(some)}" for kind, some in kinds.items() if len(some) < FEW]
    if not few:
        return ""
    return (
        f"{len(few)} of {len(kinds)} kinds of text {_has(few)} fewer than {FEW} prompts ({_some(few)}): what is said of a single kind there, "
        "intervals included, may be chance. Measure more prompts (eval.per_kind=0 takes all)."
    )


def _plain(measured: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], int]:
    """Tokens of plain decoding's answer, once an answer, however many candidates were measured on it."""
    return {tuple(one.get(key) for key in ("prompt", "turn", "temperature", "batch")): one["baseline_tokens"] for one in measured}


def _cut_off(measured: Sequence[Mapping[str, Any]], limit: int) -> str:
    answers = _plain(measured)
    cut = sum(tokens >= limit for tokens in answers.values())
    if not cut or 2 * cut < len(answers):
        return ""
    how_many = f"All {len(answers)}" if cut == len(answers) else f"{cut} of {len(answers)}"
    return (
        f"{how_many} answers were cut off at {limit} tokens: what was measured is how answers begin, and whole ones may differ, since a lookup finds "
        "more the longer a text is. Raise eval.max_new_tokens."
    )


def _short(measured: Sequence[Mapping[str, Any]]) -> str:
    answers = _plain(measured)
    short = sum(tokens <= 1 for tokens in answers.values())
    if not short:
        return ""
    return (
        f"{short} of {len(answers)} answers {'is' if short == 1 else 'are'} of one token or none: it comes from the reading of the prompt, "
        "so nothing was drafted for it, and it says nothing of a draft."
    )


def _twice(prompts: Sequence[Prompt]) -> str:
    """Whole conversations, so that two which only begin alike are two."""
    texts = [prompt_hash("\0".join([*(one["content"] for one in each.history), *each.turns])) for each in prompts]
    first: dict[str, str] = {}
    again = [
        f"{each.id} = {first[text]}"
        for each, text in zip(prompts, texts, strict=True)
        if first.setdefault(text, each.id) != each.id
    ]
    if not again:
        return ""
    return (
        f"{len(again)} of the {len(prompts)} prompts of the file {'repeats' if len(again) == 1 else 'repeat'} another ({_some(again)}): "
        "intervals take every prompt for a new one, and are too narrow."
    )


def _seen(prompts: Sequence[Prompt], folders: Sequence[Path]) -> str:
    known = frozenset().union(*(read_seen(one) or () for one in folders))
    seen = Counter(one.category for one in prompts if prompt_hash(first_turn(one)) in known)
    if not seen:
        return ""
    return (
        f"{seen.total()} of {len(prompts)} prompts were seen in training ({_some([f'{kind} {count}' for kind, count in seen.items()])}): "
        "on these a trained draft may do better than it will on new ones. Leave them out of one of the two."
    )


def first_turn(prompt: Prompt) -> str:
    """What the user said first, by which training wrote the prompt down (recipes/seen.py)."""
    return next((one["content"] for one in prompt.history if one["role"] == "user"), prompt.turns[0])


def _has(some: Sequence[str]) -> str:
    return "has" if len(some) == 1 else "have"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
