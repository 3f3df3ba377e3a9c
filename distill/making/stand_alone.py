"""An exit as a plain model of the target's class, for engines that know drafts and no exits: its map goes into a head of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.distill.making.cut import cut
from draftsmith.specdec.drafters.exit_heads import PEFT, BlockExit, ExitHead, LoraExit, adapted
from draftsmith.specdec.models import blocks, final_norm


@torch.no_grad()
def stand_alone(target: PreTrainedModel, layer: int, head: ExitHead) -> PreTrainedModel:
    """The exit after `layer` with copies of all that it uses: its layers (and its block as the last one, or with LoRA added in), its
    norm, and the target's output head times its map. The target is left as it is."""
    depth = layer + isinstance(head, BlockExit)
    model = cut(target, list(range(depth)), tied=False)
    if isinstance(head, BlockExit):
        blocks(model)[1][layer].load_state_dict(head.block.state_dict())
    if isinstance(head, LoraExit):
        for name, one in adapted(head.layers):
            plain: Any = blocks(model)[1].get_submodule(name)
            plain.weight += one.get_delta_weight(PEFT).to(plain.weight)
    norm: nn.Module = final_norm(model)[1]
    norm.load_state_dict(head.out.norm.state_dict())
    rows: Any = model.get_output_embeddings().weight
    rows.copy_(rows.float() @ head.out.square().float())
    return model
