"""How a draft is taught: steps, losses, teacher, and when it is judged and kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.recipes.fields import Closed, Positive, Share
from draftsmith.recipes.loss_names import Loss


class OnPolicy(Closed):
    """Steps whose rows the draft wrote, and the target scores."""

    share: Share = Field(0.5, description="chance that a step is on policy")
    refresh_every: Positive = Field(50, description="steps after which the draft, as it is then, writes new rows")
    rows: Positive = Field(
        64, description="rows that it writes each time, on training prompts drawn by the seed; at least those of a step"
    )
    max_new_tokens: Positive = 128
    temperature: Annotated[float, Field(ge=0)] = 1.0


Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]  # accelerate's


class Train(Closed):
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
    gradient_checkpointing: Literal["none", "blocks"] = Field(
        "none",
        description="blocks: what is made in a block of the draft is made again for its backward; the same numbers, less memory, more time",
    )
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
    on_damage: Literal["stop", "previous"] = Field(
        "stop", description="where the last checkpoint is damaged; previous: go on from the last one that is whole"
    )
    processes: Annotated[int, Field(ge=0)] = Field(
        0, description="that must have been launched; another number is refused. 0: any; batch_size is of each of them"
    )
    skip_bad_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="steps whose loss or gradient is not finite that are passed over, and counted; the next one ends the run"
    )
    lost_after: Annotated[int, Field(ge=0)] = Field(
        45, description="seconds without a sign of life from another process's machine after which a run ends; 0: never"
    )
    trackers: list[Tracker] = Field([], description="who is told of each step and evaluation too; logs stay in the run folder")
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
