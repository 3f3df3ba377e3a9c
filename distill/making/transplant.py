"""A donor whose tokenizer is another's is made to speak the target's ids: each of them gets rows mixed of the donor's own rows."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.distill.batch import Row, example
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.tokens import RAW, control_ids, specials, speller, token_bytes

KINDS = ("exact", "composed", "role", "told", "unknown", "padding")
TELLING, SILENT = ("end of turn", "eos", "bos"), ("unk", "pad")  # roles that say more of a special token than its name, and less


class Report(NamedTuple):
    """How many of the target's ids are one token of the donor (`exact`), several (`composed`), special tokens of the same `role`,
    `told` by the caller, `unknown` (they got the mean row), or `padding` behind the tokenizer; `kinds` [V] says it of each id."""

    exact: int
    composed: int
    role: int
    told: int
    unknown: int
    padding: int
    kinds: Tensor  # places in KINDS

    def known(self, rows: Iterable[Row]) -> float:
        """The share of the answer tokens of `rows` whose id the donor has as one token."""
        said = torch.tensor([one for row in rows for one in example(row).answers], dtype=torch.long)
        return float(torch.isin(self.kinds[said], torch.tensor([KINDS.index("exact"), KINDS.index("role")])).float().mean())

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in zip(KINDS, self, strict=False) if count)
        return f"{len(self.kinds)} ids: {counts}"


class Transplanted(NamedTuple):
    model: PreTrainedModel
    report: Report


@torch.no_grad()
def transplant(
    donor: PreTrainedModel, donor_tokenizer: Any, target_tokenizer: Any, vocab_size: int,
    told: Mapping[str, str] | None = None, tied: bool | None = None,
) -> Transplanted:  # fmt: skip
    """A model of the donor's class and weights that speaks the target's `vocab_size` ids, to be trained and saved by `save_draft`.

    An id whose text is one token of the donor keeps that token's rows. One that the donor writes in several is read as their
    mean, and said by a mean in which each token counts half of the one before it: the donor would say the first of them now, but
    by that row alone all ids with one beginning would be equally likely (so does transplant-vocab). A matrix that serves for
    both, as it does where the donor's is tied (or `tied` says so), is the plain mean.

    Special tokens go by their role, then by their name; `told` gives texts of the donor for tokens of the target that neither
    finds ({"<|user|>": "<|im_start|>user"}). What is left gets the mean of all rows, which no hidden state prefers.
    """
    own = bool(getattr(donor.config.get_text_config(), "tie_word_embeddings", False))
    if tied and not own:
        raise ValueError(
            "tied=True asked of a donor with a head of its own: one of its two matrices would be lost; leave `tied` out"
        )
    spelled, kinds = _spelled(donor_tokenizer, target_tokenizer, vocab_size, told or {}, output_rows(donor))
    config = copy.deepcopy(donor.config)
    for one in (config, config.get_text_config()):
        one.vocab_size, one.tie_word_embeddings = vocab_size, own if tied is None else tied
        one.bos_token_id, one.eos_token_id = target_tokenizer.bos_token_id, target_tokenizer.eos_token_id
        one.pad_token_id = target_tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=donor.dtype)
    state = dict(donor.state_dict())
    real = [one for one in donor_tokenizer.get_vocab().values() if one < output_rows(donor)]
    embedding, head = donor.get_input_embeddings(), donor.get_output_embeddings()
    for module, decay in ((embedding, 1.0), (head, 1.0 if config.get_text_config().tie_word_embeddings else 0.5)):
        for name, weight in _parameters(donor, module):
            state[name] = _mixed(weight, spelled, decay, real)
    model.load_state_dict(state, strict=True)
    counts = torch.bincount(kinds, minlength=len(KINDS)).tolist()
    return Transplanted(model.to(donor.device).eval(), Report._make([*counts, kinds]))


def _spelled(donor: Any, target: Any, vocab_size: int, told: Mapping[str, str], rows: int) -> tuple[list[list[int]], Tensor]:
    """For each id of the target the donor's ids that write it, [] where none do; and what kind it is, [V]."""
    names = {i: token for token, i in target.get_vocab().items()}
    if max(names) >= vocab_size:
        raise ValueError(f"vocab_size={vocab_size} asked; the target's tokenizer has ids up to {max(names)}")
    if strange := sorted(told.keys() - target.get_vocab().keys()):
        raise ValueError(f"told of {strange[0]!r}, which is no token of the target")
    meant, spell, special = token_bytes(target), speller(donor), _special(donor, target)
    one_token, by_name = _one_token(donor), donor.get_vocab()
    theirs = token_bytes(donor)
    spelled, kinds = [], []
    for i in range(vocab_size):
        name = names.get(i)
        if name is None:
            ids, kind = [], "padding"
        elif name in told:
            ids, kind = list(donor(told[name], add_special_tokens=False).input_ids), "told"
        elif i not in meant:
            ids, kind = special(i, name)
        elif theirs.get(by_name.get(name, -1)) == meant[i]:  # <0x0A> is <0x0A>, though the donor may have a newline besides
            ids, kind = [by_name[name]], "exact"
        elif meant[i] in one_token:
            ids, kind = [one_token[meant[i]]], "exact"
        else:
            ids, kind = spell(meant[i]), "composed"
        if kind != "padding" and (not ids or max(ids) >= rows):
            ids, kind = [], "unknown"
        spelled.append(ids)
        kinds.append(KINDS.index(kind))
    return spelled, torch.tensor(kinds)


def _special(donor: Any, target: Any) -> Any:
    """What finds the donor's token for a special token of the target: by what it does in a text, then by its name."""
    ours, theirs = specials(target), specials(donor)
    if "eos" in theirs:
        theirs.setdefault("end of turn", theirs["eos"])  # a base model's
    named = {str(donor.convert_ids_to_tokens(i)): i for i in control_ids(donor)}

    def find(i: int, name: str) -> tuple[list[int], str]:
        for roles in (TELLING, SILENT):
            for role in roles:
                if role in ours and role in theirs and ours[role].id == i:
                    return [theirs[role].id], "exact" if theirs[role].token == name else "role"
            if name in named:
                return [named[name]], "exact"
        return [], "unknown"

    return find


def _one_token(donor: Any) -> dict[bytes, int]:
    """The donor's token for a text; where it has two, the one that is not a raw byte, and then the lower id."""
    names = donor.convert_ids_to_tokens
    found: dict[bytes, int] = {}
    for i, text in sorted(token_bytes(donor).items(), key=lambda one: (RAW.fullmatch(names(one[0])) is not None, one[0])):
        found.setdefault(text, i)
    return found


def _parameters(model: PreTrainedModel, module: nn.Module) -> list[tuple[str, Tensor]]:
    """A part's parameters, a row for each id, by their names in the whole."""
    home = next(name for name, one in model.named_modules() if one is module)
    return [(f"{home}.{name}", one) for name, one in module.named_parameters()]


def _mixed(weight: Tensor, spelled: list[list[int]], decay: float, real: list[int]) -> Tensor:
    """For each id the mean of the donor's rows [D, ...] that spell it, each weighing `decay` times the one before it: [V, ...]."""
    table = weight.detach().float().reshape(len(weight), -1)
    shares = [[decay**place / sum(decay**n for n in range(len(ids))) for place in range(len(ids))] for ids in spelled]
    starts = torch.tensor([0, *(len(ids) for ids in spelled)], device=table.device).cumsum(0)[:-1]
    places = torch.tensor([one for ids in spelled for one in ids], dtype=torch.long, device=table.device)
    weights = torch.tensor([one for some in shares for one in some], dtype=torch.float32, device=table.device)
    made = nn.functional.embedding_bag(places, table, starts, mode="sum", per_sample_weights=weights)
    made[torch.tensor([not ids for ids in spelled], device=table.device)] = table[real].mean(0)
    return made.to(weight.dtype).reshape(len(spelled), *weight.shape[1:])
