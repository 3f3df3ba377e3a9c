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


def card(recipe: Recipe, proof: str, use: str, notes: list[str], library: str = "transformers") -> str:
    """README.md of an exported draft. `proof` says what a fresh process found, `use` how it is served, `notes` where it ends."""
    folder = recipe.folder
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    checkpoint = runs.best(folder)
    assert checkpoint is not None  # export found it a moment ago
    held_out = runs.state(checkpoint)["held_out"]
    loss = ", ".join(f"{weight:g} {name}" for name, weight in recipe.train.loss.items())
    theirs = licence(recipe)
    named = f" ({theirs})" if theirs else ", which its files do not name,"
    limits = "".join(f"- {one}\n" for one in (*LIMITS, *notes))
    return f"""---
{_head(recipe, theirs, library)}---

# A draft for {recipe.target.model}

Made with Draftsmith {environment["versions"]["draftsmith"]} for speculative decoding with its target; by itself it writes poorly.

| | |
|---|---|
| target | `{recipe.target.model}`, revision `{environment["target_revision"]}`; the draft speaks its token ids and no other model's |
| draft | {environment["draft"]}; {environment["trainable_parameters"]:,} trained parameters |
| start | {getattr(recipe.draft, "warm_start", "") or getattr(recipe.draft, "model", "")} |
| data | {_data(recipe, environment)} |
| loss | {loss}, {recipe.train.epochs} epoch(s), learning rate {recipe.train.learning_rate:g} |
| held-out | acceptance sum min(p, q) {held_out["acceptance"]:.3f}, argmax agreement {held_out["agreement"]:.3f} over {held_out["scored"]:.0f} tokens (teacher-forced, temperature 1 / 0) |
| proof | {proof} |

## What it is worth

{_figures(recipe, str(checkpoint / "draft"))}

## Use

```
{use}
```

## Limits

{limits}
## The recipe

```yaml
{yaml.safe_dump(recipe.model_dump(mode="json", exclude={"runs", "export"}), sort_keys=False, allow_unicode=True)}```

## Licence

The weights are derived from the target's; the target's licence{named} applies to them.
"""


LIMITS = (
    "A draft changes how fast the target writes, not what: what the target gets wrong stays wrong.",
    "The figures are of this data, this machine and this decoder; on other texts the target agrees more or less often with the draft.",
)


def _head(recipe: Recipe, theirs: str | None, library: str) -> str:
    """What a hub reads: an empty value would be refused there, so what is not known is left out."""
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    head["tags"] = ["speculative-decoding", "draft-model", "draftsmith"]
    if theirs:
        head["license"] = theirs
    if locate(recipe.target.model) is None:
        head |= {"base_model": recipe.target.model, "base_model_relation": "finetune"}
    return yaml.safe_dump(head, sort_keys=False)


def _data(recipe: Recipe, environment: dict[str, Any]) -> str:
    scored = f"({environment['scored_tokens']:,} scored tokens), {environment['held_out_rows']} held out"
    if recipe.data.format == "messages":
        whose = "the target's own" if recipe.data.words == "target" else "others'"
        return f"{environment['rows']} rows of chats, {whose}, from `{recipe.data.prompts}` {scored}"
    return f"{environment['rows']} answers of the target itself to `{recipe.data.prompts}` {scored}"


def licence(recipe: Recipe) -> str | None:
    """The licence that the target's own files name (a hub's short form), or None where they name none."""
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
    head = page.read_text(encoding="utf-8").split("---\n")[:2] if page.is_file() else []
    said = yaml.safe_load(head[1]) if len(head) == 2 and not head[0].strip() else None
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
