"""Plain decoding and every candidate on the same prompts, one after another on each, by the same loop and clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from draftsmith.recipes import Prompt
from draftsmith.specdec import Drafter, Generation, Sampling, generate
from draftsmith.specdec.models import chat_ids


class Arm(NamedTuple):
    """A candidate: what it is called, its drafter, how many tokens it drafts a round."""

    name: str
    drafter: Drafter
    k: int


@dataclass(frozen=True)
class Measurement:
    """One candidate on one answer. Lengths are a number a target call; ms are means; seconds include the prefill."""

    drafter: str
    k: int
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
) -> Iterator[list[Measurement]]:
    """The measurements of each answer in turn, plain decoding and all arms interleaved, their order turning from answer to answer.

    Each arm decodes eight tokens beforehand that are not counted. Prompts of several turns are played turn by turn, with
    plain decoding's answers in between.
    """
    settings: dict[str, Any] = {"how": how, "eos": tokenizer.eos_token_id, "seed": seed}
    warm_up = [chat_ids(tokenizer, [*prompts[0].history, {"role": "user", "content": prompts[0].turns[0]}])]
    for arm in (None, *arms):
        generate(target, warm_up, arm and arm.drafter, k=arm.k if arm else 0, max_new_tokens=8, **settings)
    for place, (prompt, turn) in enumerate((one, turn) for one in prompts for turn in range(len(one.turns))):
        if turn == 0:
            chat = list(prompt.history)
        chat.append({"role": "user", "content": prompt.turns[turn]})
        ids = [chat_ids(tokenizer, chat)]
        every: list[Arm | None] = [None, *arms]
        shift = place % len(every)
        runs: dict[str, Generation] = {}
        for arm in every[shift:] + every[:shift]:
            runs[arm.name if arm else ""] = generate(
                target, ids, arm and arm.drafter, k=arm.k if arm else 0, max_new_tokens=max_new_tokens, **settings
            )
        plain = runs[""]
        yield [_measurement(arm, prompt, plain, runs[arm.name], how) for arm in arms]
        chat.append({"role": "assistant", "content": tokenizer.decode(plain.tokens[0], skip_special_tokens=True)})


def _measurement(arm: Arm, prompt: Prompt, plain: Generation, run: Generation, how: Sampling) -> Measurement:
    rounds, greedy = run.rounds[0], how.temperature == 0
    drafted = sum(one for one, _ in rounds)
    return Measurement(
        drafter=arm.name, k=arm.k, temperature=how.temperature, batch=1, category=prompt.category, prompt=prompt.id,
        new_tokens=len(run.tokens[0]), seconds=run.seconds, baseline_tokens=len(plain.tokens[0]), baseline_seconds=plain.seconds,
        accepted_lengths=tuple(accepted for _, accepted in rounds), drafted_lengths=tuple(one for one, _ in rounds),
        equal=int(greedy and run.tokens == plain.tokens), compared=int(greedy),
        draft_ms=1000 * run.draft_seconds / max(drafted, 1), target_ms=1000 * run.target_seconds / len(rounds),
        baseline_ms=1000 * plain.target_seconds / len(plain.rounds[0]),
    )  # fmt: skip
