"""Losses against float64 references, closed forms, finite differences, and at the edges of what logits can be."""

import math

import pytest
import torch
from torch import Tensor

from draftsmith.distill import LOSSES, acceptance

REFERENCE = {
    "forward_kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "total_variation": lambda p, q: 0.5 * (p - q).abs().sum(-1),
}


def logits(seed: int, rows: int = 6, ids: int = 11, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, ids, generator=torch.Generator().manual_seed(seed)) * scale


def test_every_loss_has_a_reference() -> None:
    assert REFERENCE.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_against_float64(name: str) -> None:
    draft, target = logits(0), logits(1)
    wanted = REFERENCE[name](target.double().softmax(-1), draft.double().softmax(-1))
    assert torch.allclose(LOSSES[name](draft, target).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_zero_exactly_where_the_laws_are_equal(name: str) -> None:
    draft = logits(0)
    assert torch.allclose(LOSSES[name](draft, draft + 5), torch.zeros(6), atol=1e-6)
    assert bool((LOSSES[name](draft, logits(2)) > 0.01).all())


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_slope(name: str) -> None:
    draft, target = logits(3).double().requires_grad_(), logits(4)
    original = {
        "forward_kl": REFERENCE["forward_kl"],
        "reverse_kl": REFERENCE["reverse_kl"],
        "total_variation": REFERENCE["total_variation"],
    }[name]
    fp32 = draft.detach().float().requires_grad_()
    LOSSES[name](fp32, target).sum().backward()
    step = 1e-6
    for row, column in ((0, 0), (2, 5), (5, 10)):
        moved = torch.zeros_like(draft)
        moved[row, column] = step
        p = target.double().softmax(-1)
        slope = (original(p, (draft + moved).softmax(-1)) - original(p, (draft - moved).softmax(-1))).sum() / (2 * step)
        assert fp32.grad is not None
        assert abs(float(fp32.grad[row, column]) - float(slope)) < 1e-4


def test_the_slope_of_forward_kl_is_q_minus_p() -> None:
    draft, target = logits(5).requires_grad_(), logits(6)
    LOSSES["forward_kl"](draft, target).sum().backward()
    assert draft.grad is not None
    assert torch.allclose(draft.grad, draft.softmax(-1) - target.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_low_temperature_with_forbidden_ids_and_in_low_precision(name: str, dtype: torch.dtype) -> None:
    draft, target = (logits(7) / 0.05).to(dtype), (logits(8) / 0.05).to(dtype)
    target[:, 0] = draft[:, 0] = -torch.inf
    draft.requires_grad_()
    loss = LOSSES[name](draft, target)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert bool(torch.isfinite(loss).all())
    assert bool((loss >= 0).all())
    assert draft.grad is not None
    assert bool(torch.isfinite(draft.grad).all())


def test_acceptance_is_one_minus_total_variation_and_bounded_by_kl() -> None:
    draft, target = logits(9, 50), logits(10, 50)
    alpha, kl = acceptance(draft, target), LOSSES["forward_kl"](draft, target)
    assert torch.allclose(alpha, 1 - LOSSES["total_variation"](draft, target), atol=1e-6)
    for a, d in zip(alpha.tolist(), kl.tolist(), strict=True):
        assert a >= max(1 - math.sqrt(d / 2), 0.5 * math.exp(-d)) - 1e-6  # Pinsker; Bretagnolle-Huber
