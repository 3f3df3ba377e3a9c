"""A sentencepiece tokenizer of Llama 2's kind, made in code: scores first, then the merges that transformers' converter makes of them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("▁the", "the", "▁th", "▁theory", "▁quick", "▁brown", "▁▁", "▁▁▁▁", "ing", "▁running", "ba", "ab", "aba", "▁日本", "日本")
TEXTS = (
    "the theory  that th",
    "  running the quick brown",
    "abababa ab aba",
    "naïve 日本語 🚀\n\n\tx",
    "the</s>the",
)


def pieces_tokenizer(scheme: str = "prepend", drop: int = 0) -> Any:
    """`scheme`: how a space is put before a text (prepend: by a normalizer; else a Metaspace's scheme). `drop` leaves out that many merges."""
    letters = sorted({letter for one in WORDS for letter in one} | set("abcdefghijklmnopqrstuvwxyz▁"))
    # In the order of the words and not by length, `ba` before `ab`: a score that hangs on anything but the order merges otherwise.
    grown = list(dict.fromkeys(one[:end] for one in WORDS for end in range(2, len(one) + 1)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *grown, *letters]
    own = {token: i for i, token in enumerate(tokens)}
    merges = [
        (one[:at], one[at:])
        for one in grown
        for at in sorted(
            (at for at in range(1, len(one)) if one[:at] in own and one[at:] in own), key=lambda at: (own[one[:at]], own[one[at:]])
        )
    ]
    raw = Tokenizer(
        models.BPE(vocab=own, merges=merges[: len(merges) - drop], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if scheme == "prepend":
        raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)  # type: ignore[arg-type]
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
