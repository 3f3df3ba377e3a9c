"""What a call of `generate` asks for, checked as a whole before any work, and kept in its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from draftsmith.specdec.cache import positions
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.sampling import Sampling
from draftsmith.specdec.verify import VERIFY

# What in a generation_config would change a text. None of it acts here; what it says is listed, so that nobody wonders.
BEHIND_YOUR_BACK = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "suppress_tokens", "forced_eos_token_id", "min_new_tokens", "min_length", "stop_strings",
)  # fmt: skip
OFF = {"top_k": (0, 50, None), "do_sample": (False, None)}  # 50 is transformers' own default, in force only with do_sample


@dataclass(frozen=True)
class Settings:
    """The arguments of `generate`, checked: `ends` the EOS ids, `vocabulary` how many ids may be said, `rows` the head's."""

    k: int
    max_new_tokens: int
    min_new_tokens: int
    how: Sampling
    ends: frozenset[int]
    seed: int | Sequence[int]
    verify: str
    processors: Sequence[Any]
    stop_strings: Sequence[str]
    vocabulary: int
    rows: int

    def columns(self, prompts: list[list[int]], drafting: bool) -> int:
        """How many cache columns the call can need. A round leaves as many as its luckiest row won, so in the worst case rows take turns."""
        steps = max(self.max_new_tokens - 1, 0)
        return max(map(len, prompts)) + (steps * len(prompts) if drafting else steps)

    def in_force(self, target: PreTrainedModel, pace: Any) -> dict[str, Any]:
        """Everything that shaped the text, ready for a report, and what the target's generation_config said in vain."""
        config = getattr(target, "generation_config", None)
        said = {name: getattr(config, name, None) for name in BEHIND_YOUR_BACK}
        ignored = {name: value for name, value in said.items() if value not in OFF.get(name, (None, False, 0, 1, 1.0, []))}
        return {
            "k": getattr(pace, "k", None), "max_new_tokens": self.max_new_tokens, "min_new_tokens": self.min_new_tokens, "sampling": self.how,
            "seed": self.seed, "eos": sorted(self.ends), "verify": self.verify, "pace": type(pace).__name__,
            "processors": [type(one).__name__ for one in self.processors], "stop_strings": list(self.stop_strings),
            "vocabulary": self.vocabulary, "dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device),
            "generation_config_ignored": ignored,
        }  # fmt: skip


def checked(
    target: PreTrainedModel, prompts: list[list[int]], *, k: int, max_new_tokens: int, min_new_tokens: int, how: Sampling,
    eos: Iterable[int] | int | None, seed: int | Sequence[int], verify: str, processors: Sequence[Any] | None,
    stop_strings: Sequence[str] | str, tokenizer: Any, vocab_size: int | None,
) -> Settings:  # fmt: skip
    """The settings, or ValueError saying what was asked, what was found and what to do."""
    whole = {"k": k, "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens}
    if wrong := [f"{name}={value!r}" for name, value in whole.items() if not isinstance(value, int)]:
        raise ValueError(f"{', '.join(wrong)} must be whole numbers")
    if not isinstance(how, Sampling):
        raise ValueError(f"how must be a Sampling, found {how!r}; Sampling() is greedy")
    rows = output_rows(target)
    vocabulary = _vocabulary(vocab_size, rows)
    _check_prompts(prompts, vocabulary)
    if k < 0 or max_new_tokens < 0 or not 0 <= min_new_tokens <= max(max_new_tokens, 0):
        raise ValueError(
            f"k={k} and max_new_tokens={max_new_tokens} must be >= 0, min_new_tokens={min_new_tokens} within max_new_tokens"
        )
    longest, limit = max(map(len, prompts)) + max(max_new_tokens - 1, 0), positions(target.config.get_text_config())
    if limit and longest > limit:  # the last token written is never fed
        raise ValueError(
            f"prompt and new tokens need {longest} positions, {type(target).__name__} serves {limit} here: ask for fewer"
        )
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r} is not one of {sorted(VERIFY)}")
    if not isinstance(seed, int) and len(seed) != len(prompts):
        raise ValueError(f"one seed a row: {len(prompts)} prompts, found {len(seed)} seeds")
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    if strings and tokenizer is None:
        raise ValueError("stop strings are looked for in the text, so they need tokenizer=, the target's own")
    ends = frozenset([eos] if isinstance(eos, int) else eos or ())
    if any(not 0 <= one < vocabulary for one in ends):
        raise ValueError(f"eos {sorted(ends)} must be ids of the target, 0..{vocabulary - 1}")
    return Settings(k, max_new_tokens, min_new_tokens, how, ends, seed, verify, tuple(processors or ()), strings, vocabulary, rows)


def _vocabulary(vocab_size: int | None, rows: int) -> int:
    """How many ids may be said: the real ones, where the head has rows that only pad it."""
    if vocab_size is None:
        return rows
    if not 0 < vocab_size <= rows:
        raise ValueError(f"vocab_size={vocab_size} asked; the target's head has ids 0..{rows - 1}")
    return vocab_size


def _check_prompts(prompts: list[list[int]], vocabulary: int) -> None:
    if not len(prompts):
        raise ValueError("no prompts: generate needs at least one list of token ids")
    for b, prompt in enumerate(prompts):
        if not isinstance(prompt, (list, tuple)) or not all(isinstance(one, int) for one in prompt):
            raise ValueError(
                f"prompts must be lists of token ids (whole numbers), one list a row; prompt {b} is {str(prompt)[:60]!r} ({type(prompt).__name__})"
            )
    for b, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {b} is empty: a model needs at least one token to continue (its BOS, say)")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ValueError(f"prompt {b} holds ids {min(prompt)}..{max(prompt)}, the target has ids 0..{vocabulary - 1}")
