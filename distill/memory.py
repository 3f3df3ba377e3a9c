"""What a training step will take: the step itself, run on tensors that have shapes and no numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.distill.chunked import Asked, judged, scored_loss
from draftsmith.distill.draft import JUDGED
from draftsmith.distill.head import Head, last_hidden
from draftsmith.distill.held import Live, nbytes
from draftsmith.distill.making.drafts import CutDraft, in_float32, recomputed
from draftsmith.distill.making.lora import made_where_they_stay, with_lora
from draftsmith.distill.signal import Dense
from draftsmith.specdec.models import blocks

# Whether rows are packed is seen in numbers only. Without any, transformers makes a mask to be safe, and repeats keys and values for it.
# An attention of which it knows no mask gets none, as rows that are padded on the right have none.
UNMASKED = "sdpa_unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)


class Memory(NamedTuple):
    """Bytes. The first four stay for the whole run; the next three come and go, each at its height beyond what was there before it;
    `total` is the height of all together, which is less than their sum. It is what tensors hold: an allocator adds its own."""

    target: int  # its weights
    draft: int  # the weights that are trained
    gradients: int
    moments: int  # AdamW's two
    teacher: int  # the target's forward; 0 where what it said is stored
    activations: int  # what the draft's forward keeps for its backward
    logits: int  # the losses: a chunk of logits and all that is made of it, and hidden states with their slopes
    total: int


def predict(
    target: PretrainedConfig, draft: list[int] | PretrainedConfig, rows: int, length: int, scored: int, asked: Asked, *,
    dtype: torch.dtype = torch.float32, support: int = 0, listens: bool = True, accumulate: int = 1, bf16: bool = False,
    device: str = "cpu", recompute: bool = False, lora: Mapping[str, Any] | None = None, shards: int = 1,
) -> Memory:  # fmt: skip
    """A micro-batch of `rows` x `length` tokens, `scored` of them, for a draft of some of the target's layers, or one with a config.

    `support`: over how many ids the losses go (0: all). `listens`: the teacher is the live target. `accumulate`: micro-batches a
    step. `bf16`: trained under autocast. `recompute`: with gradient checkpointing. `lora`: settings of `with_lora`, where a draft with a
    config is trained through adapters. `shards`: parts that the target's blocks are in, of which this process has one.
    Within a few per cent of what tensors take on a CPU (docs/objectives.md has resident memory). No architecture is known here, and
    no weight read or made; ValueError where a forward asks for numbers.
    """
    try:
        return _dry_run(
            target, draft, (rows, length, scored), asked, dtype, support, listens, accumulate, bf16, device, recompute, lora, shards
        )
    except RuntimeError as error:
        raise ValueError(
            f"what a {target.model_type} takes cannot be predicted, for it does not run on tensors without numbers: {str(error).splitlines()[0]}"
        ) from error


def _dry_run(
    target: PretrainedConfig, draft: list[int] | PretrainedConfig, size: tuple[int, int, int], asked: Asked,
    dtype: torch.dtype, support: int, listens: bool, accumulate: int, bf16: bool, device: str, recompute: bool,
    lora: Mapping[str, Any] | None, shards: int,
) -> Memory:  # fmt: skip
    rows, length, scored = size
    with FakeTensorMode(), torch.device(device), Live() as live:
        model = without_numbers(target, dtype).eval().requires_grad_(False)
        step = _Step(model, draft, asked, dtype, support, bf16, lora)
        if recompute:
            recomputed(step.draft)
        parameters = [one for one in step.draft.parameters() if one.requires_grad]
        moments = [torch.zeros_like(one) for one in parameters for _ in range(2)]
        if accumulate > 1:
            for one in parameters:
                one.grad = torch.zeros_like(one)
        batch = torch.zeros(rows, length, dtype=torch.long)
        where = (torch.zeros(scored, dtype=torch.long), torch.zeros(scored, dtype=torch.long))
        weights, before, live.peak = nbytes(step.draft.parameters()), live.now, live.now
        with torch.no_grad():
            said = last_hidden(model, batch)[where] if listens else torch.zeros(scored, step.width, dtype=dtype)
        spared, gathered = in_parts(model, shards)
        highest = live.peak + gathered * listens
        teacher, now, live.peak = highest - before, live.now, live.now
        hidden = step.forward(batch, where)
        activations, highest, live.peak, now = live.now - now, max(highest, live.peak), live.now, live.now
        total = step.loss(hidden, Dense(said, Head(model)))
        del hidden, said  # as `DistillDraft.loss` forgets them
        logits, highest = live.peak - now, max(highest, live.peak)
        total.backward()
        # The update holds a denominator beside each weight: of one weight at a time on a CPU, of all of them on a GPU.
        sizes = [nbytes([one]) for one in parameters]
        update = live.now + (2 * max(sizes) if device == "cpu" else sum(sizes))
        highest = max(highest, live.peak, update)
    return Memory(
        nbytes(model.parameters()) - spared, weights, sum(sizes), nbytes(moments), teacher if listens else 0, activations, logits,
        highest - spared,
    )  # fmt: skip


class _Step:
    """What `DistillDraft` does with a batch, by the same functions, but for masks: an index says which positions are scored."""

    def __init__(
        self, target: Any, draft: list[int] | PretrainedConfig, asked: Asked, dtype: torch.dtype, support: int, bf16: bool,
        lora: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        self.cut = isinstance(draft, list)
        made: Any = CutDraft(target, draft) if isinstance(draft, list) else without_numbers(draft, dtype)
        self.draft: Any = made
        if lora is not None:
            with made_where_they_stay():
                with_lora(made, **lora)
        self.draft.train()
        if bf16:
            in_float32(self.draft)
        self.head: Any = self.draft.head if self.cut else Head(made)
        self.learned = [one for one in self.head.parameters() if one.requires_grad]
        ids = None if asked.ids is None else torch.arange(len(asked.ids))  # which ids they are changes no size
        self.asked, self.bf16, self.target = asked._replace(ids=ids), bf16, target
        self.frozen = self.head if ids is None or self.learned else self.head.over(ids)
        self.width = target.get_output_embeddings().weight.shape[1]
        self.support = torch.arange(support) if support else None
        self.narrow = None if self.support is None else self.head.over(self.support)
        self.theirs = self.narrow if self.cut or self.support is None else Head(target).over(self.support)

    def forward(self, batch: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
        kind = batch.device.type
        with torch.autocast(kind, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            if not self.cut:
                return last_hidden(self.draft, batch)[where]
            with torch.no_grad():
                embedded = self.target.get_input_embeddings()(batch)
            return self.draft(embedded, where)

    def loss(self, hidden: Tensor, signal: Dense) -> Tensor:
        hidden = hidden.to(signal.hidden.dtype)
        said = torch.zeros(len(hidden), dtype=torch.long)
        head, learned = (
            (self.frozen, self.learned) if self.asked.ids is None or not self.learned else self.head.rows_of(self.asked.ids)
        )
        if self.narrow is None or self.support is None:
            total = scored_loss(hidden, head, signal, self.asked, learned, said)
        else:
            total = scored_loss(
                hidden, self.narrow, signal.within(self.support, self.theirs), self.asked._replace(ids=None), (), said
            )
        judged(hidden, head, signal, self.asked, JUDGED)
        return total


def without_numbers(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    # A copy: what is set here must not reach the models that the config is also of.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(UNMASKED)
    return model


def in_parts(target: PreTrainedModel, shards: int) -> tuple[int, int]:
    """Bytes that a process is spared where the target's blocks are in so many parts, and that are put together while it reads: the block
    in work, and the next one on its way."""
    sizes = [nbytes(one.parameters()) for one in blocks(target)[1]] if shards > 1 else [0]
    return sum(sizes) - sum(sizes) // shards, 2 * max(sizes)
