"""A cache that forgets: after any extending and forgetting, logits equal those of the live tokens alone."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.specdec import ModelDrafter, NgramDrafter, generate
from draftsmith.specdec.cache import CachedLM
from tiny import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_see_their_live_tokens_only(family: str) -> None:
    model, chance = tiny(family), random.Random(family)
    lm, rows = CachedLM(model, 3), [[], [], []]
    for _ in range(12):
        width = chance.randint(1, 4)
        ids = torch.tensor([[chance.randrange(61) for _ in range(width)] for _ in rows])
        valid = torch.tensor([[chance.random() < 0.7 for _ in range(width)] for _ in rows])
        valid[:, -1] = True
        logits, _ = lm.extend(ids, valid)
        for b, row in enumerate(rows):
            row += ids[b][valid[b]].tolist()
            with torch.no_grad():
                wanted = model(input_ids=torch.tensor([row])).logits[0, -1]
            assert torch.allclose(logits[b, -1], wanted, atol=2e-4), family
        n = torch.tensor([chance.randint(0, min(3, len(row) - 1)) for row in rows])
        lm.forget(n)
        rows = [row[: len(row) - drop] for row, drop in zip(rows, n.tolist(), strict=True)]
        assert lm.lengths.tolist() == [len(row) for row in rows]


def test_one_row_is_cropped_not_masked() -> None:
    lm = CachedLM(tiny(), 1)
    lm.extend(torch.tensor([[1, 2, 3, 4]]), torch.ones(1, 4, dtype=torch.bool))
    lm.forget(torch.tensor([3]))
    assert lm._cache.get_seq_length() == 1
    with pytest.raises(ValueError, match="cannot forget"):
        lm.forget(torch.tensor([2]))


def test_hidden_states_come_by_layer() -> None:
    model = tiny()
    ids = torch.tensor([[1, 2, 3]])
    _, (embedded, last) = CachedLM(model, 1).extend(ids, torch.ones_like(ids, dtype=torch.bool), hidden_layers=(0, 3))
    with torch.no_grad():
        assert torch.equal(embedded, model.model.embed_tokens(ids))
        assert torch.allclose(last, model.model(input_ids=ids).last_hidden_state, atol=1e-5)


@pytest.mark.parametrize("window", [2, 4, 6, 7])
def test_sliding_windows_roll_back_exactly_for_one_row_and_are_refused_for_ragged_ones(window: int) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    prompt = [3, 1, 4, 1, 5, 9]
    plain = generate(model, [prompt], max_new_tokens=30).tokens
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=30,
        min_new_tokens=30,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=60,
    )
    assert theirs[0, 6:].tolist() == plain[0]
    for drafter in (NgramDrafter(), ModelDrafter(model), ModelDrafter(tiny(seed=3))):
        assert generate(model, [prompt], drafter, k=3, max_new_tokens=30).tokens == plain
    with pytest.raises(ValueError, match="one prompt at a time"):
        generate(model, [prompt, [1, 2]], NgramDrafter(), k=3, max_new_tokens=30)


def test_a_window_of_one_token_is_refused() -> None:
    model = tiny("mistral", sliding_window=1)
    with pytest.raises(ValueError, match="window of 1"):
        generate(model, [[1, 2, 3]], max_new_tokens=5)


def test_a_recurrent_state_is_refused_by_class_and_decoded_plainly() -> None:
    config = FalconMambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, state_size=4, intermediate_size=32)
    model = FalconMambaForCausalLM(config).eval()
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=5).tokens[0]) == 5
    with pytest.raises(ValueError, match="cannot give back refused tokens"):
        generate(model, [[1, 2, 3]], NgramDrafter(), max_new_tokens=5)
    with pytest.raises(ValueError, match="one prompt at a time"):
        generate(model, [[1, 2, 3], [1]], max_new_tokens=5)
