"""report.html: the verdict first, every figure that is there, none that is not, and no text from outside that becomes markup."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftsmith.eval import page, reports
from draftsmith.eval.page import atlas, document
from draftsmith.eval.page.series import series, with_k
from draftsmith.eval.page.svg import VARIABLES
from draftsmith.eval.page.words import written
from made_reports import made_report

HOSTILE = "\x00<i>$\\frac{x}$</i><script>alert('x')</script>\" onload=x "


class Read(HTMLParser):
    """Tags, ids, attributes and texts of a page; `open` must be empty at its end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def whole() -> str:
    return page.html(made_report())


def test_it_is_one_file_that_asks_nothing_of_any_other_and_closes_what_it_opens(whole: str) -> None:
    read = Read(whole)
    assert read.open == []
    assert "script" not in read.tags
    links = [value for name, value in read.attributes if name in ("src", "href", "xlink:href") and value]
    assert all(one.startswith(("#", "data:")) for one in links)
    assert not re.search(r"url\((?!#)|@import|@font-face", whole)
    assert "default-src 'none'" in whole
    ids = [value for name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {one.removeprefix("#") for one in links if one.startswith("#")} <= set(ids)
    assert all(one in ids for one in re.findall(r"url\(#([^)]+)\)", whole))


def test_verdict_and_advice_come_first_then_plots_texts_tables_words_and_how(whole: str) -> None:
    order = ["Use trained, k=2", "Do not speculate on chat", "Only 6 prompts a kind", 'id="plots-0"', 'id="texts"', 'id="tables-0"', 'id="words"', 'id="how"']  # fmt: skip
    places = [whole.index(one) for one in order]
    assert places == sorted(places)


def test_all_five_pictures_are_there_in_the_pages_own_colours_and_each_says_its_figures(whole: str) -> None:
    drawn = re.findall(r"<svg.*?</svg>", whole, re.DOTALL)
    assert len(drawn) == 5
    for one in drawn:
        assert "var(--ink)" in one or "var(--muted)" in one
        assert not set(re.findall("#[0-9a-f]{6}", one)) & set(VARIABLES)
        assert re.search(r'aria-label="[^"]{60,}"', one)
    made = made_report()["parts"][0]["candidates"]["trained, k=4"]
    (first_accepted, first_tried), *_ = made["all"]["acceptance_by_position"]
    (label,) = [one for one in re.findall(r'aria-label="([^"]*)"', whole) if one.startswith("Share accepted")]
    assert f"{first_accepted / first_tried:.0%}" in label
    (label,) = [one for one in re.findall(r'aria-label="([^"]*)"', whole) if one.startswith("Measured speed-up by k")]
    assert f"trained, k=4 {made['all']['speed_up']['value']:.2f} (predicted {made['predicted']['speed_up']:.2f})" in label


def test_no_text_from_outside_becomes_markup_or_mathematics() -> None:
    report = made_report(HOSTILE)
    part = report["parts"][0]
    part["kinds"] = [HOSTILE, "code"]
    part["setting"]["prompts"] = HOSTILE
    part["candidates"] = {HOSTILE: copy.deepcopy(part["candidates"]["ngram, k=4"]), **part["candidates"]}
    for one in part["candidates"].values():
        one["drafter"] = HOSTILE
        one["kinds"][HOSTILE] = one["kinds"].pop("chat")
        one["notes"] = [HOSTILE]
    report["advice"] = report["guards"] = [HOSTILE]
    report["definitions"] = {HOSTILE: HOSTILE}
    report["how"] = {"target": HOSTILE, HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}}
    report["examples"] = [{"prompt": text, "kind": HOSTILE, "candidate": HOSTILE, "pieces": [[HOSTILE, "draft"], [HOSTILE, "target"]]} for text in (HOSTILE, HOSTILE * 20)]  # fmt: skip
    found = page.html(report)
    read = Read(found)
    assert read.open == []
    assert "script" not in read.tags
    assert not any(name.startswith("on") for name, _ in read.attributes)
    assert found.count("&lt;script&gt;") > 20
    assert "\x00" not in found


def test_of_a_report_that_knows_little_the_page_says_little_and_invents_nothing() -> None:
    report = made_report()
    for one in report["parts"][0]["candidates"].values():
        for figures in (one["all"], *one["kinds"].values()):
            for gone in ("histogram", "acceptance_by_position", "mbsu", "tau", "draft_ms", "first_token_ms", "equal", "compared"):
                figures.pop(gone, None)
        one["predicted"] = one["teacher_forced"] = None
    del report["definitions"], report["examples"], report["guards"], report["advice"], report["parts"][0]["noise"]
    text = page.html(report)
    assert text.count("<svg") == 2  # by kind, and against k
    for absent in (
        "NaN",
        "None",
        "nan",
        "Who wrote what",
        "Hollow",
        "What the words mean</h2>",
        "MBSU",
        "break-even",
        "plain decoding against itself",
    ):
        assert absent not in text, absent
    assert "The fastest is" in text
    for one in report["parts"][0]["candidates"].values():
        one["all"].pop("speed_up")
        one["kinds"] = {}
    assert page.html(report).count("<svg") == 0


@pytest.mark.parametrize(
    ("speed", "says"),
    [
        ((1.2, 1.1, 1.3), "good"),
        ((1.2, 0.9, 1.3), "wait"),
        ((0.8, 0.7, 0.9), "bad"),
        ((1.2, None, None), "unknown"),
        ((1.2, 1.0, 1.3), "wait"),
    ],
)
def test_the_standing_is_read_off_the_interval_alone(speed: tuple[Any, ...], says: str) -> None:
    assert document.standing(dict(zip(("value", "low", "high"), speed, strict=True))) == says


def test_a_drafter_has_one_colour_and_one_shape_and_its_fastest_setting_stands_for_it() -> None:
    part = made_report()["parts"][0]
    ngram, trained = series(part)
    assert (ngram.label, trained.label) == ("ngram", "trained")
    speeds = {name: one["all"]["speed_up"]["value"] for name, one in part["candidates"].items()}
    assert ngram.best == max(ngram.settings, key=lambda name: speeds[name])
    assert (ngram.colour, ngram.marker) != (trained.colour, trained.marker)
    assert with_k("ngram, adaptive", {"k": "adaptive"}) == "ngram, adaptive"
    assert with_k("trained", {"k": 4}) == "trained, k = 4"
    assert with_k("trained-14", {"k": 4}) == "trained-14, k = 4"


def test_the_map_is_the_formula() -> None:
    # maths: best over k with r = 1, o = 0
    for alpha, c, best in ((0.5, 0.1, 1.46), (0.7, 0.05, 2.35), (0.8, 0.05, 3.09), (0.9, 0.2, 2.37), (0.6, 0.3, 1.23)):
        assert round(float(atlas.best_speed_up(alpha, c)), 2) == best
    assert round(float(atlas.best_speed_up(0.8, 0.05, slope=0.05)), 2) == 2.47
    grid = atlas.best_speed_up(np.linspace(0, 0.9, 4)[:, None], np.array([[0.1, 0.5]]))
    assert grid.shape == (4, 2)
    assert grid[0, 0] == pytest.approx(1 / 1.1)  # nothing is accepted: one draft is the least loss


def test_a_candidate_stands_on_the_map_by_its_measured_price_where_none_was_predicted() -> None:
    part = made_report()["parts"][0]
    one = part["candidates"]["trained, k=4"]
    one["predicted"]["c"] = 0.2
    assert atlas.stands(one) == (0.2, pytest.approx(0.6, abs=0.1))
    one["predicted"] = None
    assert atlas.stands(one) == (pytest.approx(3.0 / 27.0), pytest.approx(0.6, abs=0.1))
    one["all"]["acceptance_by_position"] = []
    assert atlas.stands(one) is None


def test_who_wrote_a_letter_is_kept_and_neighbours_are_joined() -> None:
    text = written(
        {
            "prompt": "p",
            "kind": "k",
            "candidate": "c",
            "pieces": [["ab", "target"], ["<c", "draft"], ["d", "draft"], ["e", "target"]],
        }
    )
    assert '<p class="text">ab<span class="d">&lt;cd</span>e</p>' in text
    assert "50% of the letters" in text
    long = written({"prompt": "word " * 100, "pieces": []})
    assert long.count("word ") >= 100  # folded, not cut


def test_every_part_has_its_plots_and_tables() -> None:
    text = page.html(made_report(parts=2))
    assert text.count("<svg") == 10
    assert text.count("prompts.jsonl, temperature 1, batch 1") >= 2
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_what_is_no_report_of_this_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    with pytest.raises(FileNotFoundError, match=r"holds no report.json; measure first: draftsmith eval"):
        reports.read_report(tmp_path)
    for text, says in (
        ("{", "it is not JSON"),
        ('{"schema": 1, "candidates": {}}', "is a report of schema 1, and schema 2 is read here. Measure again"),
        ("[]", "is no report of draftsmith eval"),
        ('{"schema": 2, "parts": []}', "has no parts"),
    ):
        place.write_text(text)
        with pytest.raises(ValueError, match=says):
            reports.read_report(tmp_path)
    place.write_text(json.dumps(made_report()))
    assert reports.read_report(place)["name"] == "small"
    page.write(reports.read_report(tmp_path), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match="schema 1"):
        page.html({"schema": 1})
