"""Five steps that are hard to get right on several processes: uneven rows, a process without any, a step without a scored token."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.distill import CutDraft, DistillDraft, collate
from draftsmith.distill.making.drafts import in_float32, recomputed
from draftsmith.recipes.schema import Train
from draftsmith.train.data.plan import micro_batches
from draftsmith.train.engines import engine, gathered, prepared, size
from draftsmith.train.launch import launched
from draftsmith.train.loop import evaluate, train
from draftsmith.train.sharded import held, spread
from tiny import tiny

# 1, 9, 2, 6 and 14 scored tokens: a mean of means is far off.
ROWS = [([5, 9, 11, 4], 3), ([7, *range(20, 29)], 1), ([3, 3, 20, 21], 2), ([8, *range(30, 37)], 2), ([6, *range(40, 55)], 2)]
NOTHING = ([9, 8, 7], 3)
STEPS: list[list[Any]] = [ROWS, ROWS[:1], [NOTHING, NOTHING], ROWS[3:], ROWS[::-1]]
# The same rows in fewer sequences, of which a process may have one more than the other, or the only one.
PACKED: list[list[Any]] = [[ROWS[:2], ROWS[2:4], ROWS[4:]], [ROWS[:1]], [[NOTHING, NOTHING]], [ROWS[3:]], [ROWS[3:], ROWS[:3]]]
CASES: dict[str, dict[str, Any]] = {
    "fp32": {}, "sharded": {}, "bf16": {"precision": "bf16"}, "recomputed": {"gradient_checkpointing": "blocks"}, "packed": {},
    "bf16 recomputed": {"precision": "bf16", "gradient_checkpointing": "blocks"},
}  # fmt: skip


def taught(case: str) -> dict[str, Any]:
    """What the loop records of the steps, whatever the engine, and what there is at their end."""
    settings = Train(learning_rate=1e-3, warmup=0.0, weight_decay=0.1, batch_size=2, accumulate=2, clip=0.5, **CASES[case])
    torch.set_num_threads(1)
    records: list[Any] = []
    with launched(settings.precision) as accelerator:
        target: Any = tiny()
        if case == "sharded":
            target = spread(target if accelerator.is_main_process else None, accelerator)
        objective: Any = DistillDraft(CutDraft(target, [1]), target)
        layers: list[torch.dtype] = []
        objective.draft.body.layers[0].mlp.register_forward_hook(lambda module, args, out: layers.append(out.dtype))
        calls: list[int] = []
        objective.draft.body.layers[0].mlp.register_forward_pre_hook(
            lambda module, args: calls.append(1)
        )  # a second pass ends within it
        with torch.no_grad():
            for one in objective.draft.parameters():
                one.add_(
                    accelerator.process_index * 0.1
                )  # a warm start need not have the same bits on each: the first one's are taken
        if settings.precision == "bf16":
            in_float32(objective.draft)
        if settings.gradient_checkpointing == "blocks":
            recomputed(objective.draft)
        optimizer: Any = torch.optim.AdamW(
            objective.trainable.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-3, weight_decay=settings.weight_decay
        )
        objective.trainable, optimizer = prepared(objective.trainable, optimizer, settings, 2, accelerator)
        rank, world = accelerator.process_index, accelerator.num_processes
        seen = PACKED if case == "packed" else STEPS
        train(
            objective, optimizer, lambda step: micro_batches(seen[step], 2, rank, world), start=0, steps=len(STEPS), settings=settings,
            accelerator=accelerator, after=records.append,
        )  # fmt: skip
        every = list(objective.trainable.parameters())
        here = sum((one.to_local() if hasattr(one, "to_local") else one).numel() for one in every)
        parts = here < sum(map(size, every))
        held_out = evaluate(objective, [collate([row]) for row in ROWS], accelerator)
        whole = gathered(objective.trainable, accelerator) or accelerator.unwrap_model(objective.trainable).state_dict()
        return {
            "engine": engine(accelerator), "processes": world, "layers": sorted(map(str, {*layers})), "calls": len(calls), "parts": parts, "target": held(target), "held_out": held_out,
            "weights": {name: float(one.double().norm()) for name, one in whole.items()}, "dtypes": sorted({str(one.dtype) for one in whole.values()}),
            "steps": [{"loss": one.loss, "norm": one.grad_norm, "scored": one.scored} for one in records],
        }  # fmt: skip
