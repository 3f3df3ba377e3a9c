"""A target behind an OpenAI-compatible completions endpoint, such as vLLM's: token ids go in, token ids and laws come out.

Text is never what is passed: other ids may spell it, and a law holds for the ids that were said.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from draftsmith.distill.batch import Example, Row, example
from draftsmith.distill.served.at_once import each
from draftsmith.distill.served.endpoint import Endpoint, Fault
from draftsmith.distill.top_k import Listened
from draftsmith.specdec import Sampling
from draftsmith.specdec.models import pick

PROBE = "def f(x):\n    return x + 1  # naïve, 東京, 2024"  # several scripts, spaces, digits: two tokenizers part somewhere in it
# A server fills what is not asked from the model's generation_config (a temperature, a penalty): all of it is said.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

Progress = Callable[[int, int], None]  # (rows done, rows asked)


class Answered(NamedTuple):
    """An answer's ids, with the one that ended it where it did not run out of room."""

    ids: list[int]
    finished: bool


class ServedTarget:
    """vLLM from 0.10.2 on, or a server that takes `return_token_ids` (to answer) and `prompt_logprobs` (to be listened to) as it
    does. Nothing is sent before `check`, `answer` or `listen` is called."""

    def __init__(
        self, url: str, model: str, concurrency: int = 8, timeout: float = 600.0, retries: int = 5,
        *, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._server = Endpoint(url, timeout, retries, sleep)
        self.url, self.model, self.concurrency = self._server.url, model, concurrency
        self.context: int | None = None  # tokens that a text may have, and the last id of the tokenizer, where `check` was told
        self.last_id: int | None = None

    def check(self, tokenizer: Any, k: int = 0) -> None:
        """Is the model there, does it speak `tokenizer`'s ids, does it give ids back and (k > 0) the k likeliest of a given text?

        Where not, one error that says what to do, before any long work. What is not needed (k = 0) is not asked for.
        """
        models = self._server.ask("/models", retries=1)
        try:
            cards = {card["id"]: card for card in models["data"]}
        except (TypeError, KeyError):
            raise Fault(f"{self.url}/models names no models: {str(models)[:200]}") from None
        self.context = pick(cards, self.model, f"the model served at {self.url}").get("max_model_len")
        asked: dict[str, Any] = {"prompt_logprobs": k} if k else {}
        choice = self._complete(PROBE, max_tokens=1, add_special_tokens=False, **asked)
        self.last_id = max(tokenizer.get_vocab().values())
        ours = list(tokenizer(PROBE, add_special_tokens=False).input_ids)
        if (theirs := choice["prompt_token_ids"]) != ours:
            raise Fault(
                f"{self.model} at {self.url} reads {PROBE!r} as the ids {theirs}; the target's tokenizer gives {ours}. "
                "They are not one model: serve the recipe's target, or name the folder of the served one as the target"
            )
        if k:
            self._laws(choice, example((ours, 1)), k)

    def answer(
        self, prompts: Sequence[list[int]], how: Sampling, max_new_tokens: int, seeds: Sequence[int], stop: Sequence[int],
        progress: Progress | None = None,
    ) -> list[Answered]:  # fmt: skip
        """Continue every prompt until one of the ids `stop`, which is kept, or for `max_new_tokens`; Unanswered where a row failed."""
        settings = {"temperature": how.temperature, "top_k": how.top_k or -1, "top_p": how.top_p, "max_tokens": max_new_tokens}

        def one(row: tuple[list[int], int]) -> Answered:
            prompt, seed = row
            self._room(len(prompt), max_new_tokens)
            choice = self._complete(prompt, seed=seed, stop_token_ids=list(stop), **settings)
            ids = choice["token_ids"]
            if self.last_id is not None and max(ids, default=0) > self.last_id:
                raise Fault(f"{self.url} said the id {max(ids)}; the last one of the target's tokenizer is {self.last_id}")
            return _answered(ids, choice.get("finish_reason"), set(stop), max_new_tokens)

        return each(one, list(zip(prompts, seeds, strict=True)), self.concurrency, progress)

    def listen(self, rows: Sequence[Row], k: int, progress: Progress | None = None) -> list[Listened]:
        """The laws at the scored positions of each row, as in `Batch`: what may come before each token of its spans. The k likeliest
        ids of each; Unanswered where a row failed."""

        def one(row: Row) -> Listened:
            made = example(row)
            self._room(len(made.ids), 1)  # no version refuses a completion of one token; some refuse one of none
            return self._laws(self._complete(made.ids, max_tokens=1, prompt_logprobs=k), made, k)

        return each(one, rows, self.concurrency, progress)

    def _complete(self, prompt: list[int] | str, **asked: Any) -> dict[str, Any]:
        """One completion: the server's one choice, with the ids that it read and wrote."""
        body = {"model": self.model, "prompt": prompt, "n": 1, "stream": False, "return_token_ids": True} | NEUTRAL | asked
        try:
            answer = self._server.ask("/completions", body)
        except Fault as fault:
            limit = re.search(r"logprobs.*max(?:imum)? allowed:? *(\d+)", fault.said)
            if limit is None:
                raise
            wanted = asked.get("prompt_logprobs")
            raise Fault(
                f"{self.url} gives no more than the {limit[1]} likeliest ids of a position; {wanted} were asked: "
                f"start it with --max-logprobs {wanted}, or ask for {limit[1]}",
                fault.status, fault.said, hopeless=True,
            ) from None  # fmt: skip
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise Fault(f"{self.url}/completions: one choice was asked, found {str(answer)[:200]}")
        read = choices[0].get("prompt_token_ids")
        if read is None or choices[0].get("token_ids") is None:
            raise Fault(
                f"{self.url} answers in text alone, and the ids of a text are a guess: other ids may spell it. "
                "Serve the target with vLLM 0.10.2 or newer, which gives ids (return_token_ids)",
                hopeless=True,
            )
        if not isinstance(prompt, str) and read != prompt:
            # A server that puts a BOS before the prompt, or cuts it, answers another question.
            raise Fault(
                f"{len(prompt)} ids were sent to {self.url}, and it read {len(read)} others: {read[:8]}, not {prompt[:8]} ..."
            )
        return choices[0]

    def _room(self, tokens: int, more: int) -> None:
        if self.context is not None and tokens + more > self.context:
            raise ValueError(
                f"{tokens} tokens and {more} more do not fit the {self.context} of {self.model} at {self.url}: "
                f"start it with --max-model-len {tokens + more} or more, or leave such rows out"
            )

    def _laws(self, choice: dict[str, Any], row: Example, k: int) -> Listened:
        """prompt_logprobs[t + 1] is the law AT t, of token t + 1; the first entry, of a token that nothing precedes, is null."""
        ids, found = row.ids, choice.get("prompt_logprobs")
        if found is None:
            raise Fault(
                f"{self.url} gives no prompt_logprobs: it can answer, but not be listened to. Serve the target with vLLM",
                hopeless=True,
            )
        if len(found) != len(ids):
            raise Fault(f"{self.url} gives laws for {len(found)} of {len(ids)} tokens; start it with --no-enable-prefix-caching")
        laws = [_likeliest(found[at], ids[at], at, k) for start, end in row.spans for at in range(start, end)]
        log_p = torch.tensor([[log for _, log in law] for law in laws], dtype=torch.float32).view(-1, k)
        if not bool((log_p.double().logsumexp(-1) < 1e-3).all()):
            raise Fault(f"log-probabilities from {self.url} sum to more than 1: start it with --logprobs-mode raw_logprobs")
        return Listened(
            torch.tensor([[one for one, _ in law] for law in laws]).long().view(-1, k), log_p, torch.full((len(laws),), torch.nan)
        )


def _answered(ids: list[int], reason: str | None, stop: set[int], max_new_tokens: int) -> Answered:
    """The ids tell whether a text ended: of an end at the last allowed token some versions say "length"."""
    finished = bool(ids) and ids[-1] in stop
    if any(one in stop for one in ids[:-1]):
        raise Fault(f"the server wrote on behind an id that ends a text ({sorted(stop)}): it does not know stop_token_ids")
    if reason == "stop" and not finished:
        raise Fault(
            f"the server ended a text with id {ids[-1] if ids else None}, which is none of those that end one here ({sorted(stop)}): "
            "compare eos_token_id in the generation_config.json of the target here and there"
        )
    if not finished and (reason != "length" or len(ids) != max_new_tokens):
        raise Fault(f"the server broke a text off ({reason}) after {len(ids)} of {max_new_tokens} tokens")
    return Answered(list(ids), finished)


def _likeliest(law: dict[str, dict[str, Any]] | None, own: int, at: int, k: int) -> list[tuple[int, float]]:
    """k pairs (id, log-probability), most likely first. `own` is the text's token, which comes beside the k where it is none of them."""
    logs = {int(one): float(entry["logprob"]) for one, entry in (law or {}).items()}
    if own not in logs:
        raise Fault(f"the law at position {at} does not hold the text's own token {own}: the server is one off, or skipped some")
    if len(logs) == k + 1 and logs[own] == min(logs.values()):
        del logs[own]
    if len(logs) != k:
        raise Fault(f"the law at position {at} holds {len(logs)} ids; the {k} likeliest were asked")
    return sorted(logs.items(), key=lambda one: (-one[1], one[0]))  # ids of one chance in the order of their numbers
