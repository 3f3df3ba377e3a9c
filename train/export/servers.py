"""The plain folder with what vLLM, SGLang and OpenVINO want beside it; each condition of theirs is checked on the pair, and named where it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from draftsmith.recipes import Recipe
from draftsmith.specdec.places import resolve
from draftsmith.train.export import serve
from draftsmith.train.export.conditions import Fit, shared_positions
from draftsmith.train.export.transformers_folder import Served, write_folder

CONFIG = "speculative-config.json"


def vllm(recipe: Recipe, force: bool = False) -> Path:
    """vLLM's draft_model method (read and run in 0.32): speculative-config.json and serve.sh beside the folder's files."""

    def finish(folder: Path, place: Path, pair: Fit) -> Served:
        parts, dtype = recipe.export.tensor_parallel, served_dtype(pair)
        must_split("the target", pair.target, parts)
        # vLLM runs a draft split as the target is, or on one GPU.
        own = 1 if splits(pair.draft.config, parts) else parts
        asked = {"method": "draft_model", "model": str(place.resolve()), "num_speculative_tokens": recipe.train.k}
        asked |= {"draft_tensor_parallel_size": own}
        (folder / CONFIG).write_text(json.dumps(asked) + "\n", encoding="utf-8")
        serve.write_script(
            folder, serve.vllm(_target(recipe), dtype, parts, shared_positions(pair.draft.config, pair.target), CONFIG)
        )
        alone = f"the draft runs on one GPU of {parts}: {splits(pair.draft.config, parts)}"
        return Served("sh serve.sh", [alone] if own != parts else [])

    return write_folder(recipe, force, "vllm", finish)


def sglang(recipe: Recipe, force: bool = False) -> Path:
    """SGLang's STANDALONE algorithm (read in 0.5.23, never run here: it needs a GPU): serve.sh beside the folder's files."""

    def finish(folder: Path, place: Path, pair: Fit) -> Served:
        parts, dtype = recipe.export.tensor_parallel, served_dtype(pair)
        must_split("the target", pair.target, parts)
        must_split("the draft", pair.draft.config, parts)
        positions = shared_positions(pair.draft.config, pair.target)
        serve.write_script(folder, serve.sglang(_target(recipe), dtype, parts, positions, recipe.train.k))
        return Served("sh serve.sh", ["SGLang needs a GPU, and Draftsmith did not try this command on one"])

    return write_folder(recipe, force, "sglang", finish)


def openvino(recipe: Recipe, force: bool = False) -> Path:
    """The plain folder, and the command by which OpenVINO's own converter reads it."""

    def finish(folder: Path, place: Path, pair: Fit) -> Served:
        command = "optimum-cli export openvino --task text-generation-with-past --weight-format fp32 --model"
        return Served(
            f"{command} {place} {place}-ir    # and the target in the same way\n"
            "LLMPipeline(TARGET_IR, 'CPU', draft_model=draft_model(DRAFT_IR, 'CPU'))    # GenerationConfig(num_assistant_tokens=...)",
            [],
        )

    return write_folder(recipe, force, "openvino", finish)


def speculators(recipe: Recipe, force: bool = False) -> NoReturn:
    """Kept for the heads that the format has."""
    raise ValueError(
        "since 0.5 the speculators format has no stand-alone draft (its types are heads on the target's hidden states: eagle3, dflash, mtp ...). "
        "vLLM takes the plain folder: export with --format vllm"
    )


def splits(config: Any, parts: int) -> str:
    """Why a model does not divide into so many parts; "" where it does. Fewer key-value heads than parts are copied, if that comes out even."""
    keys = config.num_key_value_heads
    if config.num_attention_heads % parts:
        return f"{config.num_attention_heads} attention heads do not divide by {parts}"
    if keys % parts and parts % keys:
        return f"{keys} key-value heads do not divide by {parts}, nor {parts} by them"
    if config.intermediate_size % parts:
        return f"{config.intermediate_size} MLP channels do not divide by {parts}"
    return ""


def must_split(who: str, config: Any, parts: int) -> None:
    if why := splits(config, parts):
        raise ValueError(f"export.tensor_parallel: {who} cannot be split over {parts} GPUs: {why}")


def served_dtype(pair: Fit) -> str:
    """The dtype that the target is kept in, in which both will run; ValueError where the draft's numbers do not fit it."""
    dtype = pair.target.dtype or torch.float32
    name = str(dtype).removeprefix("torch.")
    limit = torch.finfo(getattr(torch, name)).max
    for key, value in pair.draft.state_dict().items():
        if value.abs().max() > limit:
            raise ValueError(
                f"the pair runs in the target's {name}, and the draft's {key} holds {value.abs().max():.3g}: beyond {limit:.3g}"
            )
    return name


def _target(recipe: Recipe) -> str:
    """What to serve: a hub id, or the folder. Of a .gguf it is the dequantised one, which the draft learned from."""
    place = resolve(recipe.target.model)
    return str(Path(place).resolve()) if Path(place).is_dir() else place


SERVERS: dict[str, Callable[[Recipe, bool], Path]] = {
    "vllm": vllm,
    "sglang": sglang,
    "openvino": openvino,
    "speculators": speculators,
}
