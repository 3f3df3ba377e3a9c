"""What every section of a recipe is made of: it is closed and frozen, and takes no boolean for a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take true for 1. `precision: false` is what old YAML makes of `no`.
        wanted = info.field_name and cls.model_fields[info.field_name].annotation is bool
        if isinstance(value, bool) and not wanted and not (value is False and info.field_name == "precision"):
            raise ValueError("a number or a text is needed")
        return value


def once(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("each at most once")
    return values


one_or_list = Discriminator(lambda value: "list" if isinstance(value, list) else "name")


Files = Annotated[
    Annotated[list[str], Field(min_length=1), AfterValidator(once), Tag("list")] | Annotated[str, Tag("name")], one_or_list
]


class SamplingSettings(Closed):
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
