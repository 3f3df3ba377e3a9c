"""What is measured: every combination of what a recipe lists, and no two arms of one name."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, Tag, field_validator

from draftsmith.recipes.fields import Closed, Files, Positive, SamplingSettings, once, one_or_list
from draftsmith.recipes.runs import NAMED

Drafted = Positive | Literal["adaptive"]
Lengths = Annotated[
    Annotated[list[Drafted], Field(min_length=1), AfterValidator(once), Tag("list")] | Annotated[Drafted, Tag("name")], one_or_list
]


class Named(NamedTuple):
    """One arm of a measurement: a candidate at one k."""

    name: str
    drafter: str
    k: int | str


class Candidate(Closed):
    """A way of drafting to be measured."""

    drafter: str = Field(
        description="ngram, ngram:N, exit:N, run:untrained|warm|best|latest (of exits :N behind it), a folder, a hub id, or ngram+ and one of these"
    )
    k: Lengths = Field(4, description="tokens drafted a round; adaptive: whatever pays, none included; a list: each is measured")
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

    @property
    def arms(self) -> list[Named]:
        """One for each k, told apart by it where there are several."""
        ks = self.k if isinstance(self.k, list) else [self.k]
        return [Named(f"{self.called}, k={k}" if len(ks) > 1 else self.called, self.drafter, k) for k in ks]


def _named_apart(candidates: list[Candidate]) -> list[Candidate]:
    names = [arm.name for one in candidates for arm in one.arms]
    if len(set(names)) < len(names):
        raise ValueError(f"two candidates are called the same ({', '.join(names)}); give them names")
    return candidates


class Eval(Closed):
    prompts: Files = Field(description="a file of prompts, or several, each reported apart")
    per_kind: Annotated[int, Field(ge=0)] = Field(0, description="prompts of each kind, the first ones; 0 takes all")
    max_new_tokens: Positive = 48
    candidates: Annotated[list[Candidate], Field(min_length=1), AfterValidator(_named_apart)]
    sampling: SamplingSettings = SamplingSettings()
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], AfterValidator(once)] = Field(
        [], description="each is measured, with the top_k and top_p of sampling; none: the one of sampling"
    )
    batches: Annotated[list[Positive], Field(min_length=1), AfterValidator(once)] = Field(
        [1], description="prompts decoded together; each size is measured, plain decoding's too"
    )
    threads: Positive = 1
    decoding: Literal["as_loaded", "prepared"] = Field(
        "as_loaded", description="prepared: fp32 models on the CPU go through prepare_for_decoding, plain decoding's too"
    )
    seed: int = 0
    bootstrap: Positive = 2000

    @property
    def files(self) -> list[str]:
        return self.prompts if isinstance(self.prompts, list) else [self.prompts]

    @property
    def arms(self) -> list[Named]:
        return [arm for one in self.candidates for arm in one.arms]
