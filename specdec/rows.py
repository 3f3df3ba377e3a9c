"""What each row of a call has written, what it still has room for and where it ends: lists of ids, and nothing of models or laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftsmith.specdec.result import Generation, Written
from draftsmith.specdec.settings import Settings
from draftsmith.specdec.text import StopStrings


class Rows:
    """Each slot of the batch holds a row; one whose row has ended is `done`, and is given up with `drop`."""

    def __init__(
        self, prompts: list[list[int]], asked: Settings, tokenizer: Any, on_tokens: Callable[[Written], None] | None, out: Generation
    ) -> None:  # fmt: skip
        self._asked, self._on_tokens, self._out = asked, on_tokens, out
        self._held = list(range(len(prompts)))  # which row each slot holds
        self.done = [False] * len(prompts)
        self._stops = [StopStrings(tokenizer, asked.stop_strings, prompt) for prompt in prompts] if asked.stop_strings else None

    @property
    def texts(self) -> list[list[int]]:
        return [self._out.tokens[row] for row in self._held]

    def going(self) -> list[int]:
        """The slots whose rows go on."""
        return [slot for slot, done in enumerate(self.done) if not done]

    def room(self) -> list[int]:
        """How many drafts each slot can use: behind the last of them the target says a token of its own."""
        most = self._asked.max_new_tokens - 1
        return [0 if done else most - len(text) for done, text in zip(self.done, self.texts, strict=True)]

    def counted(self, n: list[int]) -> list[int]:
        """Up to which column behind its last token each slot reads on: n[b] drafts, -1 in rows that have ended."""
        return [-1 if done else count for done, count in zip(self.done, n, strict=True)]

    def write(
        self, drafts: list[list[int]], n: list[int], accepted: list[int], following: list[int], own: list[list[float]] | None
    ) -> None:  # fmt: skip
        """Every row that goes on gets what it won: `accepted[b]` of the n[b] `drafts[b]`, and the target's token behind them."""
        for slot in self.going():
            kept = drafts[slot][: accepted[slot]]
            self._keep(slot, kept, following[slot], n[slot], own[slot] if own is not None else None)

    def _keep(self, slot: int, drafted: list[int], following: int, n: int, own: list[float] | None) -> None:
        """Append what a row won, cut where it ends."""
        out, asked, row = self._out, self._asked, self._held[slot]
        won, text = [*drafted, following], out.tokens[row]
        end = next((i for i, token in enumerate(won) if token in asked.ends), len(won))
        reason = "eos" if end < len(won) else None
        stop = self._stops[slot].first(won[: end + 1], asked.min_new_tokens) if self._stops is not None else None
        if stop is not None and stop[0] < end:
            end, reason = stop[0], f"stop: {stop[1]}"
        won = won[: end + 1]
        text += won
        cut = reason is not None and len(won) <= len(drafted)
        out.rounds[row].append((len(won) - 1 if cut else n, len(won) - 1))
        if own is not None and out.logprobs is not None:
            out.logprobs[row] += own[: len(won)]
        if reason is not None:
            out.ends[row] = reason
        self.done[slot] = reason is not None or len(text) >= asked.max_new_tokens
        if self._on_tokens is not None:
            self._on_tokens(Written(row, won, min(len(won), len(drafted))))

    def drop(self) -> list[int]:
        """Only the slots whose rows go on are left, closed up; returns which they were."""
        left = self.going()
        self._held, self.done = [self._held[slot] for slot in left], [False] * len(left)
        if self._stops is not None:
            self._stops = [self._stops[slot] for slot in left]
        return left
