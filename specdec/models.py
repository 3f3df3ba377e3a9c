"""Targets, drafts and their tokenizers: loading them, what they are made of, and whether two speak the same ids."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jinja2 import TemplateError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftsmith.specdec.places import locate, quiet, resolve

T = TypeVar("T")
NORMS = ("norm", "ln_f", "final_layernorm")


class Loaded(NamedTuple):
    """`model` in eval mode, `tokenizer` with eos and pad set; unpacks as a pair."""

    model: PreTrainedModel
    tokenizer: Any


def load(name: str | Path, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Loaded:
    """Load a causal model and its tokenizer.

    `name`: a hub id, a folder, a `.gguf` file (dequantised once into a cached folder), or `package:NAME/FILE`, a file
    inside an installed package, which is found without importing it. Code from a checkpoint is never run.
    """
    return Loaded(load_model(name, dtype, device), with_ends(load_tokenizer(name), name))


def with_ends(tokenizer: Any, name: str | Path) -> Any:
    """A tokenizer that has an EOS, with pad set; ValueError for one that has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name}: the tokenizer names no EOS, so no answer could end; set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks come from lengths, never from ids, so pad may be eos
    return tokenizer


def load_model(name: str | Path, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu") -> PreTrainedModel:
    """The model alone, in eval mode; for a name see `load`."""
    folder = resolve(name)
    with quiet(), _named(name):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(dtype))
    return model.eval().to(device)


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer alone; for a name see `load`."""
    folder = resolve(name)
    if Path(folder).is_dir() and not any(
        (Path(folder) / one).is_file() for one in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise FileNotFoundError(f"{name} holds no tokenizer; copy the files of its target's tokenizer (tokenizer.json ...) into it")
    with quiet(), _named(name):
        return AutoTokenizer.from_pretrained(folder)


@contextlib.contextmanager
def _named(name: str | Path) -> Iterator[None]:
    """A name that is nothing here goes to a hub; its error says so in one line, and where was looked first."""
    try:
        yield
    except OSError as error:
        if locate(name) is not None:
            raise
        first = str(error).strip().splitlines()[0]
        raise OSError(f"{name} is no file or folder here (looked in {Path.cwd()}), and a hub did not give it: {first}") from error


@dataclass(frozen=True)
class Compatibility:
    """How two vocabularies relate; `problem` says why they cannot be paired, and is None where they can."""

    target_tokens: int
    draft_tokens: int
    target_rows: int
    draft_rows: int
    problem: str | None

    def raise_if_not(self) -> None:
        if self.problem:
            raise ValueError(self.problem)


def compatible(target: Any, draft: Any, target_rows: int = 0, draft_rows: int = 0) -> Compatibility:
    """Compare two tokenizers, id by id. Speculation passes ids, not text, so one swapped pair of ids is another language.

    The numbers of embedding rows may differ (one tokenizer padded two ways); the maps from id to token may not.
    """
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (target, draft))
    problem = None
    different = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if different:
        first = different[0]
        problem = (
            f"the tokenizers differ: id {first} is {ours.get(first)!r} for the target and {theirs.get(first)!r} for the draft "
            f"({len(different)} of {len(ours)} ids differ). A draft must speak the target's ids; distil one from this target."
        )
    elif (a := target.eos_token_id) != (b := draft.eos_token_id):
        problem = f"the draft ends its text with id {b}, the target with id {a}: give the draft the target's tokenizer files"
    return Compatibility(len(ours), len(theirs), target_rows or len(ours), draft_rows or len(theirs), problem)


def blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name, within the model's body, and the list of its transformer blocks."""
    body = getattr(model, model.base_model_prefix)
    for name in ("layers", "h"):
        if isinstance(getattr(body, name, None), nn.ModuleList):
            return name, getattr(body, name)
    raise ValueError(f"{type(model).__name__} keeps its blocks neither in .layers nor in .h; its layers cannot be taken apart here")


def final_norm(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The name, within the model's body, and the module of the norm between its last block and its head."""
    body = getattr(model, model.base_model_prefix)
    for name in NORMS:
        if isinstance(getattr(body, name, None), nn.Module):
            return name, getattr(body, name)
    raise ValueError(
        f"{type(model).__name__} keeps its final norm under none of {', '.join(NORMS)}; its exits can get no norm of their own here"
    )


def shell(module: PreTrainedModel) -> PreTrainedModel:
    """The same object with dictionaries of its own, so that replacing a child in one leaves the other whole."""
    own = copy.copy(module)
    own._modules = module._modules.copy()
    own._parameters = module._parameters.copy()
    own._buffers = module._buffers.copy()
    return own


def output_rows(model: Any) -> int:
    """How many ids the model's head gives a logit to, padding rows included."""
    return int(model.get_output_embeddings().weight.shape[0])


def real_ids(target: Any, tokenizer: Any) -> int:
    """How many ids the target can say: its head's rows, less those beyond its tokenizer's last token, which only pad it."""
    rows = output_rows(target)
    return rows if tokenizer is None else min(rows, max(tokenizer.get_vocab().values()) + 1)


def eos_ids(target: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text: the tokenizer's EOS and those of the target's generation_config (the end of a turn, say)."""
    return ends_of(tokenizer, getattr(target, "generation_config", None), output_rows(target))


def ends_of(tokenizer: Any, settings: Any, rows: int) -> list[int]:
    """The same of a target that is not loaded, whose generation settings and head's rows are known."""
    more = getattr(settings, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(more if isinstance(more, (list, tuple)) else [more])} - {None}
    return sorted(one for one in ids if one < rows)


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """An entry of a table by name, or an error with the choices and the nearest of them."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    raise ValueError(
        f"{what}: {name!r} is not one of {', '.join(sorted(table))}" + (f"; did you mean {near[0]!r}?" if near else "")
    )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    return pick({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}, dtype, "dtype")


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a chat up to where its answer begins: the tokenizer's template, applied once, with no BOS added again.

    A tokenizer without a template gets the bare texts, joined by blank lines.
    """
    if tokenizer.chat_template:
        try:
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the target's chat template refuses a chat of {roles}: {error}") from error
    return list(tokenizer("\n\n".join(message["content"] for message in messages) + "\n\n").input_ids)
