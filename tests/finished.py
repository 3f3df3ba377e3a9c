"""A run folder with one checkpoint, as training leaves it, without the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.recipes import Recipe, load_recipe
from draftsmith.recipes.checksums import write_sums
from draftsmith.specdec.places import quiet
from runs import write_run
from tiny import tiny, tiny_folder, tiny_tokenizer

ROWS = len(tiny_tokenizer())


def a_run(place: Path, family: str = "llama", target: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """`changes` are the draft's config, `target` the target's where it is not the usual one."""
    recipe = load_recipe(write_run(place))
    if target is not None:
        tiny_folder(place / "target", seed=2, **target)
    step = recipe.folder / "step-4"
    fewer = {"num_hidden_layers": 2} if family == "llama" else {}
    draft = tiny(family, seed=3, **{"vocab_size": ROWS, "max_position_embeddings": 2048, **fewer, **changes})
    with quiet():
        draft.save_pretrained(step / "draft")
    tiny_tokenizer().save_pretrained(step / "draft")
    (step / "draft" / "drafter.json").write_text(json.dumps({"kind": "model", "settings": {}}))
    held_out = {"acceptance": 0.5, "agreement": 0.5, "scored": 9, "block_length": 1.5}
    (step / "state.json").write_text(json.dumps({"step": 4, "held_out": held_out}))
    write_sums(step)
    (recipe.folder / "best.json").write_text(json.dumps({"checkpoint": "step-4"}))
    said = {"versions": {"draftsmith": "0"}, "target_revision": "sha256:0", "draft": "layers", "trainable_parameters": 1, "rows": 1}
    (recipe.folder / "environment.json").write_text(json.dumps({**said, "scored_tokens": 1, "held_out_rows": 1}))
    return recipe


def with_export(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"export": recipe.export.model_copy(update=settings)})


def with_chats(recipe: Recipe, place: Path, count: int = 8) -> Recipe:
    """The run's rows are chats that others wrote, half of them held out."""
    rows = [[{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"the {i * i} th"}] for i in range(count)]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in rows))
    data = {"prompts": str(place / "chats.jsonl"), "format": "messages", "words": "others", "held_out": 0.5}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})
