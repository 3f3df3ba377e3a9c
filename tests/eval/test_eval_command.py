"""`draftsmith eval` on a tiny target: what its report holds, how it goes on after an interrupt, and what is refused before any decoding."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval import measuring, run
from draftsmith.eval.bench import Answered
from draftsmith.eval.kept import Kept
from draftsmith.recipes import load_recipe
from draftsmith.recipes.seen import write_seen
from runs import inside, write_run

CANDIDATES = [
    {"drafter": "ngram", "k": [2, 3]},
    {"drafter": "exit:2", "k": [1, "adaptive"], "name": "exit"},
    {"drafter": "exit:3", "k": 2, "name": "whole"},
    {"drafter": "ngram+exit:2", "k": 2, "name": "both"},
]
NAMES = ["ngram, k=2", "ngram, k=3", "exit, k=1", "exit, k=adaptive", "whole", "both"]
LINES = [
    {"id": "a", "category": "odd", "turns": ["amber birch amber birch amber", "and more"]},
    {"id": "b", "category": "even", "turns": ["cedar 4"]},
    {"id": "c", "category": "odd", "turns": ["ember fjord"]},
    {"id": "d", "category": "even", "turns": ["heron heron"]},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("eval")
    evaluation = {"prompts": str(home / "p.jsonl"), "max_new_tokens": 8, "bootstrap": 100, "candidates": CANDIDATES}
    write_run(home, eval=evaluation)
    (home / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in LINES))
    return home


def evaluate(place: Path, runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return inside("eval", place / "small.yaml", f"runs={runs}", *words)


def report(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "small" / "report.json").read_text())


def kept(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / "small" / "measurements.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    done = evaluate(place, place / "runs")
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    (place / "stderr").write_text(done.stderr)
    return place / "runs"


def test_the_report_has_every_figure_and_defines_it(finished: Path, place: Path) -> None:
    found = report(finished)
    assert found["schema"] == 2
    (part,) = found["parts"]
    assert part["setting"] == {"prompts": str(place / "p.jsonl"), "temperature": 0.0, "batch": 1}
    assert (part["prompts"], part["prompts_in_file"], part["answers"], part["kinds"]) == (4, 4, 5, ["odd", "even"])
    assert list(part["candidates"]) == NAMES
    for name, one in part["candidates"].items():
        figures = one["all"]
        assert figures["equal"] == figures["compared"] == 5, name
        assert figures["new_tokens"] == figures["target_calls"] + figures["accepted"]
        assert figures["tau"]["value"] == pytest.approx(1 + figures["tau_without_bonus"])
        assert sum(figures["histogram"]) == figures["drafts"]
        assert sum(place * count for place, count in enumerate(figures["histogram"])) == figures["accepted"]
        assert 0 < figures["first_token_ms"] < figures["answer_ms"]
        assert 0 < figures["per_token_ms"] < figures["answer_ms"]
        assert figures["peak_bytes"] > 0
        assert set(one["kinds"]) == {"odd", "even"}
        assert sum(one["kinds"][kind]["new_tokens"] for kind in one["kinds"]) == figures["new_tokens"]
    page = (finished / "small" / "report.md").read_text()
    for word in found["definitions"]:
        assert f"- **{word}**: " in page
    assert page.startswith("# small: what the drafts are worth\n\n- ")
    assert "Plain decoding against itself" in page
    assert len([one for one in found["measurements"] if one["drafter"] == "plain decoding again"]) == 5
    assert len(found["measurements"]) == 5 * (len(NAMES) + 1)
    assert part["noise"]["low"] <= part["noise"]["value"] <= part["noise"]["high"]
    few, cut_off = found["guards"]
    assert "2 of 2 kinds of text have fewer than 10 prompts" in few
    assert "max_new_tokens" in cut_off
    said = (place / "stdout").read_text()
    for word in ("What a round costs", "were not decoding", "report.md"):
        assert word in said
    assert "5 answers in 1 part; each by 6 candidates and twice plainly: 0:0" in (place / "stderr").read_text()


def test_predictions_are_of_fixed_blocks_and_laws_are_of_models(finished: Path) -> None:
    candidates = report(finished)["parts"][0]["candidates"]
    assert candidates["exit, k=adaptive"]["predicted"] is None
    for name in ("ngram, k=2", "exit, k=1", "whole", "both"):
        said = candidates[name]["predicted"]
        assert said["decoding"] == pytest.approx(said["tau"] / (said["drafted"] * said["c"] + said["r"] + said["o"]))
        assert said["over_measured"] == pytest.approx(said["speed_up"] / candidates[name]["all"]["speed_up"]["value"])
        assert said["tau"] == pytest.approx(candidates[name]["all"]["tau"]["value"])
        assert len(said["r_by_tokens"]) > 0
        assert said["forecast"] > 0
    assert [n for n, _ in candidates["exit, k=1"]["predicted"]["r_by_tokens"]] == [2]
    assert candidates["ngram, k=3"]["teacher_forced"] is None
    whole, one, both = (candidates[name]["teacher_forced"] for name in ("whole", "exit, k=1", "both"))
    assert (whole["alpha"], whole["by_position"], whole["of"]) == (1.0, [1.0, 1.0], "the draft")
    assert (both["of"], both["block_length"]) == ("its model", None)
    assert both["alpha"] == one["alpha"] == candidates["exit, k=adaptive"]["teacher_forced"]["alpha"]
    assert one["low"] <= one["alpha"] <= one["high"]
    # At temperature 0 what is forced is what is measured, round for round.
    for name in ("whole", "exit, k=1"):
        assert candidates[name]["teacher_forced"]["block_length"] == pytest.approx(candidates[name]["all"]["tau"]["value"])
    assert candidates["ngram, k=2"]["bytes_share"] == 0
    assert candidates["ngram, k=2"]["all"]["mbsu"] == candidates["ngram, k=2"]["all"]["tau"]["value"]
    assert 0.5 < candidates["exit, k=1"]["bytes_share"] < candidates["whole"]["bytes_share"] == 1


def test_examples_are_the_answers_cut_by_who_wrote_them(finished: Path) -> None:
    examples = report(finished)["examples"]
    assert [(one["prompt"], one["kind"]) for one in examples] == [("a", "odd"), ("b", "even")]
    assert [one["asked"] for one in examples] == [LINES[0]["turns"][0], LINES[1]["turns"][0]]  # not only what it is called
    assert LINES[0]["turns"][0] in (finished / "small" / "report.html").read_text()
    said = {
        line["answer"]["group"][0]: line["answer"]["said"][0]
        for line in kept(finished)
        if "answer" in line and line["answer"]["turn"] == 0
    }
    for one in examples:
        assert "".join(text for text, _ in one["pieces"]) == said[one["prompt"]]
        assert {who for _, who in one["pieces"]} <= {"draft", "target"}
    pieces = next(line for line in kept(finished) if "answer" in line)["answer"]["pieces"]["a"]["whole"]
    assert [who for _, who in pieces][:2] == ["target", "draft"]  # the prefill's token, then what the whole target drafted


def test_the_same_command_measures_nothing_anew(finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lines = report(finished), (finished / "small" / "measurements.jsonl").read_bytes()

    def never(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run, "load", never)
    done = evaluate(place, finished)
    assert done.returncode == 0, done.stderr
    assert "all answers were measured before; remove" in done.stderr
    assert (finished / "small" / "measurements.jsonl").read_bytes() == lines
    assert report(finished)["parts"] == before["parts"]
    few = evaluate(place, finished, "eval.per_kind=1")
    assert "2 of 4 prompts; for all of them: draftsmith eval" in few.stdout
    assert evaluate(place, finished).returncode == 0


def test_a_killed_evaluation_goes_on_behind_its_last_answer(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measuring.measure

    def interrupted(*args: Any) -> Iterator[Answered]:
        for number, one in enumerate(real(*args)):
            if number == 1:  # between the two turns of the first prompt
                raise KeyboardInterrupt
            yield one

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "measure", interrupted)
        assert evaluate(place, tmp_path).returncode == 130
    assert not (tmp_path / "small" / "report.json").exists()
    first = (tmp_path / "small" / "measurements.jsonl").read_text()
    assert [(line["answer"]["group"], line["answer"]["turn"]) for line in kept(tmp_path) if "answer" in line] == [(["a"], 0)]
    with (tmp_path / "small" / "measurements.jsonl").open("a") as stream:
        stream.write('{"fingerprint": "torn')
    asked: list[tuple[list[str], int]] = []

    def watched(*args: Any) -> Iterator[Answered]:
        for one in real(*args):
            asked.append(([prompt.id for prompt in one.group], one.turn))
            yield one

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "measure", watched)
        patch.setattr(measuring, "costs", None)  # what was clocked is kept too
        done = evaluate(place, tmp_path)
    assert done.returncode == 0, done.stderr
    assert asked == [(["a"], 1), (["b"], 0), (["c"], 0), (["d"], 0)]
    assert "5 answers in 1 part, 1 of them kept from before" in done.stderr
    assert (tmp_path / "small" / "measurements.jsonl").read_text().startswith(first)
    found = report(tmp_path)
    assert found["how"]["sittings"] == 2
    assert "measured in 2 sittings, after interruptions" in found["how"]["time"]["said"]
    assert "measured in 2 sittings" in (tmp_path / "small" / "report.md").read_text()
    assert all(one["all"]["equal"] == 5 for one in found["parts"][0]["candidates"].values())


@pytest.mark.parametrize("change", ["eval.max_new_tokens=4", "eval.candidates=[{drafter: ngram, k: adaptive}]"])
def test_another_setting_begins_anew_and_the_first_is_still_there(
    finished: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    shutil.copytree(finished / "small", tmp_path / "small")
    had = len(kept(tmp_path))
    done = evaluate(place, tmp_path, change, "eval.per_kind=1")
    assert done.returncode == 0, done.stderr
    assert "kept from before" not in done.stderr
    assert report(tmp_path)["how"]["sittings"] == 1
    assert len(kept(tmp_path)) > had
    assert "all answers were measured before" in evaluate(place, tmp_path).stderr


def test_a_changed_prompt_is_measured_anew(finished: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "small", tmp_path / "small")
    path = tmp_path / "small" / "measurements.jsonl"
    lines = kept(tmp_path)
    for line in lines:
        if line.get("answer", {}).get("group") == ["c"]:
            line["answer"]["digest"] = "of another text"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = evaluate(place, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 of them kept from before" in done.stderr


def test_a_line_that_nobody_wrote_is_named(place: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "measurements.jsonl").write_text('{"fingerprint": 1}\nnonsense\n')
    done = evaluate(place, tmp_path)
    assert done.returncode == 2
    assert "line 2, is none that an evaluation wrote" in done.stderr


def test_files_temperatures_and_batches_are_parts_that_a_second_call_may_add_to(place: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.jsonl"
    two.write_text("".join(json.dumps(one) + "\n" for one in LINES[1:]))
    few = ["eval.candidates=[{drafter: exit:2, k: 2}, {drafter: ngram, k: 2}]"]
    assert (
        evaluate(
            place, tmp_path, *few, f"eval.prompts={two}", "eval.temperatures=[0]", "eval.sampling={top_k: 20, top_p: 0.9}"
        ).returncode
        == 0
    )
    grid = [f"eval.prompts=[{two}]", "eval.temperatures=[0, 0.8]", "eval.batches=[1, 2]", "eval.sampling={top_k: 20, top_p: 0.9}"]
    done = evaluate(place, tmp_path, *few, *grid)
    assert done.returncode == 0, done.stderr
    assert "12 answers in 4 parts, 3 of them kept from before" in done.stderr
    found = report(tmp_path)
    assert [(one["setting"]["temperature"], one["setting"]["batch"]) for one in found["parts"]] == [
        (0, 1),
        (0, 2),
        (0.8, 1),
        (0.8, 2),
    ]
    assert [one["answers"] for one in found["parts"]] == [3, 3, 3, 3]
    assert [(one["small_batches"], one["batches"]) for one in found["parts"]] == [(0, 3), (1, 2), (0, 3), (1, 2)]
    assert [one["candidates"]["exit:2"]["all"]["compared"] for one in found["parts"]] == [3, 3, 0, 0]
    assert found["parts"][1]["candidates"]["exit:2"]["all"]["equal"] == 3
    assert (
        "temperature 0.8, batch 2: 3 answers to 3 of 3 prompts; 1 of 2 batches were smaller"
        in (tmp_path / "small" / "report.md").read_text()
    )
    assert any(one.startswith(f"At {two}, temperature 0.8, batch 2: ") for one in found["advice"])
    pages = {name: (tmp_path / "small" / f"report.{name}").read_text().replace("\u00a0", " ") for name in ("md", "html")}
    assert "8 new tokens at most; above temperature 0 drawn from top-k 20, top-p 0.9, seed 0" in pages["md"]
    assert found["how"]["sampling"] == {"top_k": 20, "top_p": 0.9}  # each part has its own temperature
    for part in found["parts"]:
        verdict, *more = part["advice"]
        for text in pages.values():
            assert (
                f"temperature {part['setting']['temperature']:g}, batch {part['setting']['batch']}: {verdict[0].lower()}{verdict[1:]}"
                in text
            )
            assert more
            assert all(html.escape(one) in text or one in text for one in more)
    shares = [one for one in found["measurements"] if one["batch"] == 2 and one["temperature"] == 0 and one["drafter"] == "ngram"]
    assert [one["rows"] for one in shares] == [2, 2, 1]
    assert shares[0]["seconds"] == shares[1]["seconds"]
    assert shares[0]["group"] == shares[1]["group"] != shares[2]["group"]
    # A draw hangs on its prompt, not on its neighbours.
    texts: dict[int, dict[str, str]] = {1: {}, 2: {}}
    for line in kept(tmp_path):
        if "answer" in line and line["answer"]["part"][1] == 0.8:
            one = line["answer"]
            texts[one["part"][2]] |= dict(zip(one["group"], one["said"], strict=True))
    assert texts[1] == texts[2]
    assert len(set(texts[1].values())) == 3


def test_prompts_that_a_draft_of_another_run_was_trained_on_are_said(place: Path, tmp_path: Path) -> None:
    draft = tmp_path / "another" / "step-8" / "draft"
    shutil.copytree(place / "target", draft)
    write_seen(tmp_path / "another", [LINES[1]["turns"][0]])
    done = evaluate(place, tmp_path, f"eval.candidates=[{{drafter: '{draft}', k: 2}}]", "eval.max_new_tokens=4")
    assert done.returncode == 0, done.stderr
    assert "1 of 4 prompts were seen in training (even 1)" in done.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("eval.batches=[5]",), "a batch of 5 asked; there are 4 prompts, and at most 3 of as many turns"),
        (("eval.batches=[0]",), "eval.batches.0: input should be greater than 0"),
        (("eval.batches=[2, 2]",), "eval.batches: value error, each at most once"),
        (("eval.temperatures=[0, 0]",), "eval.temperatures: value error, each at most once"),
        (("eval.temperatures=[-1]",), "eval.temperatures.0: input should be greater than or equal to 0"),
        (("eval.prompts=[]",), "eval.prompts: list should have at least 1 item"),
        (("eval.max_new_tokens=3000",), "prompt a of"),
        (("eval.candidates=[{drafter: ngram, k: []}]",), "eval.candidates.0.k: list should have at least 1 item"),
        (("eval.candidates=[{drafter: ngram, k: [2, 2]}]",), "each at most once"),
        (
            ("eval.candidates=[{drafter: ngram, k: [2, 3]}, {drafter: exit:1, name: 'ngram, k=2'}]",),
            "two candidates are called the same",
        ),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is_decoded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was decoded")

    monkeypatch.setattr(measuring, "costs", never)
    done = evaluate(place, tmp_path, *words)
    assert done.returncode == 2
    assert why in done.stderr, done.stderr


def test_a_window_that_a_batch_cannot_share_is_refused_for_the_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.eval.bench import Bench, refuse_unservable
    from draftsmith.eval.measurement import Arm
    from draftsmith.recipes import Prompt
    from draftsmith.specdec import NgramDrafter, Sampling
    from tiny import tiny, tiny_tokenizer

    target = tiny("mistral", vocab_size=260, sliding_window=40)
    prompts = [Prompt(name, "all", [], ["x" * 12]) for name in "ab"]
    bench = Bench(target, tiny_tokenizer(), [Arm("ngram", NgramDrafter(), 2)], Sampling(), 40, batch=2, prompts="p.jsonl")
    with pytest.raises(ValueError, match="batch 2, prompts from a on: MistralForCausalLM attends to a window of 40 columns"):
        refuse_unservable(bench, [prompts])


def test_a_recipe_of_one_file_and_one_k_is_as_it_was(place: Path) -> None:
    recipe = load_recipe(place / "small.yaml", ["eval.candidates=[{drafter: ngram, k: adaptive}]"])
    assert [(arm.name, arm.drafter, arm.k) for arm in recipe.eval.arms] == [("ngram", "ngram", "adaptive")]
    assert recipe.eval.files == [str(place / "p.jsonl")]
    assert isinstance(Kept(place, "x").done, dict)
