"""How many tokens to draft next. Whether a position is drafted may depend only on tokens before it, or the law is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    """Asked before every round; 0 is always allowed and means a plain step of the target."""

    def next(self) -> int: ...

    def observe(self, drafted: int, accepted: int, draft_seconds: float, target_seconds: float) -> None: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same k."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k must be >= 0, found {self.k}")

    def next(self) -> int:
        return self.k

    def observe(self, drafted: int, accepted: int, draft_seconds: float, target_seconds: float) -> None:
        """A fixed pace learns nothing."""
