"""`draftsmith sweep`: clocks, then every prompt under every setting, then sweep.json, sweep.md and sweep.png."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.eval import metrics
from draftsmith.eval.bench import Bench, measure
from draftsmith.eval.candidates import folder_of, prepare_all, refuse_another_target
from draftsmith.eval.machine import processor
from draftsmith.eval.measurement import Arm, Measurement
from draftsmith.eval.prediction.chances import chances, target_chances
from draftsmith.eval.prediction.costs import PROMPTS, ROUNDS, costs
from draftsmith.eval.prediction.predicted import Answer, predict
from draftsmith.eval.prompts import sample
from draftsmith.eval.sweep import page
from draftsmith.eval.sweep.asked import Asked
from draftsmith.eval.sweep.choice import choose
from draftsmith.eval.sweep.kept import Done, Started, read_done, read_started, write_done, write_started
from draftsmith.eval.sweep.picture import draw
from draftsmith.eval.tables import print_table
from draftsmith.recipes import Prompt, read_prompts
from draftsmith.recipes.files import write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.specdec import Sampling, load, load_drafter
from draftsmith.specdec.models import chat_ids, real_ids
from draftsmith.specdec.places import revision

LATER = ("out", "bootstrap", "per_kind")  # may change from one call to the next: what is done stays true


def run_sweep(asked: Asked, show: bool = True) -> dict[str, Any]:
    """The sweep; it is printed and written to `asked.out`, where a killed one goes on behind its last whole prompt."""
    every = read_prompts(asked.prompts)
    prompts, out, how = sample(every, asked.per_kind), Path(asked.out), Sampling(asked.temperature, asked.top_k, asked.top_p)
    name = revision(asked.target)
    folders = sorted({folder for folder in map(folder_of, asked.drafters) if Path(folder).is_dir()})
    for folder in folders:
        refuse_another_target(Path(folder), name)
    torch.set_num_threads(asked.threads)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    identity = {key: value for key, value in asdict(asked).items() if key not in LATER}
    identity |= {"revision": name, "device": device, "versions": {one: metadata.version(one) for one in ("torch", "transformers")}}
    identity |= {"drafts": {folder: revision(folder) for folder in folders}}  # one that was trained on in its place is another
    identity = json.loads(json.dumps(identity))  # as it will be read
    started = read_started(out, identity)
    done = read_done(out, prompts) if started else {}
    left = [one for one in prompts if one.id not in done]
    if started is None or left:
        target, tokenizer = load(asked.target, asked.dtype, "cuda" if torch.cuda.is_available() else "cpu")
        drafters = {one: load_drafter(one, target, tokenizer) for one in asked.drafters}
        arms = [Arm(called(one, k), drafter, k) for one, drafter in drafters.items() for k in asked.k]
        prepared = prepare_all(target, arms) if asked.decoding == "prepared" else ""
        if started is None:
            started = _clock(target, tokenizer, prompts, arms, how, asked, prepared)
            write_started(out, identity, started)
        progress = Progress("sweeping", len(prompts), unit="prompts")
        progress.at(len(done))
        for prompt, one in _measure(target, tokenizer, left, drafters, arms, how, asked):
            write_done(out, prompt, one)
            done[prompt.id] = one
            progress.at(len(done))
        progress.done()
    whole = summed_up(asked, started, [done[one.id] for one in prompts], name, device, len(every))
    write_whole(out / "sweep.json", json.dumps(whole, indent=1) + "\n")
    write_whole(out / "sweep.md", page.markdown(whole))
    draw(whole, out / "sweep.png")
    if show:
        print(whole["recommendation"]["text"])
        print_table("Speed-up by drafter and k", page.rows(whole))
        print(f"page: {out / 'sweep.md'}, picture: {out / 'sweep.png'}")
    return whole


def called(drafter: str, k: int) -> str:
    return f"{drafter}, k = {k}"


def _clock(
    target: Any, tokenizer: Any, prompts: list[Prompt], arms: list[Arm], how: Sampling, asked: Asked, prepared: str
) -> Started:
    groups = [
        [chat_ids(tokenizer, [*one.history, {"role": "user", "content": one.turns[0]}])]
        for one in prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    ]
    progress = Progress("clocking", len(groups) * (len(arms) + len(asked.drafters)), unit="runs")
    step, _, found = costs(target, groups, arms, how, asked.seed, real_ids(target, tokenizer), progress.at)
    progress.done(f"a plain step takes {1000 * step:.1f} ms")
    return Started(step, found, prepared)


def _measure(
    target: Any, tokenizer: Any, prompts: list[Prompt], drafters: dict[str, Any], arms: list[Arm], how: Sampling, asked: Asked
) -> Iterator[tuple[Prompt, Done]]:
    """Each prompt with all that was found on its answers; the drafters' passes run between the clocked runs."""
    bench = Bench(target, tokenizer, arms, how, asked.max_new_tokens, asked.seed)
    done = Done([], [])
    for one in measure(bench, [[prompt] for prompt in prompts]):
        plain = one.plain.generation
        text, n, k = [*one.ids[0], *plain.tokens[0]], len(plain.tokens[0]), max(asked.k)
        p = target_chances(target, text, n, how, real_ids(target, tokenizer))
        each = {name: chances(drafter, text, n, k, how, p) for name, drafter in drafters.items()}
        done.answers.append(Answer(n, plain.prefill_seconds, plain.seconds, each))
        done.measured.extend(one.measured)
        if one.turn == len(one.group[0].turns) - 1:
            yield one.group[0], done
            done = Done([], [])


def summed_up(asked: Asked, started: Started, done: list[Done], name: str, device: str, prompts_in_file: int) -> dict[str, Any]:
    """Everything that is said of the settings, ready for json."""
    answers = [answer for one in done for answer in one.answers]
    settings = [(drafter, k) for drafter in asked.drafters for k in asked.k]
    by_name: dict[str, list[Measurement]] = {}
    for one in (m for prompt in done for m in prompt.measured):
        by_name.setdefault(one.drafter, []).append(one)
    measured = {(drafter, k): by_name[called(drafter, k)] for drafter, k in settings}
    cells, speeds, errors = [], {}, []
    for (drafter, k), its in measured.items():
        said = predict(answers, drafter, k, started.costs[called(drafter, k)])
        found = metrics.summary(its, asked.bootstrap, asked.seed)
        speeds[drafter, k] = metrics.Interval(**found["speed_up"])
        errors.append(said.speed_up / speeds[drafter, k].value)
        cells.append({"drafter": drafter, "k": k, "predicted": said._asdict() | {"cost": said.cost._asdict()}, "measured": found})
    choice = choose(measured, speeds, asked.bootstrap, asked.seed)
    return {
        "schema": 1,
        "recommendation": choice._asdict() | {"speed_up": choice.speed_up._asdict(), "elsewhere": choice.elsewhere._asdict()},
        "drafters": list(asked.drafters), "k": list(asked.k), "prompts": len(done), "answers": len(answers),
        "plain_step_ms": 1000 * started.step,
        "prefill_share": sum(one.prefill_seconds for one in answers) / sum(one.seconds for one in answers),
        "error": {"low": min(errors), "middle": float(np.median(errors)), "high": max(errors)},
        "how": {
            "target": asked.target, "target_revision": name, "dtype": asked.dtype, "device": device, "threads": asked.threads,
            "sampling": {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}, "batch": 1, "seed": asked.seed,
            "max_new_tokens": asked.max_new_tokens, "prepared": started.prepared, "prompts": asked.prompts, "prompts_in_file": prompts_in_file,
            "bootstrap": asked.bootstrap, "clocked_rounds": ROUNDS * min(PROMPTS, len(done)), "clocked_prompts": min(PROMPTS, len(done)),
            "versions": {one: metadata.version(one) for one in ("draftsmith", "torch", "transformers")},
        },
        "definitions": page.DEFINITIONS,
        "cells": cells,
    }  # fmt: skip
