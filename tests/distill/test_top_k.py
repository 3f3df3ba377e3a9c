"""k likeliest ids and one rest: the same losses as whole laws where nothing is lost, no pull where the draft is the target, honest bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draftsmith.distill import LOSSES, Dense, acceptance
from draftsmith.distill.losses import NEVER, SPREAD
from draftsmith.distill.top_k import Listened, TopK, top_k

V, N = 31, 6
GENERATOR = torch.Generator().manual_seed(0)
TARGET, DRAFT = (3 * torch.randn(N, V, generator=GENERATOR) for _ in range(2))
IDS = torch.tensor([0, 3, 4, 9, 10, 22, 30])
ALL = slice(0, N)
# Losses that the whole law does not hold at rest either, such as a cross entropy to the argmax, are no matter of the k.
AT_REST = [
    name
    for name, loss in LOSSES.items()
    if torch.autograd.grad(loss(z := DRAFT.clone().requires_grad_(), DRAFT).sum(), z)[0].abs().max() < 1e-6
]


def bucketed(logits: Tensor, top: Tensor) -> Tensor:
    """The law in float64, the chances outside `top` summed into a last column: [n, K + 1]."""
    law = logits.double().softmax(-1)
    inside = law.gather(-1, top)
    return torch.cat([inside, law.scatter(-1, top, 0.0).sum(-1, keepdim=True)], -1)


def slope(
    name: str, signal: TopK | Dense, logits: Tensor, ids: Tensor | None = None, temperature: float = 1.0
) -> tuple[float, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = LOSSES[name](*signal.against(logits, slice(0, len(logits)), ids, temperature)).sum()
    return float(loss.detach()), torch.autograd.grad(loss, logits)[0]


def test_raw_logits_can_be_had_back_and_the_tail_is_what_is_left() -> None:
    said = top_k(TARGET, 5)
    assert torch.allclose(said.log_p + said.log_sum_exp[:, None], TARGET.topk(5).values, atol=1e-5)
    assert torch.equal(said.ids, TARGET.topk(5).indices)
    assert torch.allclose(said.rest().exp(), bucketed(TARGET, said.ids)[:, -1].float(), atol=1e-6)
    assert len(TopK(said)) == N


def test_equal_chances_come_in_the_order_of_ids_as_argmax_takes_them() -> None:
    logits = torch.randint(0, 3, (200, V), generator=GENERATOR).to(torch.bfloat16)
    said = top_k(logits, 4)
    assert torch.equal(said.ids[:, 0], logits.argmax(-1))
    assert torch.equal(TopK(said).overlap(logits, slice(0, 200)).agrees, torch.ones(200, dtype=torch.bool))


@pytest.mark.parametrize("name", LOSSES)
def test_all_ids_kept_are_the_full_loss(name: str) -> None:
    whole, kept = Dense(TARGET, nn.Identity()), TopK(top_k(TARGET, V))
    for temperature in (1.0, 2.0):
        if temperature != 1:
            kept = TopK(top_k(TARGET, V, temperature), temperature)
        for draft in (DRAFT, 8 * DRAFT, TARGET + 0.1 * DRAFT):
            ours, theirs = slope(name, kept, draft, None, temperature), slope(name, whole, draft, None, temperature)
            assert ours[0] == pytest.approx(theirs[0], rel=1e-4, abs=1e-5)
            assert torch.allclose(ours[1], theirs[1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", AT_REST)
@pytest.mark.parametrize("k", [1, 4, 30, V])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_a_draft_that_is_the_target_is_at_rest(name: str, k: int, temperature: float) -> None:
    for logits in (TARGET, 6 * TARGET, 0.1 * TARGET):
        signal = TopK(top_k(logits, k, temperature), temperature)
        loss, pull = slope(name, signal, logits, None, temperature)
        assert loss < 2e-6 * N / (SPREAD if name == "tvd_pp" else 1)  # which divides rounding by it too
        # A loss with a kink there has no slope but a bottom: no step along its own slope may lead below.
        for step in (1e-3, 0.1):
            down = logits - step * pull / pull.norm().clamp(min=1e-12)
            assert slope(name, signal, down, None, temperature)[0] >= loss - 1e-6
        if "kl" in name:
            assert float(pull.abs().max()) < 1e-6


def test_the_laws_that_are_compared_are_those_of_k_ids_and_a_rest() -> None:
    said = top_k(TARGET, 4)
    ours, theirs = TopK(said).against(DRAFT[1:5], slice(1, 5))
    assert torch.allclose(ours.double().softmax(-1), bucketed(DRAFT, said.ids)[1:5], atol=1e-6)
    assert torch.allclose(theirs.double().softmax(-1), bucketed(TARGET, said.ids)[1:5], atol=1e-6)
    some = TopK(said).picked(torch.tensor([4, 2]))
    assert torch.equal(some.against(DRAFT[[4, 2]], slice(0, 2))[1], torch.stack([theirs[3], theirs[1]]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_rest_of_next_to_nothing_or_of_nothing_is_finite(name: str) -> None:
    top = TARGET.topk(4).indices
    sharp = torch.full_like(TARGET, -80.0).scatter(-1, top, 1.0)  # a rest of e^-78
    never = torch.full_like(TARGET, -torch.inf).scatter(-1, top, 1.0)
    for target in (TARGET, sharp, never):
        for draft in (DRAFT, sharp, never):
            loss, pull = slope(name, TopK(top_k(target, 4)), draft)
            assert torch.tensor(loss).isfinite()
            assert pull.isfinite().all()
            assert loss > -1e-5


def test_a_draft_of_few_ids_gets_never_for_those_it_cannot_say() -> None:
    said = top_k(TARGET, 8)
    signal, logits = TopK(said), DRAFT[:, IDS]
    whole = torch.full((N, V), -torch.inf).index_copy(1, IDS, logits)
    ours, theirs = signal.against(logits, ALL, IDS)
    unknown = ~torch.isin(said.ids, IDS)
    assert unknown.any()
    assert (~unknown).any()
    assert (ours[:, :-1][unknown] == NEVER).all()
    assert torch.allclose(ours.double().softmax(-1), bucketed(whole, said.ids), atol=1e-6)
    assert torch.allclose(theirs.double().softmax(-1), bucketed(TARGET, said.ids), atol=1e-6), "the target's law stays whole"
    found = signal.overlap(logits, ALL, IDS)
    true = acceptance(whole, TARGET)
    assert (found.low <= true + 1e-6).all()
    assert (true <= found.high + 1e-6).all()
    assert torch.equal(found.agrees, whole.argmax(-1) == TARGET.argmax(-1))
    said_by_it = TARGET[:3].argmax(-1).unique()
    agrees = signal.overlap(TARGET[:, said_by_it], ALL, said_by_it).agrees
    assert agrees[:3].all()
    assert torch.equal(agrees, torch.isin(TARGET.argmax(-1), said_by_it))
    every = TopK(top_k(TARGET, V)).overlap(logits, ALL, IDS)
    assert torch.allclose(every.low, true, atol=1e-6)
    assert torch.allclose(every.high, every.low, atol=1e-6)
    one = TopK(top_k(TARGET, 2)).against(DRAFT[:, :1], ALL, torch.tensor([V - 1]))[0]
    assert one.isfinite().all(), "a draft whose only id is among the k, or none of them"


@pytest.mark.parametrize("k", [1, 3, 16, V])
def test_true_acceptance_lies_between_the_bounds(k: int) -> None:
    widest = 0.0
    for spread in (0.3, 1.0, 4.0, 20.0):
        target, draft = (spread * torch.randn(300, V, generator=GENERATOR) for _ in range(2))
        for close in (0.0, 0.9):
            q = close * target + (1 - close) * draft
            found = TopK(top_k(target, k)).overlap(q, slice(0, 300))
            true = acceptance(q, target)
            assert (found.low <= true + 2e-6).all()
            assert (true <= found.high + 2e-6).all()
            assert torch.equal(found.agrees, q.argmax(-1) == target.argmax(-1))
            widest = max(widest, float((found.high - found.low).max()))
    assert (widest > 0.05) == (k < V)


def test_another_temperature_than_the_targets_own_is_refused_and_that_one_is_exact() -> None:
    plain, warm = TopK(top_k(TARGET, 4)), TopK(top_k(TARGET, 4, 2.0), 2.0)
    with pytest.raises(ValueError, match=r"at temperature 2 asked; this stored law is known at 1\..*make the store at that"):
        plain.against(DRAFT, ALL, temperature=2.0)
    with pytest.raises(ValueError, match=r"known at 1 and 2\."):
        warm.against(DRAFT, ALL, temperature=0.5)
    ours, theirs = warm.against(DRAFT, ALL, temperature=2.0)
    assert torch.allclose(ours.double().softmax(-1), bucketed(DRAFT / 2, warm.said.ids), atol=1e-6)
    assert torch.allclose(theirs.double().softmax(-1), bucketed(TARGET / 2, warm.said.ids), atol=1e-6)
    assert torch.equal(warm.overlap(DRAFT, ALL).low, plain.overlap(DRAFT, ALL).low), (
        "acceptance is of temperature 1 whatever teaches"
    )
    for ours, theirs in zip(warm.against(DRAFT, ALL), plain.against(DRAFT, ALL), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("k", [2, 8, V])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_within_a_support_the_law_is_the_conditional_one(k: int, temperature: float) -> None:
    signal = TopK(top_k(TARGET, k, temperature, IDS), temperature, IDS)
    narrow = signal.picked(torch.arange(N)).within(IDS)
    ours, theirs = narrow.against(DRAFT[:, IDS], ALL, temperature=temperature)
    for found, logits in ((ours, DRAFT), (theirs, TARGET)):
        given = torch.full((N, V), -torch.inf).index_copy(1, IDS, logits[:, IDS] / temperature)
        assert torch.allclose(found.double().softmax(-1), bucketed(given, narrow.said.ids), atol=1e-6)
    for name in AT_REST:
        loss, pull = slope(name, narrow, TARGET[:, IDS], None, temperature)
        assert loss < 2e-6 * N / (SPREAD if name == "tvd_pp" else 1)  # which divides rounding by it too
        assert "kl" not in name or float(pull.abs().max()) < 1e-6


def test_what_a_support_cannot_tell_is_refused() -> None:
    signal = TopK(top_k(TARGET, 4, support=IDS), support=IDS)
    for other, why in ((TopK(top_k(TARGET, 4)), "no support"), (signal, "another support")):
        with pytest.raises(ValueError, match=rf"support of 6 ids asked.*{why} was named.*set train.support=all"):
            other.within(IDS[1:])
    narrow = signal.within(IDS)
    with pytest.raises(ValueError, match="narrowed already"):
        narrow.within(IDS)
    with pytest.raises(ValueError, match="acceptance is of the whole law"):
        narrow.overlap(DRAFT[:, IDS], ALL)
    with pytest.raises(ValueError, match="takes no other ids"):
        narrow.against(DRAFT[:, IDS], ALL, IDS)
    with pytest.raises(ValueError, match=r"a narrowed law is known at 1\. "):
        narrow.against(DRAFT[:, IDS], ALL, temperature=2.0)
    with pytest.raises(ValueError, match=r"at temperature 1 asked; a narrowed law is known at 2\."):
        TopK(top_k(TARGET, 4, 2.0, IDS), 2.0, IDS).within(IDS).against(DRAFT[:, IDS], ALL)


def test_what_is_no_question_or_no_answer_is_refused() -> None:
    for k in (0, V + 1):
        with pytest.raises(ValueError, match=rf"the {k} likeliest of {V} ids asked"):
            top_k(TARGET, k)
    with pytest.raises(ValueError, match=r"temperature 0\.0 asked of a stored law"):
        top_k(TARGET, 2, 0.0)
    broken = TARGET.clone()
    broken[2, 3] = torch.nan
    with pytest.raises(ValueError, match=f"not finite at 1 of {N} positions"):
        top_k(broken, 2)


def test_a_served_target_needs_no_raw_logits() -> None:
    said = top_k(TARGET, 4)
    served = TopK(Listened(said.ids, said.log_p, torch.full((N,), torch.nan)))
    assert torch.equal(served.against(DRAFT, ALL)[1], TopK(said).against(DRAFT, ALL)[1])
    assert torch.equal(served.overlap(DRAFT, ALL).high, TopK(said).overlap(DRAFT, ALL).high)
