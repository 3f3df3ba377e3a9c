"""docs/cluster.md's table of memory is what `draftsmith plan` computes; a failure prints the table that the page should have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.plan import Asked, plan
from llamas import save_llamas

PAGE = Path(__file__).parent.parent.parent / "docs" / "cluster.md"
PAIRS = [
    ("llama-3.2-1b", "layers:2"),
    ("llama-3.1-8b", "layers:2"),
    ("llama-3.1-8b", "llama-3.2-1b"),
    ("llama-3.1-70b", "layers:2"),
    ("llama-3.1-70b", "llama-3.2-1b"),
    ("llama-3.1-70b", "llama-3.1-8b"),
]
SCHEMES = ["one process", "DDP", "ZeRO-2", "FSDP2", "ZeRO-3"]


def held(found: dict[str, Any], teacher: str) -> dict[str, dict[str, Any]]:
    """What a process holds in bf16, by scheme."""
    return {one["scheme"]: one for one in found["training"] if one["precision"] == "bf16" and one["teacher"] == teacher}


def table() -> str:
    """GB a process of bf16 training by pair, teacher and scheme, of the configs in the current folder."""
    lines = [f"| target | draft | trained | teacher | {' | '.join(SCHEMES)} |", "|---|---|---|---|" + "---|" * len(SCHEMES)]
    for target, draft in PAIRS:
        found = plan(Asked(target, draft, "h200", processes=8, tokens=4096))
        for teacher in ("live", "sharded", "stored"):
            by_scheme = held(found, teacher)
            trained = f"{found['draft']['trained'] / 1e6:,.0f} M"
            cells = " | ".join(f"{by_scheme[one]['total'] / 1e9:.1f}" if one in by_scheme else "-" for one in SCHEMES)
            lines.append(f"| {target} | {draft} | {trained} | {teacher} | {cells} |")
    return "\n".join(lines)


def test_the_page_has_the_table_that_plan_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llamas(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted = table()
    if os.environ.get("DRAFTSMITH_PAGES") == "write":  # the way to bring the page up to date
        before, _, rest = PAGE.read_text(encoding="utf-8").partition("| target | draft |")
        PAGE.write_text(before + wanted + "\n" + rest[rest.index("\n\n") + 1 :], encoding="utf-8")
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert " ".join(wanted.split()) in page, wanted
    eight, seventy = (plan(Asked(*pair, "h200", processes=8, tokens=4096)) for pair in (PAIRS[1], PAIRS[-1]))
    ddp, fsdp = (held(eight, "live")[scheme]["total"] / 1e9 for scheme in ("DDP", "FSDP2"))
    assert f"sharding saves {ddp - fsdp:.0f} of {ddp:.0f} GB" in page
    assert f"under DDP its states alone take {held(seventy, 'live')['DDP']['states'] / 1e9:.0f} GB" in page
    weights = seventy["target"]["bytes"] / 1e9
    assert f"a 70B is {weights:.0f} GB of weights: {weights / 4:.0f} GB on each of four" in page
