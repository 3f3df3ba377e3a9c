"""The acceptance rules on their own: laws that touch, laws that do not, ragged rows, wrong shapes."""

import pytest
import torch

from draftsmith.specdec.sampling import Sampling, to_probs
from draftsmith.specdec.verify import VERIFY, verify, verify_block, verify_greedy


def law(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([rows])


@pytest.mark.parametrize("rule", VERIFY)
def test_a_draft_that_the_target_forbids_is_refused_and_never_divides_by_zero(rule: str) -> None:
    p, q = law([0.0, 1.0], [0.5, 0.5]), law([0.0, 1.0])
    accepted, following = VERIFY[rule](p, q, torch.tensor([[0]]), torch.tensor([1]))
    assert (int(accepted), int(following)) == (0, 1)


@pytest.mark.parametrize("rule", VERIFY)
@pytest.mark.parametrize("shift", [0.0, 1e-8])
def test_equal_laws_accept_everything_and_leave_no_nan(rule: str, shift: float) -> None:
    p = torch.softmax(torch.randn(64, 4, 7, generator=torch.Generator().manual_seed(0)), -1)
    q = (p[:, :3] + shift).contiguous()
    draft = torch.randint(0, 7, (64, 3), generator=torch.Generator().manual_seed(1))
    accepted, following = VERIFY[rule](p, q, draft, torch.full((64,), 3), torch.Generator().manual_seed(2))
    assert int(accepted.sum()) >= 64 * 3 - 1
    assert bool(((following >= 0) & (following < 7)).all())


@pytest.mark.parametrize("rule", VERIFY)
def test_rows_keep_no_more_than_they_drafted(rule: str) -> None:
    p = torch.full((3, 4, 5), 0.2)
    n = torch.tensor([0, 2, 3])
    accepted, _ = VERIFY[rule](p, p[:, :3], torch.zeros(3, 3, dtype=torch.long), n)
    assert accepted.tolist() == [0, 2, 3]


@pytest.mark.parametrize("rule", VERIFY)
def test_nothing_drafted_is_a_plain_step(rule: str) -> None:
    accepted, following = VERIFY[rule](law([0.0, 0.0, 1.0]), None, torch.empty(1, 0, dtype=torch.long), torch.tensor([0]))
    assert (int(accepted), int(following)) == (0, 2)


def test_a_certain_draft_is_kept_with_the_targets_chance_of_it() -> None:
    p = torch.tensor([[0.3, 0.7], [0.5, 0.5]]).expand(20000, 2, 2)
    accepted, following = verify(
        p, None, torch.zeros(20000, 1, dtype=torch.long), torch.ones(20000, dtype=torch.long), torch.Generator().manual_seed(0)
    )
    assert abs(float(accepted.float().mean()) - 0.3) < 0.01
    assert bool((following[accepted == 0] == 1).all())


def test_the_block_rule_keeps_more_on_the_published_example() -> None:
    """p=(1/3, 2/3), q=(2/3, 1/3), two drafts: 2.111 tokens a call by token, 2.222 by block (Sun et al.)."""
    many = 60000
    p, q = torch.tensor([1 / 3, 2 / 3]).expand(many, 3, 2), torch.tensor([2 / 3, 1 / 3]).expand(many, 2, 2)
    draft = (torch.rand(many, 2, generator=torch.Generator().manual_seed(3)) > 2 / 3).long()
    n = torch.full((many,), 2)
    by_token = verify(p, q, draft, n, torch.Generator().manual_seed(4)).accepted.float().mean() + 1
    by_block = verify_block(p, q, draft, n, torch.Generator().manual_seed(5)).accepted.float().mean() + 1
    assert abs(float(by_token) - 2.111) < 0.015
    assert abs(float(by_block) - 2.222) < 0.015


def test_wrong_shapes_are_named() -> None:
    p, draft = torch.full((1, 3, 4), 0.25), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="needs p"):
        verify(p[:, :2], None, draft, torch.tensor([2]))
    with pytest.raises(ValueError, match="needs q"):
        verify(p, p[..., :3], draft, torch.tensor([2]))
    with pytest.raises(ValueError, match="n_draft"):
        verify(p, None, draft, torch.tensor([3]))


@pytest.mark.parametrize("rule", VERIFY)
def test_columns_that_a_row_did_not_draft_change_nothing(rule: str) -> None:
    """A row of n drafts gets the same verdict from the same noise, however many columns its neighbours need."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(200, 5, 4, generator=generator), -1)
    q = torch.softmax(2 * torch.randn(200, 4, 4, generator=generator), -1)
    draft = torch.randint(0, 4, (200, 4), generator=generator)
    for n in range(4):
        counts = torch.full((200,), n)
        wide = VERIFY[rule](p, q, draft, counts, [torch.Generator().manual_seed(row) for row in range(200)])
        narrow = VERIFY[rule](
            p[:, : n + 1], q[:, :n], draft[:, :n], counts, [torch.Generator().manual_seed(row) for row in range(200)]
        )
        assert torch.equal(wide.accepted, narrow.accepted)
        assert torch.equal(wide.next, narrow.next)


@pytest.mark.parametrize("rule", VERIFY)
@pytest.mark.parametrize("certain", [True, False])
def test_the_short_way_at_temperature_0_decides_what_the_rules_decide_on_one_hot_laws(rule: str, certain: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (300, 5, 4), generator=generator).float()  # many ties
    draft = torch.where(
        torch.rand(300, 4, generator=generator) < 0.7, logits[:, :-1].argmax(-1), torch.randint(0, 4, (300, 4), generator=generator)
    )
    n = torch.randint(0, 5, (300,), generator=generator)
    q = None if certain else torch.zeros(300, 4, 4).scatter_(-1, draft[..., None], 1.0)
    wanted = VERIFY[rule](to_probs(logits, Sampling()), q, draft, n, torch.Generator().manual_seed(1))
    found = verify_greedy(logits, draft, n)
    assert torch.equal(found.accepted, wanted.accepted)
    assert torch.equal(found.next, wanted.next)
    for bad in (float("nan"), -float("inf")):
        with pytest.raises(ValueError, match="no token a chance"):
            verify_greedy(torch.full((1, 1, 4), bad), torch.empty(1, 0, dtype=torch.long), torch.tensor([0]))


@pytest.mark.parametrize("rule", VERIFY)
def test_behind_a_forbidden_draft_there_need_be_no_law(rule: str) -> None:
    p = law([1.0, 0.0, 0.0], [float("nan")] * 3, [float("nan")] * 3)
    q = law([0.0, 1.0, 0.0], [0.0, 1.0, 0.0])
    for seed in range(9):
        accepted, following = VERIFY[rule](p, q, torch.tensor([[1, 1]]), torch.tensor([2]), torch.Generator().manual_seed(seed))
        assert (int(accepted), int(following)) == (0, 0)
