"""What modules of a model read and write on calibration text, seen at its real tokens and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import last_hidden
from draftsmith.specdec.models import blocks

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
            last_hidden(model, batch.ids, batch.documents)
            tokens += int(real.sum())
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError("no token to calibrate on; give at least one batch")
    return tokens


def influence(target: PreTrainedModel, batches: Iterable[Batch]) -> list[float]:
    """1 - cos between what each layer reads and writes, the mean over real tokens (block influence, ShortGPT 2403.03853)."""
    stack = blocks(target)[1]
    sums = torch.zeros(len(stack), dtype=torch.float64)

    def see(number: int) -> Callable[[Tensor, Tensor], None]:
        def add(read: Tensor, wrote: Tensor) -> None:
            sums[number] += float((1 - torch.cosine_similarity(read.float(), wrote.float(), dim=-1)).sum())

        return add

    tokens = observe(target, batches, [(layer, see(number)) for number, layer in enumerate(stack)])
    return (sums / tokens).tolist()
