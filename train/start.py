"""What a run starts from: the draft that the recipe asks for, what it may say, and its start in closed form."""

from __future__ import annotations

import json
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from draftsmith.distill import Batch, CutDraft, DistillDraft, WholeDraft
from draftsmith.distill.batch import Example, in_batches
from draftsmith.distill.making.make import Made, make_draft
from draftsmith.distill.making.vocabulary import Trim, always_said, frequent
from draftsmith.distill.memory import Memory, predict
from draftsmith.distill.teacher import HiddenTeacher
from draftsmith.distill.warm.bridge import Bridge, bridge, cannot_bridge
from draftsmith.distill.warm.ridge import ridge
from draftsmith.recipes import Recipe
from draftsmith.recipes.files import whole_folder, write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.schema import CheckpointDraft, ExitsDraft
from draftsmith.specdec.models import real_ids
from draftsmith.train.data.plan import Rows


def make(
    recipe: Recipe, target: Any, teacher: HiddenTeacher, tokenizer: Any, rows: Rows, held_out: list[Batch], accelerator: Accelerator
) -> Made:
    """The recipe's draft. Layers that `auto` chose are kept in the run folder, so that a run that goes on has the same."""
    settings = recipe.draft.model_dump(exclude={"kind", "vocabulary", "warm_start", "warm_start_tokens", "bridge"})
    written = recipe.folder / "start" / "layers.json"
    if written.is_file():
        settings["layers"] = json.loads(written.read_text(encoding="utf-8"))["layers"]
    batches = in_batches(rows.train, accelerator.device)
    say: Any = print if accelerator.is_main_process else lambda line: None
    agree: Any = (lambda found: broadcast_object_list([found])[0]) if recipe.target.shard else lambda found: found
    made = make_draft(
        recipe.draft.kind, target, teacher, tokenizer=tokenizer, real=real_ids(target, tokenizer), batches=batches, held_out=held_out, say=say,
        agree=agree, **settings,
    )  # fmt: skip
    if made.tried and accelerator.is_main_process:
        write_whole(written, json.dumps({"layers": made.layers, "tried": [one._asdict() for one in made.tried]}, indent=1) + "\n")
    return made


def trim(recipe: Recipe, rows: Rows, target: Any, tokenizer: Any) -> Trim | None:
    """The ids that the draft will say; None for all of them."""
    size = recipe.draft.vocabulary
    if not size:
        return None
    return frequent(rows.train, size, real_ids(target, tokenizer), always_said(target, tokenizer), rows.held_out)


def support(rows: Rows, said: Trim | None) -> Tensor:
    """The ids that the answers hold, and the draft can say, sorted: [S]."""
    ids = torch.tensor(sorted({token for row in rows.train for token in row.answers}))
    return ids if said is None else ids[torch.isin(ids, said.ids)]


def start(
    recipe: Recipe, objective: DistillDraft, teacher: HiddenTeacher, rows: Rows, held_out: list[Batch], accelerator: Accelerator
) -> None:
    """The draft before any gradient: as it was made, then (unless the recipe says none) fitted in closed form. Both are kept."""
    place, made = recipe.folder / "start", recipe.draft
    if accelerator.is_main_process:
        with whole_folder(place / "untrained") as beside:
            objective.save(beside)
    if isinstance(made, CheckpointDraft | ExitsDraft) or made.warm_start == "none":
        return
    some = first_rows(rows, made.warm_start_tokens)
    progress = Progress("warm start", len(some), unit="rows", quiet=not accelerator.is_main_process)
    batches = [*in_batches(some, accelerator.device)]
    bridges, why = _bridged(objective.draft, made.bridge, batches, held_out)
    fit = ridge(objective.draft, teacher, batches, held_out)
    crossed = f"{len(bridges)} blocks before a gap refitted, " if bridges else ""
    progress.done(f"{crossed}ridge over {fit.tokens} tokens: held-out acceptance {fit.before:.3f} -> {fit.acceptance:.3f}")
    if accelerator.is_main_process:
        about = fit._asdict() | {"bridges": [one._asdict() for one in bridges], "not_bridged": why}
        with whole_folder(place / "warm") as beside:
            objective.save(beside)
            (beside / "fit.json").write_text(json.dumps(about, indent=1) + "\n")


def first_rows(rows: Rows, tokens: int) -> list[Example]:
    """The first rows, up to the one that makes their scored tokens `tokens`."""
    some, seen = [], 0
    for row in rows.train:
        some.append(row)
        seen += row.scored
        if seen >= tokens:
            break
    return some


def _bridged(
    draft: CutDraft | WholeDraft, asked: str, batches: list[Batch], held_out: list[Batch]
) -> tuple[list[Bridge], str | None]:
    """What was refitted before gaps between the draft's layers, and why nothing was."""
    if asked == "none":
        return [], "the recipe says none"
    if not isinstance(draft, CutDraft):
        return [], "a draft with a head of its own reads no stream of the target's size"
    why = cannot_bridge(draft)
    return ([], why) if why else (bridge(draft, batches, held_out), None)


def what_a_step_takes(recipe: Recipe, objective: DistillDraft, rows: Rows, accelerator: Accelerator) -> Memory | str:
    """The memory of the largest micro-batch, or why it cannot be said."""
    train, draft = recipe.train, objective.draft
    lora = getattr(recipe.draft, "lora", None)
    length, scored = largest_batch(recipe, rows)
    model: Any = draft if isinstance(draft, CutDraft) else draft.model
    own: Any = draft.layers if recipe.draft.kind == "layers" else model.config
    only = 0 if objective.support is None else len(objective.support)
    try:
        return predict(
            draft.target.config, own, train.batch_size, length, scored, objective.asked, dtype=draft.head.linear.weight.dtype, support=only, listens=train.teacher == "live", accumulate=train.accumulate,
            bf16=train.precision == "bf16", device=accelerator.device.type, recompute=train.gradient_checkpointing == "blocks",
            lora=lora.model_dump() if lora is not None else None, shards=target_parts(recipe, accelerator),
        )  # fmt: skip
    except ValueError as error:
        return f"memory: {error}"


def largest_batch(recipe: Recipe, rows: Rows) -> tuple[int, int]:
    """The tokens of a sequence, and the scored ones of all, of a micro-batch as large as any can be."""
    longest, answered = max(len(row.ids) for row in rows.train), max(row.scored for row in rows.train)
    pack = recipe.data.pack
    return pack or longest, recipe.train.batch_size * answered * max(1, pack // longest)


def target_parts(recipe: Recipe, accelerator: Accelerator) -> int:
    """In how many parts the processes hold the target's blocks."""
    return accelerator.num_processes if recipe.target.shard else 1


def bytes_on_disk(draft: CutDraft | WholeDraft) -> int:
    """About what one checkpoint takes: the saved draft with an embedding and a head, the weights that are trained and two moments."""
    outer = 2 * int(draft.head.linear.weight.numel())
    every, trained = (sum(one.numel() for one in draft.parameters() if one.requires_grad or not only) for only in (False, True))
    return 4 * (outer + every + 3 * trained)
