"""A draft's matrices in eight bits by torchao, as transformers writes them: safetensors that `from_pretrained` reads, and no pickle."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from draftsmith.recipes import Recipe
from draftsmith.specdec.places import quiet

# What reads such a folder, and whether with an int8 head: vLLM 0.32 ends on one, for its heads are no linear layers. SGLang and OpenVINO were
# tried with none.
READ_BY = {"transformers": True, "vllm": False}


def asked(recipe: Recipe, format: str) -> bool:
    """Is the draft to be int8? ValueError where the format's engine is not known to read it, ImportError without torchao."""
    if recipe.export.quantization != "int8":
        return False
    if format not in READ_BY:
        raise ValueError(
            f"export.quantization int8 asked of format {format}; {' and '.join(READ_BY)} read what torchao writes. For llama.cpp: q8_0, with format gguf"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ImportError(
            "export.quantization int8 is written and read by torchao, which is not installed: pip install 'draftsmith[int8]'"
        )
    return True


def quantised(draft: PreTrainedModel, beside: Path, format: str, served: torch.dtype | None = None) -> PreTrainedModel:
    """The draft with the matrices of its layers, and its head where the format's reader takes that, as int8 with a scale a row.
    Embeddings stay, and a head that is one. vLLM runs the pair in the dtype that the target is kept in, `served`, and ends on tensors of another.

    It is loaded as a user would quantise it, from a folder that lives as long as that takes, `beside` the export: on its disk there is room.
    """
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found,unused-ignore]

    how = TorchAoConfig(Int8WeightOnlyConfig(version=2), include_input_output_embeddings=READ_BY[format])
    dtype = draft.dtype if format == "transformers" or served is None else served
    with TemporaryDirectory(dir=beside) as place, quiet():
        draft.save_pretrained(place)
        made: Any = AutoModelForCausalLM.from_pretrained(place, quantization_config=how, dtype=dtype, use_safetensors=True)
    return made.eval()


@torch.no_grad()
def plain(made: PreTrainedModel, draft: PreTrainedModel) -> PreTrainedModel:
    """A plain model with the numbers that an int8 one stands for: `draft`, of which it was made, with those in place of its own."""
    as_kept = copy.deepcopy(draft)
    own = dict(as_kept.named_parameters())
    for name, value in made.named_parameters():
        own[name].copy_(value.dequantize() if hasattr(value, "qdata") else value)
    return as_kept
