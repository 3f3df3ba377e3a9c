"""Who drafts, as `--draft` says it, and what that adds to memory and to a step."""

from __future__ import annotations

from typing import NamedTuple

from draftsmith.eval.plan.sizes import Size, first, read_config, size_of, trimmed


class Draft(NamedTuple):
    """`size` is what a step of it runs through (None: nothing that would count). `share` is a step's time as a share of a plain call,
    for a draft of which no more is known."""

    name: str
    size: Size | None
    own: tuple[int, int]  # parameters that must be in memory beside the target's: outside blocks, and in them
    trained: int  # parameters that a training run changes
    share: float | None = None


def draft_named(name: str, target: Size, vocabulary: int | None = None) -> Draft:
    """`ngram`, `exit:E`, `layers:N`, `cost:C`, or the config of a model of its own; `vocabulary` trims its head to so many ids."""
    kind, _, value = name.partition(":")
    if kind in ("ngram", "cost") and vocabulary is not None:
        raise ValueError(f"{name} has no head that a draft vocabulary of {vocabulary} could trim")
    if name == "ngram":
        return Draft(name, None, (0, 0), 0)
    if kind == "cost":
        return Draft(name, None, (0, 0), 0, _number(name, value, float, "cost:0.05, a share of the target's call"))
    if kind in ("exit", "layers"):
        size = first(target, int(_number(name, value, int, f"{kind}:4, a number of the target's layers")), name)
        square = size.width**2  # between its last state and the target's head
        trained = square + size.rest + (size.layers if kind == "layers" else 0)
    else:
        size = size_of(read_config(name), name)
        trained = size.parameters
    if vocabulary is not None:
        size = trimmed(size, vocabulary)
    own = (size.parameters - size.layers, size.layers)
    if kind == "exit":  # it shares all the rest with the target
        own = (square + size.rest + (0 if vocabulary is None else size.head), 0)
    return Draft(name, size, own, trained)


def notes(draft: Draft, target: Size, context: int) -> list[str]:
    """What speaks against the pair before any arithmetic."""
    said: list[str] = []
    size = draft.size
    if size is None or size.blocks[0] is target.blocks[0]:
        return said
    if size.positions is not None and size.positions < context:
        said.append(
            f"the draft serves {size.positions} positions, less than the {context} asked: beyond them the target goes on alone"
        )
    if size.width and abs(size.embedding // size.width - target.embedding // target.width) > 1024:
        said.append(
            f"the draft embeds {size.embedding // size.width} ids, the target {target.embedding // target.width}: hardly one tokenizer; "
            "`draftsmith compat` says"
        )
    return said


def _number(name: str, value: str, kind: type, example: str) -> float:
    try:
        found = kind(value)
        if found > 0:
            return found
    except ValueError:
        pass
    raise ValueError(f"{name}: found {value!r} behind the colon; write {example}")
