"""`draftsmith train`: from a recipe to the checkpoints of a draft, each step a file that can be opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator

from draftsmith.distill import Batch, CutDraft, DistillDraft, LiveTeacher, WholeDraft, collate
from draftsmith.distill.batch import Example
from draftsmith.distill.cut import check_layers
from draftsmith.distill.draft import Origin
from draftsmith.distill.make import Made, make_draft
from draftsmith.distill.packing import check_packing
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.distill.warm_start import ridge
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import room_for, whole_folder, write_whole
from draftsmith.recipes.paths import find
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.schema import CheckpointDraft
from draftsmith.specdec.models import eos_ids, load, real_ids
from draftsmith.specdec.places import revision
from draftsmith.train import checkpoint
from draftsmith.train.chats import Form, fingerprint, read_chats, reader
from draftsmith.train.choice import Choice
from draftsmith.train.data import Order, Plan, Rows, micro_batches, to_rows
from draftsmith.train.launch import launched
from draftsmith.train.loop import Record, evaluate, train
from draftsmith.train.on_policy import mixed
from draftsmith.train.prepare import identity, manifest, prepare, prepare_served, read_answers, served_revision, served_target
from draftsmith.train.record import Log, banner, environment
from draftsmith.train.states import StoredTeacher
from draftsmith.train.stream import BUILDERS, Stream

LEARNED = ("seed", "target", "data", "draft", "train")  # what the weights hang on; eval and export may change between calls

HELD_OUT = 512  # rows of a stream that are kept back to judge by


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
    data, server = recipe.data, recipe.server
    if server is not None:
        revision = served_revision(server.model, server.revision)
    if data.answers is not None:
        return read_answers(find(data.answers), identity(revision, tokenizer))
    prompts = read_prompts(data.prompts)
    name = recipe.target.model if server is None else server.model
    about = manifest(data, prompts, name, revision, tokenizer, recipe.seed)
    path = recipe.folder / "answers.jsonl"
    if path.is_file():
        return read_answers(
            path, {what: value for what, value in about.items() if what != "target"}
        )  # its revision tells, not its name
    if server is not None:
        return prepare_served(path, about, data, prompts, served_target(server), recipe.target.model, tokenizer)
    return prepare(path, about, data, prompts, target, tokenizer)


def form(recipe: Recipe, target: Any, tokenizer: Any) -> Form:
    """How the recipe wants its rows made."""
    data = recipe.data
    return Form(data.max_length, data.long, tuple(eos_ids(target, tokenizer)), data.words != "others")


def ordered(recipe: Recipe, target: Any, tokenizer: Any, name: str, size: int) -> tuple[Rows, Order]:
    """The recipe's rows and the order in which steps of `size` see them; of a stream, the rows that a warm start takes."""
    data, settings, how = recipe.data, recipe.train, form(recipe, target, tokenizer)
    if not data.stream:
        chats = read_chats(find(data.prompts)) if data.format == "messages" else answers(recipe, target, tokenizer, name)
        rows = to_rows(
            chats, tokenizer, data.max_length, data.held_out, recipe.seed, data.rows, how, data.workers, recipe.folder / "rows"
        )
        return rows, Plan(rows.train, size, settings.epochs, recipe.seed, data.pack)
    place = find(data.prompts)
    files = sorted(one for one in place.iterdir() if one.suffix in BUILDERS) if place.is_dir() else [place]
    stream = Stream(
        files, reader(tokenizer, how), size, settings.steps, recipe.seed, block=data.stream, pack=data.pack, held_out=data.held_out,
        of=fingerprint(tokenizer, how),
    )  # fmt: skip
    first: list[Example] = []
    for number in range(settings.steps):
        if sum(row.scored for row in first) >= recipe.draft.warm_start_tokens:
            break
        first += [row for one in stream.step(number) for row in (one if isinstance(one, list) else [one])]
    held_out = stream.held_out(HELD_OUT)
    if not held_out:
        raise ValueError(f"{place} holds no row to keep back; raise data.held_out ({data.held_out})")
    return Rows(first, held_out, stream.left_out, stream.counted), stream


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
        here = settings.batch_size * accelerator.num_processes
        size = checkpoint.size(folder) or here * settings.accumulate  # a run goes on with its own, on any number of processes
        rows, plan = ordered(recipe, target, tokenizer, name, size)
    accumulate = -(-size // here)
    if data.pack:
        check_packing(target, data.max_length)
    held_out = [collate(rows.held_out[start : start + 8]).to(accelerator.device) for start in range(0, len(rows.held_out), 8)]

    real = real_ids(target, tokenizer)
    live = LiveTeacher(target, real)
    kept = rows.held_out if settings.teacher == "live" else rows.train + rows.held_out
    teacher = StoredTeacher(live, folder / "teacher", kept, name, accelerator)
    with accelerator.main_process_first():  # the first of them writes which layers were chosen, the others read it
        made = _draft(recipe, target, teacher, tokenizer, real, rows, held_out, accelerator)
    draft = made.draft
    needs = _bytes(draft)
    room_for(folder, (settings.keep + 2) * needs, folder / "step-N")
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
    choice = Choice(settings.select, settings.patience)
    accelerator.register_for_checkpointing(choice)
    mixture = mixed(recipe, plan, size, rows.train, objective, target, tokenizer, accelerator, lambda line: log.write(line))
    if mixture is not None:
        accelerator.register_for_checkpointing(mixture)
    objective.trainable, optimizer = accelerator.prepare(objective.trainable, optimizer)
    steps_of = {"size": plan.size, "steps": plan.steps, "rows": plan.fingerprint}
    start = checkpoint.resume(folder, accelerator, steps_of, settings.keep, choice.by)
    if start:
        plan.go_to(runs.state(runs.steps(folder)[-1])["plan"]["at"])
    if accelerator.is_main_process:
        write_whole(folder / "environment.json", json.dumps(environment(accelerator, name, recipe, rows, draft), indent=1) + "\n")
        banner(rows, plan, start, accelerator, folder)

    log = Log(folder / "metrics.jsonl", start, accelerator.is_main_process)
    progress = Progress("training", plan.steps, quiet=not accelerator.is_main_process)

    def after(record: Record) -> bool:
        own = {} if mixture is None else {"on_policy": mixture.takes(record.step - 1)}
        log.write(record._asdict() | own)
        progress.at(
            record.step, f"loss {record.loss:.3f}, acceptance {record.acceptance:.3f}, {record.tokens_per_second:.0f} tokens/s"
        )
        last = record.step == plan.steps
        if last or record.step % settings.save_every == 0 or record.step % settings.evaluate_every == 0:
            means = evaluate(objective, held_out, accelerator, settings.k)
            better = choice.see(record.step, means)
            log.write({"step": record.step, "held_out": means})
            if choice.over:
                log.write({"step": record.step, "stopped": choice.why()})
            # With patience the best evaluation is kept whenever it comes, and the one at which it ran out.
            if last or record.step % settings.save_every == 0 or choice.over or (better and settings.patience):
                checkpoint.save(
                    folder,
                    record.step,
                    objective,
                    accelerator,
                    means,
                    steps_of | {"at": plan.state()},
                    settings.keep,
                    needs,
                    choice.by,
                )
        return choice.over

    if start < plan.steps and not choice.over:
        train(
            objective, optimizer, lambda step: micro_batches((mixture or plan).step(step), accumulate, accelerator.process_index, accelerator.num_processes),
            start=start, steps=plan.steps, settings=settings, accelerator=accelerator, after=after,
        )  # fmt: skip
        progress.done()
    if choice.over and accelerator.is_main_process:
        print(f"stopped at {runs.steps(folder)[-1].name} of {plan.steps}: {choice.why()}")
    if accelerator.is_main_process and (best := runs.best(folder)) is not None:
        figures = runs.state(best)["held_out"]
        print(
            f"best draft: {best / 'draft'}, held-out acceptance {figures['acceptance']:.3f}, "
            f"{choice.by} {figures[choice.by]:.3f} tokens a call (k = {settings.k})"
        )


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
        tokens += row.scored
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
    return torch.tensor(sorted({token for row in rows.train for token in row.answers}))


def _bytes(draft: CutDraft | WholeDraft) -> int:
    """About what one checkpoint takes: the saved draft with an embedding and a head, the weights that are trained and two moments."""
    outer = 2 * int(draft.head.linear.weight.numel())
    every, trained = (sum(one.numel() for one in draft.parameters() if one.requires_grad or not only) for only in (False, True))
    return 4 * (outer + every + 3 * trained)
