"""`python -m draftsmith.train.export.prove_gguf FILE FOLDER TOKENIZER FORM`: what a stranger's process finds in a .gguf, held against the folder that it was made from."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf.quants import dequantize
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.models import chat_ids, load_model, load_tokenizer, output_rows, pick
from draftsmith.train.export.gguf_family import tensors
from draftsmith.train.export.gguf_file import FORMS, encode, kind_of, read_metadata, read_tensors
from draftsmith.train.export.in_llama_cpp import beside
from draftsmith.train.export.prove import QUESTIONS


def prove(file: str, folder: str, tokenizer_name: str, form: str) -> dict[str, Any]:
    """{tensors, largest, llama_cpp}: how many tensors were found as they must be, how far the worst number is from the source's, and
    what llama.cpp makes of the file, where it is installed. SystemExit where something is not as it must be."""
    source, path = load_model(folder), Path(file)
    metadata = read_metadata(path)
    if (tokens := len(metadata["tokenizer.ggml.tokens"])) != output_rows(source):
        raise SystemExit(f"{file} has {tokens} tokens for {output_rows(source)} rows")
    tokenizer = load_tokenizer(tokenizer_name)
    texts = metadata["tokenizer.ggml.tokens"]
    if wrong := [token for token, i in tokenizer.get_vocab().items() if texts[i] != token]:
        raise SystemExit(f"{file} writes {len(wrong)} tokens otherwise than the target's tokenizer, {wrong[0]!r} for one")
    found: dict[str, Any] = {"tensors": 0, "largest": 0.0, "llama_cpp": None}
    wanted = dict(tensors(source))
    for name, stored in read_tensors(path):
        values = wanted.pop(name, None)
        if values is None:
            raise SystemExit(f"{file} holds {name}, which the draft has not")
        if stored.kind != kind_of(name, values, pick(FORMS, form, "the quantisation")) or not torch.equal(
            stored.values, rounded(name, values, stored.kind)
        ):
            raise SystemExit(f"{file}: {name} is not what was to be written")
        found["tensors"] += 1
        found["largest"] = max(found["largest"], float((stored.values - values).abs().max()))
    if wanted:
        raise SystemExit(f"{file} lacks {', '.join(sorted(wanted))}")
    if importlib.util.find_spec("llama_cpp"):
        found["llama_cpp"] = run(path, source, tokenizer)
    return found


def rounded(name: str, values: Tensor, kind: Any) -> Tensor:
    """What is left of a tensor in a kind."""
    return torch.from_numpy(dequantize(encode(name, values, kind), kind).reshape(values.shape).copy())


def run(path: Path, source: PreTrainedModel, tokenizer: Any) -> dict[str, float]:
    """llama.cpp beside transformers, on the questions that the other formats are proved by."""
    answers = [beside(path, source, tokenizer, chat_ids(tokenizer, [{"role": "user", "content": one}])) for one in QUESTIONS]
    return {
        "same_tokens": answers[0].same_tokens,
        "texts": answers[0].texts,
        "equal": sum(one.equal for one in answers),
        "compared": sum(one.compared for one in answers),
        "logits": max(one.logits for one in answers),
    }


if __name__ == "__main__":
    print(json.dumps(prove(*sys.argv[1:5])))
