"""`draftsmith compat A B`: how two vocabularies relate, read from tokenizers and config.json alone; whether a pair decodes is known without weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from draftsmith.specdec.cache import positions
from draftsmith.specdec.models import compatible, load_tokenizer
from draftsmith.specdec.places import gguf_folder, gguf_tokenizer, locate, quiet, resolve
from draftsmith.specdec.tokens import Special, kind, specials

SHOWN = 5  # differing ids


@dataclass(frozen=True)
class Side:
    """One of the two: what its tokenizer and its config say. `rows` is how many ids its head gives logits to."""

    name: str
    tokens: dict[int, str]
    rows: int
    kind: str
    specials: dict[str, Special]
    adds_bos: bool
    adds_eos: bool
    template: str | None
    positions: int | None

    @property
    def padding(self) -> int:
        """Rows behind the tokenizer's last id."""
        return max(0, self.rows - max(self.tokens) - 1)


class Difference(NamedTuple):
    """An id that stands for two things; None where one side does not have it."""

    id: int
    target: str | None
    draft: str | None


@dataclass(frozen=True)
class Compat:
    """Two sides, and of the target's tokens how many the draft has at the same id, at another one (`moved`), and not at all."""

    target: Side
    draft: Side
    identical: int
    moved: int
    missing: int
    added: int  # tokens of the draft that the target has not
    differences: list[Difference]  # by id, all of them
    problem: str | None  # why Draftsmith cannot pair them

    @property
    def same_ids(self) -> bool:
        return not self.differences


def compat(target_name: str | Path, draft_name: str | Path) -> Compat:
    """Compare the vocabularies of two models by name (see `load`), id by id and as sets of strings."""
    (target, ours), (draft, theirs) = _side(target_name), _side(draft_name)
    at = {token: i for i, token in draft.tokens.items()}
    identical = sum(draft.tokens.get(i) == token for i, token in target.tokens.items())
    shared = len(at.keys() & set(target.tokens.values()))
    every = sorted(target.tokens.keys() | draft.tokens.keys())
    differences = [
        Difference(i, target.tokens.get(i), draft.tokens.get(i)) for i in every if target.tokens.get(i) != draft.tokens.get(i)
    ]
    problem = compatible(ours, theirs, target_rows=target.rows, draft_rows=draft.rows).problem
    return Compat(target, draft, identical, shared - identical, len(target.tokens) - shared, len(at) - shared, differences, problem)


def _side(name: str | Path) -> tuple[Side, Any]:
    config, tokenizer = _read(name)
    text = config.get_text_config()
    plain = list(tokenizer("a").input_ids)
    side = Side(
        str(name),
        {i: token for token, i in tokenizer.get_vocab().items()},
        int(text.vocab_size),
        kind(tokenizer),
        specials(tokenizer),
        tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id],
        tokenizer.eos_token_id is not None and plain[-1:] == [tokenizer.eos_token_id],
        tokenizer.chat_template or None,
        positions(text),
    )
    return side, tokenizer


def _read(name: str | Path) -> tuple[Any, Any]:
    """Config and tokenizer. Of a .gguf that no one has loaded yet its head is read, not its weights."""
    path = locate(name)
    if path is not None and path.suffix == ".gguf" and not (gguf_folder(path) / "config.json").is_file():
        with quiet():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name), gguf_tokenizer(path)
    with quiet():
        config = AutoConfig.from_pretrained(resolve(name))
    return config, load_tokenizer(name)
