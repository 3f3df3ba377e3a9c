"""Heads of exits on the target's own cache: the text and the rounds of a cache apart, and no layer twice; a head that cannot share says so."""

from __future__ import annotations

import pytest

from draftsmith.specdec import EarlyExitDrafter, generate
from draftsmith.specdec.models import blocks
from exits import KINDS, some_head
from tiny import FAMILIES, plain_greedy, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_blocks_draft_on_the_targets_cache_and_lora_says_why_it_does_not(family: str) -> None:
    target = tiny(family)
    wanted = [plain_greedy(target, prompt, 12) for prompt in PROMPTS]
    for kind in KINDS:
        layer, head = some_head(target, kind)
        fed = [0]  # tokens that the first layer has read
        handle = blocks(target)[1][0].register_forward_hook(
            lambda _m, args, _o, fed=fed: fed.__setitem__(0, fed[0] + args[0].shape[1])
        )
        shared = EarlyExitDrafter(target, layer, head)
        fed[0] = 0
        out, once = generate(target, PROMPTS, shared, k=3, max_new_tokens=12), fed[0]
        apart = generate(target, PROMPTS, EarlyExitDrafter(target, layer, head, shared=False), k=3, max_new_tokens=12)
        twice = fed[0] - once
        handle.remove()
        assert (once < twice) == (kind != "lora"), (kind, once, twice)
        assert out.tokens == apart.tokens == wanted, kind
        assert out.rounds == apart.rounds, kind
        notes = [one for one in out.warnings if "keeps a cache of its own" in one]
        assert bool(notes) == (kind == "lora"), (kind, out.warnings)
