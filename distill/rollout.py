"""Text written by the target, here or behind a server: chats answered together, each answer kept as the very ids it was."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from draftsmith.distill.at_once import Unanswered
from draftsmith.distill.served import ServedTarget
from draftsmith.specdec import Sampling, generate
from draftsmith.specdec.models import chat_ids, eos_ids, real_ids
from draftsmith.specdec.places import resolve

Chat = list[dict[str, str]]


class Answer(NamedTuple):
    """What the target said: its ids (EOS included where it came), the text of them, and whether it ended by itself."""

    ids: list[int]
    text: str
    finished: bool


class Answerer(Protocol):
    """Answers chats, each a list of {role, content} ending with a user's turn, in their order. One that may fail for some of them
    raises Unanswered, which holds the other answers."""

    def __call__(self, chats: list[Chat]) -> list[Answer]: ...


@torch.inference_mode()
def answer(
    target: PreTrainedModel, tokenizer: Any, chats: list[Chat], how: Sampling, max_new_tokens: int, seed: int = 0
) -> list[Answer]:
    """Answer chats with the target at hand, in one batch."""
    prompts = [chat_ids(tokenizer, chat) for chat in chats]
    out = generate(
        target, prompts, how=how, max_new_tokens=max_new_tokens, eos=eos_ids(target, tokenizer), seed=_seeds(prompts, seed),
        vocab_size=real_ids(target, tokenizer),
    )  # fmt: skip
    return [_answer(tokenizer, ids, finished) for ids, finished in zip(out.tokens, out.finished, strict=True)]


def answer_served(
    server: ServedTarget, tokenizer: Any, stop: list[int], chats: list[Chat], how: Sampling, max_new_tokens: int, seed: int = 0
) -> list[Answer]:
    """Answer chats with a served target. The template stays here, so the ids that are sent are those that are trained on.

    `stop` are the ids that end a text (`ends`).
    """
    prompts = [chat_ids(tokenizer, chat) for chat in chats]
    try:
        return [_answer(tokenizer, *one) for one in server.answer(prompts, how, max_new_tokens, _seeds(prompts, seed), stop)]
    except Unanswered as some:
        raise Unanswered([None if one is None else _answer(tokenizer, *one) for one in some.done], some.why) from some


def ends(name: str, tokenizer: Any) -> list[int]:
    """The ids that end a text of the target `name`, as `eos_ids` gives them for one that is loaded; only its settings are read."""
    folder = resolve(name)
    config = AutoConfig.from_pretrained(folder)
    try:
        more = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        more = GenerationConfig.from_model_config(config).eos_token_id
    ids = {tokenizer.eos_token_id, *(more if isinstance(more, (list, tuple)) else [more])} - {None}
    return sorted(one for one in ids if one < config.get_text_config().vocab_size)


def _seeds(prompts: list[list[int]], seed: int) -> list[int]:
    """A chat's noise hangs on the chat, not on its place in a batch, so answers can be made in any order."""
    return [int(hashlib.blake2b(f"{seed}/{ids}".encode(), digest_size=7).hexdigest(), 16) for ids in prompts]


def _answer(tokenizer: Any, ids: list[int], finished: bool) -> Answer:
    return Answer(ids, tokenizer.decode(ids, skip_special_tokens=True), finished)
