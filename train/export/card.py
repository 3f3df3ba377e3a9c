"""The model card: filled from the run and its report, so that no figure in it was typed."""

from __future__ import annotations

import json
from typing import Any

from draftsmith.recipes import Recipe, runs


def card(recipe: Recipe, proof: dict[str, Any], layer: int | None = None) -> str:
    """README.md of an exported draft (of exits, the one after `layer`); without a report it says that nothing was measured."""
    folder = recipe.folder
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    checkpoint = runs.best(folder)
    assert checkpoint is not None  # export found it a moment ago
    held_out = runs.state(checkpoint)["held_out"]
    if layer is not None:
        held_out = held_out | held_out["parts"][str(layer)]
    loss = ", ".join(f"{weight:g} {name}" for name, weight in recipe.train.loss.items())
    heads = "parts" in held_out and layer is None
    library, tags = ("draftsmith", "early-exit") if heads else ("transformers", "draft-model")
    return f"""---
library_name: {library}
pipeline_tag: text-generation
tags: [speculative-decoding, {tags}, draftsmith]
---

# {"Early exits" if heads else "A draft"} for {recipe.target.model}

Made with Draftsmith {environment["versions"]["draftsmith"]} for speculative decoding with its target; by itself it writes poorly.

| | |
|---|---|
| target | `{recipe.target.model}`, revision `{environment["target_revision"]}`; the draft speaks its token ids and no other model's |
| draft | {environment["draft"]}{f"; this is the exit after layer {layer}, as a model" if layer else ""}; {environment["trainable_parameters"]:,} trained parameters |
| start | {getattr(recipe.draft, "warm_start", "") or getattr(recipe.draft, "model", "")} |
| data | {environment["rows"]} answers of the target itself to `{recipe.data.prompts}` ({environment["scored_tokens"]:,} scored tokens), {environment["held_out_rows"]} held out |
| loss | {loss}, {recipe.train.epochs} epoch(s), learning rate {recipe.train.learning_rate:g} |
| held-out | acceptance sum min(p, q) {held_out["acceptance"]:.3f}, argmax agreement {held_out["agreement"]:.3f} over {held_out["scored"]:.0f} tokens (teacher-forced, temperature 1 / 0) |
| proof | {_proof(proof)} |

## What it is worth

{_figures(recipe, str(checkpoint / "draft"))}

## Use

```python
{HEADS if heads else MODEL}
```

## Licence

The weights are derived from the target's; the target's licence applies to them.
"""


def _proof(proof: dict[str, Any]) -> str:
    answers = f"{proof['equal']} of {proof['compared']} greedy answers of {proof['tokens']} tokens equal the target's own"
    if "fingerprint" not in proof:
        return f"read in a fresh process beside the target; {answers} with these exits as its drafter"
    return f"reloaded in a fresh process, logits equal bit for bit; {answers} with this draft as `assistant_model`"


MODEL = "target.generate(**inputs, assistant_model=draft)          # transformers, batch 1"
HEADS = 'generate(target, prompts, load_drafter("FOLDER", target))   # draftsmith.specdec; "FOLDER:6" for the exit after layer 6'


def _figures(recipe: Recipe, draft: str) -> str:
    """The report of this very draft; a report of other drafts is not this one's."""
    path = recipe.folder / "report.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["candidates"].values() if path.is_file() else ()
    if not any(str(one.get("drafter")).startswith(draft) for one in measured):
        return "Not measured. `draftsmith eval` writes the figures."
    # The headings of the report are one level below the card's.
    page = (recipe.folder / "report.md").read_text(encoding="utf-8")
    return page.partition("\n")[2].replace("\n## ", "\n### ").strip()
