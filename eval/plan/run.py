"""`draftsmith plan`: from two configs and a device to one table of facts, which is printed or given as json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.plan.advice import LARGEST, Alpha, best, ks_of, needed, pays, speed_up, tokens_per_call
from draftsmith.eval.plan.devices import device_named, dtype_named, engine_named
from draftsmith.eval.plan.drafts import draft_named, notes
from draftsmith.eval.plan.memory import most_batch, most_context, serving
from draftsmith.eval.plan.roofline import Costs, Pair, costs, moved
from draftsmith.eval.plan.sizes import Size, read_config, size_of
from draftsmith.eval.plan.training import training
from draftsmith.eval.plan.verdict import verdict

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (512, 4096, 32768)
ALPHAS = ("0.5", "0.6", "0.7", "0.8", "0.9")
GOALS = (1.0, 1.5, 2.0)
CONTEXT = 4096  # where none was asked, and the target serves as many
SERVED_K = 4  # of which memory and times are told where no k was asked


@dataclass(frozen=True)
class Asked:
    """The command's arguments. An alpha is a number, or several with commas between: the conditional acceptance by position."""

    target: str
    draft: str
    device: str
    alpha: tuple[str, ...] = ALPHAS
    k: int | None = None
    context: int | None = None
    batch: int = 1
    dtype: str | None = None
    draft_dtype: str | None = None
    draft_vocabulary: int | None = None
    engine: str = "served"
    processes: int = 8
    tokens: int = 4096


def plan(asked: Asked) -> dict[str, Any]:
    """Everything that is said of a pair, in bytes, seconds and ratios; `verdict` says it in a sentence."""
    alphas = [parse_alpha(one) for one in asked.alpha]
    for what, least, value in (
        ("k", 1, asked.k), ("context", 1, asked.context), ("batch", 1, asked.batch), ("processes", 1, asked.processes), ("tokens", 1, asked.tokens),
    ):  # fmt: skip
        if value is not None and value < least:
            raise ValueError(f"{what} {value} asked; it is at least {least}")
    pair = make_pair(asked)
    positions = pair.target.positions or max(CONTEXTS)
    context = asked.context or min(CONTEXT, positions)
    if context > positions:
        raise ValueError(f"context {context} asked; {asked.target} serves {positions} positions: give a smaller --context")
    ks, k = ks_of(asked.k), asked.k or SERVED_K
    contexts = sorted({*(one for one in CONTEXTS if one <= positions), context})
    middle = alphas[len(alphas) // 2]
    now = costs(pair, asked.batch, context, max(ks.stop - 1, k))
    fits = {one: most_batch(pair, one, k) for one in contexts}
    room = serving(pair, asked.batch, context, k)
    found: dict[str, Any] = {
        "schema": 1,
        "asked": dataclasses.asdict(asked) | {"context": context},
        "device": pair.device.model_dump(),
        "engine": pair.engine.model_dump(),
        "notes": notes(pair.draft, pair.target, context) + _notes(pair.target, asked.batch, context),
        "target": _model(pair.target, pair, context),
        "draft": {
            "name": pair.draft.name, "own_parameters": sum(pair.draft.own), "trained": pair.draft.trained,
            **({} if pair.draft.size is None else _model(pair.draft.size, pair, context, draft=True)),
        },
        "serving": room._asdict() | {"k": k, "total": room.total},
        "most_batch": fits,
        "most_context": most_context(pair, asked.batch, k),
        "times": _times(now, k),
        "alpha": middle,
        "speed_up": {
            one: {
                batch: best(costs(pair, batch, one, ks.stop - 1), middle, ks)._asdict() | {"fits": batch <= fits[one]}
                for batch in sorted({*BATCHES, asked.batch})
            }
            for one in contexts
        },
        "by_alpha": [
            {
                "alpha": alpha, **best(now, alpha, ks)._asdict(),
                "pays": {one: pays(pair, alpha, one, ks, asked.batch) for one in contexts},
            }
            for alpha in alphas
        ],
        "needed": {
            batch: {goal: needed(costs(pair, batch, context, ks.stop - 1), goal, ks) for goal in GOALS}
            for batch in sorted({*BATCHES, asked.batch})
        },
        "training": [one._asdict() | {"total": one.total} for one in training(pair, asked.processes, asked.tokens)],
        "largest_batch": max(LARGEST, asked.batch),
    }  # fmt: skip
    found["verdict"] = verdict(found)
    return found


def make_pair(asked: Asked) -> Pair:
    """The configs read, counted and put on the device."""
    device, engine = device_named(asked.device), engine_named(asked.engine)
    config = read_config(asked.target)
    target = size_of(config, asked.target)
    dtype = asked.dtype or _dtype_of(config, target, asked.target)
    draft = draft_named(asked.draft, target, asked.draft_vocabulary)
    return Pair(target, draft, dtype_named(dtype), dtype_named(asked.draft_dtype or dtype), device, engine)


def parse_alpha(text: str) -> Alpha:
    """`0.7`, or `0.8,0.75,0.7` by position."""
    try:
        alpha = tuple(float(one) for one in text.split(","))
    except ValueError:
        alpha = ()
    if not alpha or not all(0 <= one <= 1 for one in alpha):
        raise ValueError(f"alpha {text!r}: an acceptance is a number from 0 to 1, or several with commas between, one a position")
    return alpha


def _dtype_of(config: Any, size: Size, name: str) -> str:
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{name} is quantised; say as what its weights are to be counted: --dtype fp8 or --dtype int4")
    return size.dtype or "bf16"


def _model(size: Size, pair: Pair, context: int, draft: bool = False) -> dict[str, Any]:
    dtype = pair.draft_dtype if draft else pair.dtype
    return {
        "name": size.name, "parameters": size.parameters, "embedding": size.embedding, "head": size.head, "layers": size.layers, "rest": size.rest,
        "experts": sum(one.experts for one in size.blocks), "blocks": len(size.blocks), "vocabulary": size.vocabulary, "width": size.width,
        "bytes": dtype.bytes(size.parameters - size.layers, size.layers), "cache_per_token": size.cache(context) * dtype.cached / context,
        "read_per_call": moved(size, dtype, 1, 1, 0), "positions": size.positions,
    }  # fmt: skip


def _times(now: Costs, k: int) -> dict[str, Any]:
    return {
        "plain": now.plain, "verify": now.verify[k], "step": now.step, "round": now.round, "k": k, "c": now.c, "r": now.r(k), "o": now.o,
        "all_accepted": speed_up(now, (1.0,), k), "tokens": tokens_per_call((1.0,), k),
    }  # fmt: skip


def _notes(target: Size, batch: int, context: int) -> list[str]:
    said = []
    windows = [one.window for one in target.blocks if one.window is not None]
    if windows and batch > 1 and context > min(windows):
        said.append(
            f"some layers look back {min(windows)} tokens only: Draftsmith's own decoder serves one sequence at a time beyond that"
        )
    if any(one.experts for one in target.blocks):
        said.append("experts are taken to be hit at random; real routing is more even over a text, and reads fewer of them")
    return said
