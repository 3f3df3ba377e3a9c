"""What is measured, how, and under which names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from draftsmith.recipes.fields import Closed, Positive, SamplingSettings
from draftsmith.recipes.runs import NAMED


class Candidate(Closed):
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


class Eval(Closed):
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
