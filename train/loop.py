"""The only training loop, and the only place where a loss is divided: once, by the global count of scored tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from draftsmith.distill import Batch, Objective
from draftsmith.distill.block_length import block_sums
from draftsmith.recipes.schema import Train
from draftsmith.train.bad_steps import Skips, keys
from draftsmith.train.engines import bare, clipped, micro_batch, shares, stepped


class Record(NamedTuple):
    """What one step showed on all processes: the mean loss of its scored tokens, acceptance and agreement of those judged; and its rows
    where it moved nothing, for loss or norm were not finite."""

    step: int
    loss: float
    acceptance: float
    agreement: float
    grad_norm: float
    learning_rate: float
    scored: int
    tokens_per_second: float
    bad: list[str] | None = None


def train(
    objective: Objective, optimizer: torch.optim.Optimizer, batches: Callable[[int], list[Batch]], *, start: int, steps: int,
    settings: Train, accelerator: Accelerator, after: Callable[[Record], bool | None] = lambda record: None,
    skips: Skips | None = None,
) -> None:  # fmt: skip
    """Steps `start`..`steps`-1. `batches(step)` gives this process's micro-batches; `after` is called with each step's record, and
    ends the training where it returns True (on every process, so from figures that all of them have).

    `objective.trainable` and `optimizer` are what the accelerator prepared. FloatingPointError on a loss or gradient
    that is not finite, unless `skips` passes over it: weights are then still those of the step before.
    """
    parameters = [one for one in objective.trainable.parameters() if one.requires_grad]
    engine: Any = objective.trainable
    engine.train()
    for step in range(start, steps):
        clock = time.perf_counter()
        rate = learning_rate(step, steps, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums = gradient(objective, micro := batches(step), accelerator)
        loss, scored = sums["loss"] / max(sums["scored"], 1), int(sums["scored"])
        norm = clipped(parameters, settings.clip, accelerator) or 0.0
        bad = None if math.isfinite(loss) and math.isfinite(norm) else keys(micro, accelerator)
        if bad is not None and not (skips and skips.take(step + 1)):
            raise FloatingPointError(
                f"step {step + 1}: loss {loss}, gradient norm {norm}, of the rows {'; '.join(bad)}. Weights are those of step {step}, and "
                "nothing was written. The same command comes to the same step: train.skip_bad_steps=N passes over N such steps, and another "
                "train.learning_rate is another run (name=...)"
            )
        if scored and bad is None:  # a step without scored tokens is counted by its record, and moves nothing
            known = stepped(engine, optimizer, accelerator)
            norm = norm if known is None else known
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"step {step + 1}: loss {loss}, gradient norm {norm}, of the rows {'; '.join(keys(micro, accelerator))}. DeepSpeed has stepped "
                    "with it, and nothing was written. Another train.learning_rate is another run (name=...)"
                )
        optimizer.zero_grad(set_to_none=True)
        speed = scored / (time.perf_counter() - clock)
        means = {name: sums[name] / max(sums["judged"], 1) for name in ("acceptance", "agreement")}
        if after(Record(step + 1, loss, means["acceptance"], means["agreement"], norm, rate, scored, speed, bad)):
            return


def gradient(objective: Objective, micro: list[Batch], accelerator: Accelerator) -> dict[str, float]:
    """Backward through all micro-batches of one step -> the sums over scored tokens on all processes.

    However the rows are split into micro-batches and over processes, the gradient is that of the mean over all their
    scored tokens: a mean of means would weigh a token by the company it keeps.
    """
    device = accelerator.device
    mine = torch.tensor(float(sum(int(batch.scored.sum()) for batch in micro)), device=device)
    count = float(accelerator.reduce(mine, "sum"))
    # Data parallelism averages gradients over processes; times `num_processes` makes the sum of it.
    scale = accelerator.num_processes / max(count, 1.0)
    sums: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(micro):
        last = number + 1 == len(micro)
        with micro_batch(objective.trainable, last, accelerator) as backward:
            loss = objective.loss(batch.to(device))
            backward(loss.total * scale)
        for name, value in {"loss": loss.total.detach(), **loss.metrics}.items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.to(device)
    reduced = accelerator.reduce(torch.stack([value.float() for value in sums.values()]), "sum")
    return dict(zip(sums, map(float, reduced), strict=True))


@torch.no_grad()
def evaluate(objective: Objective, batches: list[Batch], accelerator: Accelerator, k: int = 4) -> dict[str, Any]:
    """Means over the scored tokens of held-out batches, each process doing its share: loss, acceptance, agreement, and the expected
    tokens of a call that drafts `k` (`block_length` at temperature 1, `greedy_block_length` at 0), a block from every scored position.

    `_at_most` figures differ from the others only for a teacher that knows its law in part. Of an objective that teaches several drafts
    (`distill.objective.Several`) they are means by their shares, and `parts` has those of each, which the objective is told.
    """
    parts: Any = getattr(objective, "shares", {})
    names = (
        "loss", "acceptance", "acceptance_at_most", "agreement", *BLOCKS, *(f"{part}/{one}" for part in parts for one in OF_A_PART), "scored",
    )  # fmt: skip
    sums = dict.fromkeys(names, 0.0)
    # On the bare module where it has its weights: a wrapped one would talk to the other processes for nothing.
    wrapped = objective.trainable
    objective.trainable = bare(wrapped, accelerator)
    objective.trainable.eval()  # no dropout: held-out figures are of the draft as it will be served
    for batch, counts in shares(batches, accelerator):
        for name, value in _figures(objective, batch.to(accelerator.device), k, parts).items():
            if name in sums and counts:
                sums[name] += float(value)
    objective.trainable.train()
    objective.trainable = wrapped
    *totals, scored = accelerator.reduce(torch.tensor([sums[name] for name in names], dtype=torch.float64), "sum").tolist()
    means: dict[str, Any] = {name: total / max(scored, 1) for name, total in zip(names[:-1], totals, strict=True)}
    if not math.isfinite(means["block_length"]):
        raise FloatingPointError(
            f"the held-out block length is {means['block_length']}: the draft, or its teacher, gives no law. No checkpoint was made of it"
        )
    if parts:
        several: Any = objective
        several.figures = {part: {one: means.pop(f"{part}/{one}") for one in OF_A_PART} for part in parts}
        means["parts"] = several.figures
    return means | {"scored": scored}


BLOCKS = ("block_length", "block_length_at_most", "greedy_block_length")
OF_A_PART = ("acceptance", "agreement", "block_length", "greedy_block_length")


def _figures(objective: Objective, batch: Batch, k: int, parts: Mapping[str, float]) -> dict[str, Any]:
    """Sums over the scored positions of a held-out batch; of several drafts by their shares, and those of each as `draft/figure`."""
    loss = objective.loss(batch)
    each = {name: one for name, one in ((loss.parts or {}) if parts else {"": loss.each}).items() if one is not None}
    if len(each) < max(len(parts), 1):
        raise ValueError(f"{type(objective).__name__}.loss gave no `each` in eval mode; held-out blocks are judged by it")
    figures: dict[str, Any] = {"loss": loss.total, **loss.metrics, **dict.fromkeys(BLOCKS, 0.0)}
    for name, one in each.items():
        own = block_sums(batch.scored, one, k)
        for what in BLOCKS:
            figures[what] += parts.get(name, 1.0) * own[what]
        own |= {"acceptance": float(one.low.sum()), "agreement": float(one.agrees.float().sum())}
        figures |= {f"{name}/{what}": value for what, value in own.items()}
    return figures


def learning_rate(step: int, steps: int, settings: Train) -> float:
    """Linear warm-up, then a cosine down to `final_learning_rate` of the top: a function of the step, so it resumes by itself."""
    warm = max(1, round(settings.warmup * steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    way = (step - warm) / max(1, steps - 1 - warm)
    low = settings.final_learning_rate
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(way, 1.0))))
