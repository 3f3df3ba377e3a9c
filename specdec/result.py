"""What a call of `generate` gives back: the text, how it came about, and what a reader of it should know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


class Written(NamedTuple):
    """What one round added to a row: `tokens[:accepted]` were drafted, the rest is the target's own."""

    row: int
    tokens: list[int]
    accepted: int


@dataclass
class Generation:
    """What was written, and what each call of the target brought.

    `rounds[b]` holds (drafted, accepted) of each target call of row b, the prefill first, which says the first token, and always
    `len(tokens[b]) == sum(accepted + 1)`: a round in which the row ends counts its last token as the target's own and the
    drafts behind it as never drafted, so neither acceptance nor its denominator sees tokens that cannot be emitted.
    `ends[b]` is "eos", "length" or "stop: " and the string; the token that completes a stop string is kept. `logprobs[b]`, where asked for,
    holds the natural logarithm of the chance that the target's own logits give each token, before processors and temperature.
    """

    tokens: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    ends: list[str] = field(default_factory=list)
    logprobs: list[list[float]] | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0  # the whole call, prefill and overhead included
    settings: dict[str, Any] = field(default_factory=dict)  # what was in force, whatever a generation_config says
    warnings: list[str] = field(default_factory=list)

    @property
    def finished(self) -> list[bool]:
        """Did the row end by itself, rather than at `max_new_tokens`?"""
        return [end != "length" for end in self.ends]


def warnings(target: PreTrainedModel, drafter: Any) -> list[str]:
    """What a reader of the result should know, a line each."""
    said = list(drafter.notes()) if drafter is not None and hasattr(drafter, "notes") else []
    model = getattr(drafter, "model", None)
    if model is not None and model.device.type != target.device.type:
        said.append(f"the draft runs on {model.device}, the target on {target.device}")
    if target.dtype != torch.float32 and drafter is not None:
        said.append(
            f"in {str(target.dtype).removeprefix('torch.')} a call of one token and one of several can differ at near ties; "
            "draftsmith.specdec.audit tells them from faults"
        )
    config: Any = target.config.get_text_config()
    if drafter is not None and any(
        getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")
    ):
        said.append("the target is a mixture of experts: a verifying call reads more experts than a plain one, so it costs more")
    return said
