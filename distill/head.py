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
    """A model's final hidden states [N, H] to its logits [N, V]: the output embedding, and the soft cap where there is one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.linear: Any = model.get_output_embeddings()
        self.rows = output_rows(model)
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._capped(self.linear(hidden))

    def over(self, ids: Tensor) -> Logits:
        """The same head over a few ids only: hidden [N, H] -> logits [N, len(ids)]. For a head that is frozen."""
        with torch.no_grad():
            return self.rows_of(ids)[0]

    def rows_of(self, ids: Tensor) -> tuple[Logits, list[Tensor]]:
        """The same for a head that is trained, and the tensors that learn: rows gathered once here, and not anew for each chunk."""
        rows = [one[ids] for one in (self.linear.weight, self.linear.bias) if one is not None]
        return lambda hidden: self._capped(nn.functional.linear(hidden, *rows)), rows

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def check_head(model: PreTrainedModel, head: Logits) -> None:
    """Refuse a family whose logits are more than its head makes of its last hidden state (a scale we do not know, say)."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    with torch.no_grad():
        logits, hidden = model(input_ids=ids, use_cache=False).logits, last_hidden(model, ids)
        if not torch.allclose(head(hidden).float(), logits.float(), atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{type(model).__name__} does more to its logits than a head and a soft cap; it cannot be distilled here yet"
            )


def last_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The normed hidden states that the head reads: ids [B, T] padded on the right -> [B, T, H]. No logits are made."""
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
