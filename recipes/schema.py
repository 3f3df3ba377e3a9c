"""A recipe is closed and typed: an unknown key, a wrong type and a missing value are all reported at once, with their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, StrictBool, field_validator, model_validator

from draftsmith.recipes.data_settings import Data
from draftsmith.recipes.draft_kinds import CheckpointDraft, Draft, Exit, ExitsDraft, LayersDraft, Lora, WidthDraft
from draftsmith.recipes.eval_settings import Candidate, Eval
from draftsmith.recipes.fields import Closed, Positive, SamplingSettings
from draftsmith.recipes.loss_names import LOSSES
from draftsmith.recipes.train_settings import OnPolicy, Train

__all__ = [
    "LOSSES", "Candidate", "CheckpointDraft", "Data", "Draft", "Eval", "Exit", "ExitsDraft", "Export", "LayersDraft", "Lora", "OnPolicy", "Recipe",
    "SamplingSettings", "Server", "Target", "Train", "WidthDraft",
]  # fmt: skip


class Target(Closed):
    """The model whose text is wanted."""

    model: str = Field(description="hub id, folder, .gguf file, or package:NAME/FILE")
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    shard: StrictBool = Field(
        False,
        description="in training its blocks are spread over the processes, for a target that does not fit one device (docs/cluster.md)",
    )


class Server(Closed):
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


class Export(Closed):
    """What the engine that will serve the draft reads (docs/export.md)."""

    format: Literal["transformers", "gguf", "vllm", "sglang", "openvino", "exits", "speculators"] = Field(
        "transformers",
        description="exits: the heads of a draft of kind exits; every other writes a model (of exits one, as far as its layer)",
    )
    exit: Annotated[int, Field(ge=0)] = Field(
        0, description="layer of the exit that becomes a model; 0: the one that its folder names best"
    )
    quantization: Literal["f32", "f16", "bf16", "q8_0", "q4_0", "int8"] = Field(
        "f16", description="of a .gguf's matrices; int8, by torchao, of those of the formats transformers and vllm"
    )
    models: Literal["draft", "both"] = Field("draft", description="of format gguf; both: the target becomes a .gguf too")
    split: str | None = Field(
        None, description="llama.cpp's name for the tokenizer's pre-tokenizer (tokenizer.ggml.pre), where it is not found out"
    )
    tensor_parallel: Positive = Field(1, description="GPUs that vLLM or SGLang splits the pair over")


class Recipe(Closed):
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
        if self.data.stream and self.data.workers > 1:
            raise ValueError("a stream makes its rows as it reads them, in each process: leave data.workers out")
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
        if self.train.gradient_checkpointing != "none":
            raise ValueError(
                "train.gradient_checkpointing is not offered for a draft of kind exits: its blocks belong to the target, or are single"
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
