"""A served target: what it answers and says is what the local one does, whatever the server and the line between do wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.distill import LiveTeacher, collate
from draftsmith.distill.rollout import answer, answer_served, ends
from draftsmith.distill.served.at_once import Unanswered
from draftsmith.distill.served.endpoint import Fault
from draftsmith.distill.served.target import ServedTarget
from draftsmith.specdec import Sampling
from draftsmith.specdec.models import chat_ids, eos_ids, load
from stub_server import Reply, Stub
from tiny import tiny_folder, tiny_tokenizer

WORDS = ("amber", "jetty islet", "cedar", "pearl islet", "ember", "fjord", "grove", "heron")  # two of these are answered to an end
CHATS = [[{"role": "user", "content": word}] for word in WORDS]
NASTY = {"temperature": 0.9, "top_k": 3, "repetition_penalty": 1.7}  # what a model's generation_config may ask of every request
ROWS = [([1, 9, 30, 77, 41, 8, 200], 3), ([5, 6, 7, 99, 3], 1), ([4, 4, 90, 17], 4)]  # the last one scores nothing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("served"), seed=2)  # a seed whose target ends some of its answers by itself


@pytest.fixture(scope="module")
def loaded(folder: str) -> Any:
    return load(folder)


@pytest.fixture
def stub(loaded: Any) -> Iterator[Stub]:
    with Stub(*loaded) as one:
        yield one


def served(stub: Stub, naps: list[float] | None = None, **changes: Any) -> ServedTarget:
    return ServedTarget(stub.url, "tiny", **{"sleep": ([] if naps is None else naps).append, "retries": 3, **changes})


def prompts(loaded: Any) -> list[list[int]]:
    return [chat_ids(loaded.tokenizer, chat) for chat in CHATS]


def test_greedy_answers_are_the_local_targets(folder: str, loaded: Any, stub: Stub) -> None:
    stub.generation_config = NASTY
    target, tokenizer = loaded
    wanted = answer(target, tokenizer, CHATS, Sampling(), 24)
    assert 0 < sum(one.finished for one in wanted) < len(wanted)
    assert answer_served(served(stub), tokenizer, ends(folder, tokenizer), CHATS, Sampling(), 24) == wanted
    sent = sorted(one["prompt"] for one in stub.completions())
    assert sent == sorted(prompts(loaded))  # the template, once, and nothing before it
    # An end at the last token that is allowed is an end, whatever the server calls it.
    short = min((one for one in wanted if one.finished), key=lambda one: len(one.ids))
    again = answer_served(served(stub), tokenizer, ends(folder, tokenizer), CHATS, Sampling(), len(short.ids))
    assert again == answer(target, tokenizer, CHATS, Sampling(), len(short.ids))
    assert any(one.finished for one in again)


def test_a_sampled_answer_hangs_on_its_chat_and_seed(loaded: Any, stub: Stub) -> None:
    how = Sampling(1.0, top_k=50, top_p=0.95)

    def said(chats: list[Any], seed: int) -> list[list[int]]:
        return [one.ids for one in answer_served(served(stub), loaded.tokenizer, [2], chats, how, 8, seed)]

    together = said(CHATS, 5)
    assert said(CHATS[3:4], 5) == together[3:4]
    assert said(CHATS, 6) != together
    asked = stub.completions()[0]
    assert (asked["temperature"], asked["top_k"], asked["top_p"]) == (1.0, 50, 0.95)
    assert len({one["seed"] for one in stub.completions()}) == 2 * len(CHATS)


def test_a_text_ends_at_any_of_the_ids_that_end_one(loaded: Any, stub: Stub) -> None:
    prompt = prompts(loaded)[0]
    (whole,) = served(stub).answer([prompt], Sampling(), 6, [0], [2])
    assert not whole.finished
    end = whole.ids[3]
    assert served(stub).answer([prompt], Sampling(), 6, [0], [2, end]) == [(whole.ids[: whole.ids.index(end) + 1], True)]


def test_the_ids_that_end_a_text_are_those_of_a_loaded_target(folder: str, tmp_path: Path, loaded: Any) -> None:
    assert ends(folder, loaded.tokenizer) == eos_ids(*loaded) == [2]
    other = load(tiny_folder(tmp_path, seed=2))
    other.model.generation_config.eos_token_id = [2, 107]
    other.model.generation_config.save_pretrained(tmp_path)
    assert ends(str(tmp_path), other.tokenizer) == eos_ids(*other) == [2, 107]
    (tmp_path / "generation_config.json").unlink()
    assert ends(str(tmp_path), other.tokenizer) == eos_ids(*load(tmp_path)) == [2]


@pytest.mark.parametrize("k", [1, 4, 20])
def test_what_is_listened_to_is_the_live_law_at_the_scored_positions(loaded: Any, stub: Stub, k: int) -> None:
    batch, teacher = collate(ROWS), LiveTeacher(loaded.model)
    live = teacher.head(teacher.hidden(batch)).log_softmax(-1)
    own = torch.tensor([token for ids, prompt in ROWS for token in ids[prompt:]])
    inside = (live.topk(k).indices == own[:, None]).any(-1)
    assert not inside.all()  # so a text's own token comes beside the k
    heard = served(stub).listen(ROWS, k)
    assert [tuple(one.ids.shape) for one in heard] == [(len(ids) - prompt, k) for ids, prompt in ROWS]
    ids, log_p = torch.cat([one.ids for one in heard]), torch.cat([one.log_p for one in heard])
    assert torch.equal(ids, live.topk(k).indices)
    torch.testing.assert_close(log_p, live.topk(k).values, rtol=0, atol=1e-5)
    assert bool(torch.cat([one.log_sum_exp for one in heard]).isnan().all()), "a server gives laws, not logits"
    assert not torch.equal(ids[1:], ids[:-1])  # neighbours differ, so one off would have shown
    assert not torch.allclose(log_p[1:], log_p[:-1])


def test_a_text_that_ends_in_its_likeliest_tokens_is_heard_too(loaded: Any, stub: Stub) -> None:
    """Then the text's own token is one of the k, and the law holds k ids and not k + 1."""
    prompt = prompts(loaded)[0]
    said = served(stub).answer([prompt], Sampling(), 6, [0], [2])[0].ids
    (heard,) = served(stub).listen([(prompt + said, len(prompt))], 3)
    assert heard.ids[:, 0].tolist() == said


BROKEN = {
    "an error": Reply(500, {"error": {"message": "out of memory"}}),
    "a gateway": Reply(502, b"<html>bad gateway</html>"),
    "busy": Reply(429, {"error": {"message": "too many"}}),
    "reset in mid-body": Reply(200, {"choices": [{"text": "x" * 4000}]}, cut=900),
    "reset at once": Reply(200, {"choices": []}, cut=0),
    "no JSON": Reply(200, b'{"choices": [{"tex'),
    "no text": Reply(200, b"\xff\xfe\xff"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_passes_is_tried_again(loaded: Any, stub: Stub, fault: str) -> None:
    wanted = served(stub).listen(ROWS[:1], 3)
    stub.asked.clear()
    stub.fault = lambda number, body: BROKEN[fault] if number < 3 else None
    naps: list[float] = []
    (heard,) = served(stub, naps).listen(ROWS[:1], 3)
    assert torch.equal(heard.log_p, wanted[0].log_p)
    assert len(stub.completions()) == 4
    assert all(low <= nap <= 2 * low for nap, low in zip(naps, (0.5, 1, 2), strict=True))
    assert naps != [1, 2, 4]  # less a random part


@pytest.mark.parametrize("status", [429, 503])
def test_the_server_says_when_to_come_back(stub: Stub, status: int) -> None:
    after = [lambda: "7", lambda: formatdate(time.time() + 100, usegmt=True), lambda: "soon"]
    stub.fault = lambda number, body: Reply(status, {}, {"Retry-After": after[number]()}) if number < 3 else None
    naps: list[float] = []
    served(stub, naps).listen(ROWS[:1], 3)
    assert naps[0] == 7
    assert 60 < naps[1] <= 100
    assert 2 <= naps[2] <= 4
    stub.asked.clear()
    stub.fault = lambda number, body: Reply(status, {}, {"Retry-After": "86400"})
    with pytest.raises(Unanswered, match="wants no request for 86400 s"):
        served(stub, naps).listen(ROWS[:1], 3)
    assert len(naps) == 3


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (422, 1), (500, 4), (429, 4)])
def test_a_row_that_fails_costs_the_others_nothing(loaded: Any, stub: Stub, status: int, tries: int) -> None:
    asked = prompts(loaded)
    wanted = served(stub).answer(asked, Sampling(), 6, [0] * 8, [2])
    stub.asked.clear()
    stub.fault = lambda number, body: Reply(status, {"message": "this one not"}) if body["prompt"] == asked[2] else None
    with pytest.raises(
        Unanswered, match=rf"1 of 8 rows have no answer; row 3: {stub.url}/completions: {status}: this one not"
    ) as caught:
        served(stub, concurrency=2).answer(asked, Sampling(), 6, [0] * 8, [2])
    assert caught.value.done == [*wanted[:2], None, *wanted[3:]]
    assert list(caught.value.why) == [2]
    assert sum(one["prompt"] == asked[2] for one in stub.completions()) == tries


def test_what_every_row_would_meet_is_met_once(loaded: Any, stub: Stub) -> None:
    stub.key = "needed"
    with pytest.raises(Unanswered, match=r"8 of 8 rows have no answer.*401.*DRAFTSMITH_API_KEY"):
        served(stub, concurrency=1).answer(prompts(loaded), Sampling(), 6, [0] * 8, [2])
    assert len(stub.completions()) == 1
    with Stub(*loaded) as gone:
        pass
    naps: list[float] = []
    with pytest.raises(Fault, match=r"/v1/models: no answer \(ConnectionRefusedError.*tried 2 times\. Is the server up"):
        served(gone, naps).check(loaded.tokenizer)
    with pytest.raises(Unanswered, match=r"8 of 8 rows have no answer.*tried 4 times"):
        served(gone, naps, concurrency=1).answer(prompts(loaded), Sampling(), 6, [0] * 8, [2])
    assert len(naps) == 1 + 3


def test_an_answer_that_takes_too_long(loaded: Any, stub: Stub) -> None:
    wait = threading.Event()
    stub.hold = lambda: wait.wait(10)
    with pytest.raises(Unanswered, match=r"TimeoutError.*the timeout, 0\.05 s: raise it") as caught:
        served(stub, timeout=0.05, retries=0).listen(ROWS[:1], 3)
    wait.set()
    assert not caught.value.why[0].hopeless


def test_results_come_in_order_however_late(loaded: Any, stub: Stub) -> None:
    asked, told = prompts(loaded), []
    wanted = served(stub, concurrency=1).answer(asked, Sampling(), 6, [0] * 8, [2])
    gate, late = threading.Barrier(4, timeout=20), threading.Lock()
    first = [True]

    def hold() -> None:  # four at a time are under way; the first to come is the last of its four to be answered
        with late:
            mine, first[0] = first[0], False
        gate.wait()
        if mine:
            time.sleep(0.05)

    stub.hold = hold
    got = served(stub, concurrency=4).answer(asked, Sampling(), 6, [0] * 8, [2], lambda done, of: told.append((done, of)))
    assert got == wanted
    assert told == [(n, 8) for n in range(1, 9)]
    assert served(stub).answer([], Sampling(), 6, [], [2]) == []


def test_an_interrupt_ends_it_at_once(loaded: Any, stub: Stub) -> None:
    def interrupted(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served(stub, concurrency=1).answer(prompts(loaded), Sampling(), 6, [0] * 8, [2], interrupted)
    time.sleep(0.2)  # long enough for what would have gone on
    assert len(stub.completions()) <= 3


def test_check_passes_a_server_that_can_do_what_is_asked(loaded: Any, stub: Stub) -> None:
    target = served(stub)
    target.check(loaded.tokenizer, k=20)
    assert target.context == 512
    stub.prompt_logprobs = False
    served(stub).check(loaded.tokenizer)  # answers alone need none
    ServedTarget(stub.url.removesuffix("/v1") + "/", "tiny").check(loaded.tokenizer)


def test_check_names_what_is_wrong_and_what_to_do(loaded: Any, stub: Stub) -> None:
    def wrong(match: str, model: str = "tiny", k: int = 0, tokenizer: Any = loaded.tokenizer, url: str = stub.url) -> None:
        with pytest.raises((Fault, ValueError), match=match):
            ServedTarget(url, model, sleep=lambda _: None).check(tokenizer, k)

    wrong(r"the model served at http://127.0.0.1:\d+/v1: 'tinny' is not one of tiny; did you mean 'tiny'", "tinny")
    wrong("They are not one model: serve the recipe's target", tokenizer=tiny_tokenizer(swapped=(70, 104)))
    wrong("no more than the 20 likeliest.*32 were asked: start it with --max-logprobs 32, or ask for 20", k=32)
    wrong(r"/other/v1/models: 404: .*Is this the address", url=stub.url.replace("/v1", "/other"))
    stub.prompt_logprobs = False
    wrong("gives no prompt_logprobs: it can answer, but not be listened to", k=4)
    stub.token_ids = False
    wrong("answers in text alone.*vLLM 0.10.2")
    stub.reply = lambda path, headers, body: Reply(200, {"models": ["tiny"]})
    wrong("names no models: {'models'")


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "BOS": ("7 ids were sent to .* and it read 8 others", lambda one: one | {"prompt_token_ids": [1, *one["prompt_token_ids"]]}),
    "two": ("one choice was asked, found", lambda one: [one, one]),
    "text alone": ("answers in text alone", lambda one: {key: one[key] for key in one if "ids" not in key}),
    "abort": (r"broke a text off \(abort\) after 5 of 5", lambda one: one | {"finish_reason": "abort"}),
    "short": (r"broke a text off \(length\) after 2 of 5", lambda one: one | {"token_ids": [8, 9]}),
    "other end": (
        "ended a text with id 9, which is none of those",
        lambda one: one | {"token_ids": [8, 9], "finish_reason": "stop"},
    ),
    "no end": ("ended a text with id None", lambda one: one | {"token_ids": [], "finish_reason": "stop"}),
    "wrote on": (r"wrote on behind an id that ends a text \(\[2\]\)", lambda one: one | {"token_ids": [8, 2, 9, 9, 9]}),
    "unknown id": (
        "said the id 999; the last one of the target's tokenizer is 259",
        lambda one: one | {"token_ids": [8, 9, 999, 9, 9]},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_not_one_is_refused(loaded: Any, stub: Stub, lie: str) -> None:
    match, change = LIES[lie]
    target = served(stub)
    target.check(loaded.tokenizer)

    def fault(number: int, body: dict[str, Any]) -> Reply:
        changed = change(stub.complete(body).body["choices"][0])
        return Reply(200, {"choices": changed if isinstance(changed, list) else [changed]})

    stub.fault = fault
    with pytest.raises(Unanswered, match=match):
        target.answer([ROWS[0][0]], Sampling(), 5, [0], [2])


def without_own(laws: list[Any]) -> list[Any]:
    return [law and dict(list(law.items())[1:]) for law in laws]


def plus(much: float) -> Callable[[list[Any]], list[Any]]:
    return lambda laws: [law and {one: {"logprob": entry["logprob"] + much} for one, entry in law.items()} for law in laws]


MISHEARD: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "one off": ("does not hold the text's own token", lambda laws: [*laws[1:], laws[1]]),
    "own left out": ("does not hold the text's own token", without_own),
    "null": ("the law at position 3 does not hold", lambda laws: [None] * len(laws)),
    "part": ("gives laws for 4 of 7 tokens; start it with --no-enable-prefix-caching", lambda laws: laws[3:]),
    "none": ("gives no prompt_logprobs", lambda laws: None),
    "logits": ("sum to more than 1: start it with --logprobs-mode raw_logprobs", plus(9.0)),
    "not numbers": ("sum to more than 1|likeliest were asked", plus(float("nan"))),
    "too few": (r"the law at position 3 holds [34] ids; the 5 likeliest were asked", lambda laws: laws),
}


@pytest.mark.parametrize("lie", MISHEARD)
def test_laws_that_are_not_the_texts_are_refused(stub: Stub, lie: str) -> None:
    match, change = MISHEARD[lie]

    def fault(number: int, body: dict[str, Any]) -> Reply:
        choice = stub.complete(body | {"prompt_logprobs": 3}).body["choices"][0]
        return Reply(200, {"choices": [choice | {"prompt_logprobs": change(choice["prompt_logprobs"])}]})

    stub.fault = fault
    with pytest.raises(Unanswered, match=match):
        served(stub).listen(ROWS[:1], 5 if lie == "too few" else 3)


def test_rows_without_room_or_sense_are_named(loaded: Any, stub: Stub) -> None:
    target = served(stub)
    target.check(loaded.tokenizer)
    with pytest.raises(
        Unanswered, match=r"row 1: 500 tokens and 13 more do not fit the 512 of tiny .* --max-model-len 513"
    ) as caught:
        target.answer([[9] * 500, [9] * 499], Sampling(), 13, [0, 0], [2])
    assert caught.value.done[1] is not None
    with pytest.raises(Unanswered, match="512 tokens and 1 more do not fit"):
        target.listen([([9] * 512, 5)], 3)
    with pytest.raises(Unanswered, match="a prompt of 0 in a row of 3 tokens"):
        target.listen([([9] * 3, 0)], 3)


SECRET = 'sk-"7f3a'


def test_the_key_is_in_one_header_and_nowhere_else(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_API_KEY", SECRET)
    with Stub(*loaded, key=SECRET) as stub, Stub(*loaded) as elsewhere:
        target = served(stub)
        target.check(loaded.tokenizer, 3)
        target.listen(ROWS, 3)
        for one in stub.asked:
            assert one["headers"].pop("Authorization") == f"Bearer {SECRET}"
            assert "7f3a" not in str(one)
        stub.key = "another"
        with pytest.raises(Fault, match=r"401: Unauthorized: Bearer \*\*\* is not the key") as caught:
            target.check(loaded.tokenizer)
        assert "7f3a" not in f"{caught.value!r} {caught.value.said} {caught.value.__cause__} {target!r}"
        stub.key = ""
        stub.fault = lambda number, body: Reply(500, f"{{{json.dumps(SECRET)}".encode())  # escaped, and no JSON
        with pytest.raises(Unanswered, match=r"500.*\*\*\*") as many:
            target.listen(ROWS[:1], 3)
        assert "7f3a" not in str(many.value)
        # A redirect, which the library would follow with the key in hand.
        stub.fault = lambda number, body: Reply(302, {}, {"Location": f"{elsewhere.url}/completions?token=7f3a"})
        with pytest.raises(Unanswered, match=r"302: it points to .* not followed, since the key would go along") as moved:
            target.listen(ROWS[:1], 3)
        assert elsewhere.asked == []
        assert "7f3a" not in str(moved.value)


def test_no_proxy_stands_before_this_very_machine(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    served(stub, retries=0).listen(ROWS[:1], 3)


def test_without_a_key_no_header_is_sent(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTSMITH_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "for another service")
    served(stub).listen(ROWS[:1], 3)
    assert "Authorization" not in stub.asked[0]["headers"]


def test_a_url_or_key_that_cannot_be_used_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://me:7f3a@host/v1", "me:7f3a@host", "https://host/v1?key=7f3a"):
        with pytest.raises(ValueError, match="give it bare, and its key as DRAFTSMITH_API_KEY") as caught:
            ServedTarget(url, "m")
        assert "7f3a" not in str(caught.value)
    for url in ("localhost:8000", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="is not the url of a server; one looks like http://localhost:8000/v1"):
            ServedTarget(url, "m")
    for key in ("7f3a\n", "7f 3a", "7f3ä"):
        monkeypatch.setenv("DRAFTSMITH_API_KEY", key)
        with pytest.raises(ValueError, match="DRAFTSMITH_API_KEY holds what no header can carry") as bad:
            ServedTarget("http://host", "m")
        assert "7f" not in str(bad.value)
