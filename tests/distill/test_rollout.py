"""Rows that the draft writes: its own weights as they are, the served template's ids, nothing behind the first EOS."""

from __future__ import annotations

import copy

import pytest
import torch

from draftsmith.distill import CutDraft, DistillDraft, WholeDraft, collate
from draftsmith.distill.rollout import speaking, write_rows
from draftsmith.specdec import Sampling
from draftsmith.specdec.models import chat_ids
from tiny import FAMILIES, noisy, plain_greedy, tiny, tiny_tokenizer

PROMPTS = [[5, 9, 11], [7, 3, 20, 21, 9], [8], [6, 40, 41]]
WARM = Sampling(temperature=1.0)


def trained(draft: torch.nn.Module, sigma: float = 0.05) -> None:
    """Other weights, in place, as an optimizer leaves them."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * sigma)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_in_training_speaks_as_its_saved_self_would(family: str) -> None:
    target = tiny(family)
    draft = CutDraft(target, [0, 2])
    model = speaking(draft)
    ids = torch.tensor([[5, 9, 11, 4, 30]])
    for _ in range(2):  # the second time with other weights, through the same view
        with torch.no_grad():
            wanted = draft.whole().eval()(input_ids=ids).logits
            assert torch.allclose(model.eval()(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)
        rows = write_rows(model, PROMPTS, Sampling(), 8, [1, 2, 3, 4], [])
        assert [ids[n:] for ids, n in rows] == [plain_greedy(draft.whole(), prompt, 8) for prompt in PROMPTS]
        trained(draft)
    owned = {one.data_ptr() for one in [*draft.parameters(), *target.parameters()]}
    assert {one.data_ptr() for one in model.parameters()} <= owned, "nothing is copied"
    # What is trained, and the target, are as they were.
    assert isinstance(draft.body.get_input_embeddings(), torch.nn.Identity)
    assert len(getattr(target, target.base_model_prefix)._modules) == len(getattr(model, model.base_model_prefix)._modules)
    assert target.config.num_hidden_layers == 3
    assert draft.head.linear is target.get_output_embeddings()


def test_a_whole_draft_speaks_itself_and_a_wrapped_forward_is_copied() -> None:
    target = tiny()
    model = noisy(target)
    assert speaking(WholeDraft(model)) is model
    draft = CutDraft(target, [0, 2])
    target.forward = target.forward  # type: ignore[method-assign]  # as a hook or a compiler leaves it
    state = torch.random.get_rng_state()
    other = speaking(draft)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not {one.data_ptr() for one in other.parameters()} & {one.data_ptr() for one in draft.parameters()}
    assert write_rows(other, PROMPTS, Sampling(), 6, [0] * 4, []) == write_rows(draft.whole(), PROMPTS, Sampling(), 6, [0] * 4, [])


def test_a_row_is_the_template_and_what_was_said_up_to_the_first_eos() -> None:
    tokenizer = tiny_tokenizer()
    draft = tiny(vocab_size=len(tokenizer))
    chats = [[{"role": "user", "content": text}] for text in ("hello", "the other thing", "a")]
    prompts = [chat_ids(tokenizer, chat) for chat in chats]
    eos = plain_greedy(draft, prompts[0], 5)[4]  # a token that it does say
    rows = write_rows(draft, prompts, Sampling(), 12, [0, 1, 2], [eos])
    for (ids, prompt), wanted in zip(rows, prompts, strict=True):
        assert ids[:prompt] == wanted
        assert tokenizer.decode(ids[:prompt]).count("<s>a:") == 1
        said = ids[prompt:]
        assert said == plain_greedy(draft, wanted, 12, frozenset([eos]))
        assert eos not in said[:-1]
        assert said[-1] == eos or len(said) == 12
    assert rows[0][0][-1] == eos
    assert any(ids[-1] != eos for ids, _ in rows), "one is cut off, and no EOS is put behind it"
    batch = collate(rows)
    assert int(batch.scored.sum()) == sum(len(ids) - prompt for ids, prompt in rows)


def test_a_generation_config_is_not_asked() -> None:
    draft = tiny()
    wanted = write_rows(draft, PROMPTS, WARM, 8, [1, 2, 3, 4], [])
    other = copy.deepcopy(draft)
    other.generation_config.update(do_sample=True, temperature=0.01, top_k=1, repetition_penalty=3.0, eos_token_id=wanted[0][0][4])
    assert write_rows(other, PROMPTS, WARM, 8, [1, 2, 3, 4], []) == wanted


def test_a_row_hangs_on_its_prompt_and_seed_in_whatever_company() -> None:
    draft = tiny()
    together = write_rows(draft, PROMPTS, WARM, 10, [1, 2, 3, 4], [2])
    alone = [write_rows(draft, [prompt], WARM, 10, [seed], [2])[0] for prompt, seed in zip(PROMPTS, (1, 2, 3, 4), strict=True)]
    assert together == alone == write_rows(draft, PROMPTS, WARM, 10, [1, 2, 3, 4], [2], batch_size=2)
    assert write_rows(draft, PROMPTS, WARM, 10, [9, 2, 3, 4], [2])[0] != together[0]
    assert write_rows(draft, [], WARM, 10, [], [2]) == []
    assert all(max(ids) < 30 for ids, n in write_rows(draft, [[5]] * 3, WARM, 20, [1, 2, 3], [], vocab_size=30))
    some = torch.tensor([3, 7, 8, 20])
    limited = write_rows(draft, PROMPTS, WARM, 10, [1, 2, 3, 4], [2], ids=some)
    assert {one for ids, n in limited for one in ids[n:]} == set(some.tolist()), "a draft of few ids says no other"
    with pytest.raises(ValueError, match="one seed a row: 4 prompts, found 1"):
        write_rows(draft, PROMPTS, WARM, 10, [1], [2])


def test_sampling_leaves_no_trace_in_what_is_trained() -> None:
    target = tiny(attention_dropout=0.5)
    draft = CutDraft(target, [0, 1]).train()
    draft.body.layers[1].eval()  # each sub-module has its own mode back
    modes = [one.training for one in draft.modules()]
    before, state = copy.deepcopy(draft.state_dict()), torch.random.get_rng_state()
    rows = write_rows(speaking(draft), PROMPTS, WARM, 6, [1, 2, 3, 4], [])
    assert rows == write_rows(speaking(draft), PROMPTS, WARM, 6, [1, 2, 3, 4], []), "no dropout while it writes"
    assert [one.training for one in draft.modules()] == modes
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(one.grad is None and one.requires_grad for one in draft.parameters())
    assert all(torch.equal(one, before[name]) for name, one in draft.state_dict().items())
    objective = DistillDraft(draft.eval(), target)
    objective.loss(collate(rows)).total.backward()  # weights that were sampled with are still differentiated
    assert all(one.grad is not None for one in draft.parameters())
