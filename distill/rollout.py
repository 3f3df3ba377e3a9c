"""Text written by the target: batches of chats answered by `specdec.generate`, each answer kept as the very ids it was."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from draftsmith.specdec import Sampling, generate
from draftsmith.specdec.models import chat_ids, eos_ids, real_ids


class Answer(NamedTuple):
    """What the target said: its ids (EOS included where it came), the text of them, and whether it ended by itself."""

    ids: list[int]
    text: str
    finished: bool


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: Any, chats: list[list[dict[str, str]]], how: Sampling, max_new_tokens: int, seed: int = 0
) -> list[Answer]:
    """Answer chats together, each a list of {role, content} ending with a user's turn."""
    prompts = [chat_ids(tokenizer, chat) for chat in chats]
    # A chat's noise hangs on the chat, not on its place in a batch, so answers can be made in any order.
    seeds = [int(hashlib.blake2b(f"{seed}/{ids}".encode(), digest_size=7).hexdigest(), 16) for ids in prompts]
    out = generate(
        target, prompts, how=how, max_new_tokens=max_new_tokens, eos=eos_ids(target, tokenizer), seed=seeds,
        vocab_size=real_ids(target, tokenizer),
    )  # fmt: skip
    return [
        Answer(ids, tokenizer.decode(ids, skip_special_tokens=True), finished)
        for ids, finished in zip(out.tokens, out.finished, strict=True)
    ]
