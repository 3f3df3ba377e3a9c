"""The stored teacher: says what the live one says, is made once, and refuses what is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.distill import CutDraft, DistillDraft, LiveTeacher, WholeDraft, collate
from draftsmith.distill.batch import Example, example
from draftsmith.distill.draft import JUDGED
from draftsmith.distill.head import Head
from draftsmith.distill.making.lora import with_lora
from draftsmith.train.stored.states import StoredTeacher
from tiny import tiny

GENERATOR = torch.Generator().manual_seed(0)
ROWS = [(torch.randint(3, 61, (5 + i % 9,), generator=GENERATOR).tolist(), 1 + i % 4) for i in range(40)]


def test_it_says_what_the_live_target_says_in_any_batch(tmp_path: Path) -> None:
    live, accelerator = LiveTeacher(tiny()), Accelerator(cpu=True)
    stored = StoredTeacher(live, tmp_path / "teacher", ROWS, "r", accelerator)
    assert len(list((tmp_path / "teacher").iterdir())) == 3
    for some in (ROWS[:3], ROWS[39:], ROWS[::7], [ROWS[0], ROWS[0]]):
        batch = collate(some, pad=2)
        assert torch.allclose(stored.hidden(batch), live.hidden(batch), atol=1e-5)
    other = collate([([1, 2, 3, 4], 2)])
    assert torch.equal(stored.hidden(other), live.hidden(other)), "a row that is not stored is asked live"
    assert stored.hidden(collate([([5, 6], 2)])).shape == (0, 32)


def test_it_needs_no_target_once_all_is_kept(tmp_path: Path) -> None:
    live = LiveTeacher(tiny())
    stored, batch = StoredTeacher(live, tmp_path / "teacher", ROWS, "r", Accelerator(cpu=True)), collate(ROWS[:3])
    before = stored.hidden(batch)
    live.let_go()
    assert [name for name, one in live.target.named_parameters() if not one.is_meta] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert torch.equal(stored.hidden(batch), before)
    with pytest.raises(RuntimeError, match="rows that were not kept"):
        stored.hidden(collate([([1, 2, 3, 4], 2)]))


def test_it_is_made_once_and_interrupted_making_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, accelerator = LiveTeacher(tiny()), Accelerator(cpu=True)
    StoredTeacher(live, tmp_path / "one", ROWS, "r", accelerator)
    before = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    (tmp_path / "one" / "states-00001.safetensors").unlink()
    StoredTeacher(live, tmp_path / "one", ROWS[::-1], "r", accelerator)
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == before

    def no(batch: object) -> torch.Tensor:
        raise AssertionError("the target was asked again")

    monkeypatch.setattr(live, "hidden", no)
    StoredTeacher(live, tmp_path / "one", ROWS, "r", accelerator)


def test_states_of_another_target_or_other_rows_are_refused(tmp_path: Path) -> None:
    live, accelerator = LiveTeacher(tiny()), Accelerator(cpu=True)
    StoredTeacher(live, tmp_path / "one", ROWS, "r", accelerator)
    for rows, revision in ((ROWS, "another"), (ROWS[1:], "r")):
        with pytest.raises(ValueError, match="another target or of other rows"):
            StoredTeacher(live, tmp_path / "one", rows, revision, accelerator)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    live, accelerator = LiveTeacher(tiny()), Accelerator(cpu=True)
    StoredTeacher(live, tmp_path / "one", ROWS, "r", accelerator)
    broken = tmp_path / "one" / "states-00001.safetensors"
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"states-00001.safetensors is damaged"):
        StoredTeacher(live, tmp_path / "one", ROWS, "r", accelerator)


def test_a_support_changes_the_loss_and_never_the_figures() -> None:
    target = tiny()
    batch = collate(ROWS)
    support = torch.arange(0, 61, 2)
    whole, narrow = (DistillDraft(CutDraft(target, [0, 1]), target, support=ids) for ids in (None, support))
    wide_loss, narrow_loss = whole.loss(batch), narrow.loss(batch)
    assert abs(float(wide_loss.total.detach() - narrow_loss.total.detach())) > 1e-3
    assert float(narrow_loss.metrics["judged"]) == 32 < float(narrow_loss.metrics["scored"])
    whole.trainable.eval(), narrow.trainable.eval()
    assert torch.allclose(whole.loss(batch).total, narrow.loss(batch).total), "held-out figures are of the whole laws"
    assert torch.allclose(whole.loss(batch).metrics["acceptance"], narrow.loss(batch).metrics["acceptance"])
    every = DistillDraft(CutDraft(target, [0, 1]), target, support=torch.arange(61))
    assert torch.allclose(every.loss(batch).total, wide_loss.total)
    same = DistillDraft(CutDraft(target, [0, 1, 2]), target, support=support).loss(batch)
    assert abs(float(same.total.detach())) < 1e-4, "equal laws are equal on any support"
    with pytest.raises(ValueError, match="head is frozen"):
        DistillDraft(tiny(seed=1), target, support=support)


def test_a_support_gathers_rows_once_for_all_steps_and_runs_whole_heads_for_the_figures_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []
    rows_of = Head.rows_of
    monkeypatch.setattr(Head, "rows_of", lambda head, ids: gathered.append(len(ids)) or rows_of(head, ids))
    target, other, batch, support = tiny(), tiny(seed=1), collate(ROWS), torch.arange(0, 61, 2)
    objective = DistillDraft(CutDraft(target, [0, 1]), target, support=support)
    whole: list[int] = []
    target.lm_head.register_forward_hook(lambda module, args, out: whole.append(args[0].shape[:-1].numel()))
    for _ in range(3):
        objective.loss(batch).total.backward()
    assert gathered == [31], "the draft's head is the target's"
    assert sum(whole) == 3 * 2 * JUDGED < 3 * int(batch.scored.sum())
    with_adapters = WholeDraft(with_lora(other, 2, 4, "all-linear"))
    objective = DistillDraft(with_adapters, target, support=support)
    losses = [float(objective.loss(batch).total.detach()) for _ in range(3)]
    assert gathered == [31] * 3, "two heads, once each"
    assert losses == [losses[0]] * 3
    own, its = objective._narrow.ours, objective._narrow.theirs  # type: ignore[union-attr]
    hidden = torch.randn(5, 32)
    assert torch.equal(own(hidden), other.lm_head(hidden)[:, support])  # type: ignore[operator]
    assert torch.equal(its(hidden), target.lm_head(hidden)[:, support])  # type: ignore[misc, operator]


def test_rows_of_many_turns_and_rows_that_share_a_sequence_are_found(tmp_path: Path) -> None:
    live, accelerator = LiveTeacher(tiny()), Accelerator(cpu=True)
    ids = list(range(10, 22))
    rows = [Example(ids, ((2, 4), (8, 12))), Example(ids, ((3, 5), (8, 12))), ([5, 9, 11, 4, 2], 3), Example([7, 8], ())]
    stored = StoredTeacher(live, tmp_path / "teacher", rows, "r", accelerator)
    for some in (rows, [[rows[2], rows[1], rows[3]], [rows[0], rows[2]]]):
        batch = collate(some)
        wanted = live.hidden(batch)
        assert len(wanted) == sum(row.scored for one in some for row in map(example, one if isinstance(one, list) else [one]))
        live_only, live.hidden = live.hidden, None  # type: ignore[method-assign, assignment]
        assert torch.allclose(stored.hidden(batch), wanted, atol=1e-5)
        live.hidden = live_only  # type: ignore[method-assign]
