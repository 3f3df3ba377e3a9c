"""What a round costs, from a few rounds of the decoder itself: its own clocks, so prediction and measurement share one ruler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from scipy import stats
from transformers import PreTrainedModel

from draftsmith.eval.measurement import Arm
from draftsmith.specdec import Sampling, generate
from draftsmith.specdec.pace import Round

ROUNDS = 8  # at least so many tokens, and at most so many rounds and a few, a setting and prompt; fewer for a short evaluation
FEWEST = 3
WARM, WARM_TEXT = 8, 16  # tokens that each arm decodes beforehand and that are not counted, behind so many of a prompt
PROMPTS = 3  # that the clocks run on; costs grow with the text, so these are the prompts to be served
SHARE = 0.01  # of the tokens of the answers
TRIM = 0.2  # of the rounds at each end: a shared machine has outliers, a lookup has cheap and dear rounds


class Cost(NamedTuple):
    """A round of one setting in plain steps: one step of plain decoding, its call and all around it."""

    c: float  # a drafted token
    r: float  # the call, on k + 1 tokens where every round drafted k
    o: float  # what the loop adds
    prefill: float  # reading the prompt, over plain decoding's reading of it
    widths: tuple[tuple[int, float], ...] = ()  # r(n): (tokens fed, plain steps), of those widths that came about
    tau: float = 1.0  # tokens a round, of these few rounds


class Clocks(NamedTuple):
    """Seconds of a plain step and of plain decoding's reading of a prompt, and each setting's costs."""

    step: float
    prefill: float
    costs: dict[str, Cost]


def cost_of(read: dict[str, Any]) -> Cost:
    """A cost as json gave it back."""
    return Cost(**{**read, "widths": tuple((int(n), float(r)) for n, r in read.get("widths", ()))})


@dataclass
class Stopwatch:
    """A fixed pace that keeps what each round took."""

    k: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def sure(self) -> bool:
        return self.k > 0

    def begin(self, prefill_seconds: float, tokens: int) -> None: ...

    def next(self, evidence: list[int]) -> int:
        return self.k

    def observe(self, round: Round) -> None:
        self.rounds.append(round)


class Clocked(NamedTuple):
    """The rounds of a setting whose block was whole; in seconds, of each run, its prefill and what a round took beside draft and call."""

    rounds: list[Round]
    rest: list[float]
    prefill: list[float]


def costs(
    target: PreTrainedModel,
    groups: Sequence[list[list[int]]],
    arms: Sequence[Arm],
    how: Sampling,
    seed: int,
    vocabulary: int,
    on_step: Callable[[int], None] = lambda done: None,
    rounds: int = ROUNDS,
    beside: bool = True,
) -> Clocks:
    """Each arm's costs in plain steps, on groups of texts that are decoded together; the arms take turns on each group.

    Plain decoding, by which all is divided, runs `beside` every drafter, or only once a group.
    """
    settings: dict[str, Any] = {"how": how, "seed": seed, "vocab_size": vocabulary}
    every: list[Arm | None] = []
    for place, arm in enumerate(arms):
        every += [None, arm] if place == 0 or (beside and arms[place - 1].drafter is not arm.drafter) else [arm]
    every = every or [None]
    for one in every:
        ends = [text[-WARM_TEXT:] for text in groups[0]]  # reading whole prompts once more would take longer than the clocks
        generate(target, ends, one.drafter if one else None, k=int(one.k) if one else 0, max_new_tokens=WARM, **settings)
    found = {one.name if one else "": Clocked([], [], []) for one in every}
    for done, (group, one) in enumerate(product(groups, every), 1):
        watch, had = Stopwatch(int(one.k) if one else 0), found[one.name if one else ""]
        tokens = 1 + rounds + watch.k
        out = generate(target, group, one.drafter if one else None, pace=watch, max_new_tokens=tokens, **settings)
        had.rounds.extend(each for each in watch.rounds if each.k == watch.k)  # near its end a run drafts less
        rest = out.seconds - out.prefill_seconds - out.draft_seconds - out.target_seconds
        had.rest.append(rest / len(watch.rounds))
        had.prefill.append(out.prefill_seconds)
        on_step(done)
    return in_plain_steps(found.pop(""), found, {arm.name: int(arm.k) for arm in arms})


def in_plain_steps(plain: Clocked, found: dict[str, Clocked], ks: dict[str, int]) -> Clocks:
    """Seconds of a plain step, and every setting's costs over it."""
    step = _mean([one.draft_seconds + one.target_seconds for one in plain.rounds]) + _mean(plain.rest)
    made = {
        name: Cost(
            c=_mean([one.draft_seconds for one in it.rounds]) / ks[name] / step, r=_mean([one.target_seconds for one in it.rounds]) / step,
            o=_mean(it.rest) / step, prefill=_mean(it.prefill) / _mean(plain.prefill), widths=_widths(it.rounds, step),
            tau=1 + sum(sum(one.accepted) for one in it.rounds) / sum(len(one.accepted) for one in it.rounds),
        )
        for name, it in found.items()
    }  # fmt: skip
    return Clocks(step, _mean(plain.prefill), made)


def _widths(rounds: Sequence[Round], step: float) -> tuple[tuple[int, float], ...]:
    return tuple(
        (n, _mean([one.target_seconds for one in rounds if one.columns == n]) / step)
        for n in sorted({one.columns for one in rounds})
    )


def enough(answers: int, max_new_tokens: int) -> tuple[int, int]:
    """On how many prompts and rounds to clock: that is to take no more than a few hundredths of the decoding that it is for."""
    tokens = int(SHARE * answers * max_new_tokens)
    return max(1, min(PROMPTS, tokens // (1 + ROUNDS))), max(FEWEST, min(ROUNDS, tokens))


def _mean(seconds: list[float]) -> float:
    return float(stats.trim_mean(seconds, TRIM))
