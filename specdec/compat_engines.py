"""Which engines take a pair of vocabularies, and under what conditions: each as its source says, read or tried in the versions named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from draftsmith.specdec.compat import Compat

NEARLY = 128  # by how many tokens llama.cpp lets two vocabularies differ (common/speculative.cpp)
FROM = 5  # and the id from which on it compares their texts
FAMILIES = {"byte-level": "BPE", "sentencepiece": "SPM", "wordpiece": "WPM"}


class Verdict(NamedTuple):
    """`takes`: yes, no, or `with` where it needs a setting, or works less well than it looks; and why."""

    takes: Literal["yes", "no", "with"]
    why: str


def _sizes(pair: Compat) -> str | None:
    """How the sizes differ that most engines compare."""
    ours, theirs = pair.target.rows, pair.draft.rows
    return None if ours == theirs else f"vocab_size {ours} and {theirs} differ"


def draftsmith(pair: Compat) -> Verdict:
    if pair.problem:
        return Verdict("no", pair.problem)
    spare = "; rows that only pad a head are masked" if _sizes(pair) else ""
    return Verdict("yes", f"all {len(pair.target.tokens)} ids stand for the same tokens{spare}")


def transformers(pair: Compat) -> Verdict:
    """generate(assistant_model=...), 5.24: sizes are compared, tokens are not."""
    both = "pass tokenizer= and assistant_tokenizer= (universal assisted generation, which goes through text and is slower)"
    if differ := _sizes(pair):
        return Verdict("with", f"{differ}: {both}")
    if not pair.same_ids:
        return Verdict("with", f"assistant_model alone is taken, for the sizes are equal, but its ids mean other tokens: {both}")
    return Verdict("yes", "assistant_model=, one prompt at a time")


def vllm(pair: Compat) -> Verdict:
    """--speculative-config {"method": "draft_model"}, 0.32: sizes are compared, tokens are not."""
    if differ := _sizes(pair):
        return Verdict("with", f"{differ}: pad the smaller, or set use_heterogeneous_vocab (greedy drafts, tokens that both have)")
    if not pair.same_ids:
        return Verdict(
            "no", "it starts, for the sizes are equal, but the ids mean other tokens and almost no draft would be accepted"
        )
    return Verdict("yes", "draft_model, vocab_size is equal")


def sglang(pair: Compat) -> Verdict:
    """--speculative-algorithm STANDALONE, 0.5.23."""
    if differ := _sizes(pair):
        return Verdict("no", f"{differ}: pad the smaller")
    if not pair.same_ids:
        return Verdict("no", f"get_vocab() must be equal, {len(pair.differences)} ids differ")
    return Verdict("yes", "STANDALONE, vocab_size and get_vocab() are equal")


def llama_cpp(pair: Compat) -> Verdict:
    """-md with --spec-type draft-simple, on .gguf files of both (a .gguf holds a token for each row of the head)."""
    ours, theirs = pair.target, pair.draft
    families = [FAMILIES.get(one.kind, one.kind) for one in (ours, theirs)]
    if families[0] != families[1]:
        return Verdict("no", f"the vocabularies are of two types, {families[0]} and {families[1]}")
    for role, adds in (("bos", (ours.adds_bos, theirs.adds_bos)), ("eos", (ours.adds_eos, theirs.adds_eos))):
        ids = [one.specials[role].id if role in one.specials else None for one in (ours, theirs)]
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            says = ["adds none" if not does else f"adds id {i}" for does, i in zip(adds, ids, strict=True)]
            return Verdict("no", f"the target {says[0]} as {role.upper()} to a text and the draft {says[1]}")
    if abs(ours.rows - theirs.rows) > NEARLY:
        return Verdict("no", f"{ours.rows} and {theirs.rows} tokens differ by more than {NEARLY}")
    shared = min(ours.rows, theirs.rows)
    if wrong := [one.id for one in pair.differences if FROM <= one.id < shared]:
        return Verdict("no", f"token {wrong[0]} differs ({len(wrong)} from id {FROM} on do)")
    if any(one.id >= shared and one.target is not None for one in pair.differences) or max(ours.tokens) >= theirs.rows:
        return Verdict(
            "with", f"it starts, and aborts at the target's first token beyond {theirs.rows - 1}, the draft's last: pad the draft"
        )
    if low := [one.id for one in pair.differences if one.id < FROM]:
        return Verdict("with", f"it does not look at ids below {FROM}, of which {low} differ: a draft of one is never the target's")
    return Verdict("yes", "vocabulary type, BOS and EOS, and the tokens from id 5 on are equal")


ENGINES: dict[str, Callable[[Compat], Verdict]] = {
    "Draftsmith": draftsmith,
    "transformers assistant_model": transformers,
    "vLLM draft_model": vllm,
    "SGLang STANDALONE": sglang,
    "llama.cpp": llama_cpp,
}
