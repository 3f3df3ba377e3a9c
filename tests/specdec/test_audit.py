"""The audit finds no fault in a greedy text, a tie where there is one, and a fault where a token was changed."""

from __future__ import annotations

import copy

import pytest
import torch

from draftsmith.specdec import ModelDrafter, generate
from draftsmith.specdec.audit import audit, first_difference
from tiny import noisy, tiny

PROMPT = [5, 9, 11, 4, 8]


def test_a_greedy_text_is_the_targets_own_and_a_changed_token_is_a_fault() -> None:
    target = tiny("llama")
    text = generate(target, [PROMPT], ModelDrafter(noisy(target)), k=4, max_new_tokens=150).tokens[0]
    found = audit(target, PROMPT, text)
    assert (found.tokens, found.ties, found.faults) == (150, (), ())
    assert str(found) == "150 of 150 tokens are the target's argmax, 0 near ties (within 0.25 nats), no faults"
    for place in (0, 70, 149):
        changed = [*text[:place], (text[place] + 1) % 61, *text[place + 1 :]]
        assert audit(target, PROMPT, changed).faults[0][0] == place, place
        assert "FAULTS" in str(audit(target, PROMPT, changed))
    assert audit(target, [5], generate(target, [[5]], max_new_tokens=9).tokens[0]).faults == ()
    with pytest.raises(ValueError, match="needs the prompt"):
        audit(target, [], text)


def test_a_near_tie_is_told_from_a_fault() -> None:
    target = tiny("llama")
    text = generate(target, [PROMPT], max_new_tokens=8).tokens[0]
    twin = (text[3] + 1) % 61
    with torch.no_grad():  # a second id with almost the same logit everywhere
        target.lm_head.weight[twin] = target.lm_head.weight[text[3]] * 0.9999
    text = generate(target, [PROMPT], max_new_tokens=8).tokens[0]
    place = next(i for i, token in enumerate(text) if token == (twin - 1) % 61)
    tied = [*text[:place], twin]
    found = audit(target, PROMPT, tied)
    assert [one[0] for one in found.ties] == [place]
    assert found.faults == ()
    where = first_difference(target, PROMPT, tied, text)
    assert where is not None
    assert where[0] == place
    assert 0 < where[1] < 0.25
    assert first_difference(target, PROMPT, text, text) is None
    assert first_difference(target, PROMPT, text[:4], text) == (4, float("inf"))


def test_in_bf16_every_difference_is_a_near_tie_and_the_result_warns() -> None:
    target = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    out = generate(target, [PROMPT], ModelDrafter(noisy(target)), k=4, max_new_tokens=100)
    assert any("bfloat16" in line for line in out.warnings)
    assert audit(target, PROMPT, out.tokens[0], near=1.0).faults == ()
