"""Plain decoding and every candidate on the same prompts, one after another on each, by the same loop and clock."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from draftsmith.eval.measurement import Arm, Measurement, Watched, measurement
from draftsmith.recipes import Prompt
from draftsmith.specdec import Sampling, generate
from draftsmith.specdec.cache import CachedLM, positions
from draftsmith.specdec.models import chat_ids, eos_ids, real_ids
from draftsmith.specdec.pace import Adaptive, Fixed, Pace

Said = Callable[[list[Prompt], int], list[str] | None]  # plain decoding's answers to these prompts in this turn


@dataclass(frozen=True)
class Bench:
    """Who is measured, and how; `prompts` names the file that the prompts came from."""

    target: PreTrainedModel
    tokenizer: Any
    arms: Sequence[Arm]
    how: Sampling
    max_new_tokens: int
    seed: int = 0
    batch: int = 1
    prompts: str = ""


class Answered(NamedTuple):
    """One turn of prompts that were decoded together: their ids and texts as the target saw and wrote them, and every arm's runs."""

    group: list[Prompt]
    turn: int
    ids: list[list[int]]
    said: list[str]
    plain: Watched
    runs: dict[str, Watched]
    measured: list[Measurement]


def measure(
    bench: Bench, groups: Sequence[list[Prompt]], known: Said = lambda group, turn: None, cold: Sequence[Arm | None] | None = None
) -> Iterator[Answered]:
    """The answers in turn, plain decoding and all arms interleaved, their order turning from answer to answer.

    Each arm (of those that are `cold`, if some were warmed up before) decodes eight tokens beforehand that are not counted. Prompts of several turns are played turn by turn, with
    plain decoding's answers in between. What is `known` already is not decoded again. A consumer may take its time: no clock runs.
    """
    run = _runner(bench)
    plan = [(group, turn) for group in groups for turn in range(len(group[0].turns))]
    for place, (group, turn) in enumerate(plan):
        if turn == 0:
            chats = [list(prompt.history) for prompt in group]
        for chat, prompt in zip(chats, group, strict=True):
            chat.append({"role": "user", "content": prompt.turns[turn]})
        said = known(group, turn)
        if said is None:
            ids = [chat_ids(bench.tokenizer, chat) for chat in chats]
            for arm in (None, *bench.arms) if cold is None else cold:
                run(arm, ids, group, turn, 8)
            cold = ()
            answered = _answer(bench, run, group, turn, ids, place)
            said = answered.said
            yield answered
        for chat, text in zip(chats, said, strict=True):
            chat.append({"role": "assistant", "content": text})


def _runner(bench: Bench) -> Callable[[Arm | None, list[list[int]], list[Prompt], int, int], Watched]:
    target = bench.target
    settings: dict[str, Any] = {
        "how": bench.how,
        "eos": eos_ids(target, bench.tokenizer),
        "vocab_size": real_ids(target, bench.tokenizer),
    }
    paces: dict[str, Pace] = {
        arm.name: Adaptive() if arm.k == "adaptive" else Fixed(int(arm.k)) for arm in bench.arms if arm.drafter is not None
    }

    def run(arm: Arm | None, ids: list[list[int]], group: list[Prompt], turn: int, tokens: int) -> Watched:
        # A row's random numbers hang on its prompt alone, so answers to other prompts are other draws, and a batch changes none.
        seeds = [bench.seed + zlib.crc32(f"{prompt.id}/{turn}".encode()) for prompt in group]
        drafter, pace = (arm.drafter, paces.get(arm.name)) if arm is not None else (None, None)
        call = partial(generate, target, ids, drafter, pace=pace, max_new_tokens=tokens, seed=seeds, **settings)
        return Watched(len(ids)).run(call, target.device)

    return run


def _answer(bench: Bench, run: Any, group: list[Prompt], turn: int, ids: list[list[int]], place: int) -> Answered:
    every: list[Arm | None] = [None, *bench.arms]
    shift = place % len(every)
    runs = {arm.name if arm else "": run(arm, ids, group, turn, bench.max_new_tokens) for arm in every[shift:] + every[:shift]}
    plain = runs.pop("")
    measured = [
        measurement(
            arm, prompt, turn, row, group[0].id, ids[row], plain, runs[arm.name], bench.how, bench.batch, bench.prompts, bench.target,
        )
        for arm in bench.arms
        for row, prompt in enumerate(group)
    ]  # fmt: skip
    said = [bench.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in plain.generation.tokens]
    return Answered(group, turn, ids, said, plain, runs, measured)


def refuse_unservable(bench: Bench, groups: Sequence[list[Prompt]]) -> None:
    """ValueError now for what the last prompts may meet after hours: too few positions, or a window that a batch cannot share.

    Lengths are the most that they can become: every answer between the turns as long as allowed.
    """
    limit = positions(bench.target.config.get_text_config())
    lengths: Mapping[str, int] = {prompt.id: _longest(bench, prompt) for group in groups for prompt in group}
    for group in groups:
        for prompt in group:
            if limit and lengths[prompt.id] > limit:
                raise ValueError(
                    f"prompt {prompt.id} of {bench.prompts} may need {lengths[prompt.id]} positions with answers of {bench.max_new_tokens} tokens, "
                    f"{type(bench.target).__name__} serves {limit}: ask for fewer (eval.max_new_tokens), or leave the prompt out"
                )
        longest = max(lengths[prompt.id] for prompt in group)
        columns = longest + (len(group) - 1) * (bench.max_new_tokens - 1)  # in the worst case rows take turns to win
        try:
            CachedLM(bench.target, len(group)).refuse_ahead(columns, any(arm.drafter for arm in bench.arms))
        except ValueError as error:
            raise ValueError(f"batch {bench.batch}, prompts from {group[0].id} on: {error}") from error


def _longest(bench: Bench, prompt: Prompt) -> int:
    chat = list(prompt.history)
    for turn in prompt.turns:
        chat += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    return len(chat_ids(bench.tokenizer, chat[:-1])) + len(prompt.turns) * bench.max_new_tokens - 1
