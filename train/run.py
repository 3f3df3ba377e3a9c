"""`draftsmith train`: from a recipe to the checkpoints of a draft, each step a file that can be opened."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator

from draftsmith.distill import DistillExits
from draftsmith.distill.held import measured, resident
from draftsmith.distill.making.cut import check_layers
from draftsmith.distill.making.drafts import in_float32, recomputed
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import writable, write_whole
from draftsmith.recipes.paths import find
from draftsmith.specdec.models import load
from draftsmith.specdec.places import revision
from draftsmith.train import checkpoint, exits, say
from draftsmith.train.bad_steps import Skips, last_good_named
from draftsmith.train.choice import Choice
from draftsmith.train.company import company
from draftsmith.train.data.plan import micro_batches
from draftsmith.train.engines import check_engine, check_trainer, prepared
from draftsmith.train.interrupt import Signals
from draftsmith.train.launch import launched
from draftsmith.train.loop import train
from draftsmith.train.on_policy import mixed
from draftsmith.train.record import Log
from draftsmith.train.sharded import load_sharded
from draftsmith.train.taught import seen_by, taught_by_recipe
from draftsmith.train.trackers import check_trackers, track, tracked
from draftsmith.train.watch import Watch

LEARNED = ("seed", "target", "data", "draft", "train")  # what the weights hang on; eval and export may change between calls
# no weight hangs on these
FREE = {
    "train": {"on_damage", "processes", "skip_bad_steps", "lost_after", "trackers", "gradient_checkpointing"},
    "target": {"shard"},
}


def same_run(recipe: Recipe) -> None:
    """ValueError where the recipe's folder holds a run of another target, other data, another draft or other training."""
    written, before = recipe.folder / "recipe.yaml", None
    if not written.is_file():
        return
    with contextlib.suppress(UnicodeDecodeError, yaml.YAMLError):
        before = yaml.safe_load(written.read_text(encoding="utf-8"))
    if not isinstance(before, dict):
        raise ValueError(
            f"{written} is damaged, so nothing says what {recipe.folder} holds. Put it back from a copy, name this run otherwise (name=...), or "
            "remove the folder"
        )
    now = yaml.safe_load(recipe.dump())
    for one in (before, now):
        for section, free in FREE.items():
            one[section] = {key: value for key, value in one.get(section, {}).items() if key not in free}
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
    asked = recipe.target
    if asked.shard:
        target, tokenizer = load_sharded(asked.model, asked.dtype, accelerator)
    else:
        target, tokenizer = load(asked.model, asked.dtype, accelerator.device)
    if isinstance(named := getattr(recipe.draft, "layers", None), list):
        check_layers(target, named)
    exits.check_exits(recipe, target)
    name = revision(recipe.target.model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_whole(folder / "recipe.yaml", recipe.dump())
    seen = seen_by(recipe, target, tokenizer, name, accelerator)
    taught = taught_by_recipe(recipe, target, tokenizer, name, seen, accelerator)
    objective, plan = taught.objective, seen.plan
    if not runs.steps(folder):
        taught.begin()
    taught.spare()
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
        say.begins(recipe, seen, taught, done, name, accelerator)
    watch = Watch(recipe, log, plan, objective, seen.held_out, accelerator, choice, mixture, steps_of, taught.needs, signals)
    if done < plan.steps and not choice.over:
        rank, world, order = accelerator.process_index, accelerator.num_processes, mixture or plan
        with tracked(recipe, accelerator, done), signals.steps(), last_good_named(folder):
            train(
                objective, optimizer, lambda step: micro_batches(order.step(step), seen.accumulate, rank, world),
                start=done, steps=plan.steps, settings=settings, accelerator=accelerator, after=watch, skips=skips,
            )  # fmt: skip
        watch.progress.done()
    if accelerator.is_main_process:
        if done < plan.steps:
            where = "at most on the GPU" if accelerator.device.type == "cuda" else "more than before, at most"
            print(f"memory: {measured(held, accelerator.device.type) / 1e6:.0f} MB {where}")
        say.came(recipe, plan, choice)
