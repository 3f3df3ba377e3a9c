"""A folder of exits: their heads in one safetensors file, what they are in drafter.json, and enough of the target to know it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.drafters.exit_heads import ExitHead, ExitSettings, make_head

FILE = "heads.safetensors"
SAMPLE = "target.sample"
OF_EACH = 8  # numbers of each of the target's weights


def write_exits(
    folder: Path, target: PreTrainedModel, exits: Sequence[tuple[ExitSettings, ExitHead]], default: int, told: Mapping[int, Any] = {},
    settings: Mapping[str, Any] = {}, about: Mapping[str, Any] = {}, sampled: Tensor | None = None,
) -> None:  # fmt: skip
    """Write heads.safetensors and drafter.json into `folder`; no weight of the target but a sample, to know it again (`sampled`, where
    one process writes that has the target in part).

    `default` is the layer that is taken where none is named, `told` are figures by layer to be written beside each exit,
    `settings` go to the drafter as they are, and `about` says more of where it all comes from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"{asked.layer}.{name}": one for asked, head in exits for name, one in head.state_dict().items()}
    state[SAMPLE] = sample(target) if sampled is None else sampled
    # One key: safetensors writes several in an order that changes from one process to the next.
    save_file({name: one.detach().cpu().contiguous() for name, one in state.items()}, folder / FILE, metadata={"format": "pt"})
    each = [{**asdict(asked), **({"held_out": told[asked.layer]} if asked.layer in told else {})} for asked, _ in exits]
    whole = {"kind": "exits", "settings": {"exits": each, "default": default, **settings}, **about}
    (folder / "drafter.json").write_text(json.dumps(whole) + "\n", encoding="utf-8")


def read_exit(folder: Path, exits: list[dict[str, Any]], layer: int, target: PreTrainedModel) -> tuple[ExitSettings, ExitHead]:
    """The exit after `layer` of those that drafter.json lists, its head in the target's dtype and place, in eval mode.

    ValueError for a layer that has none, for a damaged file and for another target than the one that taught it.
    """
    known = {int(one["layer"]): one for one in exits}
    if layer not in known:
        raise ValueError(f"{folder}: an exit after layer {layer} asked; it has exits after {', '.join(map(str, sorted(known)))}")
    try:
        state = load_file(folder / FILE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder / FILE} does not exist, and the drafter.json beside it names its heads") from error
    except SafetensorError as error:
        raise ValueError(f"{folder / FILE} is damaged ({error}); train it anew or fetch it again") from error
    refuse_another(target, state.get(SAMPLE), folder)
    asked = ExitSettings(**{name: value for name, value in known[layer].items() if name != "held_out"})
    head = make_head(target, asked)
    own = {name.removeprefix(f"{layer}."): one for name, one in state.items() if name.startswith(f"{layer}.")}
    try:
        head.load_state_dict(own, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / FILE} does not hold the exit that drafter.json says is after layer {layer}: {error}"
        ) from error
    return asked, head.requires_grad_(False).to(target.dtype).eval()


def sample(target: PreTrainedModel) -> Tensor:
    """A few numbers of each of the target's weights, in their order: float32 [n]. Of a sharded target all processes take it together."""
    some = []
    for _, one in sorted(target.named_parameters()):
        whole: Any = one.detach()
        flat = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).reshape(-1)
        some.append(flat[places(len(flat)).to(flat.device)].float().cpu())
    return torch.cat(some)


def places(length: int) -> Tensor:
    """Evenly spaced places, both ends among them. In whole numbers: float32 cannot count the elements of a large embedding."""
    return torch.arange(OF_EACH) * (length - 1) // (OF_EACH - 1)


def refuse_another(target: PreTrainedModel, wanted: Tensor | None, folder: Path) -> None:
    """ValueError where the weights of `target` are not those that the sample was taken of, but for a rounding to another dtype."""
    found = sample(target)
    roundings = ((wanted, found, target.dtype), (found, wanted, torch.bfloat16), (found, wanted, torch.float16))
    if not any(
        one is not None and other is not None and torch.equal(one.to(dtype).float(), other) for one, other, dtype in roundings
    ):
        raise ValueError(
            f"{folder} holds exits of another target: its weights are not those of this {type(target).__name__}. Exits serve the very "
            "checkpoint (and revision) that taught them, in any dtype; drafter.json says which that is"
        )
