"""The vocabulary head and the loss, applied to a few positions at a time: hidden states, not logits, cross function borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.losses import LOSSES, acceptance
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
        if not torch.allclose(head(hidden).float(), logits.float(), atol=1e-3, rtol=1e-3):
            raise ValueError(
                f"{type(model).__name__} does more to its logits than a head and a soft cap; it cannot be distilled here yet"
            )


def last_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The normed hidden states that the head reads: ids [B, T] padded on the right -> [B, T, H]. No logits are made."""
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state


def scored_loss(
    draft: Tensor,
    target: Tensor,
    heads: tuple[Logits, Logits],
    weights: dict[str, float],
    chunk: int,
    learned: Sequence[Tensor] = (),
) -> Tensor:
    """The weighted sum of losses over N scored positions, from hidden states [N, H] of the draft and [N, H'] of the target.

    `heads` make the draft's and the target's logits. They exist for `chunk` positions at a time, forward and backward:
    the gradient of a chunk is taken at once and kept as [chunk, H]. It reaches `draft` and the head's own parameters, `learned`.
    """
    return _Chunked.apply(draft, target, heads, weights, chunk, *learned)


@torch.no_grad()
def judged(draft: Tensor, target: Tensor, heads: tuple[Logits, Logits], chunk: int, most: int | None = None) -> dict[str, Tensor]:
    """Sums of acceptance and argmax agreement under the whole laws, over all N positions or `most` of them, evenly spaced."""
    if most is not None and len(draft) > most:
        some = torch.linspace(0, len(draft) - 1, most, device=draft.device).long()
        draft, target = draft[some], target[some]
    sums = torch.zeros(2, device=draft.device)
    for start in range(0, len(draft), chunk):
        p, q = heads[1](target[start : start + chunk]), heads[0](draft[start : start + chunk])
        sums += torch.stack([acceptance(q, p).sum(), (q.argmax(-1) == p.argmax(-1)).sum()])
    return {"acceptance": sums[0], "agreement": sums[1], "judged": torch.tensor(float(len(draft)))}


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft: Tensor,
        target: Tensor,
        heads: tuple[Logits, Logits],
        weights: dict[str, float],
        chunk: int,
        *learned: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[5:])
        total = torch.zeros((), dtype=torch.float32, device=draft.device)
        slopes, learned_slopes = [], [torch.zeros_like(one) for one in learned]
        for start in range(0, len(draft), chunk):
            part = draft[start : start + chunk].detach().requires_grad_(wanted)
            with torch.no_grad():
                target_logits = heads[1](target[start : start + chunk])
            with torch.set_grad_enabled(wanted):
                logits = heads[0](part)
                loss = torch.stack([weight * LOSSES[name](logits, target_logits).sum() for name, weight in weights.items()]).sum()
            if wanted:
                slope, *others = torch.autograd.grad(loss, [part, *learned])
                slopes.append(slope)
                for sum_, one in zip(learned_slopes, others, strict=True):
                    sum_ += one
            total += loss.detach()
        if wanted:
            ctx.save_for_backward(torch.cat(slopes) if slopes else torch.zeros_like(draft), *learned_slopes)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        draft, *learned = ctx.saved_tensors
        return (slope * draft, None, None, None, None, *(slope * one for one in learned))
