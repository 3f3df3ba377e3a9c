"""What two reports do not share, and what of them can still be compared: texts need the same target, clocks the same machine too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.eval.compare.paired import answers
from draftsmith.eval.reports import found

TEXTS = {
    "target": ("target_revision",), "dtype": ("dtype",), "top_k": ("sampling", "top_k"), "top_p": ("sampling", "top_p"),
    "max_new_tokens": ("max_new_tokens",),
}  # fmt: skip
CLOCKS = {"device": ("device",), "threads": ("threads",), "preparation": ("prepared",), "torch": ("versions", "torch"), "transformers": ("versions", "transformers")}  # fmt: skip


class Differences(NamedTuple):
    """Settings that differ, as `what: this, that`: those on which the texts hang, and those on which the clocks do."""

    texts: list[str]
    clocks: list[str]


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    """Of two whole reports."""

    def of(keys: Mapping[str, tuple[str, ...]]) -> list[str]:
        both = {what: (found(a, "how", *path), found(b, "how", *path)) for what, path in keys.items()}
        return [f"{what}: {_said(one)}, {_said(other)}" for what, (one, other) in both.items() if (one or None) != (other or None)]

    return Differences(of(TEXTS), of(CLOCKS))


def same_setting(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Of two parts: the same file of prompts, wherever it lies, the same temperature, the same batch."""
    ours, theirs = a["setting"], b["setting"]
    names = [Path(str(one["prompts"])).name for one in (ours, theirs)]
    return names[0] == names[1] and all(ours[key] == theirs[key] for key in ("temperature", "batch"))


def lines_of(report: Mapping[str, Any], part: Mapping[str, Any], candidate: str) -> list[Mapping[str, Any]]:
    """A candidate's measurements in one part."""
    setting = part["setting"]
    return [
        one
        for one in report["measurements"]
        if one["drafter"] == candidate
        and (one["temperature"], one["batch"]) == (setting["temperature"], setting["batch"])
        and one.get("prompts", setting["prompts"]) in ("", setting["prompts"])
    ]


def other_texts(
    part: Mapping[str, Any], other: Mapping[str, Any], ours: list[Mapping[str, Any]], theirs: list[Mapping[str, Any]]
) -> str | None:
    """Why prompts of the same names are not the same prompts: their texts differ, or, in reports that do not say, greedy plain decoding
    wrote another number of tokens to them."""
    a, b = answers(ours), answers(theirs)
    one, two = found(part, "texts") or {}, found(other, "texts") or {}
    differ = list(dict.fromkeys(prompt for prompt, _ in a if prompt in one and prompt in two and one[prompt] != two[prompt]))
    if differ:
        return f"{len(differ)} prompts of the same name have other texts ({_some(differ)}), so these are other prompts"
    differ = [
        key[0] for key in a if key in b and a[key]["temperature"] == 0 and a[key]["baseline_tokens"] != b[key]["baseline_tokens"]
    ]
    if not differ:
        return None
    return f"plain decoding wrote another number of tokens to {len(differ)} prompts of the same name ({_some(differ)}), so these are other prompts"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _said(value: Any) -> str:
    return "nothing" if value in (None, "") else str(value)
