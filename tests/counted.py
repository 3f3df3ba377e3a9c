"""What a real step holds, tensor by tensor: what a prediction of it is held against."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.distill import Batch
from draftsmith.distill.held import Live


def step_twice(objective: Any, batch: Batch, live: Live) -> None:
    """Two steps of AdamW; `live.peak` is then that of the second, in which the moments are there."""
    optimizer = torch.optim.AdamW([one for one in objective.trainable.parameters() if one.requires_grad], lr=1e-3)
    objective.trainable.train()
    for _ in range(2):
        live.peak = live.now
        loss = objective.loss(batch)
        loss.total.backward()
        optimizer.step()
        del loss
        optimizer.zero_grad(set_to_none=True)
