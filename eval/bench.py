"""Plain decoding and every candidate on the same prompts, one after another on each, by the same loop and clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from draftsmith.recipes import Prompt
from draftsmith.specdec import Drafter, Generation, Sampling, generate
from draftsmith.specdec.audit import first_difference
from draftsmith.specdec.models import chat_ids, eos_ids, real_ids
from draftsmith.specdec.pace import Adaptive, Fixed, Pace


class Arm(NamedTuple):
    """A candidate: what it is called, its drafter, how many tokens it drafts a round (or "adaptive")."""

    name: str
    drafter: Drafter
    k: int | str


@dataclass(frozen=True)
class Measurement:
    """One candidate on one answer. Lengths are a number a target call, the prefill first; ms are means of the calls behind it;
    seconds include it."""

    drafter: str
    k: int | str
    temperature: float
    batch: int
    category: str
    prompt: str
    new_tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float
    accepted_lengths: tuple[int, ...]
    drafted_lengths: tuple[int, ...]
    equal: int  # answers that equal plain decoding's, token for token, of `compared`; compared at temperature 0 only
    compared: int
    gaps: tuple[float, ...]  # nats between the target's two best where an answer first differs from plain decoding's; () if none
    draft_ms: float  # a drafted token; of an answer in which nothing was drafted, all the time spent on looking
    target_ms: float  # a verifying call of the target
    baseline_ms: float  # a one-token call of the target


def measure(
    target: PreTrainedModel,
    tokenizer: Any,
    prompts: list[Prompt],
    arms: list[Arm],
    how: Sampling,
    max_new_tokens: int,
    seed: int = 0,
    on_plain: Callable[[Prompt, list[int], Generation], None] | None = None,
) -> Iterator[list[Measurement]]:
    """The measurements of each answer in turn, plain decoding and all arms interleaved, their order turning from answer to answer.

    Each arm decodes eight tokens beforehand that are not counted. Prompts of several turns are played turn by turn, with
    plain decoding's answers in between. `on_plain` is shown each prompt's ids and plain decoding's answer, when no clock runs.
    """
    settings: dict[str, Any] = {
        "how": how,
        "eos": eos_ids(target, tokenizer),
        "seed": seed,
        "vocab_size": real_ids(target, tokenizer),
    }
    paces: dict[str, Pace] = {arm.name: Adaptive() if arm.k == "adaptive" else Fixed(int(arm.k)) for arm in arms}

    def run(arm: Arm | None, ids: list[list[int]], tokens: int) -> Generation:
        if arm is None:
            return generate(target, ids, max_new_tokens=tokens, **settings)
        return generate(target, ids, arm.drafter, pace=paces[arm.name], max_new_tokens=tokens, **settings)

    warm_up = [chat_ids(tokenizer, [*prompts[0].history, {"role": "user", "content": prompts[0].turns[0]}])]
    for arm in (None, *arms):
        run(arm, warm_up, 8)
    for place, (prompt, turn) in enumerate((one, turn) for one in prompts for turn in range(len(one.turns))):
        if turn == 0:
            chat = list(prompt.history)
        chat.append({"role": "user", "content": prompt.turns[turn]})
        ids = [chat_ids(tokenizer, chat)]
        every: list[Arm | None] = [None, *arms]
        shift = place % len(every)
        runs: dict[str, Generation] = {}
        for arm in every[shift:] + every[:shift]:
            runs[arm.name if arm else ""] = run(arm, ids, max_new_tokens)
        plain = runs[""]
        if on_plain is not None:
            on_plain(prompt, ids[0], plain)
        yield [
            _measurement(arm, prompt, plain, runs[arm.name], how, _gaps(target, ids[0], plain, runs[arm.name], how)) for arm in arms
        ]
        chat.append({"role": "assistant", "content": tokenizer.decode(plain.tokens[0], skip_special_tokens=True)})


def _gaps(target: PreTrainedModel, ids: list[int], plain: Generation, run: Generation, how: Sampling) -> tuple[float, ...]:
    if how.temperature > 0 or run.tokens == plain.tokens:
        return ()
    where = first_difference(target, ids, run.tokens[0], plain.tokens[0], plain.settings["vocabulary"])
    return (where[1],) if where else ()


def _measurement(
    arm: Arm, prompt: Prompt, plain: Generation, run: Generation, how: Sampling, gaps: tuple[float, ...]
) -> Measurement:
    rounds, greedy = run.rounds[0], how.temperature == 0
    drafted = sum(one for one, _ in rounds)
    return Measurement(
        drafter=arm.name, k=arm.k, temperature=how.temperature, batch=1, category=prompt.category, prompt=prompt.id,
        new_tokens=len(run.tokens[0]), seconds=run.seconds, baseline_tokens=len(plain.tokens[0]), baseline_seconds=plain.seconds,
        accepted_lengths=tuple(accepted for _, accepted in rounds), drafted_lengths=tuple(one for one, _ in rounds),
        equal=int(greedy and run.tokens == plain.tokens), compared=int(greedy),
        draft_ms=1000 * run.draft_seconds / max(drafted, 1), target_ms=1000 * run.target_seconds / max(len(rounds) - 1, 1),
        gaps=gaps, baseline_ms=1000 * plain.target_seconds / max(len(plain.rounds[0]) - 1, 1),
    )  # fmt: skip
