"""A run whose draft is exits of the frozen target: the same data, loop and checkpoints, with heads in the place of a draft."""

from __future__ import annotations

import json
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from draftsmith.distill import Batch, DistillExits, collate
from draftsmith.distill.draft import Origin
from draftsmith.distill.early_exit import Exits
from draftsmith.distill.exit_memory import predict_exits
from draftsmith.distill.making.vocabulary import Trim
from draftsmith.distill.memory import Memory
from draftsmith.distill.warm.exit_start import start_exits
from draftsmith.recipes import Recipe
from draftsmith.recipes.files import whole_folder
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.schema import ExitsDraft, Lora
from draftsmith.specdec.drafters.exit_costs import added_bytes, copied_bytes, share_of_a_step
from draftsmith.specdec.drafters.exit_heads import ExitSettings, check_exit
from draftsmith.specdec.models import real_ids
from draftsmith.train.data.plan import Rows
from draftsmith.train.loop import evaluate
from draftsmith.train.start import first_rows, largest_batch, target_parts


def asked(draft: ExitsDraft) -> list[ExitSettings]:
    """The exits of a recipe."""
    every = []
    for one in draft.exits:
        lora = (one.lora or Lora()).model_dump() if one.head == "lora" else None
        every.append(ExitSettings(one.layer, one.head, one.rank or None, lora))
    return every


def check_exits(recipe: Recipe, target: Any) -> None:
    """ValueError where the target cannot have an exit that the recipe asks for."""
    if isinstance(recipe.draft, ExitsDraft):
        for one in asked(recipe.draft):
            check_exit(target, one)


def objective_of(
    recipe: Recipe, draft: ExitsDraft, target: Any, tokenizer: Any, revision: str, only: Tensor | None, said: Trim | None
) -> DistillExits:
    train = recipe.train
    return DistillExits(
        target, asked(draft), train.loss, [one.weight for one in draft.exits], train.chunk, only,
        Origin(recipe.target.model, revision, tokenizer), train.temperature, said.ids if said else None, real_ids(target, tokenizer),
        train.select, train.k,
    )  # fmt: skip


def start(recipe: Recipe, objective: DistillExits, rows: Rows, held_out: list[Batch], accelerator: Accelerator) -> None:
    """The heads before any gradient: untrained, then (unless the recipe says none) fitted in closed form. Both are judged and kept."""
    place, made = recipe.folder / "start", recipe.draft
    assert isinstance(made, ExitsDraft)  # the caller asked

    def keep(name: str, about: dict[str, Any]) -> None:
        evaluate(objective, held_out, accelerator, recipe.train.k)
        if accelerator.is_main_process:
            with whole_folder(place / name) as beside:
                objective.save(beside)
                if about:
                    (beside / "fit.json").write_text(json.dumps(about, indent=1) + "\n")

    keep("untrained", {})
    if made.warm_start == "none":
        return
    some = first_rows(rows, made.warm_start_tokens)
    progress = Progress("warm start", len(some), unit="rows", quiet=not accelerator.is_main_process)
    batches = [collate(some[at : at + 8]).to(accelerator.device) for at in range(0, len(some), 8)]
    started = start_exits(objective, batches, held_out)
    fits = ", ".join(f"after layer {layer} {one.before:.3f} -> {one.after:.3f}" for layer, one in started.items())
    progress.done(f"ridge over {next(iter(started.values())).tokens} tokens: held-out acceptance {fits}")
    keep("warm", {str(layer): one._asdict() for layer, one in started.items()})


def describe(exits: Exits) -> str:
    """The exits and their heads, in a line."""
    every = []
    for one in exits.asked:
        lora = f", lora of rank {one.lora['rank']}" if one.lora else ""
        every.append(f"{one.layer} ({one.head}{lora}, {f'map of rank {one.rank}' if one.rank else 'full map'})")
    return f"exits of the target itself after layers {', '.join(every)}"


def memory(objective: DistillExits) -> str:
    """What the heads add to the target, and what each exit's step reads."""
    target, heads = objective.exits.target, objective.exits.by_layer()
    ids = None if objective.asked.ids is None else len(objective.asked.ids)
    each = ", ".join(
        f"{added_bytes([head]) / 1e6:.2f} MB after layer {layer} (a step reads {share_of_a_step(target, layer, head, ids):.0%} of the target's)"
        for layer, head in heads.items()
    )
    rows = f"; each exit's copy of the rows that it says takes {copied_bytes(target, ids) / 1e6:.0f} MB more" if ids else ""
    return f"memory: the heads add {added_bytes(heads.values()) / 1e6:.2f} MB to a target of {added_bytes([target]) / 1e6:.0f} MB: {each}{rows}"


def what_a_step_takes(recipe: Recipe, objective: DistillExits, rows: Rows, accelerator: Accelerator) -> Memory | str:
    """The memory of the largest micro-batch, or why it cannot be said."""
    train, exits = recipe.train, objective.exits
    length, scored = largest_batch(recipe, rows)
    try:
        return predict_exits(
            exits.target.config, exits.asked, train.batch_size, length, scored, objective.asked, dtype=exits.target.dtype,
            support=0 if objective.support is None else len(objective.support), accumulate=train.accumulate, bf16=train.precision == "bf16",
            device=accelerator.device.type, shards=target_parts(recipe, accelerator),
        )  # fmt: skip
    except ValueError as error:
        return f"memory: {error}"


def bytes_on_disk(objective: DistillExits) -> int:
    """About what one checkpoint takes: the heads for drafting, and for the trainer again with two moments."""
    return 4 * added_bytes(objective.exits.by_layer().values()) + (1 << 20)


def figures(held_out: dict[str, Any]) -> str:
    """Each exit's own held-out figures, in a line."""
    return ", ".join(
        f"after layer {name} acceptance {one['acceptance']:.3f}, {one['block_length']:.3f} tokens a call at temperature 1 and "
        f"{one['greedy_block_length']:.3f} at 0"
        for name, one in held_out["parts"].items()
    )
