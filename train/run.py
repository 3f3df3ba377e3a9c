"""`draftsmith train`: from a recipe to the checkpoints of a draft, each step a file that can be opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from draftsmith.distill import Batch, CutDraft, DistillDraft, LiveTeacher, WholeDraft, collate
from draftsmith.distill.cut import check_layers
from draftsmith.distill.draft import Origin
from draftsmith.distill.make import Made, make_draft
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.distill.warm_start import ridge
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import room_for, whole_folder, write_whole
from draftsmith.recipes.paths import find
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.schema import CheckpointDraft
from draftsmith.specdec.models import load, real_ids
from draftsmith.specdec.places import revision
from draftsmith.train import checkpoint
from draftsmith.train.data import Plan, Rows, micro_batches, to_rows
from draftsmith.train.launch import launched
from draftsmith.train.loop import Record, evaluate, train
from draftsmith.train.prepare import identity, manifest, prepare, read_answers
from draftsmith.train.record import Log, banner, environment
from draftsmith.train.states import StoredTeacher

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


def answers(recipe: Recipe, target: Any, tokenizer: Any, revision: str) -> list[dict[str, Any]]:
    """The target's answers to the training prompts: those that the recipe names, or made in the run folder."""
    data = recipe.data
    if data.answers is not None:
        return read_answers(find(data.answers), identity(revision, tokenizer))
    prompts = read_prompts(data.prompts)
    about = manifest(data, prompts, recipe.target.model, revision, tokenizer, recipe.seed)
    path = recipe.folder / "answers.jsonl"
    if path.is_file():
        return read_answers(
            path, {what: value for what, value in about.items() if what != "target"}
        )  # its revision tells, not its name
    return prepare(path, about, data, prompts, target, tokenizer)


def run_training(recipe: Recipe) -> Path:
    """Train the recipe's draft, or go on where a run was interrupted -> the run folder."""
    if recipe.data.answers is not None:
        find(recipe.data.answers)
    else:
        read_prompts(recipe.data.prompts)  # a broken line is named before a model is loaded
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with launched(recipe.train.precision) as accelerator:
        _train(recipe, accelerator)
    return recipe.folder


def _train(recipe: Recipe, accelerator: Accelerator) -> None:
    settings = recipe.train
    same_run(recipe)
    torch.manual_seed(recipe.seed)
    target, tokenizer = load(recipe.target.model, recipe.target.dtype, accelerator.device)
    if isinstance(named := getattr(recipe.draft, "layers", None), list):
        check_layers(target, named)
    name, folder, data = revision(recipe.target.model), recipe.folder, recipe.data
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_whole(folder / "recipe.yaml", recipe.dump())
    with accelerator.main_process_first():
        rows = to_rows(answers(recipe, target, tokenizer, name), tokenizer, data.max_length, data.held_out, recipe.seed, data.rows)
    plan = Plan(rows.train, settings.batch_size * settings.accumulate * accelerator.num_processes, settings.epochs, recipe.seed)
    held_out = [collate(rows.held_out[start : start + 8]).to(accelerator.device) for start in range(0, len(rows.held_out), 8)]

    real = real_ids(target, tokenizer)
    live = LiveTeacher(target, real)
    kept = rows.held_out if settings.teacher == "live" else rows.train + rows.held_out
    teacher = StoredTeacher(live, folder / "teacher", kept, name, accelerator)
    with accelerator.main_process_first():  # the first of them writes which layers were chosen, the others read it
        made = _draft(recipe, target, teacher, tokenizer, real, rows, held_out, accelerator)
    draft = made.draft
    size = _bytes(draft)
    room_for(folder, (settings.keep + 2) * size, folder / "step-N")
    support = _support(rows) if settings.support == "answers" else None
    objective = DistillDraft(
        draft,
        teacher,
        {str(name): weight for name, weight in settings.loss.items()},
        settings.chunk,
        support,
        Origin(recipe.target.model, name, tokenizer),
    )
    optimizer = torch.optim.AdamW(
        [one for one in draft.parameters() if one.requires_grad],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    if not runs.steps(folder):
        _start(recipe, folder, objective, teacher, rows, held_out, accelerator)
    objective.trainable, optimizer = accelerator.prepare(objective.trainable, optimizer)
    steps_of = {"processes": accelerator.num_processes, "steps": plan.steps, "rows": plan.fingerprint}
    start = checkpoint.resume(folder, accelerator, steps_of, settings.keep)
    if accelerator.is_main_process:
        write_whole(folder / "environment.json", json.dumps(environment(accelerator, name, recipe, rows, draft), indent=1) + "\n")
        banner(rows, plan, start, accelerator, folder)

    log = Log(folder / "metrics.jsonl", start, accelerator.is_main_process)
    progress = Progress("training", plan.steps, quiet=not accelerator.is_main_process)

    def after(record: Record) -> None:
        log.write(record._asdict())
        progress.at(
            record.step, f"loss {record.loss:.3f}, acceptance {record.acceptance:.3f}, {record.tokens_per_second:.0f} tokens/s"
        )
        last = record.step == plan.steps
        if last or record.step % settings.save_every == 0 or record.step % settings.evaluate_every == 0:
            means = evaluate(objective, held_out, accelerator)
            log.write({"step": record.step, "held_out": means})
            if last or record.step % settings.save_every == 0:
                checkpoint.save(folder, record.step, objective, accelerator, means, steps_of, settings.keep, size)

    if start < plan.steps:
        train(
            objective, optimizer, lambda step: micro_batches(plan.step(step), settings.accumulate, accelerator.process_index, accelerator.num_processes),
            start=start, steps=plan.steps, settings=settings, accelerator=accelerator, after=after,
        )  # fmt: skip
        progress.done()
    if accelerator.is_main_process and (best := runs.best(folder)) is not None:
        print(f"best draft: {best / 'draft'}, held-out acceptance {runs.state(best)['held_out']['acceptance']:.3f}")


def _start(
    recipe: Recipe,
    folder: Path,
    objective: DistillDraft,
    teacher: HiddenTeacher,
    rows: Rows,
    held_out: list[Batch],
    accelerator: Accelerator,
) -> None:
    """The draft before any gradient: as it was cut, then (unless the recipe says none) with the ridge map. Both are kept."""
    if accelerator.is_main_process:
        with whole_folder(folder / "start" / "untrained") as beside:
            objective.save(beside)
    start = recipe.draft
    if isinstance(start, CheckpointDraft) or start.warm_start == "none" or not isinstance(objective.draft, CutDraft):
        return  # a draft with a head of its own has no map to fit
    some, tokens = [], 0
    for row in rows.train:
        some.append(row)
        tokens += len(row[0]) - row[1]
        if tokens >= start.warm_start_tokens:
            break
    progress = Progress("warm start", len(some), unit="rows", quiet=not accelerator.is_main_process)
    batches = (collate(some[at : at + 8]).to(accelerator.device) for at in range(0, len(some), 8))
    fit = ridge(objective.draft, teacher, batches, held_out)
    progress.done(f"ridge over {fit.tokens} tokens: held-out acceptance {fit.before:.3f} -> {fit.acceptance:.3f}")
    if accelerator.is_main_process:
        with whole_folder(folder / "start" / "warm") as beside:
            objective.save(beside)
            (beside / "fit.json").write_text(json.dumps(fit._asdict(), indent=1) + "\n")


def _draft(
    recipe: Recipe, target: Any, teacher: HiddenTeacher, tokenizer: Any, real: int, rows: Rows, held_out: list[Batch], accelerator: Accelerator,
) -> Made:  # fmt: skip
    """The recipe's draft. Layers that `auto` chose are kept in the run folder, so that a run that goes on has the same."""
    settings = recipe.draft.model_dump(exclude={"kind", "warm_start", "warm_start_tokens"})
    written = recipe.folder / "start" / "layers.json"
    if written.is_file():
        settings["layers"] = json.loads(written.read_text(encoding="utf-8"))["layers"]
    batches = (collate(rows.train[at : at + 8]).to(accelerator.device) for at in range(0, len(rows.train), 8))
    say: Any = print if accelerator.is_main_process else lambda line: None
    made = make_draft(
        recipe.draft.kind, target, teacher, tokenizer=tokenizer, real=real, batches=batches, held_out=held_out, say=say, **settings
    )
    if made.tried and accelerator.is_main_process:
        write_whole(written, json.dumps({"layers": made.layers, "tried": [one._asdict() for one in made.tried]}, indent=1) + "\n")
    return made


def _support(rows: Rows) -> torch.Tensor:
    """The ids that the answers hold, sorted: [S]."""
    return torch.tensor(sorted({token for ids, prompt in rows.train for token in ids[prompt:]}))


def _bytes(draft: CutDraft | WholeDraft) -> int:
    """About what one checkpoint takes: the saved draft with an embedding and a head, the weights that are trained and two moments."""
    outer = 2 * int(draft.head.linear.weight.numel())
    every, trained = (sum(one.numel() for one in draft.parameters() if one.requires_grad or not only) for only in (False, True))
    return 4 * (outer + every + 3 * trained)
