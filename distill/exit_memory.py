"""What a step that teaches exits will take: the objective itself, run on tensors that have shapes and no numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from draftsmith.distill.batch import Batch
from draftsmith.distill.chunked import Asked
from draftsmith.distill.early_exit import DistillExits
from draftsmith.distill.held import Live, nbytes
from draftsmith.distill.making.lora import made_where_they_stay
from draftsmith.distill.memory import Memory, in_parts, without_numbers
from draftsmith.specdec.drafters.exit_heads import ExitSettings


def predict_exits(
    target: PretrainedConfig, exits: Sequence[ExitSettings], rows: int, length: int, scored: int, asked: Asked, *,
    dtype: torch.dtype = torch.float32, support: int = 0, accumulate: int = 1, bf16: bool = False, device: str = "cpu",
    shards: int = 1,
) -> Memory:  # fmt: skip
    """`memory.predict` for the heads of `exits`: `draft` are these, and `teacher` is the one forward of the target that they all read."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Accessing the data pointer of FakeTensor"
            )  # a copy of a module asks, and is told there is none
            return _dry_run(target, exits, (rows, length, scored), asked, dtype, support, accumulate, bf16, device, shards)
    except RuntimeError as error:
        raise ValueError(
            f"what exits of a {target.model_type} take cannot be predicted, for it does not run on tensors without numbers: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _dry_run(
    target: PretrainedConfig, exits: Sequence[ExitSettings], size: tuple[int, int, int], asked: Asked, dtype: torch.dtype,
    support: int, accumulate: int, bf16: bool, device: str, shards: int,
) -> Memory:  # fmt: skip
    with _Shapes(), torch.device(device), Live() as live:
        model = without_numbers(target, dtype).eval().requires_grad_(False)
        ids = None if asked.ids is None else torch.arange(len(asked.ids))  # which ids they are changes no size
        only = torch.arange(support) if support else None
        with made_where_they_stay():
            objective = DistillExits.of_shapes(model, exits, asked._replace(ids=ids), only)
        heads: Any = objective.exits
        if bf16:
            _under_autocast(heads, device)
        parameters = list(heads.parameters())
        moments = [torch.zeros_like(one) for one in parameters for _ in range(2)]
        if accumulate > 1:
            for one in parameters:
                one.grad = torch.zeros_like(one)
        batch = _batch(*size)
        highest, at = 0, {"begin": live.now}
        parts: dict[str, int] = {}

        def mark(name: str, held: int) -> None:
            """Bytes of the part that ends here: what it `held`, over what lived when it began."""
            nonlocal highest
            parts[name], highest = held - at["begin"], max(highest, live.peak, held)
            at["begin"] = live.peak = live.now

        live.peak = live.now
        spared, gathered = in_parts(model, shards)
        heads.register_forward_pre_hook(lambda *_: mark("teacher", live.peak + gathered))
        heads.register_forward_hook(lambda *_: mark("activations", live.now))
        loss = objective.loss(batch)
        mark("logits", live.peak)
        loss.total.backward()
        # The update holds a denominator beside each weight: of one weight at a time on a CPU, of all of them on a GPU.
        sizes = [nbytes([one]) for one in parameters]
        update = live.now + (2 * max(sizes) if device == "cpu" else sum(sizes))
        highest = max(highest, live.peak, update)
    return Memory(nbytes(model.parameters()) - spared, sum(sizes), sum(sizes), nbytes(moments), **parts, total=highest - spared)


class _Shapes(FakeTensorMode):
    """A mode that copies of its tensors share: heads begin as copies of the target's modules, and two modes do not mix."""

    def __deepcopy__(self, memo: Any) -> _Shapes:
        return self


class _Placed(Batch):
    """A batch whose `scored` are places, for how many a mask picks is seen in numbers only."""

    def to(self, device: torch.device) -> Batch:
        return self


def _batch(rows: int, length: int, scored: int) -> Batch:
    ids = torch.zeros(rows, length, dtype=torch.long)
    places: Any = (torch.zeros(scored, dtype=torch.long), torch.zeros(scored, dtype=torch.long))
    return _Placed(ids, ids, places)


def _under_autocast(heads: Any, device: str) -> None:
    """As the accelerator prepares them: autocast inside, float32 outside."""
    forward = heads.forward

    def cast(*asked: Any) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            found = forward(*asked)
        return [one.float() for one in found]

    heads.forward = cast
