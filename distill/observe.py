"""What modules of a model read and write on calibration text, seen at its real tokens and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import last_hidden

See = Callable[[Tensor, Tensor], None]  # what a module read and what it wrote: [n, ...] each, n real tokens


@torch.no_grad()
def observe(model: PreTrainedModel, batches: Iterable[Batch], places: Sequence[tuple[nn.Module, See]]) -> int:
    """Run `model` over `batches` in eval mode, telling each place what passed through it -> the tokens read."""
    tokens, training = 0, model.training
    real = torch.empty(0, dtype=torch.bool)

    def hook(see: See) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            see(read[real], (out[0] if isinstance(out, tuple) else out)[real])

        return seen

    handles = [module.register_forward_hook(hook(see), with_kwargs=True) for module, see in places]
    try:
        model.eval()
        for batch in batches:
            batch = batch.to(model.device)
            real = batch.real
            last_hidden(model, batch.ids)
            tokens += int(real.sum())
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError("no token to calibrate on; give at least one batch")
    return tokens
