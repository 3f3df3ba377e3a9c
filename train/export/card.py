"""The model card: filled from the run and its report, so that no figure in it was typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from gguf import GGUFReader
from huggingface_hub import hf_hub_download

from draftsmith.recipes import Recipe, runs
from draftsmith.specdec.places import locate


def card(recipe: Recipe, proof: dict[str, Any]) -> str:
    """README.md of an exported draft; without a report it says that nothing was measured."""
    folder = recipe.folder
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    checkpoint = runs.best(folder)
    assert checkpoint is not None  # export found it a moment ago
    held_out = runs.state(checkpoint)["held_out"]
    loss = ", ".join(f"{weight:g} {name}" for name, weight in recipe.train.loss.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, draft-model, draftsmith]
---

# A draft for {recipe.target.model}

Made with Draftsmith {environment["versions"]["draftsmith"]} for speculative decoding with its target; by itself it writes poorly.

| | |
|---|---|
| target | `{recipe.target.model}`, revision `{environment["target_revision"]}`; the draft speaks its token ids and no other model's |
| draft | {environment["draft"]}; {environment["trainable_parameters"]:,} trained parameters |
| start | {getattr(recipe.draft, "warm_start", "") or getattr(recipe.draft, "model", "")} |
| data | {environment["rows"]} answers of the target itself to `{recipe.data.prompts}` ({environment["scored_tokens"]:,} scored tokens), {environment["held_out_rows"]} held out |
| loss | {loss}, {recipe.train.epochs} epoch(s), learning rate {recipe.train.learning_rate:g} |
| held-out | acceptance sum min(p, q) {held_out["acceptance"]:.3f}, argmax agreement {held_out["agreement"]:.3f} over {held_out["scored"]:.0f} tokens (teacher-forced, temperature 1 / 0) |
| proof | reloaded in a fresh process, logits equal bit for bit; {proof["equal"]} of {proof["compared"]} greedy answers of {proof["tokens"]} tokens equal the target's own with this draft as `assistant_model` |

## What it is worth

{_figures(recipe, str(checkpoint / "draft"))}

## Use

```python
target.generate(**inputs, assistant_model=draft)          # transformers, batch 1
```

## Licence

The weights are derived from the target's; the target's licence applies to them.
"""


def licence(recipe: Recipe) -> str | None:
    """The licence that the target's own files name (hub's short form), or None where they name none."""
    place = locate(recipe.target.model)
    if place is None:
        try:
            place = Path(hf_hub_download(recipe.target.model, "README.md"))
        except (OSError, ValueError):  # it has no card, or there is no hub here
            return None
    if place.suffix == ".gguf":
        field = GGUFReader(place).fields.get("general.license")
        return str(field.contents()) if field is not None else None
    page = place / "README.md" if place.is_dir() else place
    head = page.read_text(encoding="utf-8").split("---")[1:2] if page.is_file() else []
    said = yaml.safe_load(head[0]) if head else None
    return str(said["license"]) if isinstance(said, dict) and said.get("license") else None


def _figures(recipe: Recipe, draft: str) -> str:
    """The report of this very draft; a report of other drafts is not this one's."""
    path = recipe.folder / "report.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["candidates"].values() if path.is_file() else ()
    if draft not in [one.get("drafter") for one in measured]:
        return "Not measured. `draftsmith eval` writes the figures."
    # The headings of the report are one level below the card's.
    page = (recipe.folder / "report.md").read_text(encoding="utf-8")
    return page.partition("\n")[2].replace("\n## ", "\n### ").strip()
