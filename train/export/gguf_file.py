"""A model and its tokenizer as one .gguf file. The file is llama.cpp's; the only freedom taken is which tensors a quantisation spares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.models import output_rows, pick
from draftsmith.train.export.gguf_family import family, settings, tensors
from draftsmith.train.export.gguf_tokenizer import Vocabulary

Kind = GGMLQuantizationType


class Form(NamedTuple):
    """How matrices are stored: those of the blocks, and the embedding and the head, which quantise worst."""

    blocks: Kind
    ends: Kind
    type: LlamaFileType


FORMS = {
    "f32": Form(Kind.F32, Kind.F32, LlamaFileType.ALL_F32),
    "f16": Form(Kind.F16, Kind.F16, LlamaFileType.MOSTLY_F16),
    "bf16": Form(Kind.BF16, Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": Form(Kind.Q8_0, Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": Form(Kind.Q4_0, Kind.Q8_0, LlamaFileType.MOSTLY_Q4_0),
}
ENDS = ("token_embd.weight", "output.weight")


class Written(NamedTuple):
    """`spared`: matrices whose rows do not divide into blocks of the form, kept as f16."""

    tensors: int
    spared: list[str]


class Stored(NamedTuple):
    """A tensor of a file: its values as fp32, in transformers' order of dimensions, and how they are kept."""

    values: Tensor
    kind: Kind


def write_gguf(
    path: Path, model: PreTrainedModel, words: Vocabulary, form: str = "f16", about: dict[str, str] | None = None
) -> Written:
    """Write `path`; `about` holds general.* texts (name, license, description ...). Nothing is left where it fails."""
    how = pick(FORMS, form, "the quantisation of a .gguf")
    rows = output_rows(model)
    writer = GGUFWriter(None, MODEL_ARCH_NAMES[family(model.config).arch])
    writer.add_type("model")
    for key, text in (about or {}).items():
        writer.add_string(f"general.{key}", text)
    writer.add_file_type(how.type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for one in (*settings(model.config, rows), *words.entries):
        writer.add_key_value(one.key, one.value, one.kind, sub_type=one.of)
    count, spared = 0, []
    for name, values in tensors(model):
        kind = kind_of(name, values, how)
        if kind != wanted(name, values, how):
            spared.append(name)
        writer.add_tensor(name, encode(name, values, kind), raw_dtype=kind)
        count += 1
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        writer.close()
    return Written(count, spared)


def wanted(name: str, values: Tensor, how: Form) -> Kind:
    """Vectors stay fp32, as llama.cpp has them in every form."""
    return Kind.F32 if values.dim() < 2 else how.ends if name in ENDS else how.blocks


def kind_of(name: str, values: Tensor, how: Form) -> Kind:
    asked = wanted(name, values, how)
    return Kind.F16 if values.shape[-1] % GGML_QUANT_SIZES[asked][0] else asked


def encode(name: str, values: Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """fp32 values in the bytes of a kind; ValueError where fp16 cannot hold them."""
    if kind == Kind.F16 and values.abs().max() > torch.finfo(torch.float16).max:
        raise ValueError(f"{name} holds numbers up to {values.abs().max():.3g}, more than f16 can; take bf16, f32 or q8_0")
    return quantize(values.contiguous().numpy(), kind)


def read_tensors(path: Path) -> Iterator[tuple[str, Stored]]:
    """(name, values) of a file, dequantised; one tensor at a time is in memory."""
    for one in GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(one.shape))
        values = np.array(dequantize(one.data, one.tensor_type), dtype=np.float32).reshape(shape)
        yield one.name, Stored(torch.from_numpy(values), one.tensor_type)


def read_metadata(path: Path) -> dict[str, Any]:
    """All of the metadata of a file, lists included."""
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}
