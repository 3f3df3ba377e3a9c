"""Text written by the target, here or behind a server, or by the draft in training: kept as the very ids that were said."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from draftsmith.distill.making.drafts import CutDraft
from draftsmith.distill.served.at_once import Unanswered
from draftsmith.distill.served.target import ServedTarget
from draftsmith.specdec import Sampling, generate
from draftsmith.specdec.models import chat_ids, ends_of, eos_ids, output_rows, real_ids, shell
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
        settings = GenerationConfig.from_pretrained(folder)
    except OSError:
        settings = GenerationConfig.from_model_config(config)
    return ends_of(tokenizer, settings, config.get_text_config().vocab_size)


def _seeds(prompts: list[list[int]], seed: int) -> list[int]:
    """A chat's noise hangs on the chat, not on its place in a batch, so answers can be made in any order."""
    return [int(hashlib.blake2b(f"{seed}/{ids}".encode(), digest_size=7).hexdigest(), 16) for ids in prompts]


def _answer(tokenizer: Any, ids: list[int], finished: bool) -> Answer:
    return Answer(ids, tokenizer.decode(ids, skip_special_tokens=True), finished)


class MappedHead(nn.Module):
    """A draft's map and the target's head as one output head, neither of them copied."""

    def __init__(self, square: nn.Linear, linear: nn.Module) -> None:
        super().__init__()
        self.square, self.linear = square, linear

    @property
    def weight(self) -> Any:
        return self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.square(hidden))


def speaking(draft: Any) -> PreTrainedModel:
    """A draft in training as a model that writes.

    A `CutDraft` shares its weights with it, so it speaks as they are at each call, and nothing is copied. Any other draft, one
    whose forward is wrapped (compiled, or with hooks, which would run the whole target), and one that is trained in another dtype
    than the embedding and head that it shares gives `draft.whole()`.
    """
    wrapped = type(draft) is CutDraft and any("forward" in vars(one) for one in (draft.target, draft.body))
    if type(draft) is not CutDraft or wrapped or draft.map.weight.dtype != draft.target.dtype:
        with torch.random.fork_rng():  # building a model draws random weights; the run must not see that
            return draft.whole()
    model, body = shell(draft.target), shell(draft.body)
    body.set_input_embeddings(draft.target.get_input_embeddings())
    setattr(model, draft.target.base_model_prefix, body)
    model.config = body.config  # of as many layers as the draft has, which is what a cache is built by
    model.set_output_embeddings(MappedHead(draft.map, draft.head.linear))
    return model


@torch.inference_mode()
def write_rows(
    draft: PreTrainedModel, prompts: list[list[int]], how: Sampling, max_new_tokens: int, seeds: Sequence[int],
    eos: Iterable[int], vocab_size: int | None = None, batch_size: int = 24, ids: Tensor | None = None,
) -> list[tuple[list[int], int]]:  # fmt: skip
    """Rows (prompt + what the draft says after it, prompt length), in the order of `prompts`, which are ids as they will be served.

    A row ends with the first EOS, which it keeps, or where `max_new_tokens` cut it off; then nothing is added, and nothing
    stands behind what was said that a mask would have to hide. Only `how` shapes the law, and `ids` where they are all that the draft
    can say; a generation_config is not asked. Row i hangs on its prompt, `seeds`[i] and the weights. (DistillSpec 2310.08461, GKD 2306.13649.)
    """
    if len(seeds) != len(prompts):
        raise ValueError(f"one seed a row: {len(prompts)} prompts, found {len(seeds)} seeds")
    only: list[Any] = []
    if ids is not None:
        never = torch.ones(output_rows(draft), dtype=torch.bool, device=draft.device).index_fill(0, ids.to(draft.device), False)
        only = [lambda _, scores: scores.masked_fill(never, -torch.inf)]
    rows: dict[int, tuple[list[int], int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # prompts of like length together: less padding
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        out = generate(
            draft, [prompts[i] for i in some], how=how, max_new_tokens=max_new_tokens, eos=eos, seed=[seeds[i] for i in some],
            vocab_size=vocab_size, processors=only,
        )  # fmt: skip
        rows |= {i: (prompts[i] + said, len(prompts[i])) for i, said in zip(some, out.tokens, strict=True)}
    return [rows[i] for i in range(len(prompts))]
