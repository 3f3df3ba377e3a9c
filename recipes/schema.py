"""A recipe is closed and typed: an unknown key, a wrong type and a missing value are all reported at once, with their paths."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from draftsmith.recipes.runs import NAMED

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


# What `train.loss` may name, and the parameter that may stand behind a colon. This file imports no torch, so the table is written
# twice: a test holds it against distill.losses.
LOSSES: dict[str, tuple[str, type[int] | type[float], float, float] | None] = {
    "forward_kl": None,
    "reverse_kl": None,
    "jsd": ("beta", float, 0, 1),
    "total_variation": None,
    "tvd_pp": None,
    "lk_alpha": None,
    "lk_lambda": ("eta", float, 0, math.inf),
    "ce_argmax": None,
    "ce_data": None,
    "hass": ("k", int, 0, math.inf),
}


def _known_loss(name: str) -> str:
    kind, colon, value = name.partition(":")
    if kind not in LOSSES:
        near = difflib.get_close_matches(kind, LOSSES, n=1)
        raise ValueError(f"no such loss; did you mean {near[0]}?" if near else f"no such loss; known are {', '.join(LOSSES)}")
    if not colon:
        return name
    if (parameter := LOSSES[kind]) is None:
        raise ValueError(f"{kind} takes no parameter; those that do are {', '.join(one for one, takes in LOSSES.items() if takes)}")
    what, read, low, high = parameter
    try:
        fits = low < read(value) < high
    except ValueError:
        fits = False
    if not fits:
        kind = "whole number" if read is int else "number"
        raise ValueError(f"{what} must be a {kind} above {low}" + (f" and below {high}" if high < math.inf else ""))
    return name


Loss = Annotated[str, AfterValidator(_known_loss)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take true for 1; no key of a recipe is a boolean. `precision: false` is what old YAML makes of `no`.
        if isinstance(value, bool) and not (value is False and info.field_name == "precision"):
            raise ValueError("a number or a text is needed")
        return value


def _once(layers: list[int]) -> list[int]:
    if len(set(layers)) < len(layers):
        raise ValueError("each layer at most once")
    return layers


class Target(_Closed):
    """The model whose text is wanted."""

    model: str = Field(description="hub id, folder, .gguf file, or package:NAME/FILE")
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class Server(_Closed):
    """Where the target is served, if it answers from behind an OpenAI-compatible completions endpoint (docs/served.md)."""

    url: str = Field(description="such as http://host:8000/v1; its key goes into the environment, as DRAFTSMITH_API_KEY")
    model: str = Field(description="the target's name there, as /v1/models gives it")
    revision: str | None = Field(None, description="what is known of its version; answers and laws are kept apart by it")
    concurrency: Positive = Field(8, description="requests under way at a time")
    timeout: Annotated[float, Field(gt=0)] = Field(600.0, description="seconds of silence after which a request is tried again")
    retries: Annotated[int, Field(ge=0)] = 5

    @field_validator("url")
    @classmethod
    def _bare(cls, value: str) -> str:
        if "@" in value or "?" in value:
            raise ValueError("it holds a user, a password or a query; give it bare, and its key as DRAFTSMITH_API_KEY")
        return value


class SamplingSettings(_Closed):
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Data(_Closed):
    """Training prompts, and the target's own answers to them."""

    prompts: str
    answers: str | None = Field(
        None, description="answers made earlier by `draftsmith prepare`; otherwise they are made in the run folder"
    )
    max_new_tokens: Positive = 192
    batch_size: Positive = Field(24, description="prompts answered together")
    sampling: SamplingSettings = SamplingSettings()
    format: Literal["prompts", "messages"] = Field(
        "prompts", description="messages: `prompts` holds whole chats (JSONL or parquet), whose assistant's turns are learned"
    )
    words: Literal["target", "others"] | None = Field(
        None, description="who said these turns; what others said is counted in the report. Needed with format: messages"
    )
    max_length: Positive = Field(1024, description="tokens of a row")
    long: Literal["leave_out", "split"] = Field(
        "leave_out", description="longer rows are left out and counted, or split so that each scored token is scored once"
    )
    pack: Annotated[int, Field(ge=0)] = Field(
        0, description="tokens of a sequence that rows share, unseen by each other; 0: none do"
    )
    workers: Positive = Field(1, description="processes that make rows of chats; with several the rows are kept in the run folder")
    stream: Annotated[int, Field(ge=0)] = Field(
        0, description="records of a file (or a folder of files) in memory at a time, for train.steps steps; 0 reads all of them"
    )
    rows: Annotated[int, Field(ge=0)] = Field(0, description="answers to train on, drawn by the seed; 0 takes all")
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(0.05, description="share of the rows kept for held-out acceptance")

    @model_validator(mode="after")
    def _told(self) -> Data:
        if (self.format == "messages") != (self.words is not None):
            raise ValueError(
                "words says whose chats `format: messages` reads: target, or others (a draft learns best what its target says: "
                "leave both out, and `draftsmith prepare` lets it answer)"
            )
        if self.format == "messages" and self.answers is not None:
            raise ValueError("answers belong to prompts; with format: messages the chats hold what is learned")
        if self.pack and self.pack < self.max_length:
            raise ValueError(f"rows of up to max_length ({self.max_length}) tokens do not fit sequences of pack ({self.pack})")
        return self


def _named(layers: str) -> str:
    if not re.fullmatch(r"(first|spread|ends|auto)(:[1-9][0-9]*)?", layers):
        raise ValueError("a list of layers is needed, or first:N, spread:N, ends:N or auto:N")
    return layers


Layers = Annotated[
    Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(_once), Tag("list")]
    | Annotated[str, AfterValidator(_named), Tag("name")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "list"),
]
WHICH = "which of the target's layers, counted from 0: a list, first:4, spread:4, ends:4, or auto:4 (ranked by held-out acceptance)"


class Lora(_Closed):
    """Low-rank adapters, merged when the draft is saved."""

    rank: Positive = 16
    alpha: Positive = Field(32, description="an update counts alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field("all-linear", description="names of layers; all-linear: all but the head")


class _Said(_Closed):
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


class Exit(_Closed):
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
    _once([one.layer for one in exits])
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


class OnPolicy(_Closed):
    """Steps whose rows the draft wrote, and the target scores."""

    share: Share = Field(0.5, description="chance that a step is on policy")
    refresh_every: Positive = Field(50, description="steps after which the draft, as it is then, writes new rows")
    rows: Positive = Field(
        64, description="rows that it writes each time, on training prompts drawn by the seed; at least those of a step"
    )
    max_new_tokens: Positive = 128
    temperature: Annotated[float, Field(ge=0)] = 1.0


class Train(_Closed):
    epochs: Positive = 1
    steps: Annotated[int, Field(ge=0)] = Field(0, description="of a stream (data.stream), which knows no epochs")
    batch_size: Positive = Field(8, description="rows a step on each process")
    accumulate: Positive = Field(1, description="micro-batches a step")
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Share = Field(0.03, description="share of the steps")
    final_learning_rate: Share = Field(0.05, description="of learning_rate, reached by a cosine at the last step")
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    loss: dict[Loss, Annotated[float, Field(gt=0)]] = Field({"forward_kl": 1.0}, min_length=1)
    temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="of both laws in the losses; not the one that answers were sampled at"
    )
    chunk: Positive = Field(128, description="scored positions whose logits exist at one time")
    teacher: Literal["live", "states", "stored"] = Field(
        "live",
        description="states: the target's final states are kept in the run folder; stored: its top_k likeliest ids at each position, with their chances",
    )
    top_k: Positive = Field(32, description="ids that a stored teacher knows of each position; about 4 bytes each")
    support: Literal["all", "answers"] = Field("all", description="answers: the losses see the ids that occur in the answers only")
    precision: Literal["no", "bf16"] = "no"
    evaluate_every: Positive = 50
    save_every: Positive = 50
    keep: Positive = 2
    select: Literal["block_length", "greedy_block_length"] = Field(
        "block_length", description="what the best checkpoint has most of: held-out tokens a call, at temperature 1 or 0"
    )
    k: Positive = Field(4, description="tokens drafted a call, for the held-out block length")
    patience: Annotated[int, Field(ge=0)] = Field(
        0, description="evaluations without a better one after which training stops; 0: never"
    )
    on_policy: OnPolicy | None = None
    threads: Annotated[int, Field(ge=0)] = Field(0, description="CPU threads; 0 leaves torch's choice")

    @field_validator("precision", mode="before")
    @classmethod
    def _no_is_no(cls, value: Any) -> Any:
        return "no" if value is False else value  # an override or a program may still hand over a boolean

    @model_validator(mode="after")
    def _scored_by_the_target(self) -> Train:
        if self.on_policy is not None and self.teacher == "stored":
            raise ValueError(
                "a stored teacher cannot score the rows that the draft writes (on_policy); take teacher: live or states"
            )
        return self


class Candidate(_Closed):
    """A way of drafting to be measured."""

    drafter: str = Field(
        description="ngram, ngram:N, exit:N, run:untrained|warm|best|latest (of exits :N behind it), a folder, a hub id, or ngram+ and one of these"
    )
    k: Positive | Literal["adaptive"] = Field(4, description="tokens drafted a round; adaptive: whatever pays, none included")
    name: str | None = None

    @field_validator("drafter")
    @classmethod
    def _known(cls, value: str) -> str:
        kind, colon, rest = value.rpartition("+")[2].partition(":")
        which, _, layer = rest.partition(":")
        if kind == "run" and colon and (which not in NAMED or not (layer or "1").isdigit()):
            raise ValueError(
                f"a run's drafts are {', '.join(f'run:{one}' for one in NAMED)}, and run:best:6 the exit after layer 6"
            )
        if kind in ("exit", "ngram") and (colon or kind == "exit") and not rest.isdigit():
            raise ValueError(f"{kind} takes a whole number, as in {kind}:4")
        return value

    @property
    def called(self) -> str:
        return self.name or self.drafter.replace("run:", "")


def _named_apart(candidates: list[Candidate]) -> list[Candidate]:
    names = [one.called for one in candidates]
    if len(set(names)) < len(names):
        raise ValueError(f"two candidates are called the same ({', '.join(names)}); give them names")
    return candidates


class Eval(_Closed):
    prompts: str
    per_kind: Annotated[int, Field(ge=0)] = Field(0, description="prompts of each kind, the first ones; 0 takes all")
    max_new_tokens: Positive = 48
    candidates: Annotated[list[Candidate], Field(min_length=1), AfterValidator(_named_apart)]
    sampling: SamplingSettings = SamplingSettings()
    threads: Positive = 1
    decoding: Literal["as_loaded", "prepared"] = Field(
        "as_loaded", description="prepared: fp32 models on the CPU go through prepare_for_decoding, plain decoding's too"
    )
    seed: int = 0
    bootstrap: Positive = 2000


class Export(_Closed):
    format: Literal["transformers", "exits"] = Field(
        "transformers", description="a model of its own (of exits one, as far as its layer), or the heads of a draft of kind exits"
    )
    exit: Annotated[int, Field(ge=0)] = Field(
        0, description="layer of the exit that becomes a model; 0: the one that its folder names best"
    )


class Recipe(_Closed):
    """Everything a run does, and nothing that it does not."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: int = 0
    runs: str = "runs"
    target: Target
    server: Server | None = None
    data: Data
    draft: Draft
    train: Train = Train()
    eval: Eval
    export: Export = Export()

    @model_validator(mode="after")
    def _streams(self) -> Recipe:
        if bool(self.data.stream) != bool(self.train.steps):
            raise ValueError("data.stream and train.steps go together: a stream is as long as it is told")
        if self.data.stream and self.data.format != "messages":
            raise ValueError("a stream reads whole chats: it needs data.format messages")
        if self.data.stream and (self.train.teacher != "live" or self.train.support == "answers" or self.draft.vocabulary):
            raise ValueError(
                "a stream's rows are never all at hand: it needs train.teacher live, train.support all and draft.vocabulary 0"
            )
        return self

    @model_validator(mode="after")
    def _as_served(self) -> Recipe:
        train = self.train
        if self.server is not None and train.teacher == "stored" and (train.temperature != 1 or train.support == "answers"):
            raise ValueError(
                "a server gives laws at temperature 1 over all ids: with teacher: stored, train.temperature must be 1 and train.support all"
            )
        return self

    @model_validator(mode="after")
    def _exits(self) -> Recipe:
        if not isinstance(self.draft, ExitsDraft):
            if self.export.format == "exits" or self.export.exit:
                raise ValueError(
                    f"export.format exits and export.exit belong to a draft of kind exits; this one is of kind {self.draft.kind}"
                )
            return self
        if self.train.teacher != "live":
            raise ValueError(
                "exits are taught by the last layer of the same forward that gives their states, so what the target said is of no use on "
                f"disk: a draft of kind exits needs train.teacher live, found {self.train.teacher}"
            )
        if self.train.on_policy is not None:
            raise ValueError("train.on_policy is not offered for a draft of kind exits: several exits would each write other rows")
        if self.export.exit and self.export.exit not in [one.layer for one in self.draft.exits]:
            raise ValueError(
                f"export.exit names layer {self.export.exit}, and the draft's exits are after {[one.layer for one in self.draft.exits]}"
            )
        return self

    @property
    def folder(self) -> Path:
        return Path(self.runs) / self.name

    def dump(self) -> str:
        """The resolved recipe as yaml; loading it gives the same recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
