"""All that is measured while the models are loaded: clocks first, so that the time is known, then every answer that is not kept yet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.eval.bench import Answered, Bench, measure, refuse_unservable
from draftsmith.eval.kept import Done, Kept, Part, Pieces
from draftsmith.eval.measurement import AGAIN, Arm, Watched
from draftsmith.eval.prediction.costs import Clocks, costs, enough
from draftsmith.eval.prediction.forced import Forced, forced, lawful
from draftsmith.eval.prompts import digest
from draftsmith.recipes import Prompt
from draftsmith.recipes.progress import Progress, clock
from draftsmith.specdec.drafters import ModelDrafter
from draftsmith.specdec.models import chat_ids, real_ids
from draftsmith.specdec.text import Detokenizer

Groups = Mapping[Part, Sequence[list[Prompt]]]


def measure_left(benches: Mapping[Part, Bench], groups: Groups, kept: Kept, places: Mapping[str, str]) -> None:
    """Measure what `kept` lacks, and keep it answer by answer. `places` has the drafter of each arm as it was loaded."""
    turns = {part: [(group, turn) for group in some for turn in range(len(group[0].turns))] for part, some in groups.items()}
    left = {part: [one for one in some if kept.find(part, *one) is None] for part, some in turns.items()}
    total, missing = _rows(turns.values()), _rows(left.values())
    for part, bench in benches.items():
        refuse_unservable(bench, groups[part])
    warm = _clock(benches, groups, left, kept)
    _say_how_long(benches, left, kept, total)
    progress = Progress("measuring", total, unit="answers")
    progress.at(total - missing)
    done, sitting = total - missing, f"{time.time_ns()}-{os.getpid()}"
    for part, bench in benches.items():
        if left[part]:
            cold = [arm for arm in bench.arms if arm.k == "adaptive"] if part in warm else [None, *bench.arms]
            for rows in _measure_part(bench, part, groups[part], kept, places, sitting, cold):
                done += rows
                progress.at(done)
    progress.done()


def _measure_part(
    bench: Bench, part: Part, groups: Sequence[list[Prompt]], kept: Kept, places: Mapping[str, str], sitting: str,
    cold: Sequence[Arm | None],
) -> Iterator[int]:  # fmt: skip
    """Keeps every answer that is missing; how many rows each had."""
    shown = {m.category for one in kept.done.values() if one.part == part for m in one.measured if m.prompt in one.pieces}

    def known(group: list[Prompt], turn: int) -> list[str] | None:
        found = kept.find(part, group, turn)
        return found.said if found is not None else None

    began = time.perf_counter()
    for answered in measure(bench, groups, known, cold):
        found, took = _forced(bench, answered, places)
        done = _done(bench, part, sitting, answered, found, shown)
        decoding = sum(run.generation.seconds for run in (answered.plain, *answered.runs.values()))
        now = time.perf_counter()
        kept.add(done._replace(seconds={"decoding": decoding, "teacher_forced": took, "all": now - began}))
        began = now
        yield len(answered.group)


def _clock(benches: Mapping[Part, Bench], groups: Groups, left: Mapping[Part, Any], kept: Kept) -> list[Part]:
    """Costs of every setting of fixed k, once a part, for the estimate of the time and r(n); the parts that were clocked now."""
    wanted = [part for part in benches if left[part] and part not in kept.clocks]
    for number, part in enumerate(wanted, 1):
        began, bench = time.perf_counter(), benches[part]
        arms = [arm for arm in bench.arms if isinstance(arm.k, int) and arm.drafter is not None]
        prompts, rounds = enough(_rows([left[part]]), bench.max_new_tokens)
        whole = [group for group in groups[part] if len(group) == part.batch]
        texts = [_texts(bench, group) for group in whole[:: max(1, len(whole) // prompts)][:prompts]]  # costs grow with the text
        progress = Progress(f"clocking {number}/{len(wanted)}", len(texts) * (len(arms) + 1), unit="runs")
        vocabulary = real_ids(bench.target, bench.tokenizer)
        found = costs(bench.target, texts, arms, bench.how, bench.seed, vocabulary, progress.at, rounds, beside=False)
        progress.stop()
        kept.clock(part, found, time.perf_counter() - began)
    return wanted


def _texts(bench: Bench, group: list[Prompt]) -> list[list[int]]:
    return [chat_ids(bench.tokenizer, [*one.history, {"role": "user", "content": one.turns[0]}]) for one in group]


def _say_how_long(benches: Mapping[Part, Bench], left: Mapping[Part, Any], kept: Kept, total: int) -> None:
    seconds = sum(len(some) * answer_seconds(kept.clocks[part][0], benches[part]) for part, some in left.items() if some)
    arms = len(next(iter(benches.values())).arms) - 1
    found = _rows(left.values())
    print(
        f"measuring: {total} answers in {len(benches)} part{'s' if len(benches) > 1 else ''}"
        + (f", {total - found} of them kept from before" if found < total else "")
        + f"; each by {arms} candidate{'s' if arms > 1 else ''} and twice plainly: {clock(seconds)} at most, were every answer as long as allowed",
        file=sys.stderr,
    )


def answer_seconds(clocks: Clocks, bench: Bench) -> float:
    """What one turn of a group takes by all arms if every answer is as long as allowed; an adaptive arm is about as fast as plain."""
    rounds = bench.max_new_tokens - 1
    plain = clocks.prefill + rounds * clocks.step
    seconds = plain
    for arm in bench.arms:
        cost = clocks.costs.get(arm.name)
        if cost is None:
            seconds += plain
        else:
            step = clocks.step * (int(arm.k) * cost.c + cost.r + cost.o) / cost.tau
            seconds += cost.prefill * clocks.prefill + rounds * step
    return seconds


def _forced(bench: Bench, answered: Answered, places: Mapping[str, str]) -> tuple[list[dict[str, Forced]], float]:
    """Each drafter that has laws along each row's plain answer, and how long that took."""
    began = time.perf_counter()
    drafters: dict[str, tuple[ModelDrafter, list[int]]] = {}
    for arm in bench.arms:
        if (model := lawful(arm.drafter)) is not None:
            ks = drafters.setdefault(places[arm.name], (model, []))[1]
            if model is arm.drafter and isinstance(arm.k, int):  # a lookup's share in the blocks of both cannot be had so
                ks.append(arm.k)
    vocabulary = real_ids(bench.target, bench.tokenizer)
    rows = [
        forced(bench.target, drafters, [*ids, *said], len(said), bench.how, vocabulary)
        for ids, said in zip(answered.ids, answered.plain.generation.tokens, strict=True)
    ]
    return rows, time.perf_counter() - began


def _done(bench: Bench, part: Part, sitting: str, answered: Answered, found: list[dict[str, Forced]], shown: set[str]) -> Done:
    pieces: dict[str, dict[str, Pieces]] = {}
    for row, prompt in enumerate(answered.group):
        if answered.turn == 0 and prompt.category not in shown:
            shown.add(prompt.category)
            runs = {name: run for name, run in answered.runs.items() if name != AGAIN.name}
            pieces[prompt.id] = {name: pieces_of(bench.tokenizer, answered.ids[row], run, row) for name, run in runs.items()}
    notes = {name: run.generation.warnings for name, run in answered.runs.items() if run.generation.warnings}
    ids = tuple(prompt.id for prompt in answered.group)
    return Done(
        part, ids, answered.turn, digest(answered.group), sitting, answered.said, answered.measured, found, pieces, notes, {}
    )


def pieces_of(tokenizer: Any, prompt: list[int], run: Watched, row: int) -> Pieces:
    """A row's text in the order it was written, cut wherever the writer changes."""
    words = Detokenizer(tokenizer, prompt, skip_special=True)
    pieces: Pieces = []
    for written in run.written[row]:
        for who, tokens in (("draft", written.tokens[: written.accepted]), ("target", written.tokens[written.accepted :])):
            _put(pieces, words.push(tokens), who)
    _put(pieces, words.flush(), "target")
    return pieces


def _put(pieces: Pieces, text: str, who: str) -> None:
    if text and pieces and pieces[-1][1] == who:
        pieces[-1] = (pieces[-1][0] + text, who)
    elif text:
        pieces.append((text, who))


def with_plain_again(arms: Sequence[Arm]) -> list[Arm]:
    """Plain decoding's second run goes into the middle, as far from the first as any arm is."""
    half = (len(arms) + 1) // 2
    return [*arms[:half], AGAIN, *arms[half:]]


def at(bench: Bench, part: Part) -> Bench:
    """The same under another setting."""
    return replace(bench, how=replace(bench.how, temperature=part.temperature), batch=part.batch, prompts=part.prompts)


def _rows(some: Iterable[Sequence[tuple[list[Prompt], int]]]) -> int:
    return sum(len(group) for each in some for group, _ in each)
