"""The closed-form start of exits: the ridge's map for each, cut to the rank of its head where that has one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.batch import Batch
from draftsmith.distill.early_exit import DistillExits
from draftsmith.distill.warm.ridge import exits
from draftsmith.specdec.drafters.exit_heads import AdapterExit, BlockExit


class Started(NamedTuple):
    """Held-out acceptance of an exit as it was and with the map, which it keeps only where that is more (`strength` is None otherwise)."""

    before: float
    after: float
    strength: float | None
    tokens: int


@torch.no_grad()
def start_exits(objective: DistillExits, batches: Sequence[Batch], held_out: Sequence[Batch]) -> dict[int, Started]:
    """Give each exit the map from what its norm reads to the target's final states, fitted on the scored tokens of `batches`.

    A block is at first the target's next layer, and LoRA changes nothing at first, so the map of a block is that of the layer after it
    and the map of LoRA that of its own. A map of low rank is the nearest one for the states that were seen (reduced-rank regression, Izenman
    1975), not for all vectors alike.
    """
    heads, target = objective.exits.by_layer(), objective.exits.target
    reads = {layer: layer + isinstance(head, BlockExit) for layer, head in heads.items()}
    before, old = _acceptance(objective, held_out), {layer: copy.deepcopy(head.out.state_dict()) for layer, head in heads.items()}
    found = exits(target, sorted(set(reads.values())), batches, held_out)
    for layer, head in heads.items():
        set_map(head.out, found[reads[layer]].map, found[reads[layer]].moments)
    after = _acceptance(objective, held_out)
    started = {}
    for layer, head in heads.items():
        fit = found[reads[layer]].fit
        better = after[layer] > before[layer]
        if not better:
            head.out.load_state_dict(old[layer])
        started[layer] = Started(
            before[layer], after[layer] if better else before[layer], fit.strength if better else None, fit.tokens
        )
    return started


@torch.no_grad()
def set_map(out: AdapterExit, map_: Tensor, moments: Tensor) -> None:
    """Make the head's map `map_` [H, H], or the nearest that its rank can say, in the metric of the `moments` [H, H] of what it reads."""
    if out.rank is None:
        out.map.weight.copy_(map_)
        return
    wanted, moments = map_.double().cpu(), moments.cpu()
    change = wanted - torch.eye(len(wanted), dtype=torch.float64)
    # What the map adds to its input has the covariance C M C'; its first principal directions are kept.
    directions = torch.linalg.eigh(change @ moments @ change.T).eigenvectors[:, -out.rank :]
    reads = directions.T @ change  # [r, H]
    size = reads.norm(dim=1)
    kept = size > 1e-9 * size.max().clamp(
        min=1e-9
    )  # a direction of nothing stays as it began, or both its sides would be 0 and learn nothing
    root = size[kept].sqrt()  # both sides alike, as an optimizer likes them
    out.up.weight[:, kept.to(out.up.weight.device)] = (directions[:, kept] * root).to(out.up.weight)
    out.down.weight[kept.to(out.down.weight.device)] = (reads[kept] / root[:, None]).to(out.down.weight)


def _acceptance(objective: DistillExits, held_out: Sequence[Batch]) -> dict[int, float]:
    """Held-out acceptance of each exit, by layer."""
    objective.exits.eval()
    found = [objective.loss(batch).metrics for batch in held_out]
    objective.exits.train()
    judged = max(sum(float(one["judged"]) for one in found), 1.0)
    return {layer: sum(float(one[f"acceptance after {layer}"]) for one in found) / judged for layer in objective.exits.by_layer()}
