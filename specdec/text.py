"""Text that grows token by token: what is certain of it, and where a stop string ends it. Neither ever decodes a text twice over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

HALF = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
CONTEXT = 8  # tokens before the newest that are always decoded with it: more than one character can be split over
WINDOW = 24  # tokens that are decoded together at most, before all but the context is left behind
BYTES = 4  # the longest character of UTF-8, so tokens that one can be split over


class Detokenizer:
    """The text of a row's tokens, piece by piece; all pieces and `flush` together are decode(prompt + tokens) without the prompt.

    A piece is what no later token can change: bytes of a character wait for its other bytes. New tokens are decoded behind
    a few old ones, because a token's leading space hangs on what stands before it (the technique of vLLM and TGI), so a
    token costs the same however long the text is. Punctuation keeps its spaces, whatever clean-up a tokenizer is set to.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special: bool = False) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        self._ids = self._context(prompt)
        self._text: str = self._decode(self._ids) if self._ids else ""
        self._given = len(self._text)
        self._split = self._text if self._text.endswith(HALF) else ""  # the output may complete the prompt's last character
        self._unsure = 0  # tokens since the text last ended in a whole character
        self._limit = WINDOW

    def push(self, tokens: Iterable[int]) -> str:
        """The text that has become certain by these tokens; often "", for bytes of a character that is not whole."""
        return "".join([self._push(int(token)) for token in tokens])

    def flush(self) -> str:
        """What was held back, as it stands."""
        piece, self._given = self._text[self._given :], len(self._text)
        return piece

    def _push(self, token: int) -> str:
        self._ids.append(token)
        self._text = text = self._decode(self._ids)
        if self._split:
            self._given = next(
                (at for at, (old, new) in enumerate(zip(self._split, text, strict=False)) if old != new), len(self._split)
            )
        firm = len(text.rstrip(HALF))
        self._unsure = self._unsure + 1 if firm < len(text) else 0
        if self._unsure >= BYTES:  # not one character any more, so only the bytes of the newest can still become one
            firm = max(firm, len(text) - BYTES + 1)
        piece = text[self._given : firm]
        self._given = max(self._given, firm)
        if piece:
            self._split = ""
        if len(self._ids) > self._limit:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Leave old tokens behind where the rest decodes to the end of the same text, so not within a character."""
        waiting = len(self._text) - self._given
        for start in range(len(self._ids) - CONTEXT, len(self._ids) - CONTEXT - BYTES, -1):
            rest = self._decode(self._ids[start:])
            # Nothing but broken bytes for four windows is cut anywhere: there is no better place.
            whole = rest[:1] != HALF or len(self._ids) > 4 * WINDOW
            if whole and len(rest) > waiting and self._text.endswith(rest):
                self._ids, self._text, self._given, self._limit = self._ids[start:], rest, len(rest) - waiting, WINDOW
                self._split = rest[: self._given] if self._split else ""
                return
        self._limit = 2 * len(self._ids)  # doubling keeps the failed tries few

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The end of the prompt that begins with a whole character; it has text, where the prompt has any."""
        some = CONTEXT
        while some < len(prompt):
            ids = list(prompt[-some:])
            if (text := self._decode(ids)) and text[0] != HALF:
                return ids
            some *= 2
        return list(prompt)


class StopStrings:
    """Which token of a row completes a stop string, wherever the string begins and however its text is split over tokens.

    Special tokens count with their text ("<|im_end|>"); the prompt's text does not count.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int] = ()) -> None:
        strings = [strings] if isinstance(strings, str) else list(strings)
        if tokenizer is None:
            raise ValueError(f"stop strings {strings} are looked for in text, so they need the target's tokenizer: tokenizer=...")
        if wrong := [one for one in strings if not (isinstance(one, str) and one)]:
            raise ValueError(f"a stop string must be text of at least one character, found {wrong[0]!r}")
        self._strings = strings
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._before = ""  # as much of the text as a string that is not complete can have begun in
        self._tokens = 0

    def first(self, tokens: Iterable[int], least: int = 0) -> tuple[int, str] | None:
        """(index in `tokens` of the first that completes a string, that string), or None; `tokens` are those just won.

        Of strings that one token completes, the one that begins first counts, then the longest. A string that is complete
        before the row has `least` tokens, over all calls, is passed over. Behind an answer there is no next call.
        """
        for place, token in enumerate(tokens):
            self._tokens += 1
            piece = self._detokenizer.push([token])
            if not piece:
                continue
            text, old = self._before + piece, len(self._before)
            found = [
                (at, -len(one), one) for one in self._strings if (at := text.find(one, max(0, old - len(one) + 1))) >= 0
            ]  # none that was complete before
            self._before = text[max(0, len(text) - max(map(len, self._strings), default=1) + 1) :]
            if found and self._tokens >= least:
                return place, min(found)[2]
        return None
