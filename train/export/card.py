"""The model card: filled from the run and its report, so that no figure in it was typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from gguf import GGUFReader
from huggingface_hub import hf_hub_download

from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.places import locate


def card(
    recipe: Recipe, proof: str, use: str, notes: list[str], library: str = "transformers", layer: int | None = None, lost: str = ""
) -> str:
    """README.md of an exported draft. `proof` says what a fresh process found, `use` how it is served, `notes` where it ends.

    `lost`: what a quantisation cost. Of exits it is the one after `layer`, as a model; no layer: their heads, for which `use` needs this package.
    """
    folder = recipe.folder
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    checkpoint = runs.best(folder)
    assert checkpoint is not None  # export found it a moment ago
    held_out = runs.state(checkpoint)["held_out"]
    if layer is not None:
        held_out = held_out | held_out["parts"][str(layer)]
    heads = isinstance(recipe.draft, ExitsDraft) and layer is None
    which = f"; this is the exit after layer {layer}, as a model" if layer is not None else ""
    loss = ", ".join(f"{weight:g} {name}" for name, weight in recipe.train.loss.items())
    theirs = licence(recipe)
    named = f" ({theirs})" if theirs else ", which its files do not name,"
    limits = "".join(f"- {one}\n" for one in (*LIMITS, *notes))
    return f"""---
{_head(recipe, theirs, library, heads)}---

# {"Early exits" if heads else "A draft"} for {recipe.target.model}

Made with Draftsmith {environment["versions"]["draftsmith"]} for speculative decoding with its target; by itself it writes poorly.

| | |
|---|---|
| target | `{recipe.target.model}`, revision `{environment["target_revision"]}`; the draft speaks its token ids and no other model's |
| draft | {environment["draft"]}{which}; {environment["trainable_parameters"]:,} trained parameters |
| start | {getattr(recipe.draft, "warm_start", "") or getattr(recipe.draft, "model", "")} |
| data | {_data(recipe, environment)} |
| loss | {loss}, {recipe.train.epochs} epoch(s), learning rate {recipe.train.learning_rate:g} |
| held-out | acceptance sum min(p, q) {held_out["acceptance"]:.3f}, argmax agreement {held_out["agreement"]:.3f} over {held_out["scored"]:.0f} tokens (teacher-forced, temperature 1 / 0) |
| proof | {proof} |
{f"| quantisation | {lost} |" + chr(10) if lost else ""}
## What it is worth

{_figures(recipe, checkpoint / "draft", layer)}

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


def _head(recipe: Recipe, theirs: str | None, library: str, heads: bool) -> str:
    """What a hub reads: an empty value would be refused there, so what is not known is left out."""
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    head["tags"] = ["speculative-decoding", "early-exit" if heads else "draft-model", "draftsmith"]
    if theirs:
        head["license"] = theirs
    if locate(recipe.target.model) is None:
        head |= {"base_model": recipe.target.model, "base_model_relation": "adapter" if heads else "finetune"}
    return yaml.safe_dump(head, sort_keys=False)


def _data(recipe: Recipe, environment: dict[str, Any]) -> str:
    scored = f"({environment['scored_tokens']:,} scored tokens), {environment['held_out_rows']} held out"
    if longest := environment.get("longest_row"):  # runs of before do not say
        scored += f", no row longer than {longest:,} tokens"
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


def _figures(recipe: Recipe, draft: Path, layer: int | None) -> str:
    """The report of this very draft (of heads: of one of them); a report of other drafts is not this one's."""
    path = recipe.folder / "report.json"
    parts = json.loads(path.read_text(encoding="utf-8")).get("parts", ()) if path.is_file() else ()
    if not {one.get("drafter") for part in parts for one in part["candidates"].values()} & _measured_as(recipe, draft, layer):
        return "Not measured. `draftsmith eval` writes the figures."
    # The headings of the report are one level below the card's.
    page = (recipe.folder / "report.md").read_text(encoding="utf-8")
    return page.partition("\n")[2].replace("\n## ", "\n### ").strip()


def _measured_as(recipe: Recipe, draft: Path, layer: int | None) -> set[str]:
    """What eval calls this draft; the folder alone is its default exit."""
    if not isinstance(recipe.draft, ExitsDraft):
        return {str(draft)}
    default = json.loads((draft / "drafter.json").read_text(encoding="utf-8"))["settings"]["default"]
    layers = [one.layer for one in recipe.draft.exits] if layer is None else [layer]
    return {f"{draft}:{one}" for one in layers} | ({str(draft)} if default in layers else set())
