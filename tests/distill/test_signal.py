"""A draft's logits against what the target says: the same figures as whole laws give, for a draft that can say a few ids only too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.distill import LOSSES, Dense, acceptance

V = 31
GENERATOR = torch.Generator().manual_seed(0)
TARGET, DRAFT = (3 * torch.randn(6, V, generator=GENERATOR) for _ in range(2))
SAID = Dense(TARGET, nn.Identity())
IDS = torch.tensor([0, 3, 4, 9, 10, 22, 30])


def test_positions_are_compared_a_few_at_a_time_and_both_laws_at_one_temperature() -> None:
    ours, theirs = SAID.against(DRAFT[2:5], slice(2, 5), temperature=2.0)
    assert torch.equal(theirs, TARGET[2:5] / 2)
    assert torch.equal(ours, DRAFT[2:5] / 2)
    assert torch.equal(SAID.picked(torch.tensor([5, 1])).against(DRAFT[:2], slice(0, 2))[1], TARGET[[5, 1]])
    found = SAID.overlap(DRAFT, slice(0, 6))
    assert torch.equal(found.low, acceptance(DRAFT, TARGET))
    assert torch.equal(found.high, found.low)


def test_a_draft_of_few_ids_is_judged_by_the_whole_law() -> None:
    logits = DRAFT[:, IDS].requires_grad_()
    whole = torch.full((6, V), -torch.inf).index_copy(1, IDS, logits.detach())
    assert torch.allclose(SAID.overlap(logits, slice(0, 6), IDS).low, acceptance(whole, TARGET), atol=1e-6)
    ours, theirs = SAID.against(logits, slice(0, 6), IDS)
    LOSSES["forward_kl"](ours, theirs).sum().backward()
    p, q = TARGET.softmax(-1)[:, IDS], logits.detach().softmax(-1)
    assert torch.allclose(logits.grad, p.sum(-1, keepdim=True) * q - p, atol=1e-5), "the KL of what it can say, by its share"  # type: ignore[arg-type]
    best = SAID.against(TARGET[:, IDS].requires_grad_(), slice(0, 6), IDS)
    assert float(torch.autograd.grad(LOSSES["forward_kl"](*best).sum(), best[0])[0][:, :-1].abs().max()) < 1  # finite


def test_a_narrowed_law_cannot_be_narrowed_again() -> None:
    with pytest.raises(ValueError, match="narrowed already"):
        SAID.within(IDS)


def test_agreement_is_about_single_ids_though_all_that_a_draft_cannot_say_together_are_likelier() -> None:
    law = torch.full((1, V), 0.68 / 29)
    law[0, 4], law[0, 1] = 0.3, 0.02
    said, ids = Dense(law.log(), nn.Identity()), torch.tensor([1, 4])
    assert bool(said.overlap(torch.tensor([[0.0, 2.0]]), slice(0, 1), ids).agrees), "the target says id 4, and so does the draft"
    assert not bool(said.overlap(torch.tensor([[2.0, 0.0]]), slice(0, 1), ids).agrees)
    outside = Dense(law.roll(-4, 1).log(), nn.Identity())
    assert not bool(outside.overlap(torch.tensor([[2.0, 0.0]]), slice(0, 1), ids).agrees), "place 0 of the draft is not id 0"


def test_a_target_with_no_chance_outside_leaves_every_loss_finite() -> None:
    for outside in (-torch.inf, -1e4):
        logits = DRAFT[:, IDS].requires_grad_()
        wanted = torch.full((6, V), outside).index_copy(1, IDS, TARGET[:, IDS])
        ours, theirs = Dense(wanted, nn.Identity()).against(logits, slice(0, 6), IDS)
        for name, loss in LOSSES.items():
            value = loss(ours, theirs)
            assert bool(value.isfinite().all()), name
            slope = torch.autograd.grad(value.sum(), logits, retain_graph=True)[0]
            plain = DRAFT[:, IDS].requires_grad_()
            wanted_slope = torch.autograd.grad(loss(plain, TARGET[:, IDS]).sum(), plain)[0]
            assert torch.allclose(slope, wanted_slope, atol=1e-5), name
