"""The drafter contract: after any history a drafter proposes what a fresh one, begun on that history, would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.specdec import (
    DRAFTERS,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    Outcome,
    Sampling,
    load,
    load_drafter,
)
from tiny import noisy, tiny, tiny_folder, tiny_tokenizer

TARGET = tiny("llama")
MAKE: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(noisy(TARGET)),
    "ngram": lambda: NgramDrafter(longest=3),
    "early_exit": lambda: EarlyExitDrafter(TARGET, 1),
}


def test_every_kind_of_drafter_is_held_to_the_contract() -> None:
    assert MAKE.keys() == DRAFTERS.keys()


def begin(drafter: Drafter, histories: list[list[int]]) -> None:
    widest = max(map(len, histories)) - 1
    ids, valid = torch.zeros(len(histories), widest, dtype=torch.long), torch.zeros(len(histories), widest, dtype=torch.bool)
    for b, history in enumerate(histories):
        if len(history) > 1:
            ids[b, widest - len(history) + 1 :] = torch.tensor(history[:-1])
            valid[b, widest - len(history) + 1 :] = True
    drafter.begin(ids, valid, torch.tensor([history[-1] for history in histories]), ())


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, top_p=0.9)])
def test_any_history_proposes_as_a_fresh_drafter_would(kind: str, how: Sampling) -> None:
    chance = random.Random(f"{kind}{how}")
    for trial in range(6):
        used, fresh = MAKE[kind](), MAKE[kind]()
        alphabet = range(61) if trial % 2 else range(3)  # few tokens: many repeats for a lookup
        histories = [[chance.choice(alphabet) for _ in range(chance.randint(1, 9))] for _ in range(trial % 3 + 1)]
        begin(used, histories)
        for _ in range(12):
            k, seed = chance.choice([0, 1, 2, 5]), chance.randrange(1000)

            def noise(seed: int = seed, rows: int = len(histories)) -> list[torch.Generator]:
                return [torch.Generator().manual_seed(seed + row) for row in range(rows)]

            begin(fresh, histories)
            ours, theirs = used.propose(k, how, noise()), fresh.propose(k, how, noise())
            assert ours.n.tolist() == theirs.n.tolist()
            for b, n in enumerate(ours.n.tolist()):
                assert ours.tokens[b, :n].tolist() == theirs.tokens[b, :n].tolist()
                if ours.probs is not None and theirs.probs is not None:
                    assert torch.allclose(ours.probs[b, :n], theirs.probs[b, :n], atol=1e-5)
            accepted = [chance.choice([0, n // 2, n]) for n in ours.n.tolist()]  # all, none and some, row by row
            following = [chance.choice(alphabet) for _ in histories]
            for history, tokens, kept, token in zip(histories, ours.tokens.tolist(), accepted, following, strict=True):
                history += [*tokens[:kept], token]
            used.observe(Outcome(torch.tensor(accepted), torch.tensor(following)))


def test_the_lookup_takes_the_longest_then_the_latest_match_and_runs_on_through_its_own_copy() -> None:
    def proposal(history: list[int], k: int, **settings: int) -> list[int]:
        drafter = NgramDrafter(**settings)
        begin(drafter, [history])
        out = drafter.propose(k, Sampling())
        return out.tokens[0, : int(out.n[0])].tolist()

    assert proposal([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 1) == [9], "the longest match, though a shorter one is later"
    assert proposal([5, 2, 3, 8, 4, 2, 3, 7, 6, 2, 3], 2) == [7, 6], "the latest of equals"
    assert proposal([4, 5, 4, 5, 4, 5], 5) == [4, 5, 4, 5, 4], "a loop is drafted whole"
    assert proposal([1, 2, 3], 4) == []
    assert proposal([9, 1, 2, 9], 4, shortest=2) == []
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        NgramDrafter(longest=2, shortest=3)


def test_drafters_by_name_and_by_folder(tmp_path: Path) -> None:
    target, tokenizer = load(tiny_folder(tmp_path / "target"))
    assert isinstance(load_drafter("ngram", target), NgramDrafter)
    assert load_drafter("ngram:7", target).longest == 7  # type: ignore[attr-defined]
    assert load_drafter("exit:2", target).layer == 2  # type: ignore[attr-defined]
    tiny_folder(tmp_path / "draft", seed=4)
    assert isinstance(load_drafter(tmp_path / "draft", target, tokenizer), ModelDrafter)
    (tmp_path / "draft" / "drafter.json").write_text(json.dumps({"kind": "ngram", "settings": {"longest": 2}}))
    assert load_drafter(tmp_path / "draft", target).longest == 2  # type: ignore[attr-defined]
    (tmp_path / "draft" / "drafter.json").write_text(json.dumps({"kind": "modle"}))
    with pytest.raises(ValueError, match="did you mean 'model'"):
        load_drafter(tmp_path / "draft", target)
    for about, message in (({}, "kind of drafter"), ({"kind": "ngram", "settings": {"longst": 2}}, "settings do not fit")):
        (tmp_path / "draft" / "drafter.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match=message):
            load_drafter(tmp_path / "draft", target)
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        load_drafter("ngrams", target)
    with pytest.raises(ValueError, match="whole number"):
        load_drafter("ngram:x", target)
    with pytest.raises(ValueError, match="exit:6"):
        load_drafter("exit", target)
    with pytest.raises(ValueError, match=r"layers 1\.\.3"):
        load_drafter("exit:4", target)


def test_a_draft_with_two_ids_swapped_is_refused_naming_them(tmp_path: Path) -> None:
    target = load(tiny_folder(tmp_path / "target"))
    tiny_folder(tmp_path / "draft", seed=4, swapped=(5, 6))
    with pytest.raises(ValueError, match="id 5 is") as error:
        load_drafter(tmp_path / "draft", target.model, target.tokenizer)
    first, second = (tiny_tokenizer().convert_ids_to_tokens(i) for i in (5, 6))
    assert repr(first) in str(error.value)
    assert repr(second) in str(error.value)
