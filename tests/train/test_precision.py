"""`train.precision: bf16`: the layers run in bfloat16, what is trained and the losses do not, whatever the target's weights are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from draftsmith.distill import LOSSES, CutDraft, DistillDraft, WholeDraft, collate
from draftsmith.distill.making.drafts import in_float32
from draftsmith.distill.making.lora import with_lora
from draftsmith.distill.rollout import speaking, write_rows
from draftsmith.recipes import runs
from draftsmith.specdec import Sampling
from runs import inside, write_run
from tiny import tiny

BATCH = collate([([5, 9, 11, 4], 3), ([7, *range(20, 29)], 1)])
LOW, FULL = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _no_other_precision() -> Iterator[None]:
    """accelerate knows one precision a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("dtype", [FULL, LOW])
def test_layers_run_as_asked_heads_in_their_own_dtype_and_losses_in_float32(dtype: torch.dtype, precision: str) -> None:
    target = tiny().to(dtype)
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    if precision == "bf16":
        in_float32(objective.draft)
    assert {one.dtype for one in objective.draft.parameters()} == {FULL if precision == "bf16" else dtype}
    objective.trainable = Accelerator(cpu=True, mixed_precision=precision).prepare(objective.trainable)
    heads: list[tuple[torch.dtype, torch.dtype]] = []
    layers: list[torch.dtype] = []
    target.lm_head.register_forward_hook(lambda module, args, out: heads.append((args[0].dtype, out.dtype)))
    objective.draft.body.layers[0].mlp.register_forward_hook(lambda module, args, out: layers.append(out.dtype))
    loss = objective.loss(BATCH).total
    loss.backward()
    assert set(layers) == {LOW if precision == "bf16" else dtype}
    assert set(heads) == {(dtype, dtype)}
    assert loss.dtype == FULL
    assert all(bool(one.grad.isfinite().all()) and one.grad.dtype == one.dtype for one in objective.draft.parameters())  # type: ignore[union-attr]
    with torch.no_grad():
        hidden, theirs = objective.trainable(*objective.draft.inputs(BATCH)).to(dtype), objective.teacher.hidden(BATCH)  # type: ignore[attr-defined]
        wanted = LOSSES["forward_kl"](target.lm_head(hidden).float(), target.lm_head(theirs).float()).sum()  # type: ignore[operator]
    assert torch.allclose(loss, wanted, rtol=1e-5)


def test_a_draft_in_float32_speaks_and_is_saved_in_the_targets_dtype_and_frozen_weights_stay_as_they_are() -> None:
    target = tiny().to(LOW)
    draft = CutDraft(target, [0, 1])
    in_float32(draft)
    with torch.no_grad():
        draft.map.weight.add_(0.01 * torch.randn(draft.map.weight.shape, generator=torch.Generator().manual_seed(0)))
    whole = draft.whole()
    assert {one.dtype for one in whole.parameters()} == {LOW}
    rows: Any = [write_rows(one, [[5, 6, 7]], Sampling(), 5, [1], [2]) for one in (speaking(draft), whole)]
    assert rows[0] == rows[1]
    assert {one.dtype for one in target.parameters()} == {LOW}
    adapted = WholeDraft(with_lora(tiny(seed=1).to(LOW), 2, 4, "all-linear"))
    in_float32(adapted)
    assert {(one.requires_grad, one.dtype) for one in adapted.parameters()} == {(True, FULL), (False, LOW)}


def test_a_run_in_bf16_of_a_target_in_bf16_keeps_what_it_trains_in_float32(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, 8, train={"batch_size": 3, "threads": 1})
    asked = "train.on_policy={share: 0.5, refresh_every: 2, rows: 3, max_new_tokens: 4}"
    done = inside("train", recipe, "target.dtype=bf16", "train.precision=bf16", asked)
    assert done.returncode == 0, done.stderr
    (last,) = runs.steps(tmp_path / "runs" / "small")
    for what, dtype in (("trainer", FULL), ("draft", LOW)):
        assert {one.dtype for one in load_file(last / what / "model.safetensors").values()} == {dtype}
