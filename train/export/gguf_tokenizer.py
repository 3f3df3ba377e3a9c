"""A tokenizer as llama.cpp keeps it: in metadata, by scores or with the split into words by a name; a split that has no name there is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFReader, GGUFValueType, TokenType

from draftsmith.specdec.tokens import RAW, control_ids, end_of_turn, kind
from draftsmith.train.export.gguf_pieces import pieces


class Entry(NamedTuple):
    """One line of a file's metadata; `of` is what a list holds."""

    key: str
    value: Any
    kind: GGUFValueType
    of: GGUFValueType | None = None


class Vocabulary(NamedTuple):
    """The entries, and in which texts llama.cpp will read other tokens than transformers does."""

    entries: list[Entry]
    notes: list[str]


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is split into words, and whether a word that is a token is taken whole, whatever the merges say: llama.cpp knows both by
# one name. The patterns are those that src/llama-vocab.cpp (0.5.0) quotes from the tokenizers that gave the names.
SPLITS: dict[tuple[tuple[str, ...], bool], str] = {
    (("gpt2",), False): "gpt-2",
    (("digit", "gpt2"), False): "smollm",
    ((WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST, "bytes"), True): "llama-bpe",
    ((WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST, "bytes"), False): "dbrx",
    ((WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST, "bytes"), False): "qwen2",
    ((WORDS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}" + REST.replace(r"^\s\p{L}", r"^\s\p{L}\p{M}"), "bytes"), False): "qwen35",
    ((CASED % ("", "") + r"\p{N}" + SLASHED, "bytes"), True): "tekken",
    ((CASED % (WORDS + "?", WORDS + "?") + r"\p{N}{1,3}" + SLASHED, "bytes"), False): "gpt-4o",
}


def vocabulary(tokenizer: Any, rows: int, bos: int | None = None, split: str | None = None) -> Vocabulary:
    """Everything llama.cpp needs of a BPE, of bytes or of sentencepiece's, for a model of `rows` ids.

    `bos`: the model's, where the tokenizer names none (llama.cpp would take id 11). `split`: what llama.cpp calls its
    pre-tokenizer, where that is known better than by its pattern.
    """
    whole = _plain(tokenizer)
    texts, types = _tokens(tokenizer, rows)
    string, integer, truth = GGUFValueType.STRING, GGUFValueType.UINT32, GGUFValueType.BOOL
    by_score = pieces(whole, texts) if whole["model"].get("byte_fallback") else None
    entries = [
        Entry("tokenizer.ggml.model", "gpt2" if by_score is None else "llama", string),
        Entry("tokenizer.ggml.pre", (split or split_name(whole)) if by_score is None else "default", string),
        Entry("tokenizer.ggml.tokens", texts, GGUFValueType.ARRAY, string),
        Entry("tokenizer.ggml.token_type", types, GGUFValueType.ARRAY, GGUFValueType.INT32),
    ]
    if by_score is None:
        pairs = [one if isinstance(one, str) else " ".join(one) for one in whole["model"]["merges"]]
        # The writer cannot write an empty list, and llama.cpp wants the key: a merge of nothing merges nothing.
        entries.append(Entry("tokenizer.ggml.merges", pairs or [" "], GGUFValueType.ARRAY, string))
    else:
        entries.append(Entry("tokenizer.ggml.scores", by_score.scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32))
    plain = list(tokenizer("a").input_ids)
    ids = {one: getattr(tokenizer, f"{one}_token_id", None) for one in ("bos", "eos", "unk", "pad")} | {
        "eot": end_of_turn(tokenizer)
    }
    if ids["bos"] is None:
        ids["bos"] = bos
    spelled = {"unk": "unknown", "pad": "padding"}
    for role, i in ids.items():
        if i is not None:
            entries.append(Entry(f"tokenizer.ggml.{spelled.get(role, role)}_token_id", int(i), integer))
    # Always said: some names of a split make llama.cpp add a BOS by itself.
    entries += [
        Entry("tokenizer.ggml.add_bos_token", ids["bos"] is not None and plain[:1] == [ids["bos"]], truth),
        Entry("tokenizer.ggml.add_eos_token", ids["eos"] is not None and plain[-1:] == [ids["eos"]], truth),
        Entry("tokenizer.ggml.add_space_prefix", by_score is not None and by_score.prefix, truth),
    ]
    if tokenizer.chat_template:
        entries.append(Entry("tokenizer.chat_template", str(tokenizer.chat_template), string))
    return Vocabulary(entries, _notes(whole, tokenizer, split) if by_score is None else by_score.notes)


def copied(path: Path, rows: int) -> Vocabulary:
    """The tokenizer of a .gguf as that file has it, entry by entry: a pair with that file agrees by construction."""
    fields = GGUFReader(path).fields
    entries = [
        Entry(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for key, field in fields.items()
        if key.startswith("tokenizer.")
    ]
    had = next((len(one.value) for one in entries if one.key == "tokenizer.ggml.tokens"), 0)
    if had != rows:
        raise ValueError(
            f"{path.name} has {had} tokens and the draft {rows} rows; llama.cpp would abort at a token that one has not"
        )
    return Vocabulary(entries, [])


def split_name(whole: dict[str, Any]) -> str:
    """llama.cpp's name for a tokenizer's split into words (`whole`: tokenizer.json); ValueError where it has none."""
    first = whole["pre_tokenizer"] or {}
    parts = tuple(_part(one) for one in (first["pretokenizers"] if first.get("type") == "Sequence" else [first]))
    key = (parts, bool(whole["model"].get("ignore_merges")))
    if key in SPLITS:
        return SPLITS[key]
    near = SPLITS.get((parts, not key[1]))
    raise ValueError(
        f"the tokenizer splits text by {json.dumps(first)[:300]} (ignore_merges {key[1]}), which is none of the splits known here "
        f"({', '.join(SPLITS.values())}{f'; {near} differs in ignore_merges alone' if near else ''}). A draft is handed ids and splits no text: "
        "name the one that the target's own .gguf has (tokenizer.ggml.pre) with export.split=NAME"
    )


def _part(one: dict[str, Any]) -> str:
    kind = one.get("type")
    if kind == "ByteLevel" and not one.get("add_prefix_space"):
        return "gpt2" if one.get("use_regex", True) else "bytes"
    if kind == "Digits" and one.get("individual_digits"):
        return "digit"
    if kind == "Split" and one.get("behavior") in ("Isolated", "isolated") and not one.get("invert"):
        return str(one["pattern"].get("Regex", one["pattern"]))
    return json.dumps(one)


def _plain(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json of a BPE of bytes, or of sentencepiece's with bytes to fall back on; what else a tokenizer may be is refused."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {"model": {"type": type(tokenizer).__name__}}
    model = whole["model"]
    found = kind(tokenizer)
    if model["type"] != "BPE" or found != ("sentencepiece" if model.get("byte_fallback") else "byte-level"):
        raise ValueError(
            f"the tokenizer is a {found} {model['type']}; written here are byte-level BPE tokenizers (Llama 3, Qwen, SmolLM, GPT-2 ...), and "
            "sentencepiece's BPE with a token for each byte (Llama 2, Mistral ...). llama.cpp's own convert_hf_to_gguf.py converts the plain folder (--format transformers) of such a model"
        )
    if odd := [one for one in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(one)]:
        raise ValueError(f"the tokenizer's BPE has a {odd[0]} ({model[odd[0]]!r}), which llama.cpp's has not")
    if found == "byte-level" and (whole["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        raise ValueError(
            f"the tokenizer rewrites its text first ({json.dumps(whole['normalizer'])[:200]}), which llama.cpp does not"
        )
    return whole


def _tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    """Text and type of each of `rows` ids; rows that no token owns are named as llama.cpp's converter names them."""
    texts = [f"[PAD{i}]" for i in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    by_pieces = kind(tokenizer) == "sentencepiece"
    vocabulary, added, control = tokenizer.get_vocab(), tokenizer.added_tokens_decoder, control_ids(tokenizer)
    if (last := max(vocabulary.values())) >= rows:
        raise ValueError(f"the draft has {rows} rows and the tokenizer an id {last}; llama.cpp would abort at it")
    for token, i in vocabulary.items():
        texts[i] = added[i].content if i in added else token
        # llama.cpp's converter takes for control tokens what looks like them too, and a pair should agree.
        special = i in control or (i in added and token.startswith("<|") and token.endswith("|>"))
        types[i] = int(TokenType.CONTROL if special else TokenType.USER_DEFINED if i in added else TokenType.NORMAL)
        if by_pieces and i not in added and RAW.fullmatch(token):
            types[i] = int(TokenType.BYTE)
    if by_pieces and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = int(TokenType.UNKNOWN)
    seen: dict[str, int] = {}
    for i, text in enumerate(texts):
        if not text or text in seen:
            raise ValueError(
                f"ids {seen.get(text)} and {i} are both written {text!r}; llama.cpp wants each text once, and none empty"
            )
        seen[text] = i
    return texts, types


def _notes(whole: dict[str, Any], tokenizer: Any, split: str | None) -> list[str]:
    stripped = sorted(one.content for one in tokenizer.added_tokens_decoder.values() if one.lstrip or one.rstrip or one.single_word)
    notes = [f"the split {split!r} was named, not found out: texts may be split otherwise"] if split else []
    if whole["normalizer"]:
        notes.append("llama.cpp does not normalise text to NFC first, transformers does: text that is not NFC gets other tokens")
    if stripped:
        notes.append(f"llama.cpp keeps the spaces around {', '.join(stripped[:5])}, transformers does not")
    return notes
