"""A .gguf run by llama.cpp itself beside the transformers model that it was made from; llama-cpp-python must be installed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

F32 = 0  # ggml's number of the type: with its default, an f16 cache, logits differ by 1e-3 for that alone
TEXTS = (
    "Hello, world! It's 1234567 o'clock; don't wait.",
    "def f(x):\n    return x ** 2  # naïve\n\n\tif x<=10 and y != 3:\n        pass\n",
    "Ünïcödé: żółw, 日本語のテキスト, Привет, 🚀👩‍💻 é",
    "  leading, trailing  \n\n\n   and   inner   ",
)


class Beside(NamedTuple):
    """Texts with the same tokens, of `texts`; greedy tokens equal, of `compared`; the largest difference of two logits."""

    same_tokens: int
    texts: int
    equal: int
    compared: int
    logits: float


def beside(path: Path, model: PreTrainedModel, tokenizer: Any, prompt: list[int], tokens: int = 24) -> Beside:
    """Compare tokens of TEXTS, logits on `prompt` and the greedy text behind it; ImportError where llama.cpp is not installed."""
    from llama_cpp import Llama

    engine = Llama(str(path), n_ctx=len(prompt) + tokens, logits_all=True, verbose=False, type_k=F32, type_v=F32, seed=0)
    special = [tokenizer.convert_ids_to_tokens(i) for i in tokenizer.all_special_ids[:2]]
    texts = [*TEXTS, f"{special[0]}user\nwhy?{special[-1]}\n"]
    same = sum(engine.tokenize(one.encode(), add_bos=True, special=True) == list(tokenizer(one).input_ids) for one in texts)
    ids = list(prompt)
    engine.eval(prompt)
    while len(ids) < len(prompt) + tokens:
        ids.append(int(np.argmax(engine.scores[len(ids) - 1])))
        engine.eval(ids[-1:])
    with torch.no_grad():  # one call: its greedy text is llama.cpp's as far as each next token is
        ours = model(input_ids=torch.tensor([ids])).logits[0].float()
    theirs = torch.from_numpy(np.array(engine.scores[: len(ids)]))
    largest = float((ours - theirs).abs().max())
    equal = int((ours[len(prompt) - 1 : -1].argmax(-1) == torch.tensor(ids[len(prompt) :])).sum())
    engine.close()
    return Beside(same, len(texts), equal, tokens, largest)
