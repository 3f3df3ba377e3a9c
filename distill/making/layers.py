"""Which layers of a target to keep: by name, or whichever of a few named sets is accepted most after a short calibration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.draft import DistillDraft
from draftsmith.distill.head import Head
from draftsmith.distill.making.cut import check_layers
from draftsmith.distill.making.drafts import CutDraft
from draftsmith.distill.making.observe import influence
from draftsmith.distill.signal import Dense
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.distill.warm.ridge import ridge
from draftsmith.specdec.models import blocks, pick

JUDGED = 6 * 512  # positions whose logits a ridge needs to choose its strength
TOKENS = 4000  # scored tokens that rank the candidates: the map stops gaining from more long before its rank is in doubt


def first(total: int, n: int) -> list[int]:
    return list(range(n))


def spread(total: int, n: int) -> list[int]:
    """Evenly spaced, the first and the last among them."""
    return [round(one * (total - 1) / max(n - 1, 1)) for one in range(n)]


def ends(total: int, n: int) -> list[int]:
    """The first ones and the last one, or the last two from eight on."""
    last = 0 if n == 1 else 1 if n < 8 else 2
    return [*range(n - last), *range(total - last, total)]


NAMED: dict[str, Callable[[int, int], list[int]]] = {"first": first, "spread": spread, "ends": ends}


class Tried(NamedTuple):
    """A candidate: its held-out acceptance as it was cut and after the calibration, and the seconds that took."""

    name: str
    layers: list[int]
    before: float
    acceptance: float
    seconds: float


class Choice(NamedTuple):
    """The layers to keep, and what was tried for them, the best first; nothing was where they were named."""

    layers: list[int]
    table: list[Tried]


def asked(spec: str) -> tuple[str, int | None]:
    """`spread:4` -> ("spread", 4); ValueError for a name or a number that is none. Needs no model, so a recipe can be checked."""
    name, colon, number = spec.partition(":")
    pick({**NAMED, "auto": first}, name, "layers")
    if colon and not (number.isdigit() and int(number)):
        raise ValueError(f"layers {spec!r}: a number of layers goes behind the colon, as in {name}:4")
    return name, int(number) if colon else None


def named_layers(total: int, spec: str) -> list[int]:
    """Layers of `total` from `first:4`, `spread:4` or `ends:4`; without a number an eighth of them, at least one."""
    name, number = asked(spec)
    n = number or max(1, round(total / 8))
    if n > total:
        raise ValueError(f"layers {spec!r}: {n} layers asked, and the target has {total}")
    if name == "auto":
        raise ValueError(f"layers {spec!r}: auto looks at data; use choose_layers")
    return NAMED[name](total, n)


def _as_it_is(found: Any) -> Any:
    return found


def choose_layers(
    target: PreTrainedModel, teacher: HiddenTeacher, spec: list[int] | str, batches: Iterable[Batch] = (), held_out: Iterable[Batch] = (), *,
    tokens: int = TOKENS, steps: int = 0, learning_rate: float = 1e-3, say: Callable[[str], None] = print,
    agree: Callable[[Any], Any] = _as_it_is,
) -> Choice:  # fmt: skip
    """The layers that `spec` means: a list, a name for `named_layers`, or `auto:4`.

    `auto` tries first, spread, ends and the layers of most influence. Each is cut and given the closed-form map
    (`ridge`) from `tokens` scored tokens of `batches`, then `steps` of AdamW; the highest acceptance on `held_out` wins.
    The cost is said before, the table after. Processes that ask a sharded target together must cut the same layers, whatever their last
    bits say: `agree` gives each what the first one has found.
    """
    if not isinstance(spec, str):
        check_layers(target, spec)
        return Choice(list(spec), [])
    total = len(blocks(target)[1])
    if asked(spec)[0] != "auto":
        return Choice(named_layers(total, spec), [])
    n = len(named_layers(total, spec.replace("auto", "first")))
    batches, held_out = up_to(batches, tokens), up_to(held_out, tokens // 4)
    if not batches or not held_out:
        raise ValueError(
            f"layers {spec!r}: auto calibrates on rows and judges by held-out ones; give both, or name layers: first:{n}"
        )
    say(
        f"layers {spec}: {len(NAMED) + 1} candidates of {n} of {total} layers, {_scored(batches)} tokens and {_scored(held_out)} held out; "
        f"as long as the target takes to read them about {_readings(target, teacher, n, batches, held_out, steps):.1f} times"
    )
    most = agree(sorted(sorted(range(total), key=influence(target, batches).__getitem__)[-n:]))
    candidates: dict[tuple[int, ...], str] = {}
    for called, layers in {**{one: of(total, n) for one, of in NAMED.items()}, "influence": most}.items():
        same = candidates.get(tuple(layers))
        candidates[tuple(layers)] = called if same is None else f"{same} = {called}"
    heard, table = _Heard(teacher), list[Tried]()
    for places, called in candidates.items():
        clock = time.perf_counter()
        draft = CutDraft(target, list(places), real=teacher.rows)
        fit = ridge(draft, heard, batches, held_out)
        reached = _trained(draft, heard, batches, held_out, steps, learning_rate) if steps else fit.acceptance
        table.append(Tried(called, list(places), fit.before, reached, time.perf_counter() - clock))
    table = agree(sorted(table, key=lambda tried: -tried.acceptance))  # stable: of equals the earlier name
    for row in shown(table):
        say(row)
    return Choice(table[0].layers, table)


def shown(table: list[Tried]) -> list[str]:
    """The table as lines of text."""
    wide = max(len(tried.name) for tried in table)
    return [f"{'layers':{wide}}  as cut  calibrated  seconds"] + [
        f"{one.name:{wide}}  {one.before:6.3f}  {one.acceptance:10.3f}  {one.seconds:7.1f}  {one.layers}" for one in table
    ]


class _Heard:
    """A teacher that is asked once about each batch, however many candidates hear it."""

    head: Head

    def __init__(self, teacher: HiddenTeacher) -> None:
        self.head, self.rows, self._teacher = teacher.head, teacher.rows, teacher
        self._kept: dict[int, tuple[Batch, Tensor]] = {}  # by identity; the batch is kept, so that its number is not given again

    def hidden(self, batch: Batch) -> Tensor:
        if id(batch) not in self._kept:
            self._kept[id(batch)] = batch, self._teacher.hidden(batch)
        return self._kept[id(batch)][1]

    def signal(self, batch: Batch) -> Dense:
        return Dense(self.hidden(batch), self.head)


def _trained(
    draft: CutDraft, teacher: HiddenTeacher, batches: list[Batch], held_out: list[Batch], steps: int, learning_rate: float
) -> float:
    """Held-out acceptance after a few plain steps of forward KL."""
    objective = DistillDraft(draft, teacher)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    draft.train()
    for step in range(steps):
        loss = objective.loss(batches[step % len(batches)])
        optimizer.zero_grad()
        (loss.total / max(float(loss.metrics["scored"]), 1.0)).backward()
        optimizer.step()
    draft.eval()
    with torch.no_grad():
        metrics = [objective.loss(batch).metrics for batch in held_out]
    return sum(float(one["acceptance"]) for one in metrics) / max(sum(float(one["judged"]) for one in metrics), 1.0)


def _readings(
    target: PreTrainedModel, teacher: HiddenTeacher, n: int, batches: list[Batch], held_out: list[Batch], steps: int
) -> float:
    """What `auto` costs in multiplications, against one reading of all the tokens by the target's layers."""
    stack = blocks(target)[1]
    reading = sum(int(batch.real.sum()) for batch in [*batches, *held_out]) * sum(one.numel() for one in stack.parameters())
    each = n / len(stack) * (1 + 3 * steps / len(batches)) + JUDGED * teacher.head.linear.weight.numel() / reading
    return 2 + (len(NAMED) + 1) * each  # influence and the teacher first


def _scored(batches: list[Batch]) -> int:
    return sum(int(batch.scored.sum()) for batch in batches)


def up_to(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """The first batches that hold `tokens` scored tokens."""
    kept: list[Batch] = []
    for batch in batches:
        if kept and _scored(kept) >= tokens:
            break
        kept.append(batch)
    return kept
