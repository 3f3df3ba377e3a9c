"""From hidden states to logits. Hidden states, not logits, cross function borders, for logits are a vocabulary wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.specdec.models import output_rows

Logits = Callable[[Tensor], Tensor]


class Head(nn.Module):
    """A model's final hidden states [N, H] to its logits [N, V]: the output embedding, and the soft cap where there is one.

    `real` keeps the first ids only, where the rows beyond pad the head: they are cut off before any softmax, so no law gives them mass.
    """

    def __init__(self, model: PreTrainedModel, real: int | None = None) -> None:
        super().__init__()
        self.linear: Any = model.get_output_embeddings()
        rows = output_rows(model)
        if real is not None and not 0 < real <= rows:
            raise ValueError(f"{real} real ids asked of {type(model).__name__}, whose head has {rows} rows; each id needs one")
        self.rows = real or rows
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._capped(self.linear(hidden)[..., : self.rows])

    def over(self, ids: Tensor) -> Logits:
        """The same head over a few ids only: hidden [N, H] -> logits [N, len(ids)]. For a head that is frozen."""
        weight = self.linear.weight.detach()[ids].contiguous()
        bias = None if self.linear.bias is None else self.linear.bias.detach()[ids]
        return lambda hidden: self._capped(nn.functional.linear(hidden, weight, bias))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def check_head(model: PreTrainedModel, head: Logits) -> None:
    """Refuse a family whose logits are more than its head makes of its last hidden state (a scale we do not know, say)."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    with torch.no_grad():
        logits, hidden = model(input_ids=ids, use_cache=False).logits, last_hidden(model, ids)
        found = head(hidden).float()
        if not torch.allclose(found, logits[..., : found.shape[-1]].float(), atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{type(model).__name__} does more to its logits than a head and a soft cap; it cannot be distilled here yet"
            )


def last_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The normed hidden states that the head reads: ids [B, T] padded on the right -> [B, T, H]. No logits are made."""
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
