"""Logits processors under speculation: each drafted position sees the prefix that plain decoding would show it, and a
processor's memory of a refused draft goes with the draft."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# transformers' own processors that are functions of (prefix, scores) alone; every other one is copied before each drafted position.
STATELESS = {
    f"{name}LogitsProcessor"
    for name in (
        "MinLength", "MinNewTokensLength", "RepetitionPenalty", "NoRepeatNGram", "SequenceBias", "NoBadWords", "PrefixConstrained",
        "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "SuppressTokensAtBegin", "SuppressTokens",
    )
} | {f"{name}LogitsWarper" for name in ("Temperature", "TopP", "TopK", "TopH", "MinP", "Typical", "Epsilon", "Eta")}  # fmt: skip
STATELESS |= {"ExponentialDecayLengthPenalty", "LogitNormalization"}


class PrefixProcessors:
    """Transformers' `LogitsProcessor`s (callables of ids [1, L] and scores [1, V]) for `rows` rows.

    Every row works on copies of its own, so a row does not depend on its neighbours and the caller's objects stay as they were.
    A processor's memory must be in its attributes: what a plain function keeps in variables around it cannot be copied.
    """

    def __init__(self, processors: Sequence[Any], rows: int) -> None:
        for one in processors:
            if rows > 1 and type(one).__name__ == "PrefixConstrainedLogitsProcessor":
                raise ValueError(
                    "PrefixConstrainedLogitsProcessor asks for the number of its row, and every row is processed alone here (it would be "
                    "told 0): decode one prompt at a time"
                )
            if not callable(one):
                raise ValueError(f"processors must be callables of (ids, scores), found {type(one).__name__}")
            if any(isinstance(held, nn.Module) for held in getattr(one, "__dict__", {}).values()):
                raise ValueError(
                    f"{type(one).__name__} runs a model of its own, whose cache would keep refused drafts; it cannot be served here"
                )
        self._stateless = all(_stateless(one) for one in processors)
        self._rows = [self._copied(processors) for _ in range(rows)]
        self._behind: list[list[Sequence[Any]]] = [[] for _ in range(rows)]

    def __call__(self, logits: Tensor, prefixes: list[list[int]], drafts: list[list[int]], n: list[int], greedy: bool) -> Tensor:
        """Scores [B, K+1, V] for logits [B, K+1, V]: column j of row b sees `prefixes[b] + drafts[b][:j]`, j <= n[b] (n < 0: none).

        Behind a draft that is refused for certain (forbidden, or at temperature 0 not the first choice) no column is processed:
        plain decoding never comes there, and a grammar would raise.
        """
        scores = logits.float().clone()
        for b, columns in enumerate(n):
            ids = torch.tensor([[*prefixes[b], *drafts[b][: max(columns, 0)]]], device=logits.device)
            acting, self._behind[b] = self._rows[b], []
            for j in range(columns + 1):
                acting = self._copied(acting) if columns else acting  # a plain step is never taken back
                seen, row = ids[:, : len(prefixes[b]) + j], scores[b, j][None]
                for one in acting:
                    row = _scored(one, seen, row)
                if not bool((row > -torch.inf).any()):
                    raise ValueError(f"the processors leave a row no token at all behind its {seen.shape[1]} tokens")
                scores[b, j] = row[0]
                self._behind[b].append(acting)
                if j < columns and (row[0, drafts[b][j]] == -torch.inf or (greedy and int(row[0].argmax()) != drafts[b][j])):
                    break
        return scores

    def keep(self, accepted: list[int]) -> None:
        """What row b's processors remember is what they knew behind its `accepted[b]` drafts."""
        self._rows = [
            behind[count] if behind else row for row, behind, count in zip(self._rows, self._behind, accepted, strict=True)
        ]

    def select(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self._rows, self._behind = [self._rows[b] for b in rows], [[] for _ in rows]

    def _copied(self, processors: Sequence[Any]) -> Sequence[Any]:
        if self._stateless:
            return processors
        try:
            return copy.deepcopy(list(processors))  # at once, for two may share what they remember
        except Exception as error:
            names = ", ".join(type(one).__name__ for one in processors if not _stateless(one))
            raise ValueError(
                f"a processor cannot be copied ({names}: {error}), so it could not forget a refused draft; give it a __deepcopy__"
            ) from error


def _scored(one: Any, ids: Tensor, row: Tensor) -> Tensor:
    scores = one(ids, row)
    if not isinstance(scores, Tensor) or scores.shape != row.shape:
        found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{type(one).__name__} must give scores {list(row.shape)} for ids {list(ids.shape)}, found {found}")
    return scores


def _stateless(one: Any) -> bool:
    return type(one).__module__.startswith("transformers.") and type(one).__name__ in STATELESS
