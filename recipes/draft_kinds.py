"""The kinds of draft that can be asked for, each with what it takes and nothing else."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from draftsmith.recipes.fields import Closed, Positive, once, one_or_list


def _named(layers: str) -> str:
    if not re.fullmatch(r"(first|spread|ends|auto)(:[1-9][0-9]*)?", layers):
        raise ValueError("a list of layers is needed, or first:N, spread:N, ends:N or auto:N")
    return layers


Layers = Annotated[
    Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(once), Tag("list")]
    | Annotated[str, AfterValidator(_named), Tag("name")],
    one_or_list,
]
WHICH = "which of the target's layers, counted from 0: a list, first:4, spread:4, ends:4, or auto:4 (ranked by held-out acceptance)"


class Lora(Closed):
    """Low-rank adapters, merged when the draft is saved."""

    rank: Positive = 16
    alpha: Positive = Field(32, description="an update counts alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field("all-linear", description="names of layers; all-linear: all but the head")


class _Said(Closed):
    vocabulary: Annotated[int, Field(ge=0)] = Field(
        0,
        description="ids that the draft can say, those that the answers hold most often; its head is these rows; 0 is all of the target's",
    )


class _Start(_Said):
    warm_start: Literal["ridge", "none"] = "ridge"
    warm_start_tokens: Positive = Field(12000, description="scored tokens that the ridge regression sees")
    bridge: Literal["auto", "none"] = Field(
        "auto", description="auto: blocks before a gap in `layers` are refitted in closed form, where the family allows it"
    )
    steps: Annotated[int, Field(ge=0)] = Field(0, description="gradient steps after the ridge map, for each candidate of auto")


class LayersDraft(_Start):
    """Some of the target's layers between its own embedding and head."""

    kind: Literal["layers"] = "layers"
    layers: Layers = Field(description=WHICH)


class WidthDraft(_Start):
    """The target's layers, or some of them, made narrower."""

    kind: Literal["width"] = "width"
    layers: Layers | None = Field(None, description=f"{WHICH}; none named: all")
    intermediate: Positive | None = Field(None, description="MLP channels a layer, those that write most")
    heads: Positive | None = Field(None, description="attention heads a layer, in whole groups that share keys and values")
    hidden: Positive | None = Field(
        None, description="numbers a token, by principal components; the draft gets its own embedding and head"
    )


class CheckpointDraft(_Said):
    """A model of its own: one that speaks the target's ids, or one that is made to (`transplant`)."""

    kind: Literal["checkpoint"] = "checkpoint"
    model: str = Field(description="hub id, folder, .gguf file, or package:NAME/FILE")
    transplant: Literal["never", "where_needed"] = Field(
        "never", description="where_needed: a model with another tokenizer gets the target's, its rows composed from its own"
    )
    lora: Lora | None = Field(None, description="train adapters only; none: every weight")


class Exit(Closed):
    """An exit after one of the target's layers, and what is trained for it."""

    layer: Positive = Field(description="of the target, counted from 1: how many run before it")
    head: Literal["adapter", "block", "lora"] = Field(
        "adapter", description="a norm and a map; one more transformer block and these; low-rank adapters on its layers and these"
    )
    rank: Annotated[int, Field(ge=0)] = Field(64, description="of the map; 0: a square matrix")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="in the loss and in the figure that checkpoints are chosen by")
    lora: Lora | None = Field(None, description="of head lora; none given: rank 16, alpha 32")

    @model_validator(mode="after")
    def _lora_is_for_lora(self) -> Exit:
        if self.lora is not None and self.head != "lora":
            raise ValueError(f"lora settings belong to head lora, and this exit has head {self.head}")
        return self


def _apart(exits: list[Exit]) -> list[Exit]:
    once([one.layer for one in exits])
    return exits


class ExitsDraft(_Said):
    """Heads for early exits of the target, which is frozen and drafts for itself (docs/exit_heads.md)."""

    kind: Literal["exits"] = "exits"
    exits: Annotated[list[Exit], Field(min_length=1), AfterValidator(_apart)]
    warm_start: Literal["ridge", "none"] = "ridge"
    warm_start_tokens: Positive = Field(12000, description="scored tokens that the ridge regression sees")


def _kind(value: Any) -> str:
    """A draft that does not say its kind is one of layers."""
    return str(value.get("kind", "layers") if isinstance(value, dict) else getattr(value, "kind", "layers"))


Draft = Annotated[
    Annotated[LayersDraft, Tag("layers")]
    | Annotated[WidthDraft, Tag("width")]
    | Annotated[CheckpointDraft, Tag("checkpoint")]
    | Annotated[ExitsDraft, Tag("exits")],
    Discriminator(_kind),
]
