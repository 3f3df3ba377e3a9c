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
    CombinedDrafter,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    Outcome,
    Sampling,
    load,
    load_drafter,
)
from exits import some_head
from tiny import begin, noisy, tiny, tiny_folder, tiny_tokenizer

TARGET = tiny("llama")
MAKE: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(noisy(TARGET)),
    "ngram": lambda: NgramDrafter(longest=3),
    "early_exit": lambda: EarlyExitDrafter(TARGET, 1),
    "combined": lambda: CombinedDrafter(NgramDrafter(longest=3, least=0.1), ModelDrafter(noisy(TARGET)), min_match=2),
    "exits": lambda: EarlyExitDrafter(TARGET, *some_head(TARGET, "adapter")),
}
CORPUS = [[0, 1, 2, 0, 2, 1, 1], list(range(60, 0, -1)), []]
MORE = {  # what the table's kinds leave out
    "exits, block": lambda: EarlyExitDrafter(TARGET, *some_head(TARGET, "block")),
    "exits, lora": lambda: EarlyExitDrafter(TARGET, *some_head(TARGET, "lora")),
    "exits, trimmed": lambda: EarlyExitDrafter(TARGET, *some_head(TARGET, "full"), ids=torch.arange(1, 61, 3)),
    "ngram, corpus": lambda: NgramDrafter(longest=4, corpus=CORPUS, least=0.0),
    "model, trimmed": lambda: ModelDrafter(noisy(TARGET), ids=torch.arange(1, 61, 3)),
    "combined, trimmed": lambda: CombinedDrafter(
        NgramDrafter(longest=3, least=0.1), ModelDrafter(noisy(TARGET), ids=torch.arange(1, 61, 3)), min_match=2
    ),
    "combined, short": lambda: CombinedDrafter(
        NgramDrafter(least=0.0), ModelDrafter(tiny("llama", 3, max_position_embeddings=24, vocab_size=50)), min_match=2
    ),
}


def test_every_kind_of_drafter_is_held_to_the_contract() -> None:
    assert MAKE.keys() == DRAFTERS.keys()


@pytest.mark.parametrize("kind", [*MAKE, *MORE])
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0, top_p=0.9)])
def test_any_history_proposes_as_a_fresh_drafter_would(kind: str, how: Sampling) -> None:
    """Whatever was accepted, whichever rows were selected on the way, in whichever way it was told to propose."""
    make, chance = (MAKE | MORE)[kind], random.Random(f"{kind}{how}")
    for trial in range(6):
        used, fresh = make(), make()
        alphabet = range(61) if trial % 2 else range(3)  # few tokens: many repeats for a lookup
        histories = [[chance.choice(alphabet) for _ in range(chance.randint(1, 9))] for _ in range(trial % 4 + 1)]
        begin(used, histories)
        for _ in range(12):
            k, seed = chance.choice([0, 1, 2, 5]), chance.randrange(1000)

            def noise(seed: int = seed, rows: int = len(histories)) -> list[torch.Generator]:
                return [torch.Generator().manual_seed(seed + row) for row in range(rows)]

            begin(fresh, histories)
            ways = [one.ways() if hasattr(one, "ways") else [one.evidence()] for one in (used, fresh)]
            assert ways[0] == ways[1]
            assert ways[0][0] == used.evidence()
            evidence = ways[0][way := chance.randrange(len(ways[0]))]
            if way:  # a way that was chosen once is not chosen for the next time
                used.choose(way)
                fresh.choose(way)
            ours, theirs = used.propose(k, how, noise()), fresh.propose(k, how, noise())
            assert ours.n.tolist() == theirs.n.tolist()
            for b, n in enumerate(ours.n.tolist()):
                assert (n > 0) == (k > 0 and evidence[b] >= 0), "evidence says beforehand who will speak"
                assert n == 0 or getattr(used, "matches", evidence)[b] == evidence[b]
                assert ours.tokens[b, :n].tolist() == theirs.tokens[b, :n].tolist()
                if n and ours.probs is not None:
                    assert torch.allclose(ours.probs[b, :n], theirs.probs[b, :n], atol=1e-5)
            accepted = [chance.choice([0, n // 2, n]) for n in ours.n.tolist()]  # all, none and some, row by row
            following = [chance.choice(alphabet) for _ in histories]
            for history, tokens, kept, token in zip(histories, ours.tokens.tolist(), accepted, following, strict=True):
                history += [*tokens[:kept], token]
            used.observe(Outcome(torch.tensor(accepted), torch.tensor(following)))
            if len(histories) > 1 and chance.random() < 0.2:
                left = sorted(chance.sample(range(len(histories)), chance.randint(1, len(histories))))
                used.select(torch.tensor(left))
                histories = [histories[row] for row in left]


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


def test_a_lookup_before_another_drafter_by_name_and_by_folder(tmp_path: Path) -> None:
    target, tokenizer = load(tiny_folder(tmp_path / "target"))
    draft = tmp_path / "draft"
    tiny_folder(draft, seed=4)
    one = load_drafter("ngram:5+exit:2", target, tokenizer)
    assert isinstance(one, CombinedDrafter)
    assert (one.ngram.longest, one.drafter.layer) == (5, 2)  # type: ignore[attr-defined]
    assert type(load_drafter(f"ngram+{draft}", target, tokenizer).drafter) is ModelDrafter  # type: ignore[attr-defined]
    (draft / "past.jsonl").write_text('[5, 6, 7]\n\n"the"\n{"answer_ids": [9], "prompt": "x"}\n')
    about = {"kind": "combined", "settings": {"min_match": 2, "ngram": {"longest": 3, "corpus": "past.jsonl"}}}
    (draft / "drafter.json").write_text(json.dumps(about))
    one = load_drafter(draft, target, tokenizer)
    assert isinstance(one, CombinedDrafter)
    assert (one.min_match, one.ngram.longest) == (2, 3)
    begin(one, [[40, 5, 6]])
    assert one.propose(1, Sampling()).tokens.tolist() == [[7]]
    the = tokenizer("the").input_ids
    begin(one, [[40, *the[:-1]], [40, 41, 42]])
    assert one.evidence() == [0 if len(the) < 3 else len(the) - 1, 0]
    for name, message in {
        "ngram+": "ngram\\+: name what drafts",
        "ngram+ngram": "is a NgramDrafter",
        f"ngram+{draft}": "is a CombinedDrafter",
        "ngram:x+exit:1": "whole number",
        "ngram+exit:9": r"layers 1\.\.3",
        "ngarm+exit:2": "did you mean 'ngram'",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_drafter(name, target, tokenizer)


def test_a_corpus_or_a_description_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    target, tokenizer = load(tiny_folder(tmp_path / "draft"))
    draft = tmp_path / "draft"
    (draft / "drafter.json").write_text(json.dumps({"kind": "ngram", "settings": {"corpus": "past.jsonl"}}))
    with pytest.raises(FileNotFoundError, match=r"past\.jsonl does not exist"):
        load_drafter(draft, target)
    for line, message in {
        "[1, 2": "line 2: not JSON",
        "[1, 2.5]": "line 2: a list of ids",
        "{}": "answer_ids is needed",
        "[1, 99999]": "line 2: ids 1..99999, the target has 0..",
        "[-1]": "line 2: ids -1..-1",
        '"text"': "needs the target's tokenizer",
    }.items():
        (draft / "past.jsonl").write_text(f"[1]\n{line}\n")
        with pytest.raises(ValueError, match=message):
            load_drafter(draft, target, None)
    (draft / "past.jsonl").write_text('"text"\n')
    assert isinstance(load_drafter(draft, target, tokenizer), NgramDrafter)
    for text, message in {"{": "is not JSON", "[1]": "must say", '{"kind": "model", "settings": {"a": 1}}': "do not fit"}.items():
        (draft / "drafter.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_drafter(draft, target, tokenizer)


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0)])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(300, 320), (320, 300)])
def test_rows_that_only_pad_a_head_get_no_mass(tmp_path: Path, how: Sampling, target_rows: int, draft_rows: int) -> None:
    """One tokenizer padded in two ways: the draft's law covers the real ids, even where a padding row would be the most likely."""
    real = len(tiny_tokenizer())
    target = padded_folder(tmp_path / "target", target_rows)
    padded_folder(tmp_path / "draft", draft_rows)
    tokenizer = load(tmp_path / "target").tokenizer
    for name in (tmp_path / "draft", "exit:1", f"ngram+{tmp_path / 'draft'}"):
        drafter = load_drafter(name, target, tokenizer)
        begin(drafter, [[5, 9, 30], [7]])
        out = drafter.propose(4, how, torch.Generator().manual_seed(1))
        assert out.n.tolist() == [4, 4]
        assert int(out.tokens.max()) < real
        if out.probs is not None:
            assert out.probs.shape[-1] == real
            assert torch.allclose(out.probs.sum(-1), torch.ones(2, 4))
    with pytest.raises(ValueError, match="vocab_size=0"):
        ModelDrafter(target, vocab_size=0)


def padded_folder(place: Path, rows: int) -> torch.nn.Module:
    """A model whose padding rows get the largest logits there are."""
    tokenizer = tiny_tokenizer()
    model = tiny("llama", 4, vocab_size=rows)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 50 * model.lm_head.weight[: rows - len(tokenizer)]
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return model


def test_a_row_that_can_no_longer_be_drafted_for_says_so() -> None:
    short = tiny("llama", 3, max_position_embeddings=8, vocab_size=40)
    for drafter in (ModelDrafter(short, 61), CombinedDrafter(NgramDrafter(), ModelDrafter(short, 61))):
        begin(drafter, [[1, 2], [50, 3], [4, 5, 6], list(range(9, 20))])
        assert drafter.evidence() == [0, -1, 0, -1]
        drafter.select(torch.tensor([1, 2, 3]))
        for _ in range(3):
            n = drafter.propose(2, Sampling()).n
            assert isinstance(drafter, CombinedDrafter) or n[0] == n[2] == 0
            drafter.observe(Outcome(n, torch.tensor([7, 7, 8])))
        assert drafter.notes() == [
            "row 1 holds an id that the draft cannot embed (it has 0..39) and was decoded plainly",
            "row 2 outgrew the draft's 8 positions and was decoded plainly",
            "row 3 outgrew the draft's 8 positions and was decoded plainly",
        ]
        begin(drafter, [[1, 2]])
        assert drafter.notes() == []
    assert NgramDrafter().notes() == []
