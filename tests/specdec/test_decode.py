"""Greedy equality with two references that share no code with the decoder, and every way a row can end."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from draftsmith.specdec import EarlyExitDrafter, ModelDrafter, NgramDrafter, Outcome, Proposal, Sampling, generate
from tiny import FAMILIES, noisy, plain_greedy, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]
TARGET = tiny("llama")
DRAFT = noisy(TARGET, 0.05)


def drafters(target: torch.nn.Module = TARGET, draft: torch.nn.Module = DRAFT) -> dict[str, object]:
    return {
        "plain": None, "model": ModelDrafter(draft), "self": ModelDrafter(target), "ngram": NgramDrafter(),
        "exit": EarlyExitDrafter(target, 2), "gpt2": ModelDrafter(tiny("gpt2", 5)),
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own(family: str) -> None:
    """Every drafter, k in 1..6, batch 1 and 3, against a loop without a cache and against transformers.generate."""
    every = family in ("llama", "gpt2")  # rotary and absolute positions; the other families differ inside the model only
    target = tiny(family)
    wanted = [plain_greedy(target, prompt, 30) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        ids = torch.tensor([prompt])
        theirs = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
        )
        cut = text.index(2) if 2 in text else 30  # transformers must be kept from its own EOS; ours had none
        assert theirs[0, len(prompt) :].tolist()[:cut] == text[:cut]
    for (name, drafter), k in itertools.product(drafters(target, noisy(target)).items(), range(1, 7) if every else (1, 4)):
        together = generate(target, PROMPTS, drafter, k=k, max_new_tokens=30)
        assert together.tokens == wanted, (name, k)
        for prompt, text, rounds in zip(PROMPTS, wanted, together.rounds, strict=True):
            alone = generate(target, [prompt], drafter, k=k, max_new_tokens=30)
            assert alone.tokens == [text], (name, k)
            assert alone.rounds == [rounds], (name, k, "a row's acceptance must not hang on its neighbours")


def test_acceptance_of_the_test_draft_lies_between_0_and_1() -> None:
    out = generate(TARGET, PROMPTS, ModelDrafter(DRAFT), k=4, max_new_tokens=40)
    drafted, accepted = (sum(side) for side in zip(*itertools.chain(*out.rounds), strict=True))
    assert 0.1 < accepted / drafted < 0.95


@pytest.mark.parametrize("k", range(1, 7))
def test_a_draft_that_is_the_target_is_always_accepted(k: int) -> None:
    for drafter in (ModelDrafter(TARGET), EarlyExitDrafter(TARGET, 3)):
        for how in (Sampling(), Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)):
            out = generate(TARGET, [PROMPTS[0]], drafter, k=k, max_new_tokens=200, how=how)
            assert all(drafted == accepted for drafted, accepted in out.rounds[0]), (k, how)
            assert len(out.rounds[0]) == 1 + -(-199 // (k + 1)), "the prefill says the first token"


def test_each_greedy_token_declared_as_eos_ends_the_row_there() -> None:
    for prompt in PROMPTS:
        text = plain_greedy(TARGET, prompt, 30)
        for eos in set(text):
            wanted = text[: text.index(eos) + 1]
            for (name, drafter), k in itertools.product(drafters().items(), (1, 4)):
                out = generate(TARGET, [prompt], drafter, k=k, max_new_tokens=30, eos={eos, 60})
                assert out.tokens == [wanted], (name, k, eos)
                assert out.finished == [True]
                assert len(wanted) == sum(accepted + 1 for _, accepted in out.rounds[0])


class Scripted:
    """Says what it is told to, so that an EOS can be put into any place of a block."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, says: list[int]) -> None:
        self.says = says

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: object) -> None:
        self.at = 0

    def propose(self, k: int, how: Sampling, generator: object) -> Proposal:
        said = self.says[self.at : self.at + k]
        return Proposal(torch.tensor([said], dtype=torch.long).reshape(1, -1), None, torch.tensor([len(said)]))

    def observe(self, outcome: Outcome) -> None:
        self.at += int(outcome.accepted) + 1


def test_an_eos_as_accepted_draft_as_correction_and_as_bonus() -> None:
    text = plain_greedy(TARGET, PROMPTS[0], 30)
    eos = text[-1]
    first = text.index(eos)
    assert first >= 3
    k = first  # the prefill has said the first token, so the EOS is draft `first`
    ended = [(0, 0), (first - 1, first - 1)]  # it counts as the round's last token, and drafts behind it as never drafted
    cases = {
        "accepted draft": (text[1:], k, ended),
        "bonus": (text[1:], first - 1, ended),
        "correction": ([*text[1:first], (eos + 1) % 61, 0, 0], k, [(0, 0), (k, first - 1)]),
    }
    for name, (says, drafted, rounds) in cases.items():
        out = generate(TARGET, [PROMPTS[0]], Scripted(says), k=drafted, max_new_tokens=40, eos=eos)
        assert out.tokens == [text[: first + 1]], name
        assert out.rounds == [rounds], name


def test_a_drafts_own_eos_is_an_ordinary_token() -> None:
    text = plain_greedy(TARGET, PROMPTS[0], 20)
    DRAFT.config.eos_token_id = text[5]
    assert generate(TARGET, [PROMPTS[0]], ModelDrafter(DRAFT), k=4, max_new_tokens=20).tokens == [text]


def test_exactly_max_new_tokens() -> None:
    for (name, drafter), k in itertools.product(drafters().items(), (0, 1, 4)):
        for n in range(k + 3):
            out = generate(TARGET, PROMPTS, drafter, k=k, max_new_tokens=n)
            assert [len(row) for row in out.tokens] == [n] * 3, (name, k, n)
            assert all(len(row) == sum(a + 1 for _, a in rounds) for row, rounds in zip(out.tokens, out.rounds, strict=True))


def test_rows_that_end_ten_rounds_apart_leave_the_others_alone() -> None:
    text = plain_greedy(TARGET, PROMPTS[0], 40)
    eos = {text[0]}
    wanted = [plain_greedy(TARGET, prompt, 40, frozenset(eos)) for prompt in PROMPTS]
    assert len({len(row) for row in wanted}) > 1
    for name, drafter in drafters().items():
        assert generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=40, eos=eos).tokens == wanted, name


def test_min_new_tokens_masks_eos_at_exactly_those_places() -> None:
    text = plain_greedy(TARGET, PROMPTS[0], 30)
    place = next(i for i in range(3, 30) if text[i] not in text[:i])
    for name, drafter in drafters().items():
        out = generate(TARGET, [PROMPTS[0]], drafter, k=4, max_new_tokens=30, eos=text[place], min_new_tokens=place)
        assert out.tokens == [text[: place + 1]], (name, "EOS may be the first token behind the least number")
    eos = text[2]
    for name, drafter in drafters().items():
        early = generate(TARGET, [PROMPTS[0]], drafter, k=4, max_new_tokens=30, eos=eos, min_new_tokens=9)
        assert eos not in early.tokens[0][:8], name
        assert early.tokens == generate(TARGET, [PROMPTS[0]], max_new_tokens=30, eos=eos, min_new_tokens=9).tokens, name


def test_a_seed_repeats_and_a_row_with_its_own_seed_does_not_hang_on_its_neighbours() -> None:
    how = Sampling(1.0, top_p=0.95)
    for rule in ("token", "block"):
        together = generate(TARGET, PROMPTS, ModelDrafter(DRAFT), k=3, max_new_tokens=25, how=how, seed=[7, 8, 9], verify=rule)
        again = generate(TARGET, PROMPTS, ModelDrafter(DRAFT), k=3, max_new_tokens=25, how=how, seed=[7, 8, 9], verify=rule)
        assert together.tokens == again.tokens
        for prompt, seed, row in zip(PROMPTS, (7, 8, 9), together.tokens, strict=True):
            assert generate(
                TARGET, [prompt], ModelDrafter(DRAFT), k=3, max_new_tokens=25, how=how, seed=[seed], verify=rule
            ).tokens == [row]


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    generate(TARGET, PROMPTS, ModelDrafter(DRAFT), k=3, max_new_tokens=9, how=Sampling(1.0))
    generate(TARGET, PROMPTS, NgramDrafter(), k=3, max_new_tokens=9)
    assert torch.equal(torch.rand(3), wanted)


def test_a_model_in_train_mode_decodes_without_dropout_and_gets_its_mode_back() -> None:
    target = tiny("llama", attention_dropout=0.9)
    wanted = plain_greedy(target, PROMPTS[0], 20)
    target.train()
    target.model.layers[1].eval()
    assert generate(target, [PROMPTS[0]], ModelDrafter(target), k=3, max_new_tokens=20).tokens == [wanted]
    assert target.training
    assert not target.model.layers[1].training


def test_an_exit_of_a_target_that_was_put_into_train_mode_later_drafts_without_dropout() -> None:
    target = tiny("llama", attention_dropout=0.9)
    drafter = EarlyExitDrafter(target, 3)
    target.train()
    out = generate(target, [PROMPTS[0]], drafter, k=3, max_new_tokens=20)
    assert all(drafted == accepted for drafted, accepted in out.rounds[0])
    target.eval()
    target.model.train()  # the root alone says eval
    assert generate(target, [PROMPTS[0]], max_new_tokens=20).tokens == out.tokens
    target.forward = target.forward  # as a compiled or hooked model has it
    with pytest.raises(ValueError, match="wrapped forward"):
        EarlyExitDrafter(target, 1)


def test_a_row_near_the_end_of_the_drafts_positions_does_not_hang_on_its_neighbours() -> None:
    short, how = tiny("llama", 3, max_position_embeddings=20), Sampling(1.0)
    prompt = list(range(3, 14))
    for seed in range(12):
        alone = generate(TARGET, [prompt], ModelDrafter(short), k=4, max_new_tokens=10, how=how, seed=[seed])
        together = generate(TARGET, [prompt, [5]], ModelDrafter(short), k=4, max_new_tokens=10, how=how, seed=[seed, 99])
        assert alone.tokens[0] == together.tokens[0]
        assert alone.rounds[0] == together.rounds[0]


def test_a_generation_config_does_not_turn_sampling_on() -> None:
    target = tiny("llama")
    target.generation_config.update(do_sample=True, temperature=3.0, top_k=3, repetition_penalty=5.0)
    out = generate(target, [PROMPTS[0]], max_new_tokens=20)
    assert out.tokens == [plain_greedy(target, PROMPTS[0], 20)]
    assert out.settings["sampling"] == Sampling()


def test_a_draft_with_fewer_or_more_rows_than_the_target() -> None:
    wanted = [plain_greedy(TARGET, prompt, 25) for prompt in PROMPTS]
    narrow, wide = tiny("llama", 3, vocab_size=40), tiny("llama", 3, vocab_size=90)
    assert generate(TARGET, PROMPTS, ModelDrafter(narrow, vocab_size=61), k=3, max_new_tokens=25).tokens == wanted
    assert generate(TARGET, PROMPTS, ModelDrafter(wide, vocab_size=61), k=3, max_new_tokens=25).tokens == wanted
    with pytest.raises(ValueError, match="ids"):
        generate(TARGET, PROMPTS, ModelDrafter(wide), k=3, max_new_tokens=25, how=Sampling(1.0))


def test_a_draft_out_of_positions_pauses_and_the_text_goes_on() -> None:
    short = tiny("llama", 3, max_position_embeddings=16)
    drafter = ModelDrafter(short)
    out = generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=30)
    assert out.tokens == [plain_greedy(TARGET, prompt, 30) for prompt in PROMPTS]
    assert all(drafter.paused)
    assert generate(TARGET, [list(range(3, 40))], drafter, k=3, max_new_tokens=5).tokens == [
        plain_greedy(TARGET, list(range(3, 40)), 5)
    ]


def test_a_fault_in_a_drafter_leaves_the_target_whole() -> None:
    class Broken(NgramDrafter):
        def propose(self, k: int, how: Sampling, generator: object = None) -> Proposal:
            raise RuntimeError("broken")

    drafter = EarlyExitDrafter(TARGET, 1)
    for one in (Broken(), drafter):
        with pytest.raises((RuntimeError, ValueError)):
            generate(TARGET, [[1], [2], [70]] if one is drafter else PROMPTS, one, max_new_tokens=9)
    assert generate(TARGET, [PROMPTS[0]], max_new_tokens=20).tokens == [plain_greedy(TARGET, PROMPTS[0], 20)]


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 61]], {}, "ids 0..60"),
        ([[1]], {"k": -1}, "k=-1"),
        ([[1]], {"min_new_tokens": 99}, "min_new_tokens=99"),
        ([[1]], {"max_new_tokens": 513}, "positions"),
        ([[1]], {"eos": 61}, "eos"),
        ([[1]], {"eos": [-1]}, "eos"),
        ([[1]], {"verify": "typical"}, "typical"),
        ([[1]], {"seed": [1, 2]}, "one seed a row"),
        ([[1]], {"stop_strings": ["x"]}, "tokenizer="),
        ([1, 2, 3], {}, "lists of token ids"),
        (["hello"], {}, "lists of token ids"),
        ([[1.5, 2.0]], {}, "lists of token ids"),
        ([[1]], {"max_new_tokens": 3.5}, "whole numbers"),
        ([[1]], {"how": None}, "must be a Sampling"),
        ([[1]], {"vocab_size": 62}, "ids 0..60"),
        ([[40]], {"vocab_size": 40}, "ids 0..39"),
        ([[1]], {"processors": [3]}, "callables"),
    ],
)
def test_what_cannot_be_served_is_refused(prompts: list[list[int]], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(TARGET, prompts, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (Proposal(torch.tensor([[5]]), None, torch.tensor([3])), "n \\[1\\] in 0..K"),
        (Proposal(torch.tensor([[5]]), None, torch.tensor([-1])), "n \\[1\\] in 0..K"),
        (Proposal(torch.tensor([[5], [6]]), None, torch.tensor([1, 1])), "tokens \\[1, K\\]"),
        (Proposal(torch.tensor([[-1]]), None, torch.tensor([1])), "ids -1..-1"),
        (Proposal(torch.tensor([[61]]), None, torch.tensor([1])), "ids 61..61"),
        (Proposal(torch.tensor([[5]]), None, torch.tensor([1]), torch.tensor([[-1]])), "a tree of candidates"),
    ],
)
def test_a_proposal_that_cannot_be_verified_is_refused(proposal: Proposal, message: str) -> None:
    class Wrong(NgramDrafter):
        def propose(self, k: int, how: Sampling, generator: object = None) -> Proposal:
            return proposal

    with pytest.raises(ValueError, match=message):
        generate(TARGET, [list(range(3, 40))], Wrong(), k=3, max_new_tokens=9)


def test_columns_that_do_not_count_may_hold_anything() -> None:
    class Padding(NgramDrafter):
        def propose(self, k: int, how: Sampling, generator: object = None) -> Proposal:
            return Proposal(torch.full((1, 2), -1), None, torch.tensor([0]))

        def observe(self, outcome: Outcome, said: Proposal | None = None) -> None:
            pass

    assert generate(TARGET, [PROMPTS[0]], Padding(), k=2, max_new_tokens=9).tokens == [plain_greedy(TARGET, PROMPTS[0], 9)]
