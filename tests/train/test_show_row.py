"""A row as it is shown: what is scored between markers in a pipe, in colours on a screen, special tokens and control characters visible."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftsmith.distill.batch import Example
from draftsmith.train.data.chats import Form, made
from draftsmith.train.data.show_row import pieces, show_row, show_rows
from tiny import tiny_tokenizer

TALK = [
    {"role": "user", "content": "hi [/bold] \x1b[31m"}, {"role": "assistant", "content": "hé th"},
    {"role": "user", "content": "end"}, {"role": "assistant", "content": "ok\nbye"},
]  # fmt: skip


def row() -> Example:
    return made({"key": "c", "messages": TALK, "finished": True}, tiny_tokenizer(), Form(500)).rows[0]


def shown(console: Console) -> str:
    show_row(row(), tiny_tokenizer(), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_scored_text_between_markers_and_the_counts() -> None:
    assert shown(Console(file=io.StringIO())).splitlines() == [
        "<s>u:hi [/bold] \\x1b[31m</s><s>a:[[hé th</s>]]<s>u:end</s><s>a:[[ok",
        "bye</s>]]",
        "scored text stands between [[ and ]]",
        "46 tokens, 13 of them scored in 2 spans; it ends with '</s>'",
    ]


def test_a_screen_gets_colours_and_the_same_words() -> None:
    text = shown(Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40))
    assert "\x1b[1;32mhé th\x1b[0m" in text
    assert "\x1b[1;7;32m</s>\x1b[0m" in text
    assert "\x1b[2mu:hi [/bold] \\x1b[31m\x1b[0m" in text
    assert "[[" not in text


def test_the_pieces_are_the_whole_text() -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(text for text, _, _ in pieces(row(), tokenizer)) == tokenizer.decode(row().ids).replace("\x1b", "\\x1b")


def test_a_row_of_which_nothing_is_learned_says_so() -> None:
    console = Console(file=io.StringIO())
    show_row(Example([70, 71], ()), tiny_tokenizer(), console)
    assert "2 tokens, 0 of them scored in 0 spans; nothing is learned from it" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_first_rows_of_answers_or_chats_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    chats = [{"key": str(one), "messages": TALK, "finished": True} for one in range(3)]
    answers = [
        {"prompt": "p", "messages": TALK[:1], "answer_ids": [80, 2]},
        {"prompt": "r", "messages": TALK[:1], "answer_ids": [81, 2]},
    ]
    for records, most, wanted in ((chats, 2, 2), (answers, 1, 1), (answers, 9, 2), (chats, 0, 0)):
        show_rows(records, tiny_tokenizer(), Form(500), most)
        assert capsys.readouterr().out.count("of them scored") == wanted
