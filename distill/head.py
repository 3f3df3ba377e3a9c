"""From hidden states to logits. Hidden states, not logits, cross function borders, for logits are a vocabulary wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.packing import apart
from draftsmith.specdec.models import output_rows

Logits = Callable[[Tensor], Tensor]

# What transformers' families do to logits, by the field of their config that says so. A field that a family has and does not heed, or
# another meaning of one, is caught by `check_head`, for it compares with the logits themselves.
TIMES = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere; Falcon-H1; Muse
OVER = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, MiniCPM3 (its hidden states, which is the same); Inkling
TIMES_THE_DIVISOR = ("hyperclovax",)  # model types whose `logits_scaling` multiplies
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, NanoChat, Beam; RecurrentGemma; xLSTM


class Head(nn.Module):
    """A model's final hidden states [N, H] to its logits [N, V]: the output embedding, a scale, and then a soft cap, where there are any.

    `real` keeps the first ids only, where the rows beyond pad the head: they are cut off before any softmax, so no law gives them mass.
    """

    def __init__(self, model: PreTrainedModel, real: int | None = None) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.linear: Any = model.get_output_embeddings()
        rows = output_rows(model)
        if real is not None and not 0 < real <= rows:
            raise ValueError(f"{real} real ids asked of {type(model).__name__}, whose head has {rows} rows; each id needs one")
        self.rows = real or rows
        self.scale = _scale(config)
        self.cap = next((value for one in CAPS if (value := getattr(config, one, None)) is not None), None)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._finished(self.linear(hidden)[..., : self.rows])

    def over(self, ids: Tensor) -> Logits:
        """The same head over a few ids only: hidden [N, H] -> logits [N, len(ids)]. For a head that is frozen."""
        with torch.no_grad():
            return self.rows_of(ids)[0]

    def rows_of(self, ids: Tensor) -> tuple[Logits, list[Tensor]]:
        """The same for a head that is trained, and the tensors that learn: rows gathered once here, and not anew for each chunk."""
        if type(self.linear) is not nn.Linear:
            raise ValueError(
                f"the head is a {type(self.linear).__name__}, of which single rows cannot be taken; let the losses see every id "
                "(train.support: all)"
            )
        rows = [one[ids] for one in (self.linear.weight, self.linear.bias) if one is not None]
        return lambda hidden: self._finished(nn.functional.linear(hidden, *rows)), rows

    def _finished(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def check_head(model: PreTrainedModel, head: Logits) -> None:
    """ValueError where a model's logits are not what `head` makes of its last hidden state (a scale that is not known here, say)."""
    name, ids = type(model).__name__, torch.tensor([[0, 1, 2]], device=model.device)
    training = [module for module in model.modules() if module.training]
    with torch.no_grad():
        for module in training:  # with dropout no two forwards would be alike
            module.training = False
        logits, found = model(input_ids=ids, use_cache=False).logits, head(last_hidden(model, ids))
        for module in training:
            module.training = True
    if found.shape[-1] > logits.shape[-1]:
        raise ValueError(f"{name} gives {logits.shape[-1]} logits, its head {found.shape[-1]}; it cannot be distilled here yet")
    logits = logits[..., : found.shape[-1]]
    # Of the largest logit: a wrong scale is as wrong in a model whose logits are small.
    apart, largest = float((found.float() - logits.float()).abs().max()), float(logits.float().abs().max())
    if not apart <= max(1e-4, 4 * torch.finfo(logits.dtype).eps) * largest:
        raise ValueError(
            f"{name} does more to its logits than a head, the scales {', '.join(TIMES + OVER)} and the soft caps {', '.join(CAPS)}: "
            f"they are up to {apart:.3g} away, the largest being {largest:.3g}; it cannot be distilled here yet"
        )


def last_hidden(model: PreTrainedModel, ids: Tensor, documents: Tensor | None = None) -> Tensor:
    """The normed hidden states that the head reads: ids [B, T] padded on the right -> [B, T, H]. No logits are made.

    `documents` [B, T] are those of the batch, where rows share a sequence.
    """
    body: Any = getattr(model, model.base_model_prefix)
    return body(input_ids=ids, use_cache=False, **apart(documents, model.config, model.dtype)).last_hidden_state


def _scale(config: Any) -> float:
    """What the family multiplies its logits by, before it caps them."""
    scale = 1.0
    for one in TIMES:
        scale *= 1.0 if (value := getattr(config, one, None)) is None else value
    for one in OVER:
        value = getattr(config, one, None)
        if value is not None:
            scale *= value if config.model_type in TIMES_THE_DIVISOR else 1 / value
    return scale
