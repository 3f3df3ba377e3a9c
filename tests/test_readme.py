"""The README: its commands exist, its tree is the tree, and its tables are the ones in docs/measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from draftsmith import cli
from draftsmith.eval import report
from draftsmith.eval.advice import advice

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)
    assert {"quickstart", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = re.findall(r"^(?:\.venv/bin/)?draftsmith (\w+)|`draftsmith (\w+)", README, re.MULTILINE)
    named = {one or other for one, other in commands}
    assert {"run", "prepare", "train", "eval", "export", "validate"} <= named
    assert named <= set(cli.COMMANDS)


TREE = README.split("## The house")[1].split("```")[1]


def test_every_module_has_its_place_in_the_tree() -> None:
    sections = dict(re.findall(r"^(\w+)/(.*\n(?: .*\n)*)", TREE, re.MULTILINE))
    for folder in ("draftsmith", "recipes", "specdec", "distill", "train", "eval"):
        for path in (ROOT / folder).glob("[a-z]*.py"):
            name = r"\*_settings\.py" if path.stem.endswith("_settings") else rf"(?<!\w){re.escape(path.name)}"
            assert re.search(name, sections[folder]), f"{folder}/{path.name} is new: say in the README's tree what it is"


def test_every_path_exists() -> None:
    folder = Path()
    for line in TREE.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        names = re.findall(r"(?:^|\s{2,})([a-z_0-9]+(?:/|\.py))(?=\s)", line)
        assert names, line
        for name in names:
            if indent == 0:
                folder = Path(name)
                assert (ROOT / folder).is_dir(), line
            else:
                assert (ROOT / folder / name).exists(), line


def test_the_tables_are_what_was_measured() -> None:
    measured = json.loads((ROOT / "docs" / "measured" / "spec_bench.json").read_text())
    (part,) = measured["parts"]
    assert (part["prompts"], part["answers"], len(part["kinds"])) == (130, 210, 13)
    for table in (report.rows(part), report.kinds(part)):
        for line in table:
            assert "| " + " | ".join(line) + " |" in README, line
    assert measured["advice"] == advice(measured["parts"])
    assert f"**{measured['advice'][0]}**" in README
    assert measured["how"]["versions"]["torch"] in README
    assert measured["how"]["device"] in README


def test_the_decoders_ratios_are_what_was_measured() -> None:
    measured = json.loads((ROOT / "docs" / "measured" / "decode.json").read_text())
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for name, one in measured["ratios"].items():
        line = f"| {name} | {one['wanted']} | {one['median']:.2f} | {one['total']:.2f} |"
        assert line in speed, line
    table = README.split("## The decoder against transformers'")[1].split("##")[0]
    rows = re.findall(r"^\| (.+? / .+?) \| ([0-9.]+) \| ([0-9/]+) \|$", table, re.MULTILINE)
    assert len(rows) > 3
    for name, total, equal in rows:
        one = measured["ratios"][name]
        assert (total, equal) == (f"{one['total']:.2f}", f"{one['equal']}/{one['compared']}"), name
