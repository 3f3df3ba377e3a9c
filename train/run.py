"""`draftsmith train`: from a recipe to the checkpoints of a draft, each step a file that can be opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator

from draftsmith.distill import Batch, DistillDraft, DistillExits, LiveTeacher
from draftsmith.distill.batch import in_batches
from draftsmith.distill.draft import Origin
from draftsmith.distill.making.cut import check_layers
from draftsmith.distill.making.drafts import in_float32, recomputed
from draftsmith.distill.making.vocabulary import Trim
from draftsmith.distill.memory import measured, resident
from draftsmith.distill.packing import check_packing
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import room_for, writable, write_whole
from draftsmith.recipes.paths import find
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.models import load, real_ids
from draftsmith.specdec.places import revision
from draftsmith.train import checkpoint, exits
from draftsmith.train.bad_steps import Skips, last_good_named
from draftsmith.train.choice import Choice
from draftsmith.train.company import company
from draftsmith.train.data.plan import Order, Rows, micro_batches
from draftsmith.train.engines import check_engine, check_trainer, prepared
from draftsmith.train.interrupt import Signals
from draftsmith.train.launch import launched
from draftsmith.train.loop import train
from draftsmith.train.on_policy import mixed
from draftsmith.train.record import Log, banner, environment, reach
from draftsmith.train.rows import ordered
from draftsmith.train.start import bytes_on_disk, make, start, support, trim, what_a_step_takes
from draftsmith.train.teachers import taught_by, with_states
from draftsmith.train.trackers import begin, check_trackers, track
from draftsmith.train.watch import Watch

LEARNED = ("seed", "target", "data", "draft", "train")  # what the weights hang on; eval and export may change between calls
# of train: no weight hangs on these
FREE = {"on_damage", "processes", "skip_bad_steps", "lost_after", "trackers", "gradient_checkpointing"}


def same_run(recipe: Recipe) -> None:
    """ValueError where the recipe's folder holds a run of another target, other data, another draft or other training."""
    written = recipe.folder / "recipe.yaml"
    if not written.is_file():
        return
    before, now = (yaml.safe_load(text) for text in (written.read_text(encoding="utf-8"), recipe.dump()))
    for one in (before, now):
        one["train"] = {key: value for key, value in one.get("train", {}).items() if key not in FREE}
    if changed := [key for key in LEARNED if before.get(key) != now[key]]:
        raise ValueError(
            f"{recipe.folder} holds a run with another {', '.join(changed)} (see {written}). "
            "Name this one otherwise (name=...), or remove the folder"
        )


def run_training(recipe: Recipe) -> Path:
    """Train the recipe's draft, or go on where a run was interrupted -> the run folder. `Interrupted` where a signal ended it."""
    for name in recipe.data.answer_files or [recipe.data.prompts]:
        find(name)
    if recipe.data.answers is None and recipe.data.format == "prompts":
        read_prompts(recipe.data.prompts)  # a broken line is named before a model is loaded
    check_trackers(recipe.train.trackers)
    writable(recipe.folder)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with (
        Signals() as signals,
        launched(recipe.train.precision, recipe.train.processes) as accelerator,
        company(recipe.folder, accelerator, recipe.train.lost_after),
    ):
        _train(recipe, accelerator, signals)
    return recipe.folder


def _train(recipe: Recipe, accelerator: Accelerator, signals: Signals) -> None:
    settings, folder, held = recipe.train, recipe.folder, resident()
    same_run(recipe)
    check_engine(recipe, accelerator)
    checkpoint.sound(folder, settings.on_damage, accelerator)
    check_trainer(folder, accelerator)
    torch.manual_seed(recipe.seed)
    target, tokenizer = load(recipe.target.model, recipe.target.dtype, accelerator.device)
    if isinstance(named := getattr(recipe.draft, "layers", None), list):
        check_layers(target, named)
    exits.check_exits(recipe, target)
    name = revision(recipe.target.model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_whole(folder / "recipe.yaml", recipe.dump())
    seen = _seen(recipe, target, tokenizer, name, accelerator)
    taught = _taught(recipe, target, tokenizer, name, seen, accelerator)
    objective, plan = taught.objective, seen.plan
    if not runs.steps(folder):
        taught.begin()
    if settings.precision != "no" and not isinstance(objective, DistillExits):  # heads see to it themselves
        in_float32(objective.draft)
    if settings.gradient_checkpointing == "blocks":
        recomputed(objective.draft)
    optimizer = torch.optim.AdamW(
        [one for one in taught.draft.parameters() if one.requires_grad],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    log = Log(folder / "metrics.jsonl", accelerator.is_main_process, partial(track, accelerator=accelerator))
    choice, skips = Choice(settings.select, settings.patience), Skips(settings.skip_bad_steps)
    mixture = mixed(recipe, plan, seen.size, seen.rows.train, objective, target, tokenizer, accelerator, log.write)
    accelerator.register_for_checkpointing(*(one for one in (choice, skips, mixture) if one is not None))
    objective.trainable, optimizer = prepared(objective.trainable, optimizer, settings, seen.accumulate, accelerator)
    steps_of = {"size": plan.size, "steps": plan.steps, "rows": plan.fingerprint}
    done = checkpoint.resume(folder, accelerator, steps_of, settings.keep, choice.by)
    log.goes_on_from(done)
    if done:
        plan.go_to(runs.state(runs.steps(folder)[-1])["plan"]["at"])
    if accelerator.is_main_process:
        _say_what_begins(recipe, seen, taught, done, name, accelerator)
    watch = Watch(recipe, log, plan, objective, seen.held_out, accelerator, choice, mixture, steps_of, taught.needs, signals)
    if done < plan.steps and not choice.over:
        begin(recipe, accelerator, done)
        rank, world, order = accelerator.process_index, accelerator.num_processes, mixture or plan
        with signals.steps(), last_good_named(folder):
            train(
                objective, optimizer, lambda step: micro_batches(order.step(step), seen.accumulate, rank, world),
                start=done, steps=plan.steps, settings=settings, accelerator=accelerator, after=watch, skips=skips,
            )  # fmt: skip
        watch.progress.done()
    if accelerator.is_main_process:
        if done < plan.steps:
            where = "at most on the GPU" if accelerator.device.type == "cuda" else "more than before, at most"
            print(f"memory: {measured(held, accelerator.device.type) / 1e6:.0f} MB {where}")
        _say_what_came(recipe, plan, choice)


class Seen(NamedTuple):
    """What the steps see: rows, their order, `size` of them a step on all processes together, as so many micro-batches on each."""

    rows: Rows
    plan: Order
    held_out: list[Batch]
    size: int
    accumulate: int


def _seen(recipe: Recipe, target: Any, tokenizer: Any, name: str, accelerator: Accelerator) -> Seen:
    settings, data = recipe.train, recipe.data
    with accelerator.main_process_first():
        here = settings.batch_size * accelerator.num_processes
        size = (
            checkpoint.size(recipe.folder) or here * settings.accumulate
        )  # a run goes on with its own, on any number of processes
        rows, plan = ordered(recipe, target, tokenizer, name, size)
    if data.pack:
        check_packing(target, data.max_length)
    held_out = [*in_batches(rows.held_out, accelerator.device)]
    return Seen(rows, plan, held_out, size, -(-size // here))


class Taught(NamedTuple):
    """What is taught: the objective, its bare module, what the draft may say, the bytes of a checkpoint, and how it starts."""

    objective: Any
    draft: Any
    said: Trim | None
    needs: int
    begin: Callable[[], None]


def _taught(recipe: Recipe, target: Any, tokenizer: Any, name: str, seen: Seen, accelerator: Accelerator) -> Taught:
    settings, rows = recipe.train, seen.rows
    said = trim(recipe, rows, target, tokenizer)  # refused before the target is listened to
    only = support(rows, said) if settings.support == "answers" else None
    if isinstance(recipe.draft, ExitsDraft):
        heads = exits.objective_of(recipe, recipe.draft, target, tokenizer, name, only, said)
        needs = _with_room(recipe, exits.bytes_on_disk(heads))
        return Taught(heads, heads.exits, said, needs, lambda: exits.start(recipe, heads, rows, seen.held_out, accelerator))
    states = with_states(recipe, LiveTeacher(target, real_ids(target, tokenizer)), rows, name, accelerator)
    with accelerator.main_process_first():  # the first of them writes which layers were chosen, the others read it
        draft = make(recipe, target, states, tokenizer, rows, seen.held_out, accelerator).draft
    needs = _with_room(recipe, bytes_on_disk(draft))
    teacher = taught_by(recipe, states, rows, only, name, tokenizer, accelerator)
    objective = DistillDraft(
        draft, teacher, settings.loss, settings.chunk, only, Origin(recipe.target.model, name, tokenizer), settings.temperature,
        said.ids if said else None,
    )  # fmt: skip
    return Taught(objective, draft, said, needs, lambda: start(recipe, objective, states, rows, seen.held_out, accelerator))


def _with_room(recipe: Recipe, needs: int) -> int:
    """The bytes of a checkpoint, of which the run's folder has room for as many as are kept."""
    room_for(recipe.folder, (recipe.train.keep + 2) * needs, recipe.folder / "step-N")
    return needs


def _say_what_begins(recipe: Recipe, seen: Seen, taught: Taught, done: int, name: str, accelerator: Accelerator) -> None:
    folder, objective = recipe.folder, taught.objective
    about = environment(accelerator, name, recipe, seen.rows, taught.draft)
    write_whole(folder / "environment.json", json.dumps(about, indent=1) + "\n")
    banner(seen.rows, seen.plan, done, accelerator, folder, recipe.train.processes)
    told = isinstance(objective, DistillExits)
    if told:
        print(exits.memory(objective))
    elif far := reach(taught.draft, seen.rows):
        print(far)
    expected = (exits.what_a_step_takes if told else what_a_step_takes)(recipe, objective, seen.rows, accelerator)
    print(expected if isinstance(expected, str) else f"memory: {expected.total / 1e6:.0f} MB of tensors expected")
    if taught.said:
        print(f"the draft says {taught.said}")


def _say_what_came(recipe: Recipe, plan: Order, choice: Choice) -> None:
    folder = recipe.folder
    if told := runs.passed_over(folder):
        print(told)
    if choice.over:
        print(f"stopped at {runs.steps(folder)[-1].name} of {plan.steps}: {choice.why()}")
    if (best := runs.best(folder)) is not None:
        figures = runs.state(best)["held_out"]
        print(
            f"best draft: {best / 'draft'}, held-out acceptance {figures['acceptance']:.3f}, "
            f"{choice.by} {figures[choice.by]:.3f} tokens a call (k = {recipe.train.k})"
        )
        if "parts" in figures:
            print(f"of its exits: {exits.figures(figures)}")
