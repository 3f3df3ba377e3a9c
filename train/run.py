"""`draftsmith train`: from a recipe to the checkpoints of a draft, each step a file that can be opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from accelerate import Accelerator
from torch import Tensor

from draftsmith.distill import Batch, DistillDraft, DistillExits, LiveTeacher, collate
from draftsmith.distill.draft import Origin
from draftsmith.distill.making.cut import check_layers
from draftsmith.distill.making.vocabulary import Trim
from draftsmith.distill.memory import measured, resident
from draftsmith.distill.packing import check_packing
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import room_for, write_whole
from draftsmith.recipes.paths import find
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.models import load, real_ids
from draftsmith.specdec.places import revision
from draftsmith.train import checkpoint, exits
from draftsmith.train.choice import Choice
from draftsmith.train.data.plan import Rows, micro_batches
from draftsmith.train.launch import launched
from draftsmith.train.loop import train
from draftsmith.train.on_policy import mixed
from draftsmith.train.record import Log, banner, environment
from draftsmith.train.rows import ordered
from draftsmith.train.start import bytes_on_disk, make, start, support, trim, what_a_step_takes
from draftsmith.train.teachers import taught_by, with_states
from draftsmith.train.watch import Watch

LEARNED = ("seed", "target", "data", "draft", "train")  # what the weights hang on; eval and export may change between calls


def same_run(recipe: Recipe) -> None:
    """ValueError where the recipe's folder holds a run of another target, other data, another draft or other training."""
    written = recipe.folder / "recipe.yaml"
    if not written.is_file():
        return
    before, now = yaml.safe_load(written.read_text(encoding="utf-8")), yaml.safe_load(recipe.dump())
    if changed := [key for key in LEARNED if before.get(key) != now[key]]:
        raise ValueError(
            f"{recipe.folder} holds a run with another {', '.join(changed)} (see {written}). "
            "Name this one otherwise (name=...), or remove the folder"
        )


def run_training(recipe: Recipe) -> Path:
    """Train the recipe's draft, or go on where a run was interrupted -> the run folder."""
    if recipe.data.answers is not None or recipe.data.format == "messages":
        find(recipe.data.answers or recipe.data.prompts)
    else:
        read_prompts(recipe.data.prompts)  # a broken line is named before a model is loaded
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with launched(recipe.train.precision) as accelerator:
        _train(recipe, accelerator)
    return recipe.folder


def _train(recipe: Recipe, accelerator: Accelerator) -> None:
    settings, held = recipe.train, resident()
    same_run(recipe)
    torch.manual_seed(recipe.seed)
    target, tokenizer = load(recipe.target.model, recipe.target.dtype, accelerator.device)
    if isinstance(named := getattr(recipe.draft, "layers", None), list):
        check_layers(target, named)
    exits.check_exits(recipe, target)
    name, folder, data = revision(recipe.target.model), recipe.folder, recipe.data
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_whole(folder / "recipe.yaml", recipe.dump())
    with accelerator.main_process_first():
        here = settings.batch_size * accelerator.num_processes
        size = checkpoint.size(folder) or here * settings.accumulate  # a run goes on with its own, on any number of processes
        rows, plan = ordered(recipe, target, tokenizer, name, size)
    accumulate = -(-size // here)
    if data.pack:
        check_packing(target, data.max_length)
    held_out = [collate(rows.held_out[start : start + 8]).to(accelerator.device) for start in range(0, len(rows.held_out), 8)]

    said = trim(recipe, rows, target, tokenizer)  # refused before the target is listened to
    only = support(rows, said) if settings.support == "answers" else None
    objective, draft, needs, begin = (_exits if isinstance(recipe.draft, ExitsDraft) else _draft)(
        recipe, target, tokenizer, name, rows, held_out, said, only, accelerator
    )
    optimizer = torch.optim.AdamW(
        [one for one in draft.parameters() if one.requires_grad],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    if not runs.steps(folder):
        begin()
    log = Log(folder / "metrics.jsonl", accelerator.is_main_process)
    choice = Choice(settings.select, settings.patience)
    accelerator.register_for_checkpointing(choice)
    mixture = mixed(recipe, plan, size, rows.train, objective, target, tokenizer, accelerator, log.write)
    if mixture is not None:
        accelerator.register_for_checkpointing(mixture)
    objective.trainable, optimizer = accelerator.prepare(objective.trainable, optimizer)
    steps_of = {"size": plan.size, "steps": plan.steps, "rows": plan.fingerprint}
    done = checkpoint.resume(folder, accelerator, steps_of, settings.keep, choice.by)
    log.goes_on_from(done)
    if done:
        plan.go_to(runs.state(runs.steps(folder)[-1])["plan"]["at"])
    if accelerator.is_main_process:
        write_whole(folder / "environment.json", json.dumps(environment(accelerator, name, recipe, rows, draft), indent=1) + "\n")
        banner(rows, plan, done, accelerator, folder)
        told = isinstance(objective, DistillExits)
        expected = exits.memory(objective) if told else what_a_step_takes(recipe, objective, rows, accelerator)
        print(expected if isinstance(expected, str) else f"memory: {expected.total / 1e6:.0f} MB of tensors expected")
        if said:
            print(f"the draft says {said}")

    watch = Watch(recipe, log, plan, objective, held_out, accelerator, choice, mixture, steps_of, needs)
    if done < plan.steps and not choice.over:
        train(
            objective, optimizer, lambda step: micro_batches((mixture or plan).step(step), accumulate, accelerator.process_index, accelerator.num_processes),
            start=done, steps=plan.steps, settings=settings, accelerator=accelerator, after=watch,
        )  # fmt: skip
        watch.progress.done()
    if done < plan.steps and accelerator.is_main_process:
        where = "at most on the GPU" if accelerator.device.type == "cuda" else "more than before, at most"
        print(f"memory: {measured(held, accelerator.device.type) / 1e6:.0f} MB {where}")
    if choice.over and accelerator.is_main_process:
        print(f"stopped at {runs.steps(folder)[-1].name} of {plan.steps}: {choice.why()}")
    if accelerator.is_main_process and (best := runs.best(folder)) is not None:
        figures = runs.state(best)["held_out"]
        print(
            f"best draft: {best / 'draft'}, held-out acceptance {figures['acceptance']:.3f}, "
            f"{choice.by} {figures[choice.by]:.3f} tokens a call (k = {settings.k})"
        )
        if "parts" in figures:
            print(f"of its exits: {exits.figures(figures)}")


class Setting(NamedTuple):
    """What is trained, as the loop needs it: the objective, its bare module, the bytes of a checkpoint, and its start."""

    objective: Any
    draft: Any
    needs: int
    begin: Callable[[], None]


def _draft(
    recipe: Recipe, target: Any, tokenizer: Any, name: str, rows: Rows, held_out: list[Batch], said: Trim | None, only: Tensor | None,
    accelerator: Accelerator,
) -> Setting:  # fmt: skip
    settings = recipe.train
    states = with_states(recipe, LiveTeacher(target, real_ids(target, tokenizer)), rows, name, accelerator)
    with accelerator.main_process_first():  # the first of them writes which layers were chosen, the others read it
        draft = make(recipe, target, states, tokenizer, rows, held_out, accelerator).draft
    needs = _with_room(recipe, bytes_on_disk(draft))
    teacher = taught_by(recipe, states, rows, only, name, tokenizer, accelerator)
    objective = DistillDraft(
        draft, teacher, settings.loss, settings.chunk, only, Origin(recipe.target.model, name, tokenizer), settings.temperature,
        said.ids if said else None,
    )  # fmt: skip
    return Setting(objective, draft, needs, lambda: start(recipe, objective, states, rows, held_out, accelerator))


def _exits(
    recipe: Recipe, target: Any, tokenizer: Any, name: str, rows: Rows, held_out: list[Batch], said: Trim | None, only: Tensor | None,
    accelerator: Accelerator,
) -> Setting:  # fmt: skip
    assert isinstance(recipe.draft, ExitsDraft)  # the caller asked
    objective = exits.objective_of(recipe, recipe.draft, target, tokenizer, name, only, said)
    needs = _with_room(recipe, exits.bytes_on_disk(objective))
    return Setting(objective, objective.exits, needs, lambda: exits.start(recipe, objective, rows, held_out, accelerator))


def _with_room(recipe: Recipe, needs: int) -> int:
    """The bytes of a checkpoint, of which the run's folder has room for as many as are kept."""
    room_for(recipe.folder, (recipe.train.keep + 2) * needs, recipe.folder / "step-N")
    return needs
