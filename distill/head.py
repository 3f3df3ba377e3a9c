"""The vocabulary head and the loss, applied to a few positions at a time: hidden states, not logits, cross function borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.losses import LOSSES, acceptance
from draftsmith.distill.objective import Loss
from draftsmith.specdec.models import output_rows


class Head(nn.Module):
    """A model's final hidden states [N, H] to its logits [N, V]: the output embedding, and the soft cap where there is one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.linear: Any = model.get_output_embeddings()
        self.rows = output_rows(model)
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.linear(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def check_head(model: PreTrainedModel, head: Callable[[Tensor], Tensor]) -> None:
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
    draft_head: nn.Module,
    target_head: Callable[[Tensor], Tensor],
    weights: dict[str, float],
    chunk: int,
) -> Loss:
    """The weighted sum of losses over N scored positions, from hidden states [N, H] of the draft and [N, H'] of the target.

    Logits exist for `chunk` positions at a time, forward and backward: the gradient of a chunk is taken at once and kept
    as [chunk, H]. Gradients reach `draft` and the head's trainable parameters.
    """
    learned = [one for one in draft_head.parameters() if one.requires_grad]
    total, *sums = _Chunked.apply(draft, target, draft_head, target_head, weights, chunk, *learned)
    return Loss(total, dict(zip(("acceptance", "agreement"), sums, strict=True)) | {"scored": torch.tensor(float(len(draft)))})


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, draft_head: nn.Module, target_head: Callable[[Tensor], Tensor],
        weights: dict[str, float], chunk: int, *learned: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        wanted = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[6:])
        total, accepted, agreed = (torch.zeros((), dtype=torch.float32, device=draft.device) for _ in range(3))
        slopes, learned_slopes = [], [torch.zeros_like(one) for one in learned]
        for start in range(0, len(draft), chunk):
            part = draft[start : start + chunk].detach().requires_grad_(wanted)
            with torch.no_grad():
                target_logits = target_head(target[start : start + chunk])
            with torch.set_grad_enabled(wanted):
                logits = draft_head(part)
                loss = torch.stack([weight * LOSSES[name](logits, target_logits).sum() for name, weight in weights.items()]).sum()
            if wanted:
                slope, *others = torch.autograd.grad(loss, [part, *learned])
                slopes.append(slope)
                for sum_, one in zip(learned_slopes, others, strict=True):
                    sum_ += one
            with torch.no_grad():
                total += loss.detach()
                accepted += acceptance(logits, target_logits).sum()
                agreed += (logits.argmax(-1) == target_logits.argmax(-1)).sum()
        if wanted:
            ctx.save_for_backward(torch.cat(slopes) if slopes else torch.zeros_like(draft), *learned_slopes)
        ctx.mark_non_differentiable(accepted, agreed)
        return total, accepted, agreed

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        draft, *learned = ctx.saved_tensors
        return (slope * draft, None, None, None, None, None, *(slope * one for one in learned))
