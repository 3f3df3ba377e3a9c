"""`draftsmith generate` on a tiny target: into a pipe, onto a screen, stopped, interrupted, compared and refused."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.cli import main
from draftsmith.specdec import Generation, generate, load, show
from draftsmith.specdec.decode import Written
from draftsmith.specdec.models import chat_ids
from draftsmith.specdec.page import Screen
from draftsmith.specdec.show import Asked
from tiny import tiny_folder, tiny_tokenizer

FINAL = (
    r"(\d+) tokens in (\d+) calls of the target: (\d+\.\d\d) tokens a call; (\d+\.\d) tokens/s(?:; (\d+) of (\d+) drafts accepted)?"
)
GREEN = "\x1b[1;32m"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("target") / "target", seed=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's twin, so that every draft is accepted."""
    return tiny_folder(tmp_path_factory.mktemp("draft") / "draft", seed=2)


def answer(target: str, ids: Any, n: int = 24, **settings: Any) -> tuple[str, list[int]]:
    model, tokenizer = load(target)
    ids = ids(tokenizer)
    tokens = generate(model, [ids], max_new_tokens=n, eos=tokenizer.eos_token_id, **settings).tokens[0]
    return tokenizer.decode([*ids, *tokens], skip_special_tokens=True)[
        len(tokenizer.decode(ids, skip_special_tokens=True)) :
    ], tokens


def chat(prompt: str, system: str = "") -> Any:
    turns = [{"role": "system", "content": system}] if system else []
    return lambda tokenizer: chat_ids(tokenizer, [*turns, {"role": "user", "content": prompt}])


def ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def run(*words: str) -> int:
    return main(["generate", *words])


def test_a_pipe_gets_the_greedy_text_and_nothing_else(target: str, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, tokens = answer(target, chat("amber birch"))
    for who in ([], ["--draft", draft, "-k", "3"], ["--ngram"], ["--ngram", "--draft", "exit:1", "--adaptive"]):
        assert run("--target", target, *who, "--max-new-tokens", "24", "amber birch") == 0
        said = capsys.readouterr()
        assert said.out == ended(wanted)
        final = re.fullmatch(FINAL, said.err.strip().splitlines()[-1])
        assert final
        assert int(final[1]) == len(tokens)
        assert (final[6] is not None) == bool(who)
        assert final[3] == f"{int(final[1]) / int(final[2]):.2f}"
    assert "\x1b" not in said.out + said.err


def test_the_prompt_is_a_chat_unless_raw_and_may_come_from_stdin(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[list[str], Any]] = [
        (["--raw"], lambda tokenizer: tokenizer("cedar").input_ids),
        (["--system", "be brief"], chat("cedar", "be brief")),
    ]
    for words, ids in cases:
        assert run("--target", target, *words, "--max-new-tokens", "12", "cedar") == 0
        assert capsys.readouterr().out == ended(answer(target, ids, 12)[0])
    monkeypatch.setattr(sys, "stdin", io.StringIO("cedar\n"))
    assert run("--target", target, "--max-new-tokens", "12", "-") == 0
    assert capsys.readouterr().out == ended(answer(target, chat("cedar"), 12)[0])


def test_special_tokens_are_hidden_and_half_a_character_is_shown_at_the_end(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [*tiny_tokenizer()("hi😀").input_ids[:4], 2]

    def scripted(*some: Any, on_tokens: Any, **settings: Any) -> Generation:
        on_tokens(Written(0, tokens, 2))
        return Generation([tokens], [[(2, 4)]], seconds=1.0)

    monkeypatch.setattr(show, "generate", scripted)
    assert run("--target", target, "x") == 0
    assert capsys.readouterr().out == "hi\ufffd\n"


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
    target: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, _ = answer(target, chat("delta"))
    stop = wanted[6:9]
    for who in ([], ["--draft", draft]):
        assert run("--target", target, *who, "--stop", "never", "--stop", stop, "--max-new-tokens", "24", "delta") == 0
        said = capsys.readouterr().out.removesuffix("\n")
        assert wanted.startswith(said)
        assert stop in said
        assert len(said) < len(wanted)


def screen(width: int = 30) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, color_system="standard", highlight=False, legacy_windows=False
    )


def lines(console: Console) -> list[str]:
    """What a terminal would show: erased lines gone, colours left in."""
    seen, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[AK]|\x1b\[\?25[lh]|\r|\n)", console.file.getvalue()):  # type: ignore[attr-defined]
        if part == "\n":
            row += 1
            seen += [""] * (row + 1 - len(seen))
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part.endswith("K"):
            seen[row] = ""
        elif part and part[0] != "\r" and "?25" not in part:
            seen[row] += part
    return [one.rstrip() for one in seen]


def bare(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


def test_a_screen_colours_what_was_drafted_and_accepted(target: str, draft: str) -> None:
    wanted, tokens = answer(target, chat("ember"))
    coloured = {}
    for who in ("", draft):
        console = screen(400)
        assert show.show(Asked(target, "ember", draft=who, k=3, max_new_tokens=24), console) == 0
        seen = lines(console)
        body = seen[1 if who else 0 :]
        assert "\n".join(map(bare, body)).startswith(
            "\n".join(part.rstrip() for part in wanted.translate(show_table()).split("\n"))
        )
        assert re.search(FINAL, " ".join(map(bare, body)))
        coloured[who] = sum(map(len, re.findall(re.escape(GREEN) + r"([^\x1b]*)", "\n".join(body))))
    assert coloured[""] == 0
    assert coloured[draft] >= len(tokens) // 2  # three of four, less what bytes that are no text take
    assert "guessed by" in bare(seen[0])
    plain = screen()
    assert show.show(Asked(target, "ember", draft=draft, max_new_tokens=24, plain=True), plain) == 0
    assert plain.file.getvalue() == ended(wanted)  # type: ignore[attr-defined]


def show_table() -> dict[int, Any]:
    from draftsmith.specdec.page import SHOWN

    return SHOWN


def test_a_screen_wraps_at_words_and_keeps_colours_indents_and_wide_characters() -> None:
    console = screen(10)
    page = Screen(console)
    page.note("")
    text = "the quick browner fox\n\n    if x:\n        abcdefghijklm\n你好你好你好 end\tof\x1b[2J it \r\n"
    for at, letter in enumerate(text):
        page.write(letter, drafted=at in (4, 5, 6))
        page.tally("one line that is wider than the screen")
    page.close()
    seen = lines(console)
    assert seen[0].replace(f"\x1b[0m{GREEN}", "") == f"the {GREEN}qui\x1b[0mck"
    assert [bare(one) for one in seen[:10]] == [
        "the quick", "browner", "fox", "", "    if x:", "        ab", "cdefghijkl", "m", "你好你好你", "好 end",
    ]  # fmt: skip
    assert "".join(map(bare, seen[10:])) == "of␛[2J it"
    assert "one line" not in "\n".join(seen)


def test_ctrl_c_ends_with_the_count_of_what_there_is(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = answer(target, chat("fjord"))
    add, calls = show.Tally.add, []

    def interrupted(self: Any, written: Any) -> None:
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(written)
        add(self, written)

    monkeypatch.setattr(show.Tally, "add", interrupted)
    assert run("--target", target, "--ngram", "--max-new-tokens", "24", "fjord") == 130
    said = capsys.readouterr()
    assert wanted.startswith(said.out.removesuffix("\n"))
    assert "in 5 calls of the target" in said.err
    assert said.err.strip().endswith("drafts accepted; interrupted")
    assert "Traceback" not in said.err


def test_compare_says_whether_the_text_is_equal(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--target", target, "--ngram", "--compare", "--max-new-tokens", "16", "grove"]
    assert run(*words) == 0
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(r"plain decoding: \d+\.\d tokens/s, so drafting is \d+\.\d\d times as fast; the text is equal", line)
    assert run(*words, "--temperature", "1") == 0
    assert capsys.readouterr().err.strip().endswith("sampled texts are not compared")

    def wrong(*some: Any, **settings: Any) -> Any:
        out = generate(*some, **settings)
        if "on_tokens" in settings:
            out.tokens[0][3] += 1
        return out

    monkeypatch.setattr(show, "generate", wrong)
    assert run(*words) == 0
    assert "THE TEXT DIFFERS from token 3 on" in capsys.readouterr().err


def test_showing_is_not_counted_as_decoding(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.specdec.page.Pipe.tally", lambda self, line: time.sleep(0.3))
    assert run("--target", target, "--max-new-tokens", "6", "heron") == 0
    final = re.search(FINAL, capsys.readouterr().err)
    assert final
    assert float(final[4]) > 5  # at a token every 0.3 s it could be 3


def test_warnings_come_last_and_to_stderr(target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*some: Any, **settings: Any) -> Any:
        out = generate(*some, **settings)
        out.warnings.append("a [warning]")
        return out

    monkeypatch.setattr(show, "generate", warned)
    assert run("--target", target, "--max-new-tokens", "4", "heron") == 0
    said = capsys.readouterr()
    assert "a [warning]" not in said.out
    assert said.err.strip().endswith("a [warning]")


def test_bad_input_gets_one_line_and_nothing_is_loaded_for_it(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = tiny_folder(tmp_path / "swapped", seed=4, swapped=(5, 6))
    loads: dict[tuple[str, ...], str] = {
        ("--draft", swapped, "x"): "id 5 is",
        ("--draft", "ngarm", "x"): "did you mean 'ngram'",
        ("--draft", "exit:9", "x"): "9",
        ("--max-new-tokens", "9999", "x"): "positions",
        ("--draft", str(tmp_path / "gone"), "x"): "does not exist",
        ("--dtype", "fp23", "x"): "did you mean",
    }
    loads_not: dict[tuple[str, ...], str] = {
        (" \n",): "the prompt is empty",
        ("-",): "the prompt on stdin is empty",
        ("--raw", "--system", "a", "x"): "give one of them",
        ("--adaptive", "x"): "--adaptive needs somebody who drafts",
        ("--compare", "x"): "--compare needs somebody who drafts",
        ("--ngram", "-k", "0", "x"): "-k must be at least 1",
        ("--max-new-tokens", "0", "x"): "at least 1",
        ("--threads", "-1", "x"): "at least 0",
        ("--stop", "", "x"): "at least one character",
        ("--temperature", "-1", "x"): "temperature must be",
        ("--top-p", "0", "x"): "top_p must lie in",
    }
    for cases, may_load in ((loads, True), (loads_not, False)):
        if not may_load:
            monkeypatch.setattr(show, "load", lambda *some: pytest.fail("loaded"))
        for words, wanted in cases.items():
            monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
            assert run("--target", target, *words) == 2, words
            said = capsys.readouterr()
            assert said.out == "", words
            assert said.err.startswith("draftsmith generate: "), words
            assert wanted in said.err, words
            assert said.err.count("\n") == 1, said.err


def test_words_without_quotes_are_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("--target", target, "two", "words=x")
    assert ended.value.code == 2
    assert "goes between quotes" in capsys.readouterr().err


def test_ngram_beside_a_draft_is_the_combined_drafter() -> None:
    assert Asked("t", "p", ngram=True, draft="exit:6").drafter == "ngram+exit:6"
    assert Asked("t", "p", ngram=True).drafter == "ngram"
    assert Asked("t", "p").drafter == ""
