"""`draftsmith compare`: ratios on the prompts that both answered, and nothing said of what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.cli import main
from draftsmith.eval.compare import compare, page
from draftsmith.eval.compare.paired import answers, paired, ratio, units
from made_reports import made_report

NAMES = ("ngram, k=4", "trained, k=4")


def saved(place: Path, name: str, changes: dict[str, Any] | None = None, **how: Any) -> Path:
    """A run folder with a report; `how` changes its settings."""
    report = made_report(name, names=NAMES, **(changes or {}))
    report["how"] |= how
    (place / name).mkdir()
    (place / name / "report.json").write_text(json.dumps(report))
    return place / name


def test_theirs_over_ours_on_the_same_prompts_drawn_together(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "before"), saved(tmp_path, "after", {"faster": 1.25})
    said = compare([a, b])
    assert said.ratios is not None
    rows = {row[0]: row[1:] for row in said.ratios.rows}
    for name in NAMES:
        setting, prompts, speed, tokens = rows[f"after: {name} / before: {name}"]
        assert setting == "prompts.jsonl, temperature 0, batch 1"
        assert prompts == "12 of 12"
        assert speed == "1.25 (1.25..1.25)"  # every prompt by the same factor, and the pairing takes the rest away
        assert tokens == "1.00 (1.00..1.00)"
    assert said.found == ["after is ahead of before: its fastest, trained, k=4, has 1.25 (1.25..1.25) times the speed-up of trained, k=4 on the same 12 prompts."]  # fmt: skip
    assert said.not_compared == []
    (table,) = said.side_by_side
    assert table.head == ["drafter", "before", "after"]
    assert [row[0] for row in table.rows] == [*NAMES, "answers"]


def test_without_a_difference_they_are_not_told_apart_and_names_that_clash_get_their_places(tmp_path: Path) -> None:
    a = saved(tmp_path, "run")
    (tmp_path / "again").mkdir()
    b = saved(tmp_path / "again", "run", {"seed": 1})
    said = compare([a, b])
    assert [name for name, _ in said.reports] == [f"run ({a})", f"run ({b})"]
    assert f"are not to be told apart: of run ({b}) the fastest, trained, k=4, has" in said.found[0]


def test_only_common_prompts_count_and_without_any_nothing_is_compared(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a"), saved(tmp_path, "b", {"prompts": 4})
    assert {row[2] for row in compare([a, b]).ratios.rows} == {"8 of 12"}  # type: ignore[union-attr]
    report = json.loads((b / "report.json").read_text())
    for one in report["measurements"]:
        one["prompt"] = "another " + one["prompt"]
    (b / "report.json").write_text(json.dumps(report))
    said = compare([a, b])
    assert (said.ratios, said.found) == (None, [])
    assert said.not_compared == ["b and a have no prompt in common at prompts.jsonl, temperature 0, batch 1."]


def test_prompts_of_one_name_that_were_answered_otherwise_are_other_prompts(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a"), saved(tmp_path, "b", {"tokens": 30})
    said = compare([a, b])
    assert said.ratios is None
    assert "another number of tokens to 12 prompts of the same name (chat-0, chat-1, chat-2 ...)" in said.not_compared[0]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"target_revision": "sha256:2"}, "target: sha256:1, sha256:2"),
        ({"dtype": "bf16"}, "dtype: fp32, bf16"),
        ({"max_new_tokens": 64}, "max_new_tokens: 32, 64"),
        ({"sampling": {"temperature": 0.0, "top_k": 5, "top_p": 1.0}}, "top_k: 0, 5"),
    ],
)
def test_texts_of_other_settings_are_not_compared(tmp_path: Path, how: dict[str, Any], says: str) -> None:
    said = compare([saved(tmp_path, "a"), saved(tmp_path, "b", **how)])
    assert said.ratios is None
    assert said.found == []
    assert says in said.not_compared[0]
    assert said.side_by_side  # as they were reported


@pytest.mark.parametrize(
    "how", [{"device": "another"}, {"threads": 2}, {"prepared": "prepared"}, {"versions": {"torch": "3", "transformers": "5"}}]
)
def test_clocks_of_other_conditions_are_not_compared_but_tokens_a_call_are(tmp_path: Path, how: dict[str, Any]) -> None:
    said = compare([saved(tmp_path, "a"), saved(tmp_path, "b", **how)])
    assert said.ratios is not None
    assert all(row[3] == "\u2013" and row[4] == "1.00 (1.00..1.00)" for row in said.ratios.rows)
    assert "only tokens a call are compared" in said.not_compared[0]
    assert "times the tokens a call of" in said.found[0]


def test_another_temperature_batch_or_file_is_another_setting(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a"), saved(tmp_path, "b", {"temperature": 1.0})
    said = compare([a, b])
    assert said.ratios is None
    assert "share no prompts, temperature and batch" in said.not_compared[0]
    assert len(said.side_by_side) == 2


def test_several_parts_are_held_against_their_like(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", {"parts": 2}), saved(tmp_path, "b", {"parts": 2, "faster": 0.8})
    said = compare([a, b])
    assert {row[1] for row in said.ratios.rows} == {
        "prompts.jsonl, temperature 0, batch 1",
        "prompts.jsonl, temperature 1, batch 1",
    }  # type: ignore[union-attr]
    assert {row[3] for row in said.ratios.rows} == {"0.80 (0.80..0.80)"}  # type: ignore[union-attr]
    assert len(said.found) == 2


def test_turns_of_a_prompt_are_one_unit_and_few_prompts_have_no_interval() -> None:
    def answer(prompt: str, turn: int, seconds: float) -> dict[str, Any]:
        return {"prompt": prompt, "turn": turn, "new_tokens": 10, "seconds": seconds, "baseline_tokens": 10, "baseline_seconds": 2.0, "accepted_lengths": [0] * 5}  # fmt: skip

    ours = [answer(prompt, turn, 2.0) for prompt in "ab" for turn in (0, 1)]
    theirs = [answer(prompt, turn, 1.0 + turn) for prompt in "ab" for turn in (0, 1)]
    found = paired(ours, theirs, True)
    assert found.prompts == 2
    assert found.speed_up == {"value": pytest.approx(8 / 6), "low": None, "high": None}
    on_a_slow_day = [{**one, "seconds": 3 * one["seconds"], "baseline_seconds": 3 * one["baseline_seconds"]} for one in theirs]
    assert paired(ours, on_a_slow_day, True).speed_up == found.speed_up | {"value": pytest.approx(8 / 6)}  # type: ignore[operator]


def test_the_interval_is_the_bootstraps_over_units() -> None:
    table = np.array([[float(n), 10.0] for n in (1, 5, 9, 13, 22)])
    found = ratio(table, (1, -1), resamples=4000)
    rng = np.random.default_rng(7)
    drawn = [table[rng.integers(0, 5, 5)].sum(0) for _ in range(4000)]
    low, high = np.percentile([a / b for a, b in drawn], (2.5, 97.5))
    assert found["value"] == pytest.approx(1.0)
    assert found["low"] == pytest.approx(low, abs=0.1)
    assert found["high"] == pytest.approx(high, abs=0.1)


def test_the_command_prints_tables_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved(tmp_path, "[red]<script>"), saved(tmp_path, "after", {"faster": 1.25})
    out = tmp_path / "compare.html"
    assert main(["compare", str(a), str(b / "report.json"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "On the same prompts",
        "1.25 (1.25..1.25)",
        "after is ahead of [red]<script>: ",
        "after: trained, k=4 / [red]<script>: trained, k=4",
        f"page: {out}",
    ):
        assert words in printed
    text = out.read_text()
    assert text.count("<svg") == 1
    assert "<script" not in text
    assert "is ahead of" in text


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(tmp_path, "a")
    assert main(["compare", str(a)]) == 2
    assert "compare takes two reports or more, found 1" in capsys.readouterr().err
    (tmp_path / "old.json").write_text('{"schema": 1}')
    assert main(["compare", str(a), str(tmp_path / "old.json")]) == 2
    assert "is a report of schema 1, and schema 2 is read here. Measure again with this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "lacks"),
    [
        (lambda report: report.pop("measurements"), "lacks measurements. Measure again"),
        (lambda report: report["parts"].append({}), "lacks part 2: setting, part 2: kinds, part 2: candidates. Measure again"),
        (lambda report: report["parts"].append(None), "lacks part 2: setting"),
        (lambda report: report["parts"][0]["setting"].pop("batch"), "lacks part 1: setting.batch"),
    ],
)
def test_a_damaged_report_is_named_with_what_it_lacks(tmp_path: Path, damage: Any, lacks: str) -> None:
    a, b = saved(tmp_path, "a"), saved(tmp_path, "b")
    report = json.loads((b / "report.json").read_text())
    damage(report)
    (b / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"b/report\.json is damaged: it " + lacks):
        compare([a, b])


def test_prompts_of_one_name_whose_texts_differ_are_other_prompts_however_long_the_answers(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a"), saved(tmp_path, "b")
    for place, changed in ((a, ""), (b, "chat-3")):
        report = json.loads((place / "report.json").read_text())
        prompts = {one["prompt"] for one in report["measurements"]}
        report["parts"][0]["texts"] = {one: "other" if one == changed else "same" for one in prompts}
        (place / "report.json").write_text(json.dumps(report))
    said = compare([a, b])
    assert said.ratios is None
    assert "1 prompts of the same name have other texts (chat-3), so these are other prompts" in said.not_compared[0]


def test_rows_of_a_batch_in_either_report_are_drawn_together() -> None:
    def answer(prompt: str, group: str, seconds: float) -> dict[str, Any]:
        return {"prompt": prompt, "group": group, "new_tokens": 10, "seconds": seconds, "baseline_tokens": 10, "baseline_seconds": 2.0, "accepted_lengths": [0] * 5}  # fmt: skip

    ours = [answer(one, one, 2.0) for one in "abcdef"]
    theirs = [answer(one, first, 1.0) for one, first in zip("abcdef", "aaacef", strict=True)]
    one_a_prompt, batched = paired(ours, ours, True), paired(ours, theirs, True)
    assert one_a_prompt.prompts == batched.prompts == 6
    assert units([answers(ours), answers(theirs)]) == {"a": "a", "b": "a", "c": "a", "d": "a", "e": "e", "f": "f"}
    assert one_a_prompt.speed_up is not None
    assert one_a_prompt.speed_up["low"] is not None
    two = [answer(one, first, 1.0) for one, first in zip("abcdef", "aaaddd", strict=True)]
    assert paired(ours, two, True).speed_up == {"value": pytest.approx(2.0), "low": None, "high": None}


def test_a_pipe_gets_all_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (saved(tmp_path, name + "x" * 90) for name in "ab")
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    (line,) = [one for one in printed.splitlines() if one.startswith(f"\u2502 {b.name}: ngram, k=4")]
    assert line.count("1.00 (1.00..1.00)") == 2


def test_the_page_of_reports_that_share_nothing_says_so(tmp_path: Path) -> None:
    text = page(compare([saved(tmp_path, "a"), saved(tmp_path, "b", dtype="bf16")]))
    assert "Nothing here can be compared prompt by prompt" in text
    assert "dtype: fp32, bf16" in text
