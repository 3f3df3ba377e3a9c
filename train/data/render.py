"""Text of others through the target's template: where each assistant's turn lies in the ids, found by rendering the chat up to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError

from draftsmith.specdec.models import chat_ids


class Turn(NamedTuple):
    """What is asked, up to where the answer begins, and the answer, as ids."""

    prompt: list[int]
    said: list[int]


def rendered_turns(
    chat: dict[str, Any], tokenizer: Any, ends: Sequence[int], left_out: Counter[str], counted: Counter[str]
) -> list[Turn]:
    """Each assistant's turn of `messages` behind the prompt that would have asked for it; ids in `ends` end a turn and belong to it."""
    messages, turns = chat["messages"], []
    for place in (at for at, message in enumerate(messages) if message["role"] == "assistant"):
        if not place:
            left_out["assistant's turn that opens a chat"] += 1
            continue
        until = messages[: place + 1]
        prompt, whole = chat_ids(tokenizer, until[:-1]), _rendered(tokenizer, until)
        if whole[: len(prompt)] != prompt:
            left_out["turn that the template does not render behind its own prompt for an answer"] += 1
            continue
        start = len(prompt)
        if until[-1].keys() <= {"role", "content"} and not _says(tokenizer, whole[start:], until[-1]["content"]):
            start = max(start, _opened(tokenizer, until, whole))
            counted["turns that the template opens with words of its own, which are not scored"] += start > len(prompt)
        said = whole[start:]
        end = next((at for at in range(len(said) - 1, -1, -1) if said[at] in ends), None)
        counted["turns without a token that ends them"] += end is None
        if not chat["finished"] and place == len(messages) - 1:  # whoever was cut off did not say the end that a template adds
            counted["answers that were cut off"] += 1
            said = said[:end]
        elif end is not None:
            said = said[: end + 1]  # what a template puts behind it is never said
        turns.append(Turn(whole[:start], said if until[-1]["content"].strip() else []))
    return turns


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a chat that ends with an answer."""
    if not tokenizer.chat_template:
        said = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids
        return [*chat_ids(tokenizer, messages[:-1]), *said, tokenizer.eos_token_id]
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except TemplateError as error:
        raise ValueError(
            f"the target's chat template refuses a chat of {', '.join(m['role'] for m in messages)}: {error}"
        ) from error


def _says(tokenizer: Any, said: list[int], content: str) -> bool:
    return str(tokenizer.decode(said, skip_special_tokens=False)).lstrip().startswith(content.strip())


def _opened(tokenizer: Any, messages: list[dict[str, str]], whole: list[int]) -> int:
    """How many ids come before the answer's own: as many as stay when it is another one (an empty thought, say)."""

    def shared(content: str) -> int:
        other = _rendered(tokenizer, [*messages[:-1], messages[-1] | {"content": content}])
        return next((at for at, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), min(len(whole), len(other)))

    return min(shared("0"), shared("Z"))
