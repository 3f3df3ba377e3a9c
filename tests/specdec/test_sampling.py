"""Laws: order, ties, edges of temperature, top-k and top-p; draws never pick what has no mass."""

import pytest
import torch

from draftsmith.specdec.sampling import Sampling, draw, flip, to_probs, uniform


def test_greedy_is_one_hot_on_the_lowest_of_equal_ids() -> None:
    probs = to_probs(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), Sampling())
    assert probs.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("how", [Sampling(1e-6), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-9), Sampling(1e-3, 5, 0.5)])
def test_the_edges_equal_greedy(how: Sampling) -> None:
    logits = torch.randn(4, 3, 17, generator=torch.Generator().manual_seed(0)) * 8
    assert torch.allclose(to_probs(logits, how), to_probs(logits, Sampling()), atol=1e-6)


def test_top_k_and_top_p_keep_what_they_should() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert torch.allclose(to_probs(logits, Sampling(1.0, top_k=2)), torch.tensor([0.625, 0.375, 0, 0]))
    assert torch.allclose(to_probs(logits, Sampling(1.0, top_p=0.79)), torch.tensor([0.625, 0.375, 0, 0]), atol=1e-6)
    assert torch.allclose(to_probs(logits, Sampling(1.0, top_p=0.81)), torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95, atol=1e-6)
    assert torch.allclose(to_probs(logits, Sampling(1.0, top_k=99)), torch.tensor([0.5, 0.3, 0.15, 0.05]))


def test_the_law_agrees_with_transformers_own_warpers() -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)])
    theirs = warp(torch.zeros(5, 1, dtype=torch.long), logits).softmax(-1)
    assert torch.allclose(to_probs(logits, Sampling(0.7, 12, 0.8)), theirs, atol=1e-6)


def test_low_precision_logits_are_taken_to_float32() -> None:
    assert to_probs(torch.randn(2, 9, dtype=torch.bfloat16), Sampling(1.0)).dtype == torch.float32


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_draw_never_gives_an_id_without_mass_even_at_the_ends_of_the_noise() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for noise in (0.0, 0.3, 1 - 2**-53):
        assert int(draw(weights, noise=torch.tensor([noise], dtype=torch.float64))) in (1, 3)
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="not finite"):
        draw(torch.tensor([[float("nan"), 1.0]]))


def test_draws_follow_the_law() -> None:
    law = torch.tensor([0.1, 0.2, 0.7])
    drawn = draw(law.expand(20000, 3), torch.Generator().manual_seed(0))
    assert torch.allclose(drawn.bincount(minlength=3) / 20000, law, atol=0.015)


def test_a_coin_of_chance_0_never_falls_and_of_chance_1_always() -> None:
    noise = torch.tensor([[0.0, 1 - 2**-53]], dtype=torch.float64)
    assert not flip(torch.zeros(1, 2), noise).any()
    assert flip(torch.ones(1, 2), noise).all()


def test_a_row_of_noise_does_not_hang_on_its_neighbours() -> None:
    def seeded(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    together = uniform(3, 4, seeded(1, 2, 3), torch.device("cpu"))
    assert torch.equal(together[1:2], uniform(1, 4, seeded(2), torch.device("cpu")))
    with pytest.raises(ValueError, match="one generator a row"):
        uniform(2, 1, seeded(1), torch.device("cpu"))
