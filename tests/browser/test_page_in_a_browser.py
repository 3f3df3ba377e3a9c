"""report.html and compare.html in a real Chromium (`make test-browser`): nothing asked of any other place, nothing in the console,
nothing wider than a phone, and every drawing drawn, in light and in dark. CHROMIUM names the browser where it is not on the path."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from draftsmith.eval import page
from draftsmith.eval.compare import compare
from draftsmith.eval.compare import page as compare_page
from made_reports import made_report

# What it would say to its makers is refused here, and its sandbox takes a user other than root.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
# Of each drawing: is it as large as the page would have it, and are there strokes and letters inside it?
DRAWN = """() => [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect(), paths = [...svg.querySelectorAll('path, use')].filter(one => one.getBoundingClientRect().width > 0)
  const texts = [...svg.querySelectorAll('text')].map(one => one.getBoundingClientRect())
  const inside = texts.every(one => one.left >= box.left - 2 && one.right <= box.right + 2 && one.top >= box.top - 2 && one.bottom <= box.bottom + 2)
  return {width: box.width, height: box.height, paths: paths.length, texts: texts.length, inside, least: Math.min(...texts.map(one => one.height))}
})"""
# The contrast of every piece of text with what lies behind it, as WCAG counts it; the least one and where it is.
CONTRAST = """() => {
  const parse = said => said.match(/[0-9.]+/g).map(Number)
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
  const behind = one => { for (; one; one = one.parentElement) {
    const c = parse(getComputedStyle(one).backgroundColor); if (c.length < 4 || c[3] === 1) return c } return [255, 255, 255] }
  let least = [99, '']
  for (const one of document.querySelectorAll('body *')) {
    if (![...one.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || one.closest('defs, style') || one.getAttribute('aria-hidden')) continue
    const style = getComputedStyle(one), a = light(parse(one.closest('svg') ? style.fill : style.color)), b = light(behind(one))
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    if (ratio < least[0]) least = [ratio, one.tagName + ' ' + one.textContent.slice(0, 40)]
  }
  return least
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    )
    if found is None:
        raise RuntimeError("no Chromium here: install one (Debian: apt-get install chromium), or name it (CHROMIUM=/path/to/it)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    report = made_report("a run whose name is long: " + "x" * 60, parts=2)
    report["how"]["all_prompts_command"] = "draftsmith eval /" + "a/very/long/path" * 12
    page.write(report, place / "report.html")
    for name in ("before", "after"):
        (place / name).mkdir()
        (place / name / "report.json").write_text(json.dumps(made_report(name)))
    (place / "compare.html").write_text(compare_page(compare([place / "before", place / "after"])))
    return {name: place / f"{name}.html" for name in ("report", "compare")}


@pytest.fixture
def opened(
    chromium: Browser, pages: dict[str, Path], request: pytest.FixtureRequest
) -> Iterator[tuple[Page, list[str], list[str]]]:
    """A page in a window, what the console said, and what was asked for."""
    name, size, scheme = request.param
    context = chromium.new_context(viewport=size, color_scheme=scheme)
    window, said, asked = context.new_page(), [], []
    window.on("console", lambda message: said.append(message.text))
    window.on("pageerror", lambda error: said.append(str(error)))
    window.on("request", lambda one: asked.append(one.url))
    window.goto(pages[name].as_uri())
    yield window, said, asked
    context.close()


EVERY: list[Any] = [
    (name, size, scheme) for name in ("report", "compare") for size in (PHONE, DESK) for scheme in ("light", "dark")
]


@pytest.mark.parametrize("opened", EVERY, indirect=True, ids=[f"{n}-{s['width']}-{c}" for n, s, c in EVERY])
def test_the_page(opened: tuple[Page, list[str], list[str]], pages: dict[str, Path]) -> None:
    window, said, asked = opened
    assert said == []
    assert len(asked) == 1
    assert asked[0].startswith("file://")
    wide, screen = window.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= screen
    drawings = window.evaluate(DRAWN)
    assert len(drawings) in (1, 10)
    for one in drawings:
        assert one["width"] > 250
        assert one["height"] > 100
        assert one["paths"] > 10
        assert one["texts"] >= 6
        assert one["inside"]
        assert one["least"] > 8
    ratio, where = window.evaluate(CONTRAST)
    assert ratio >= 4.5, where


def test_a_table_too_wide_for_a_phone_scrolls_by_itself_and_keeps_its_first_column(
    chromium: Browser, pages: dict[str, Path]
) -> None:
    window = chromium.new_page(viewport=PHONE)
    window.goto(pages["report"].as_uri())
    table = window.locator(".scroll").first
    assert table.evaluate("one => one.scrollWidth > one.clientWidth + 50")
    table.evaluate("one => one.scrollLeft = 1000")
    first = table.locator("tbody th").first
    assert first.bounding_box()["x"] >= 0  # type: ignore[index]
    window.close()


def test_the_check_can_fail(chromium: Browser, tmp_path: Path) -> None:
    """A picture from elsewhere is refused by the page's own policy, and the console says so; a wide block makes the page wide."""
    from draftsmith.eval.page.document import document

    path = tmp_path / "bad.html"
    path.write_text(document("x", ['<img src="http://127.0.0.1:9/x.png"><div style="width:900px">x</div>'], "x"))
    window, said = chromium.new_page(viewport=PHONE), []
    window.on("console", lambda message: said.append(message.text))
    window.goto(path.as_uri())
    assert any("Content Security Policy" in one for one in said)
    assert window.evaluate("document.documentElement.scrollWidth") > 390
    window.close()
