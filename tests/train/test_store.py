"""The stored teacher: says what the live one says, ends in the same bytes whatever befell it, and takes nothing that is not its own."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from draftsmith.distill import CutDraft, DistillDraft, LiveTeacher, acceptance, collate
from draftsmith.distill.batch import Example, example
from draftsmith.distill.top_k import Listened, top_k
from draftsmith.train.stored import store
from draftsmith.train.stored.columns import bytes_a_position
from draftsmith.train.stored.listened import ListenedTeacher, ask_live
from draftsmith.train.stored.store import about_store, write_store
from tiny import noisy, tiny, tiny_tokenizer

GENERATOR = torch.Generator().manual_seed(0)
ROWS = [(torch.randint(3, 61, (5 + i % 9,), generator=GENERATOR).tolist(), 1 + i % 4) for i in range(40)]
K = 8
TOKENIZER = tiny_tokenizer()
ABOUT = about_store("tiny", "r", TOKENIZER, "fp32", 61, K)
ALONE = Accelerator(cpu=True)


def made(folder: Path, ask: Any = None, rows: list[Example] = ROWS, about: dict[str, Any] = ABOUT, who: Any = ALONE) -> Path:
    write_store(folder, rows, ask or ask_live(LiveTeacher(tiny()), K), about, who, rows_a_shard=16)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("store") / "whole")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy", ignore=shutil.ignore_patterns("read")))


def test_it_says_what_the_live_target_says_in_any_batch(whole: Path) -> None:
    live, teacher = LiveTeacher(tiny()), ListenedTeacher(whole, ABOUT, ROWS)
    assert teacher.rows == live.rows == 61
    for some in (ROWS[:3], ROWS[39:], ROWS[::7], [ROWS[0], ROWS[0]]):
        batch = collate(some, pad=2)
        logits = live.head(live.hidden(batch))
        said, wanted = teacher.signal(batch).said, top_k(logits, K)
        assert torch.equal(said.ids, wanted.ids)
        assert torch.allclose(said.log_p, wanted.log_p, atol=4e-3)
        assert torch.allclose(said.rest().exp(), wanted.rest().exp(), atol=5e-4)
        assert torch.allclose(said.log_sum_exp, logits.logsumexp(-1), atol=1e-5)
        assert torch.allclose(said.log_p + said.log_sum_exp[:, None], logits.gather(1, said.ids), atol=5e-3)
        assert torch.allclose(said.log_p.exp().sum(-1) + said.rest().exp(), torch.ones(len(logits)), atol=1e-6)
    assert len(teacher.signal(collate([([5, 6], 2)]))) == 0


def test_a_draft_is_taught_and_judged_by_it_as_by_the_whole_law(whole: Path) -> None:
    target, batch = tiny(), collate(ROWS)
    teacher = ListenedTeacher(whole, ABOUT, ROWS)
    same = DistillDraft(tiny(), teacher).loss(batch)
    assert 0 <= float(same.total.detach()) / float(same.metrics["scored"]) < 2e-5, "a draft that is its target has nothing to learn"
    draft = noisy(target, 0.2)
    ours, theirs = (DistillDraft(draft, teacher).loss(batch) for teacher in (teacher, target))
    true = float(theirs.metrics["acceptance"])
    assert float(ours.metrics["acceptance"]) - 0.05 <= true <= float(ours.metrics["acceptance_at_most"]) + 0.05
    assert float(ours.metrics["acceptance"]) < float(ours.metrics["acceptance_at_most"])
    assert torch.equal(ours.metrics["agreement"], theirs.metrics["agreement"])
    assert 0 < float(ours.total.detach()) <= float(theirs.total.detach()) + 1e-2, (
        "outcomes that are one lose nothing but what tells them apart"
    )
    cut = DistillDraft(CutDraft(target, [0]), teacher)
    cut.loss(batch).total.backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in cut.draft.parameters())


def test_all_ids_kept_teach_what_the_live_target_teaches(tmp_path: Path) -> None:
    about, batch = ABOUT | {"k": 61}, collate(ROWS)
    made(tmp_path / "s", ask_live(LiveTeacher(tiny()), 61), about=about)
    draft, teacher = noisy(tiny(), 0.2), ListenedTeacher(tmp_path / "s", about, ROWS)
    ours, theirs = (DistillDraft(draft, teacher).loss(batch) for teacher in (teacher, tiny()))
    assert torch.allclose(ours.total, theirs.total, rtol=1e-3)
    assert torch.allclose(ours.metrics["acceptance"], theirs.metrics["acceptance"], rtol=1e-3)
    assert torch.allclose(ours.metrics["acceptance_at_most"], theirs.metrics["acceptance"], rtol=1e-3)


def test_another_temperature_and_a_support_are_stored_where_they_were_asked_for(tmp_path: Path) -> None:
    support = torch.arange(0, 61, 2)
    about = about_store("tiny", "r", TOKENIZER, "fp32", 61, K, 2.0, support)
    live, batch = LiveTeacher(tiny()), collate(ROWS)
    made(tmp_path / "s", ask_live(live, K, 2.0, support), about=about)
    signal = ListenedTeacher(tmp_path / "s", about, ROWS, support).signal(batch)
    logits, at = live.head(live.hidden(batch)), slice(0, len(signal))
    for temperature in (1.0, 2.0):
        theirs = signal.against(logits, at, temperature=temperature)[1].softmax(-1)
        wanted = (logits / temperature).softmax(-1)
        assert torch.allclose(theirs[:, :-1], wanted.gather(-1, signal.said.ids), atol=2e-3)
        assert torch.allclose(theirs[:, -1], wanted.scatter(-1, signal.said.ids, 0.0).sum(-1), atol=2e-3)
    given = torch.full_like(logits, -torch.inf).index_copy(1, support, logits[:, support] / 2).softmax(-1)
    theirs = signal.within(support).against(logits[:, support], at, temperature=2.0)[1].softmax(-1)
    assert torch.allclose(theirs[:, :-1], given.gather(-1, signal.said.ids), atol=2e-3)
    narrow = DistillDraft(CutDraft(live.target, [0, 1, 2]), ListenedTeacher(tmp_path / "s", about, ROWS, support), support=support)
    narrow.asked = narrow.asked._replace(temperature=2.0)
    assert abs(float(narrow.loss(batch).total.detach())) / len(logits) < 1e-4, "equal laws are equal on any support"
    with pytest.raises(ValueError, match="which the target's answer lacks"):
        made(tmp_path / "t", about=about)


class Killed(BaseException):
    """Not an Exception, so that nothing on the way may take it for an error that it can handle."""


def killed(times: int, what: Callable[..., Any], first: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`what`, until it was called so many times; then `first` is done and the process dies."""
    left = [times]

    def until(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            if first is not None:
                first(*given, **named)
            raise Killed
        return what(*given, **named)

    return until


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("where", ["asking", "half written", "before its checksum", "before its name", "merging"])
def test_a_kill_at_any_moment_ends_in_the_same_bytes(
    after: int, where: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ask = tmp_path / "s", ask_live(LiveTeacher(tiny()), K)
    with monkeypatch.context() as patch:
        if where == "asking":
            ask = killed(after, ask)
        elif where == "half written":
            half = lambda self, path: path.write_bytes(b"PAR1 and no more")  # noqa: E731
            patch.setattr(Dataset, "to_parquet", killed(after, Dataset.to_parquet, half))
        elif where == "before its checksum":
            patch.setattr(store, "sha256", killed(after, store.sha256))
        else:  # a manifest, then a checksum a shard, then the manifest again
            moments = 1 + after if where == "before its name" else 4
            after_it = store.write_whole if where == "before its name" or after else None
            patch.setattr(store, "write_whole", killed(moments, store.write_whole, after_it))
        with pytest.raises(Killed):
            made(folder, ask)
    if where != "merging":
        with pytest.raises(ValueError, match="not finished"):
            ListenedTeacher(folder, ABOUT, ROWS)
    (folder / ".said-00001.parquet.writing").write_bytes(b"what a process that was killed in earnest leaves")
    asked: list[int] = []
    live = ask_live(LiveTeacher(tiny()), K)
    made(folder, lambda rows: asked.append(len(rows)) or live(rows))
    (folder / ".said-00001.parquet.writing").unlink(missing_ok=True)
    assert contents(folder) == contents(whole)
    assert len(asked) == (0 if where == "merging" else 3 - after), "what was heard is not asked again"
    assert len(ListenedTeacher(folder, ABOUT, ROWS).signal(collate(ROWS[:2]))) == sum(len(ids) - n for ids, n in ROWS[:2])


def test_it_is_made_once_from_rows_in_any_order_and_each_row_once(
    whole: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no(rows: object) -> Any:
        raise AssertionError("the target was asked again")

    capsys.readouterr()
    made(copy, no, ROWS[::-1] + ROWS[:9] + [([7, 8, 9], 3)])
    assert contents(copy) == contents(whole)
    assert capsys.readouterr().out == ""
    assert sum(row["key"] != "" for row in Dataset.from_parquet(str(copy / "said-00002.parquet"), cache_dir=str(copy / "x"))) == 8


@pytest.mark.parametrize("name", [*ABOUT, "rows", "rows_a_shard", "positions"])
def test_any_other_term_is_refused_by_name(name: str, copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    was = manifest[name]
    manifest[name] = "another" if isinstance(was, str) or was is None else was + 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"under other terms: {name} is {manifest[name]} there and {was} here\. Set them back"):
        made(copy)
    if name in ABOUT:
        with pytest.raises(ValueError, match=f"under other terms: {name} is"):
            ListenedTeacher(copy, ABOUT, ROWS)


def test_every_thing_that_tells_stores_apart_is_in_their_terms() -> None:
    other = tiny_tokenizer()
    other.chat_template += " "
    support = torch.tensor([1, 2])
    for changed, name in (
        (about_store("other", "r", TOKENIZER, "fp32", 61, K), "target"),
        (about_store("tiny", "s", TOKENIZER, "fp32", 61, K), "revision"),
        (about_store("tiny", "r", tiny_tokenizer(swapped=(40, 41)), "fp32", 61, K), "tokenizer"),
        (about_store("tiny", "r", other, "fp32", 61, K), "chat_template"),
        (about_store("tiny", "r", TOKENIZER, "bf16", 61, K), "target_dtype"),
        (about_store("tiny", "r", TOKENIZER, "fp32", 62, K), "vocabulary"),
        (about_store("tiny", "r", TOKENIZER, "fp32", 61, K + 1), "k"),
        (about_store("tiny", "r", TOKENIZER, "fp32", 61, K, 2.0), "temperature"),
        (about_store("tiny", "r", TOKENIZER, "fp32", 61, K, support=support), "support"),
    ):
        assert [key for key in ABOUT if changed[key] != ABOUT[key]] == [name]


@pytest.mark.parametrize("how", ["cut short", "one bit", "another shard", "gone"])
def test_a_damaged_shard_is_named_and_made_anew_once_it_is_removed(how: str, whole: Path, copy: Path) -> None:
    path = copy / "said-00001.parquet"
    raw = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        raw[len(raw) // 2] ^= 1
        path.write_bytes({"cut short": raw[:100], "one bit": raw, "another shard": (copy / "said-00000.parquet").read_bytes()}[how])
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"said-00001\.parquet is (damaged or was changed|missing).*makes it anew"
    ):
        ListenedTeacher(copy, ABOUT, ROWS)
    path.unlink(missing_ok=True)
    (copy / "read").mkdir()
    asked: list[int] = []
    live = ask_live(LiveTeacher(tiny()), K)
    made(copy, lambda rows: asked.append(len(rows)) or live(rows))
    assert asked == [16]
    assert not (copy / "read").exists(), "a copy of shards that were others is not kept"
    assert contents(copy) == contents(whole)


def test_a_shard_damaged_before_the_store_was_finished_is_named(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        made(tmp_path / "s", killed(2, ask_live(LiveTeacher(tiny()), K)))
    path = tmp_path / "s" / "said-00000.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"said-00000\.parquet is damaged or was changed.*remove it"):
        made(tmp_path / "s")


def test_no_store_or_a_broken_manifest_is_named(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no stored teacher: there is no manifest\.json"):
        ListenedTeacher(tmp_path / "nothing", ABOUT, ROWS)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*remove"):
        made(copy)
    with pytest.raises(ValueError, match="none of 1 rows has a position to score"):
        made(tmp_path / "s", rows=[([3, 4], 2)])


def test_rows_that_are_not_there_are_counted_and_never_asked_live_unless_a_live_teacher_is_given(whole: Path) -> None:
    others = [([5, 6, 7, 8], 2), ([9, 8, 7], 1)]
    with pytest.raises(ValueError, match="holds 40 rows and lacks 2 of the 5 asked for"):
        ListenedTeacher(whole, ABOUT, ROWS[:3] + others, live=LiveTeacher(tiny()))
    with pytest.raises(ValueError, match="lacks 1 of the 1"):
        ListenedTeacher(whole, ABOUT, [(ROWS[0][0], ROWS[0][1] + 1)])  # the same ids, but scored from another place
    batch = collate(ROWS[:1] + others)
    with pytest.raises(ValueError, match="2 of the 3 rows of a batch are not in the store, and no live target was given"):
        ListenedTeacher(whole, ABOUT, ROWS).signal(batch)
    live = LiveTeacher(tiny())
    assert torch.equal(ListenedTeacher(whole, ABOUT, ROWS, live=live).signal(batch).hidden, live.hidden(batch))


def test_processes_share_the_making(whole: Path, tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    asked: dict[int, int] = {0: 0, 1: 0}
    wrong: list[BaseException] = []
    live = ask_live(LiveTeacher(tiny()), K)

    def work(index: int) -> None:
        who = SimpleNamespace(num_processes=2, process_index=index, is_main_process=not index, wait_for_everyone=barrier.wait)

        def ask(rows: list[Example]) -> list[Listened]:
            asked[index] += len(rows)
            return live(rows)

        try:
            made(tmp_path / "s", ask, who=who)
        except BaseException as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert asked == {0: 24, 1: 16}
    assert contents(tmp_path / "s") == contents(whole)


def likely(vocabulary: int, k: int, some: int = 2000) -> Callable[[list[Example]], list[Listened]]:
    """A target whose laws are about as long-tailed as a language's, over `some` ids of its vocabulary, a few likely everywhere."""
    common = -1.2 * torch.arange(1, some + 1).float().log()[torch.randperm(some, generator=GENERATOR)]
    ids = torch.randperm(vocabulary, generator=GENERATOR)[:some]

    def ask(rows: list[Example]) -> list[Listened]:
        said = [top_k(common + 2.5 * torch.randn(row.scored, some, generator=GENERATOR), k) for row in map(example, rows)]
        return [one._replace(ids=ids[one.ids]) for one in said]

    return ask


@pytest.mark.parametrize("vocabulary, few, many", [(5000, 90, 138), (70000, 140, 152)])
def test_the_size_that_is_printed_is_the_size_that_is_written(
    vocabulary: int, few: int, many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [example(([i, *range(3, 63)], 1)) for i in range(20)]
    about = about_store("long-tailed", "r", TOKENIZER, "fp32", vocabulary, 32)
    write_store(tmp_path / "s", rows, likely(vocabulary, 32), about, ALONE)
    kept, mapped = bytes_a_position(about)
    out = capsys.readouterr().out
    assert f"32 ids at each of 1200 positions, about {kept} bytes: {1200 * kept / 1e6:.1f} MB in {tmp_path / 's'}" in out
    assert few <= kept <= many
    (path,) = (tmp_path / "s").glob("*.parquet")
    assert 0.7 * kept < path.stat().st_size / 1200 < 1.1 * kept
    signal = ListenedTeacher(tmp_path / "s", about, rows).signal(collate(rows[3:5]))
    assert int(signal.said.ids.max()) < vocabulary
    (copied,) = (tmp_path / "s" / "read").rglob("*.arrow")
    assert 0.9 * mapped < copied.stat().st_size / 1200 < 1.2 * mapped
    assert vocabulary < 1 << 16 or int(signal.said.ids.max()) > 1 << 16


def test_a_disk_that_is_too_small_is_refused_before_the_target_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda where: SimpleNamespace(free=1000))

    def no(rows: object) -> Any:
        raise AssertionError("the target was asked")

    with pytest.raises(OSError, match="needs 0 MB, 0 MB are free"):
        made(tmp_path / "s", no)
    assert contents(tmp_path / "s") == {}


@pytest.mark.parametrize(
    "wrong, why",
    [
        (lambda said: said[1:], "asked about 16 rows; the target's answer is of 15"),
        (lambda said: [said[0].picked(slice(1, None)), *said[1:]], "asked for the 8 likeliest ids at 4 scored positions"),
        (lambda said: [one._replace(log_p=one.log_p.flip(-1)) for one in said], "is no law"),
        (lambda said: [one._replace(log_p=one.log_p * 0) for one in said], "is no law"),
        (lambda said: [one._replace(log_p=one.log_p * torch.nan) for one in said], "is no law"),
        (
            lambda said: [one._replace(ids=one.ids + 1) for one in said],
            "names an id twice at a position, or one that is not in 0..60",
        ),
        (lambda said: [one._replace(ids=one.ids * 0) for one in said], "names an id twice"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_refused(wrong: Any, why: str, tmp_path: Path) -> None:
    ask = ask_live(LiveTeacher(tiny()), K)
    with pytest.raises(ValueError, match=why):
        made(tmp_path / "s", lambda rows: wrong(ask(rows)))
    assert not list((tmp_path / "s").glob("*.parquet"))


def test_acceptance_is_between_the_stored_bounds(whole: Path) -> None:
    live, batch = LiveTeacher(tiny()), collate(ROWS)
    logits, signal = live.head(live.hidden(batch)), ListenedTeacher(whole, ABOUT, ROWS).signal(batch)
    for spread in (0.0, 0.3, 2.0):
        draft = logits + spread * torch.randn(logits.shape, generator=GENERATOR)
        found, true = signal.overlap(draft, slice(0, len(signal))), acceptance(draft, logits)
        assert (found.low <= true + 5e-4).all()
        assert (true <= found.high + 5e-4).all()
