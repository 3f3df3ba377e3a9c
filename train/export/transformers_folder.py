"""A plain transformers folder: what `assistant_model=` takes, and what vLLM's draft_model method reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.files import whole_folder
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.drafters.trimmed import FILE as IDS
from draftsmith.specdec.models import load_tokenizer, output_rows
from draftsmith.specdec.places import quiet
from draftsmith.train.export.card import card
from draftsmith.train.export.exits_folder import as_model
from draftsmith.train.export.proof import proved
from draftsmith.train.export.prove import fingerprint
from draftsmith.train.run import same_run


def export(recipe: Recipe, force: bool = False) -> Path:
    """Write the run's best draft to runs/NAME/export/transformers, proved by a fresh process before it gets that name."""
    same_run(recipe)
    place = recipe.folder / "export" / "transformers"
    if place.exists() and not force:
        raise FileExistsError(f"{place} exists; --force replaces it")
    source, exit_ = runs.find_draft(recipe.folder, "best"), None
    if isinstance(recipe.draft, ExitsDraft):
        exit_ = as_model(recipe, source)
        draft: Any = exit_.model
    else:
        with quiet():
            draft = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = load_tokenizer(recipe.target.model)
    if output_rows(draft) < len(tokenizer):
        raise ValueError(
            f"the draft has {output_rows(draft)} output rows for {len(tokenizer)} tokens; engines would abort on the rest"
        )
    draft.generation_config.eos_token_id = tokenizer.eos_token_id
    draft.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    needs = 2 * sum(one.numel() * one.element_size() for one in draft.parameters())
    with whole_folder(place, needs) as beside:
        with quiet():
            draft.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        for name in ("drafter.json", IDS):  # a head trimmed to some ids is written whole; our decoder alone reads which
            if (source / name).is_file():
                shutil.copyfile(source / name, beside / name)
        if exit_ is not None:
            (beside / "drafter.json").write_text(json.dumps(exit_.about) + "\n", encoding="utf-8")
        proof = proved("prove", beside, recipe.target.model)
        if proof["fingerprint"] != fingerprint(draft):
            raise RuntimeError(
                "the exported folder gives other logits in a fresh process than the draft that was written; nothing was exported"
            )
        (beside / "README.md").write_text(card(recipe, proof, exit_.layer if exit_ else None), encoding="utf-8")
    print(
        f"exported {place}: reloaded in a fresh process, logits equal bit for bit; as transformers' assistant_model, {proof['equal']} of {proof['compared']} greedy answers equal the target's own"
    )
    return place
