"""Tokenizers of other kinds and other merges than `tiny_tokenizer`, built in code, for drafts that speak another vocabulary."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

ROLES = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<end>"}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<end>\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def byte_level(
    merges: list[str], roles: dict[str, str] = ROLES, more: tuple[str, ...] = ("<tool>",), template: str | None = TEMPLATE
) -> Any:
    """GPT-2's alphabet with `merges` ("t h", ...), its special tokens in front; one added token, `<note>`, is ordinary text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    tokens = [*roles.values(), *more, *letters, *(one.replace(" ", "") for one in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(one.split(" ")) for one in merges]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **roles)
    if more:
        tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    tokenizer.add_tokens(["<note>"])
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece(merges: list[str]) -> Any:
    """▁ for a space, <0x0A> for a byte that is no letter here, <s> and a space before every text."""
    letters = ["▁", *string.ascii_letters, *string.digits, "é", "."]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *(one.replace(" ", "") for one in merges),
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(one.split(" ")) for one in merges]
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
