"""Guards: each says its count where something is amiss, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.guards import FEW, guards
from draftsmith.recipes import Prompt
from draftsmith.recipes.seen import trained_in, write_seen

KINDS = ("chat", "code")


def answered(prompts: list[Prompt], tokens: int = 20, candidates: int = 2, **changes: int) -> dict[str, Any]:
    """A report on the prompts; `changes` are tokens of single prompts' answers."""
    lines = [
        {"drafter": f"d{n}", "prompt": one.id, "category": one.category, "temperature": 0.0, "batch": 1, "baseline_tokens": changes.get(one.id, tokens)}
        for one in prompts
        for n in range(candidates)
    ]  # fmt: skip
    return {
        "how": {"max_new_tokens": 32},
        "parts": [{"setting": {"prompts": "a/file.jsonl", "temperature": 0.0, "batch": 1}}],
        "measurements": lines,
    }


def asked(each: int = FEW) -> list[Prompt]:
    return [Prompt(f"{kind}{n}", kind, [], [f"What is {kind} {n}?"]) for kind in KINDS for n in range(each)]


def said(prompts: list[Prompt], folder: Path, **changes: Any) -> list[str]:
    return guards(answered(prompts, **changes), {"a/file.jsonl": prompts}, folder)


def test_nothing_amiss_nothing_said(tmp_path: Path) -> None:
    assert said(asked(), tmp_path) == []
    write_seen(tmp_path, ["What is another?"])
    assert said(asked(), tmp_path) == []


def test_too_few_prompts_of_a_kind(tmp_path: Path) -> None:
    (one,) = said(asked()[:-1], tmp_path)  # the last is code
    assert one.startswith(f"1 of 2 kinds of text has fewer than {FEW} prompts (code {FEW - 1})")
    (one,) = said(asked(2), tmp_path)
    assert one.startswith(f"2 of 2 kinds of text have fewer than {FEW} prompts (chat 2, code 2)")


def test_answers_that_were_cut_off_are_counted_once_however_many_candidates_there_are(tmp_path: Path) -> None:
    (one,) = said(asked(), tmp_path, tokens=32)
    assert one.startswith("All 20 answers were cut off at 32 tokens")
    half: dict[str, Any] = {f"chat{n}": 32 for n in range(10)}
    (one,) = said(asked(), tmp_path, **half)
    assert one.startswith("10 of 20 answers were cut off at 32 tokens")
    del half["chat0"]
    assert said(asked(), tmp_path, **half) == []


def test_answers_of_one_token(tmp_path: Path) -> None:
    (one,) = said(asked(), tmp_path, chat3=1)
    assert one.startswith("1 of 20 answers is of one token or none")
    (one,) = said(asked(), tmp_path, chat3=1, code2=0)
    assert one.startswith("2 of 20 answers are of one token")


def test_prompts_of_the_file_that_repeat_another_in_letters_that_matter(tmp_path: Path) -> None:
    prompts = asked()
    prompts[3] = prompts[3]._replace(turns=[" what IS\tchat  1? "])
    (one,) = said(prompts, tmp_path)
    assert one.startswith("1 of the 20 prompts of the file repeats another (chat3 = chat1)")
    prompts[3] = prompts[1]._replace(id="chat3", turns=[*prompts[1].turns, "And then?"])  # begins alike, goes on otherwise
    assert said(prompts, tmp_path) == []


def test_prompts_that_training_read_are_counted_by_kind_by_their_first_turn(tmp_path: Path) -> None:
    write_seen(tmp_path, ["What is chat 1?", "what is  CHAT 2?", "What is code 4?", "What is code 99?"])
    prompts = asked()
    prompts[2] = prompts[2]._replace(turns=[prompts[2].turns[0], "And then?"])
    prompts[14] = prompts[14]._replace(
        history=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompts[14].turns[0]}], turns=["More."]
    )
    (one,) = said(prompts, tmp_path)
    assert one.startswith("3 of 20 prompts were seen in training (chat 2, code 1)")
    del prompts[1]  # not measured: not counted
    (one,) = guards(answered(prompts), {"a/file.jsonl": asked()}, tmp_path)[1:]
    assert one.startswith("2 of 19 prompts were seen in training")


def test_prompts_that_the_training_of_a_draft_from_another_run_read_are_counted_too(tmp_path: Path) -> None:
    write_seen(tmp_path / "mine", ["What is chat 1?"])
    write_seen(tmp_path / "theirs", ["What is code 2?"])
    draft = tmp_path / "theirs" / "step-8" / "draft"
    draft.mkdir(parents=True)
    assert trained_in(draft) == (tmp_path / "theirs").resolve()
    assert trained_in(tmp_path) is None
    prompts = asked()
    (one,) = guards(answered(prompts), {"a/file.jsonl": prompts}, tmp_path / "mine", tmp_path / "theirs")
    assert one.startswith("2 of 20 prompts were seen in training (chat 1, code 1)")


def test_each_file_of_several_has_its_name_before_what_is_said_of_it(tmp_path: Path) -> None:
    first, second = asked(), asked(2)
    report = answered(first)
    report["measurements"] = [{**one, "prompts": "a/file.jsonl"} for one in report["measurements"]]
    report["measurements"] += [{**one, "prompts": "b/other.jsonl"} for one in answered(second)["measurements"]]
    (one,) = guards(report, {"a/file.jsonl": first, "b/other.jsonl": second}, tmp_path)
    assert one.startswith("other.jsonl: 2 of 2 kinds")


def test_a_file_of_hashes_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.sha256").write_text("What is chat 1?\n")
    with pytest.raises(ValueError, match=r"holds 'What', which is no SHA-256\. Remove the file"):
        said(asked(), tmp_path)
