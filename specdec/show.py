"""`draftsmith generate`: one answer, streamed, with the draft's tokens in a colour of their own and a count of what they brought."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from draftsmith.specdec.audit import parting
from draftsmith.specdec.decode import Generation, Written, generate
from draftsmith.specdec.drafters import load_drafter
from draftsmith.specdec.models import chat_ids, eos_ids, load, real_ids
from draftsmith.specdec.pace import Adaptive
from draftsmith.specdec.page import DRAFT, Page, Pipe, Screen
from draftsmith.specdec.sampling import Sampling
from draftsmith.specdec.text import Detokenizer

WARM_UP = 8  # tokens decoded beforehand where two runs are compared, as the first call of all is slow


@dataclass(frozen=True)
class Asked:
    """What the command was asked for; an empty `draft` without `ngram` is plain decoding."""

    target: str
    prompt: str  # "-" is what stdin says
    draft: str = ""
    ngram: bool = False
    k: int = 4
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    system: str = ""
    raw: bool = False
    stop: Sequence[str] = ()
    threads: int = 0  # 0 leaves it to torch
    dtype: str = "fp32"
    plain: bool = False
    adaptive: bool = False
    compare: bool = False

    @property
    def drafter(self) -> str:
        """The name that `load_drafter` is given, or ""."""
        return "+".join([*["ngram"] * self.ngram, *[self.draft] * bool(self.draft)])


class Tally:
    """What has been written so far. A drafted token that ends a call's text counts as the target's own, as in `Generation`."""

    def __init__(self, drafts: bool) -> None:
        self.drafts = drafts
        self.tokens = self.calls = self.accepted = 0
        self.showing = 0.0  # seconds that went into showing, not decoding
        self.started = time.perf_counter()

    def add(self, written: Written) -> None:
        self.tokens, self.calls = self.tokens + len(written.tokens), self.calls + 1
        self.accepted += len(written.tokens) - 1

    def so_far(self) -> str:
        """A short line, for how many were drafted is known at the end only."""
        rate = _rate(self.tokens, time.perf_counter() - self.started - self.showing)
        line = f"{self.tokens} tokens, {self.tokens / max(self.calls, 1):.2f} a call, {rate}"
        return line + (f", {self.accepted} drafts accepted" if self.drafts else "")

    def whole(self, out: Generation | None) -> str:
        """The final count; without a generation, of an answer that was interrupted."""
        seconds = (out.seconds if out else time.perf_counter() - self.started) - self.showing
        line = f"{self.tokens} tokens in {self.calls} calls of the target: {self.tokens / max(self.calls, 1):.2f} tokens a call"
        line += f"; {_rate(self.tokens, seconds)}"
        if self.drafts:
            of = f" of {sum(drafted for drafted, _ in out.rounds[0])}" if out else ""
            line += f"; {self.accepted}{of} drafts accepted"
        return line if out else f"{line}; interrupted"


def show(asked: Asked, console: Console | None = None) -> int:
    """Stream the answer; 130 where it was interrupted. `console` is where to: stdout unless told."""
    prompt = _check(asked)
    how = Sampling(asked.temperature, asked.top_k, asked.top_p)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    target, tokenizer = load(asked.target, asked.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    drafter = load_drafter(asked.drafter, target, tokenizer) if asked.drafter else None
    ids = _ids(tokenizer, prompt, asked)
    settings: dict[str, Any] = {"how": how, "eos": eos_ids(target, tokenizer), "seed": asked.seed}
    settings |= {"stop_strings": list(asked.stop), "tokenizer": tokenizer}
    settings |= {"vocab_size": real_ids(target, tokenizer)}
    if asked.compare:
        for one in (None, drafter):
            generate(target, [ids], one, k=asked.k, max_new_tokens=min(WARM_UP, asked.max_new_tokens), **settings)
    settings |= {"max_new_tokens": asked.max_new_tokens}
    console = console or Console(highlight=False)
    page: Page = Screen(console) if console.is_terminal and not asked.plain else Pipe(console.file)
    page.note(f"[{DRAFT}]guessed by {escape(asked.drafter)}, accepted[/]  written by the target" if drafter is not None else "")
    try:
        out, tally = _stream(page, target, ids, drafter, asked, settings)
        if out is None:
            return 130
        for warning in out.warnings:
            Console(stderr=True, highlight=False).print(Text(warning, style="dim"))
        if asked.compare:
            page.say("decoding without the draft, to compare ...")
            plain = generate(target, [ids], k=0, **settings)
            page.say(_comparison(out, plain, out.seconds - tally.showing, how))
    except BrokenPipeError:  # whoever read this has enough (`| head`); at its exit Python would complain once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _stream(
    page: Page, target: Any, ids: list[int], drafter: Any, asked: Asked, settings: dict[str, Any]
) -> tuple[Generation | None, Tally]:
    """Decode and show; None in the place of the generation where it was interrupted."""
    pace = Adaptive(asked.k) if asked.adaptive else None
    text, tally, out = Detokenizer(settings["tokenizer"], ids, skip_special=True), Tally(drafter is not None), None

    def on_tokens(written: Written) -> None:
        clock = time.perf_counter()
        tally.add(written)
        page.write(text.push(written.tokens[: written.accepted]), drafted=True)
        page.write(text.push(written.tokens[written.accepted :]), drafted=False)
        page.tally(tally.so_far())
        tally.showing += time.perf_counter() - clock

    try:
        out = generate(target, [ids], drafter, k=asked.k, pace=pace, on_tokens=on_tokens, **settings)
    except KeyboardInterrupt:
        pass
    finally:
        page.write(text.flush(), drafted=False)
        page.close()
    page.say(tally.whole(out))
    return out, tally


def _check(asked: Asked) -> str:
    """The prompt; ValueError for what is wrong before anything is loaded."""
    if asked.raw and asked.system:
        raise ValueError("--system is a turn of a chat, --raw shows the target no chat: give one of them")
    if not asked.drafter and (asked.adaptive or asked.compare):
        raise ValueError(f"{'--adaptive' if asked.adaptive else '--compare'} needs somebody who drafts: --draft NAME or --ngram")
    if asked.k < 1 and asked.drafter:
        raise ValueError(f"-k must be at least 1 for a draft, found {asked.k}; without --draft and --ngram nothing is drafted")
    if asked.max_new_tokens < 1 or asked.threads < 0:
        raise ValueError(
            f"--max-new-tokens {asked.max_new_tokens} must be at least 1, --threads {asked.threads} at least 0 (torch decides)"
        )
    if "" in asked.stop:
        raise ValueError("--stop needs text of at least one character")
    prompt = sys.stdin.read().removesuffix("\n") if asked.prompt == "-" else asked.prompt
    if not prompt.strip():
        raise ValueError(f"the prompt {'on stdin ' if asked.prompt == '-' else ''}is empty")
    return prompt


def _ids(tokenizer: Any, prompt: str, asked: Asked) -> list[int]:
    if asked.raw:
        return list(tokenizer(prompt).input_ids)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    return chat_ids(tokenizer, [*system, {"role": "user", "content": prompt}])


def _comparison(out: Generation, plain: Generation, seconds: float, how: Sampling) -> str:
    """Plain decoding beside the run that was shown; a sampled text is another one by right."""
    faster = (len(out.tokens[0]) / seconds) / (len(plain.tokens[0]) / plain.seconds)
    line = f"plain decoding: {_rate(len(plain.tokens[0]), plain.seconds)}, so drafting is {faster:.2f} times as fast; "
    if how.temperature > 0:
        return line + "sampled texts are not compared"
    if out.tokens == plain.tokens:
        return line + "the text is equal"
    same = parting(out.tokens[0], plain.tokens[0])
    return (
        line + f"THE TEXT DIFFERS from token {same} on (in fp32 it should not; in half precision equal scores may fall either way)"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):.1f} tokens/s"
