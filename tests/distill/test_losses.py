"""Losses against references written another way in float64, closed forms, slopes, and the edges of what logits can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from draftsmith.distill import LOSSES, acceptance
from draftsmith.distill.losses import DIVERGENCES, OF_DATA, OF_TOKENS, PARAMETERS, SPREAD, loss_named
from draftsmith.distill.signal import inside_and_rest, with_never

Law = Sequence[float]
NAMES = [*LOSSES, "jsd:0.1", "jsd:0.9", "lk_lambda:10", "hass:3", "hass:99"]
DIVERGING = [name for name in NAMES if name.partition(":")[0] in DIVERGENCES]
EYE = torch.eye(11, dtype=torch.float64)


def entropy(law: Law) -> float:
    return -math.fsum(a * math.log(a) for a in law if a)


def kl(p: Law, q: Law) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def apart(p: Law, q: Law) -> float:
    return math.fsum(max(a - b, 0) for a, b in zip(p, q, strict=True))


def mixed(p: Law, q: Law, beta: float) -> float:
    mixture = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return entropy(mixture) - beta * entropy(p) - (1 - beta) * entropy(q)


def spread(p: Law, q: Law) -> float:
    reward = [float(a > b) for a, b in zip(p, q, strict=True)]
    mean = math.fsum(b * r for b, r in zip(q, reward, strict=True))
    return max(SPREAD, math.sqrt(math.fsum(b * (r - mean) ** 2 for b, r in zip(q, reward, strict=True))))


def blend(p: Law, q: Law, eta: float) -> float:
    share = math.exp(-eta * (1 - apart(p, q)))
    return share * kl(p, q) + (1 - share) * apart(p, q)


def best(p: Law, q: Law, k: int) -> float:
    return -math.fsum(a * math.log(b) for a, b in sorted(zip(p, q, strict=True), reverse=True)[:k])


REFERENCE: dict[str, Callable[[Law, Law], float]] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: mixed(p, q, 0.5),
    "jsd:0.1": lambda p, q: mixed(p, q, 0.1),
    "jsd:0.9": lambda p, q: mixed(p, q, 0.9),
    "total_variation": apart,
    "tvd_pp": lambda p, q: apart(p, q) / spread(p, q),
    "lk_alpha": lambda p, q: -math.log(1 - apart(p, q)),
    "lk_lambda": lambda p, q: blend(p, q, 3),
    "lk_lambda:10": lambda p, q: blend(p, q, 10),
    "ce_argmax": lambda p, q: -math.log(q[p.index(max(p))]),
    "ce_data": lambda p, q: -math.log(q[p.index(max(p))]),
    "hass": lambda p, q: best(p, q, 10),
    "hass:3": lambda p, q: best(p, q, 3),
    "hass:99": lambda p, q: entropy(p) + kl(p, q),
}


def logits(seed: int, rows: int = 6, ids: int = 11, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * scale


def slope(name: str, draft: Tensor, target: Tensor) -> Tensor:
    draft = draft.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_named(name)(draft, target).sum(), draft)
    return found


def test_every_loss_has_a_reference() -> None:
    assert REFERENCE.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_against_float64(name: str) -> None:
    draft, target = logits(0), logits(1)
    p, q = target.double().softmax(-1).tolist(), draft.double().softmax(-1).tolist()
    wanted = torch.tensor([REFERENCE[name](*pair) for pair in zip(p, q, strict=True)], dtype=torch.float64)
    assert torch.allclose(loss_named(name)(draft, target).double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(loss_named(name)(draft.double(), target.double()), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGING)
def test_zero_and_at_rest_exactly_where_the_laws_are_equal(name: str) -> None:
    draft = logits(0)
    draft[:, 3] = -torch.inf
    assert torch.allclose(loss_named(name)(draft, draft + 5), torch.zeros(6), atol=1e-5)
    assert float(slope(name, draft, draft).abs().max()) < 1e-5
    assert bool((loss_named(name)(draft, logits(2)) > 0.01).all())
    assert bool((slope(name, draft, logits(2)).abs().amax(-1) > 1e-4).all())


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(DIVERGING)))
def test_a_cross_entropy_is_not_zero_where_the_laws_are_equal(name: str) -> None:
    assert bool((loss_named(name)(logits(0), logits(0)) > 0.001).all())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("tvd_pp", "lk_lambda"))])
def test_the_slope_is_that_of_finite_differences(name: str) -> None:
    target = logits(4).double()
    assert torch.autograd.gradcheck(lambda draft: loss_named(name)(draft, target), logits(3).double().requires_grad_())


@pytest.mark.parametrize("name", ["tvd_pp", "lk_lambda", "lk_lambda:10"])
def test_the_slope_is_that_of_finite_differences_with_what_is_held_fixed_fixed(name: str) -> None:
    draft, target = logits(3).double(), logits(4).double()
    p = target.softmax(-1)
    tv, divergence = LOSSES["total_variation"], LOSSES["forward_kl"]
    if name == "tvd_pp":
        reward = (p > draft.softmax(-1)).double()
        mean = (draft.softmax(-1) * reward).sum(-1, keepdim=True)
        deviation = (draft.softmax(-1) * (reward - mean) ** 2).sum(-1).sqrt().clamp(min=SPREAD)
        found = slope("total_variation", draft, target) / deviation[:, None]
    else:
        share = torch.exp(-float(name.partition(":")[2] or 3) * acceptance(draft, target))
        found = torch.autograd.functional.jacobian(
            lambda z: (share * divergence(z, target) + (1 - share) * tv(z, target)).sum(), draft
        )
    assert torch.allclose(slope(name, draft, target), found, atol=1e-12)


def test_the_slopes_in_closed_form() -> None:
    draft, target = logits(5).double(), logits(6).double()
    p, q = target.softmax(-1), draft.softmax(-1)
    assert torch.allclose(slope("forward_kl", draft, target), q - p)
    ratio = (q / p).log()
    assert torch.allclose(slope("reverse_kl", draft, target), q * (ratio - (q * ratio).sum(-1, keepdim=True)))
    for beta, name in ((0.5, "jsd"), (0.1, "jsd:0.1")):
        over_mixture = (q / (beta * p + (1 - beta) * q)).log()
        wanted = (1 - beta) * q * (over_mixture - (q * over_mixture).sum(-1, keepdim=True))
        assert torch.allclose(slope(name, draft, target), wanted)
    sign = (q - p).sign()
    assert torch.allclose(slope("total_variation", draft, target), 0.5 * q * (sign - (q * sign).sum(-1, keepdim=True)))
    chosen = EYE[p.argmax(-1)]
    assert torch.allclose(slope("ce_argmax", draft, target), q - chosen)
    assert torch.allclose(slope("ce_data", draft, chosen.log()), q - chosen)
    top = torch.zeros_like(p).scatter(-1, p.topk(3).indices, p.topk(3).values)
    assert torch.allclose(slope("hass:3", draft, target), top.sum(-1, keepdim=True) * q - top)


def test_total_variation_is_a_policy_gradient_and_tvd_pp_one_with_a_baseline() -> None:
    """grad TV = -E_{x~q}[r(x) grad log q(x)], r = 1{p > q}; TVD++ has (r - mean r) / std r in r's place: sums over all x."""
    draft, target = logits(7, scale=1.0).double(), logits(8, scale=1.0).double()
    p, q = target.softmax(-1), draft.softmax(-1)
    reward = (p > q).double()
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / (q * (reward - mean) ** 2).sum(-1, keepdim=True).sqrt()
    for name, weight in (("total_variation", reward), ("tvd_pp", advantage)):
        wanted = torch.zeros_like(q)
        for x in range(11):
            grad_log_q = EYE[x] - q  # of log q(x) in the logits
            wanted -= (q[:, x] * weight[:, x])[:, None] * grad_log_q
        assert torch.allclose(slope(name, draft, target), wanted), name


def test_the_slope_of_lk_alpha_is_that_of_total_variation_over_the_acceptance_however_small_that_is() -> None:
    draft, target = logits(9).double(), logits(10).double()
    alpha = acceptance(draft, target)[:, None]
    assert torch.allclose(slope("lk_alpha", draft, target), slope("total_variation", draft, target) / alpha)
    far, there = torch.zeros(1, 11), torch.zeros(1, 11)
    far[0, 0], there[0, 1] = 300.0, 300.0  # acceptance e^-300, 0 in float32
    assert float(slope("total_variation", far, there).abs().sum()) == 0
    assert 0.5 < float(slope("lk_alpha", far, there).abs().sum()) <= 2 + 1e-5
    assert float(LOSSES["lk_alpha"](far, there)) == pytest.approx(300 - math.log(11), abs=1e-3)  # eleven shares of e^-300


def test_which_way_round_the_divergences_are() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).double().log(), torch.tensor([[0.5, 0.5]]).double().log()
    forward, reverse = 0.9 * math.log(1.8) + 0.1 * math.log(0.2), 0.5 * math.log(5 / 9) + 0.5 * math.log(5)
    assert float(LOSSES["forward_kl"](q, p)) == pytest.approx(forward)
    assert float(LOSSES["reverse_kl"](q, p)) == pytest.approx(reverse)
    assert float(loss_named("jsd:1e-6")(q, p)) / 1e-6 == pytest.approx(forward, rel=1e-4), "GKD's beta: near 0 is forward"
    assert float(loss_named("jsd:0.999999")(q, p)) / 1e-6 == pytest.approx(reverse, rel=1e-4)
    assert float(LOSSES["jsd"](q, p)) == pytest.approx(float(LOSSES["jsd"](p, q))), "a half is symmetric"
    assert float(loss_named("jsd:0.1")(q, p)) == pytest.approx(float(loss_named("jsd:0.9")(p, q)))


def test_closed_forms_of_laws_that_share_nothing_and_of_coins() -> None:
    ours, theirs = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
    for beta in (0.5, 0.1):
        wanted = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert float(loss_named(f"jsd:{beta}")(ours, theirs)) == pytest.approx(wanted)
    assert float(LOSSES["total_variation"](ours, theirs)) == 1
    assert float(LOSSES["lk_lambda"](ours, theirs)) == pytest.approx(30), "the share of KL is 1 where nothing is accepted"
    uniform = torch.zeros(1, 8)
    for name in ("ce_argmax", "ce_data"):
        assert float(LOSSES[name](uniform, logits(0, 1, 8))) == pytest.approx(math.log(8))
    assert float(loss_named("hass:4")(uniform, uniform)) == pytest.approx(math.log(8) / 2)


FORBID: dict[str, tuple[slice, slice]] = {  # what the draft forbids, what the target does
    "both": (slice(0, 4), slice(0, 4)),
    "the draft": (slice(0, 4), slice(0, 0)),
    "the target": (slice(0, 0), slice(0, 4)),
    "each something else": (slice(0, 5), slice(5, 11)),
    "all but one": (slice(0, 10), slice(0, 10)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("who", FORBID)
@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_with_forbidden_ids_at_any_temperature_in_any_precision(
    name: str, who: str, temperature: float, dtype: torch.dtype
) -> None:
    draft, target = (logits(7) / temperature).to(dtype), (logits(8) / temperature).to(dtype)
    ours, theirs = FORBID[who]
    draft[:, ours] = target[:, theirs] = -torch.inf
    loss, found = loss_named(name)(draft, target), slope(name, draft, target)
    assert loss.dtype == torch.float32
    assert bool(torch.isfinite(loss).all())
    assert bool((loss >= -1e-6).all())
    assert bool(torch.isfinite(found).all())
    assert bool((found[draft == -torch.inf] == 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_what_both_forbid_is_as_if_it_were_not_there(name: str) -> None:
    draft, target = logits(0), logits(1)
    wider = [torch.cat([one, torch.full((6, 5), -torch.inf)], dim=-1) for one in (draft, target)]
    assert torch.allclose(loss_named(name)(*wider), loss_named(name)(draft, target), rtol=1e-5)
    assert torch.allclose(slope(name, *wider)[:, :11], slope(name, draft, target), atol=1e-5)


def test_a_draft_is_taught_to_leave_what_the_target_forbids_and_kept_from_what_it_cannot_say() -> None:
    draft, target = logits(0, 1), logits(1, 1)
    target[:, 0] = draft[:, 1] = -torch.inf
    for name in ("forward_kl", "reverse_kl", "jsd", "total_variation", "lk_lambda"):
        assert float(slope(name, draft, target)[0, 0]) > 0, name  # gradient descent takes the logit down
    assert float(LOSSES["forward_kl"](draft, target)) == pytest.approx(
        float((target.softmax(-1) * (target.log_softmax(-1).clamp(min=-30) - draft.log_softmax(-1).clamp(min=-30))).sum()), rel=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_in_log_space_as_float64_has_it_at_a_low_temperature(name: str) -> None:
    """D17: log(softmax) has slopes of 0 or not a number here, where log-probabilities are -100 and less."""
    draft, target = logits(3) / 0.05, logits(4) / 0.05
    assert torch.allclose(loss_named(name)(draft, target).double(), loss_named(name)(draft.double(), target.double()), rtol=1e-4)
    assert torch.allclose(slope(name, draft, target).double(), slope(name, draft.double(), target.double()), rtol=1e-3, atol=1e-4)
    if name.startswith(("forward_kl", "ce_")):
        elsewhere = draft.argmax(-1) != target.argmax(-1)
        assert int(elsewhere.sum()) == 5
        assert bool((slope(name, draft, target)[elsewhere].abs().amax(-1) > 1e-3).all()), "a slope that leads back"


def test_reverse_kl_at_a_low_temperature_in_closed_form() -> None:
    draft, target = logits(3) / 0.05, logits(4) / 0.05
    log_q, log_p = draft.double().log_softmax(-1), target.double().log_softmax(-1)
    value = (log_q.exp() * (log_q - log_p)).sum(-1)
    assert float(value.median()) > 70
    assert torch.allclose(LOSSES["reverse_kl"](draft, target).double(), value, rtol=1e-5)
    wanted = log_q.exp() * (log_q - log_p - value[:, None])
    assert torch.allclose(slope("reverse_kl", draft, target).double(), wanted, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_low_precision_is_left_before_the_softmax(name: str) -> None:
    """D15: a softmax in bfloat16 over many ids gives negative KLs."""
    draft, target = logits(0, 2, 5000).bfloat16(), logits(1, 2, 5000).bfloat16()
    assert torch.equal(loss_named(name)(draft, target), loss_named(name)(draft.float(), target.float()))
    if name in DIVERGING:
        near = (draft.float() + logits(2, 2, 5000, 0.01)).bfloat16()
        assert bool((loss_named(name)(near, draft) >= -1e-6).all())
        assert bool((loss_named(name)(draft, draft).abs() < 1e-5).all())


@pytest.mark.parametrize("name", NAMES)
def test_each_position_stands_by_itself_and_nothing_is_divided(name: str) -> None:
    """D14; and chunks cannot matter."""
    draft, target = logits(0), logits(1)
    whole = loss_named(name)(draft, target)
    assert whole.shape == (6,)
    for at in range(6):
        assert torch.allclose(loss_named(name)(draft[at : at + 1], target[at : at + 1]), whole[at : at + 1], rtol=1e-6)
        assert torch.allclose(slope(name, draft[at : at + 1], target[at : at + 1])[0], slope(name, draft, target)[at], atol=1e-6)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(loss_named(name)(draft[:, order] + 7, target[:, order] - 7), whole, rtol=1e-4), "only laws count"


@pytest.mark.parametrize("name", DIVERGING)
def test_on_buckets_of_ids(name: str) -> None:
    draft, target = logits(0), logits(1)
    ids = torch.tensor([1, 4, 5, 9])
    ours, theirs = (inside_and_rest(one.log_softmax(-1), ids) for one in (draft, target))
    merged = loss_named(name)(ours, theirs)
    p, q = theirs.double().exp().tolist(), ours.double().exp().tolist()
    wanted = [REFERENCE[name](*pair) for pair in zip(p, q, strict=True)]
    assert torch.allclose(merged, torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    if not name.startswith(("tvd_pp", "lk_lambda")):  # those are no f-divergences, nor monotone in one
        assert bool((merged <= loss_named(name)(draft, target) + 1e-6).all()), "what is merged cannot differ more"
    assert torch.allclose(loss_named(name)(theirs, theirs), torch.zeros(6), atol=1e-5)
    never = with_never(draft[:, ids])
    assert bool(torch.isfinite(loss_named(name)(never, theirs)).all())
    assert bool(torch.isfinite(slope(name, never, theirs)).all())


def test_a_bucket_is_no_token() -> None:
    law = torch.tensor([[0.1, 0.3, 0.2, 0.4]]).log()  # the last one stands for many
    ours = torch.tensor([[0.4, 0.1, 0.2, 0.3]]).log()
    assert float(LOSSES["ce_argmax"](ours, law)) == pytest.approx(-math.log(0.3))
    assert float(LOSSES["ce_argmax"](ours, law, rest=1)) == pytest.approx(-math.log(0.1))
    wanted = -0.3 * math.log(0.1) - 0.2 * math.log(0.2)
    assert float(LOSSES["hass"](ours, law, k=2, rest=1)) == pytest.approx(wanted), "by the whole law's own chances"


def test_acceptance_is_one_minus_total_variation_and_bounded_by_kl() -> None:
    draft, target = logits(9, 50), logits(10, 50)
    alpha, divergence = acceptance(draft, target), LOSSES["forward_kl"](draft, target)
    assert torch.allclose(alpha, 1 - LOSSES["total_variation"](draft, target), atol=1e-6)
    assert torch.allclose(alpha.log(), -LOSSES["lk_alpha"](draft, target), atol=1e-5)
    for a, d in zip(alpha.tolist(), divergence.tolist(), strict=True):
        assert a >= max(1 - math.sqrt(d / 2), 0.5 * math.exp(-d)) - 1e-6  # Pinsker; Bretagnolle-Huber


def test_lk_lambda_is_kl_far_away_and_overlap_nearby() -> None:
    target = logits(1)
    far, near = target.flip(-1) * 3, target + logits(2, scale=0.05)
    for eta, name in ((3.0, "lk_lambda"), (10.0, "lk_lambda:10")):
        for draft in (far, near):
            share = torch.exp(-eta * acceptance(draft, target))
            wanted = share * LOSSES["forward_kl"](draft, target) + (1 - share) * LOSSES["total_variation"](draft, target)
            assert torch.allclose(LOSSES["lk_lambda"](draft, target, eta=eta), wanted, rtol=1e-5)
            assert torch.equal(loss_named(name)(draft, target), LOSSES["lk_lambda"](draft, target, eta=eta))


def test_names_and_their_parameters() -> None:
    assert set(LOSSES) == DIVERGENCES | OF_TOKENS | OF_DATA
    assert {"ce_argmax", "ce_data", "hass"} == OF_TOKENS | OF_DATA
    assert PARAMETERS.keys() == {"jsd", "lk_lambda", "hass"}
    assert loss_named("forward_kl") is LOSSES["forward_kl"]
    for wrong, problem in {
        "forward_lk": "did you mean 'forward_kl'",
        "jsb:0.5": "did you mean 'jsd'",
        "forward_kl:2": "takes no parameter; those that do are jsd:BETA, lk_lambda:ETA, hass:K",
        "jsd:0": "beta must be a number above 0 and below 1, found '0'",
        "jsd:1": "above 0 and below 1",
        "jsd:": "found ''",
        "jsd:nan": "found 'nan'",
        "lk_lambda:-3": "eta must be a number above 0, found '-3'",
        "lk_lambda:inf": "found 'inf'",
        "hass:2.5": "k must be a whole number above 0, found '2.5'",
        "hass:0": "found '0'",
    }.items():
        with pytest.raises(ValueError, match=problem):
            loss_named(wrong)
