"""Chats to rows: every turn of the assistant is scored, its end included, and nothing that the template or the user says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill.batch import Example
from draftsmith.specdec.models import chat_ids
from draftsmith.train.data import all_rows
from draftsmith.train.data.all_rows import all_made, fingerprint
from draftsmith.train.data.chats import Form, first_asked, made, of_answers, read_chats, split
from draftsmith.train.data.plan import to_rows
from tiny import tiny_tokenizer

CHATML = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
# As Qwen3's: thoughts leave the history, and a last answer without any gets an empty one.
THINKS = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% if loop.last and '</think>' not in m['content'] %}<think>\n\n</think>\n\n{% endif %}"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# As DeepSeek-R1's: the prompt for an answer opens a thought that no rendered answer has.
OPENS = CHATML.replace("<s>assistant\n{% endif %}", "<s>assistant\n<think>\n{% endif %}")
TALK = [
    {"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "the end?"}, {"role": "assistant", "content": "yes"},
]  # fmt: skip


def speaks(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def talk(messages: list[dict[str, str]] = TALK, **more: Any) -> dict[str, Any]:
    return {"key": "c", "messages": messages, "finished": True, **more}


def scored(rows: list[Example], tokenizer: Any) -> list[list[str]]:
    return [[tokenizer.decode(row.ids[start:end]) for start, end in row.spans] for row in rows]


def test_every_turn_of_a_chat_is_scored_in_one_row_and_nothing_else() -> None:
    tokenizer = speaks(CHATML)
    rows, left_out, counted = made(talk(), tokenizer, Form(500))
    assert scored(rows, tokenizer) == [["hello</s>", "yes</s>"]]
    assert rows[0].ids == tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=False)[:-1]  # the newline is never said
    assert not left_out
    assert counted == {"turns": 2}


def test_a_prompt_is_known_by_the_first_turn_of_its_user() -> None:
    assert first_asked({"key": "1", "messages": TALK}) == "hi"
    answers = [{"prompt": "p", "turn": turn, "messages": TALK[: 2 + 2 * turn], "answer_ids": [1]} for turn in (1, 0)]
    assert [first_asked(chat) for chat in of_answers(answers)] == ["hi"]
    assert first_asked({"key": "1", "messages": [{"role": "assistant", "content": "hello"}]}) is None


def test_a_literal_end_of_turn_in_an_answer_does_not_end_it() -> None:
    tokenizer = speaks(CHATML)
    rows = made(talk([TALK[1], {"role": "assistant", "content": "write </s> here"}]), tokenizer, Form(500)).rows
    assert scored(rows, tokenizer) == [["write </s> here</s>"]]


def test_other_ends_of_a_turn_are_the_targets() -> None:
    tokenizer = speaks(CHATML.replace("</s>", "<|endoftext|>"))
    assert scored(made(talk(), tokenizer, Form(500, ends=(0, 2))).rows, tokenizer) == [["hello<|endoftext|>", "yes<|endoftext|>"]]
    rows, _, counted = made(talk(), tokenizer, Form(500))
    assert counted["turns without a token that ends them"] == 2
    assert scored(rows, tokenizer) == [["hello<|endoftext|>\n", "yes<|endoftext|>\n"]]


def test_thoughts_that_a_template_drops_or_puts_are_not_learned() -> None:
    tokenizer = speaks(THINKS)
    rows, _, counted = made(talk(), tokenizer, Form(500))
    assert scored(rows, tokenizer) == [["hello</s>"], ["yes</s>"]], "the empty thoughts are the template's"
    assert tokenizer.decode(rows[0].ids[: rows[0].spans[0][0]]).endswith("assistant\n<think>\n\n</think>\n\n")
    assert "<think>" not in tokenizer.decode(rows[1].ids[: rows[1].spans[0][0] - 20])
    assert counted["turns that the template opens with words of its own, which are not scored"] == 2
    assert counted["turns in a row of their own, for the template renders history otherwise than it was said"] == 1
    for word in ("Zebra", "0 of them"):
        assert scored(made(talk([TALK[1], {"role": "assistant", "content": word}]), tokenizer, Form(500)).rows, tokenizer) == [
            [word + "</s>"]
        ]
    thought = talk([*TALK[:2], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"}, *TALK[3:]])
    assert scored(made(thought, tokenizer, Form(500)).rows, tokenizer)[0] == ["<think>\nhm\n</think>\n\nhello</s>"]


def test_answers_of_the_target_become_one_row_only_where_history_is_what_was_said() -> None:
    for template, wanted in ((CHATML, [["hello</s>", "yes"]]), (THINKS, [["<think>hm</think>hello</s>"], ["yes"]])):
        tokenizer = speaks(template)
        first = "hello" if template is CHATML else "<think>hm</think>hello"
        history = [*TALK[:2], {"role": "assistant", "content": first}, TALK[3]]
        said = [tokenizer(text, add_special_tokens=False).input_ids for text in (first + "</s>", "yes")]
        answers = [
            {"prompt": "p", "turn": 1, "messages": history, "answer_ids": said[1], "finished": False},
            {"prompt": "p", "turn": 0, "messages": TALK[:2], "answer_ids": said[0], "finished": True},
        ]
        (chat,) = of_answers(answers)
        rows, left_out, counted = made(chat, tokenizer, Form(500))
        assert scored(rows, tokenizer) == wanted, "and no end is put behind an answer that was cut off"
        assert counted["answers that were cut off"] == 1
        assert rows[-1].ids == chat_ids(tokenizer, history) + said[1]
        assert not left_out
        assert sum(row.scored for row in rows) == sum(map(len, said))


def test_an_answer_that_is_tokenised_otherwise_in_history_keeps_the_ids_that_were_said() -> None:
    tokenizer = speaks(CHATML)
    t, h = tokenizer.convert_tokens_to_ids(["t", "h"])  # the target said two tokens where its text makes one
    answers = [
        {"prompt": "p", "turn": 0, "messages": TALK[1:2], "answer_ids": [t, h, 2]},
        {"prompt": "p", "turn": 1, "messages": [TALK[1], {"role": "assistant", "content": "th"}, TALK[3]], "answer_ids": [t, 2]},
    ]
    rows, _, counted = made(of_answers(answers)[0], tokenizer, Form(500))
    assert [row.answers for row in rows] == [[t, h, 2], [t, 2]]
    assert counted["turns in a row of their own, for the template renders history otherwise than it was said"] == 1


def test_rows_are_joined_only_where_they_fit_and_what_does_not_is_left_out_and_counted() -> None:
    tokenizer = speaks(CHATML)
    whole = made(talk(), tokenizer, Form(500)).rows[0]
    first = made(talk(TALK[:3]), tokenizer, Form(500)).rows[0]
    rows, left_out, _ = made(talk(), tokenizer, Form(len(whole.ids) - 1))
    assert rows == [first]
    assert left_out == {"longer than max_length": 1}
    assert made(talk(), tokenizer, Form(len(whole.ids))).rows == [whole]


def test_split_rows_score_each_token_once_with_half_a_piece_of_context() -> None:
    tokenizer = speaks(CHATML)
    whole = made(talk(), tokenizer, Form(500)).rows[0]
    rows, left_out, counted = made(talk(), tokenizer, Form(20, "split"))
    assert counted["rows that were split"] == 1
    assert not left_out
    assert all(len(row.ids) <= 20 for row in rows)
    assert [one for row in rows for one in row.answers] == whole.answers
    long = Example(list(range(100)), ((3, 40), (41, 90), (95, 100)))
    pieces = split(long, 16)
    assert [one for piece in pieces for one in piece.answers] == long.answers
    for piece in pieces:
        assert len(piece.ids) == 16
        assert piece.ids == list(range(piece.ids[0], piece.ids[0] + 16))
        assert piece.ids[0] == 0 or piece.spans[0][0] >= 8
    assert split(Example([1, 2, 3], ((1, 3),)), 16) == [Example([1, 2, 3], ((1, 3),))]


def test_turns_that_cannot_be_placed_are_left_out_and_counted() -> None:
    rows, left_out, _ = made(talk(), speaks(OPENS), Form(500))
    assert rows == []
    assert left_out == {"turn that the template does not render behind its own prompt for an answer": 2}
    rows, left_out, _ = made(talk([TALK[2], TALK[1], {"role": "assistant", "content": " "}]), speaks(CHATML), Form(500))
    assert rows == []
    assert left_out == {"assistant's turn that opens a chat": 1, "empty answer": 1}
    assert made(talk(TALK[:2]), speaks(CHATML), Form(500)).left_out == {"chat without an assistant's turn": 1}
    refuses = speaks("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML)
    (why,) = made(talk(), refuses, Form(500)).left_out
    assert "refuses a chat of system, user: no system" in why


def test_an_answer_cut_off_elsewhere_is_not_taught_to_end() -> None:
    tokenizer = speaks(CHATML)
    rows, _, counted = made(talk(finished=False), tokenizer, Form(500))
    assert scored(rows, tokenizer) == [["hello</s>", "yes"]]
    assert counted["answers that were cut off"] == 1


def test_a_tokenizer_without_a_template_gets_the_bare_texts() -> None:
    tokenizer = speaks(None)
    rows = made(talk(TALK[1:3]), tokenizer, Form(500)).rows
    assert scored(rows, tokenizer) == [["hello</s>"]]
    assert tokenizer.decode(rows[0].ids) == "hi\n\nhello</s>"


def test_a_template_that_knows_no_assistant_is_named() -> None:
    tokenizer = speaks("{% for m in messages %}{% if m['role'] == 'user' %}<s>{{ m['content'] }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match=r"3 chats leave 0 rows .*know the assistant\? It begins .{% for m in messages"):
        to_rows([talk(key=str(one)) for one in range(3)], tokenizer, 500, 0.3, 0)


def test_words_that_are_not_the_targets_are_counted() -> None:
    chats = [talk([{"role": "system", "content": str(one)}, *TALK[1:]], key=str(one)) for one in range(4)]
    rows = to_rows(chats, speaks(CHATML), 500, 0.25, 0, form=Form(500, own_words=False))
    assert rows.counted["scored tokens that are not the target's own words"] == 4 * 10
    assert (len(rows.train), len(rows.held_out)) == (3, 1)


def test_a_worker_that_is_killed_is_told_of_and_nothing_of_its_rows_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, form, here = speaks(CHATML), Form(500), os.getpid()
    chats = [talk(key=str(number)) for number in range(6)]
    alone = list(all_made(chats, tokenizer, form))

    def dies(one: Any, *rest: Any) -> Any:
        if one["key"] == "4" and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return made(one, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(all_rows, "made", dies)
        with pytest.raises(RuntimeError, match=r"one of 2 data workers died .* and data\.workers=1 takes less memory"):
            list(all_made(chats, tokenizer, form, 2, tmp_path))
    assert list(all_made(chats, tokenizer, form, 2, tmp_path)) == alone


def test_workers_change_neither_rows_nor_their_order_and_what_was_kept_is_kept_under_all_it_hangs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, form = speaks(CHATML), Form(500)
    chats = [
        talk([TALK[1], {"role": "assistant", "content": f"number {one}"}] if one % 3 else TALK[:1], key=str(one))
        for one in range(7)
    ]
    alone = list(all_made(chats, tokenizer, form))
    assert [len(one.rows) for one in alone] == [0, 1, 1, 0, 1, 1, 0]
    for workers in (2, 3):
        assert list(all_made(chats, tokenizer, form, workers, tmp_path / str(workers))) == alone
    kept = sorted((tmp_path / "2").iterdir())
    stamps = [path.stat().st_mtime_ns for path in kept]
    assert list(all_made(chats, tokenizer, form, 2, tmp_path / "2")) == alone
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "2").iterdir())] == stamps
    other = speaks(CHATML.replace("<s>assistant", "<s>model").replace("m['role']", "m['role'].replace('assistant', 'model')"))
    assert list(all_made(chats, other, form, 2, tmp_path / "2")) == list(all_made(chats, other, form))
    names = {fingerprint(tokenizer, form, ["x"]), fingerprint(other, form, ["x"]), fingerprint(tokenizer, form, ["y"])}
    names |= {fingerprint(tokenizer, Form(499), ["x"]), fingerprint(tokenizer, Form(500, "split"), ["x"])}
    swapped = tiny_tokenizer((70, 71))
    swapped.chat_template = CHATML
    assert len(names | {fingerprint(swapped, form, ["x"])}) == 6


def test_files_of_chats_are_read_whole_or_their_broken_records_named(tmp_path: Path) -> None:
    records = [{"id": "x", "messages": TALK, "finish_reason": None}, {"id": None, "messages": TALK[:3], "finish_reason": "length"}]
    lines, table = tmp_path / "chats.jsonl", tmp_path / "chats.parquet"
    lines.write_text("".join(json.dumps(one) + "\n" for one in records))
    from datasets import Dataset

    Dataset.from_list(records).to_parquet(str(table))
    wanted = [{"key": "x", "messages": TALK, "finished": True}, {"key": "2", "messages": TALK[:3], "finished": False}]
    assert read_chats(lines) == read_chats(table) == wanted
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": None}]}) + "\n" + json.dumps({"text": "x"}) + "\n")
    with pytest.raises(
        ValueError, match=r"2 of 2 records cannot be used:\n  record 1: messages must be.*\n  record 2: .*found text"
    ):
        read_chats(lines)
