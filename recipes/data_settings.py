"""A recipe's data: prompts and the answers to them, or chats, and what becomes of them as rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftsmith.recipes.fields import Closed, Files, Positive, SamplingSettings


class Data(Closed):
    """Training prompts, and the target's own answers to them."""

    prompts: str
    answers: Files | None = Field(
        None,
        description="answers made earlier by `draftsmith prepare`, in one file or several (of other seeds, temperatures or prompts); "
        "otherwise they are made in the run folder",
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
    held_out: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="share of the prompts kept for held-out acceptance, with all answers"
    )

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

    @property
    def answer_files(self) -> list[str]:
        return [self.answers] if isinstance(self.answers, str) else self.answers or []
