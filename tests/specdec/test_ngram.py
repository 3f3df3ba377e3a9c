"""The lookup against a definition that counts by searching the text, and what it says, when it stops, what it costs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from draftsmith.specdec import NgramDrafter, Sampling, generate
from draftsmith.specdec.drafters.ngram import chance
from draftsmith.specdec.drafters.suffixes import END, Reader, Suffixes
from tiny import begin, plain_greedy, tiny

TARGET = tiny("llama")


def proposal(history: list[int], k: int, **settings: object) -> list[int]:
    drafter = NgramDrafter(**{"least": 0.0, **settings})  # type: ignore[arg-type]
    begin(drafter, [history])
    out = drafter.propose(k, Sampling())
    assert out.probs is None
    return out.tokens[0, : int(out.n[0])].tolist()


def followers(texts: list[list[int]], context: list[int]) -> list[int]:
    """Every token that followed `context`, in order: what a `Suffixes` is to know, by search."""
    size = len(context)
    return [text[i] for text in texts for i in range(size, len(text)) if text[i - size : i] == context]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_the_trie_counts_what_a_search_counts(depth: int) -> None:
    chance_ = random.Random(depth)
    for trial in range(30):
        alphabet, trie, texts = range(chance_.choice([1, 2, 3, 6])), Suffixes(depth), [[]]
        for _ in range(60):
            if trial % 3 == 0 and chance_.random() < 0.1:
                trie.close()
                texts.append([])
            texts[-1].append(chance_.choice(alphabet))
            trie.append(texts[-1][-1])
            reader, text = Reader(trie), list(texts[-1])
            for _ in range(5):  # on from the end of the text, through tokens that are not in it
                wanted = {}
                for size in range(min(depth, len(text)) + 1):
                    if found := followers(texts, text[len(text) - size :]):
                        wanted[size] = found
                token = chance_.choice(alphabet)
                seen = reader.seen(token)
                for size, found in wanted.items():
                    assert seen[size] == (found.count(token), len(found))
                assert not any(total for _, total in seen[max(wanted, default=0) + 1 :])
                if top := max(wanted, default=0):
                    found = wanted[top]
                    latest = max(
                        dict.fromkeys(found), key=lambda one: (found.count(one), max(i for i, x in enumerate(found) if x == one))
                    )
                    assert reader.best() == (top, latest)
                else:
                    assert reader.best() == (0, END)
                reader.read(token)
                text.append(token)


def test_the_longest_match_wins_then_the_most_frequent_then_the_latest_and_a_loop_is_drafted_whole() -> None:
    assert proposal([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 1) == [9], "the longest match, though a shorter one is later"
    assert proposal([5, 2, 3, 8, 4, 2, 3, 7, 6, 2, 3], 2) == [7, 6], "the latest of equals"
    assert proposal([5, 2, 3, 8, 6, 2, 3, 8, 4, 2, 3, 7, 9, 2, 3], 1) == [8], "the most frequent, though another is later"
    assert proposal([4, 5, 4, 5, 4, 5], 5) == [4, 5, 4, 5, 4], "a loop is drafted whole"
    assert proposal([6, 6], 4) == [6, 6, 6, 6]
    assert proposal([1, 2, 3], 4) == []
    assert proposal([3], 4) == []
    assert proposal([9, 1, 2, 9], 4, shortest=2) == []
    assert proposal([1, 2, 3, 4, 9, 2, 3, 8, 7, 1, 2, 3], 1, longest=2) == [8], "beyond `longest` nothing is looked at"


def test_it_ends_where_it_knows_nothing_more() -> None:
    assert proposal([1, 2, 3, 4, 1, 2], 6) == [3, 4, 1, 2, 3, 4]
    assert proposal([1, 2, 3, 4, 1, 2], 6, least=0.5) == [3], "a match of two is right at .56, of three at .70, of four at .80"
    assert proposal([1, 2, 3, 4, 1, 2], 6, least=0.35) == [3, 4]
    assert proposal([1, 2, 3, 4, 1, 2], 6, least=0.3) == [3, 4, 1]
    assert proposal([1, 2, 3, 1], 6, least=0.3) == [2]
    assert proposal([1, 2, 3, 1], 6, least=0.34) == []
    assert proposal([1, 2, 1, 3, 1, 4, 1, 5, 1], 6, least=0.15) == [5]
    assert proposal([1, 2, 1, 3, 1, 4, 1, 5, 1], 6, least=0.17) == [], "one of four followers"
    assert proposal([1, 2] * 20, 6, least=0.6) == [1, 2, 1, 2, 1, 2], "a long match is trusted"


def test_the_chance_grows_with_the_match_and_with_the_count() -> None:
    def likely(*seen: list[tuple[int, int]]) -> tuple[float, int]:
        return chance(0, [SimpleNamespace(seen=lambda token, one=one: one) for one in seen])  # type: ignore[misc]

    assert likely([(0, 0)]) == (0.0, 0)
    assert likely([(5, 9), (1, 1)]) == (pytest.approx(1 / 3), 1), "how common a token is, is no evidence"
    assert likely([(5, 9), (1, 1), (1, 1)]) == (pytest.approx((1 + 2 / 3) / 3), 2)
    assert likely([(5, 9), (3, 3)]) == (pytest.approx(3 / 5), 1)
    assert likely([(5, 9), (1, 3), (0, 1)]) == (pytest.approx((0 + 2 / 5) / 3), 1)
    assert likely([(0, 0), (9, 9), (9, 9)], [(5, 9), (1, 1)]) == (pytest.approx((1 + 2 * (9 + 2 * 9 / 11) / 11) / 3), 2)


def test_a_corpus_speaks_where_the_row_knows_less() -> None:
    past = [[1, 2, 3, 4], [7, 8, 9]]
    assert proposal([5, 2], 3, corpus=past) == [3, 4], "and stops at the end of a text, for the next is another one"
    assert proposal([5, 7, 8], 3, corpus=past) == [9]
    assert proposal([1, 2, 6, 1, 2], 1, corpus=[[2, 3]]) == [6], "the row's own longer match goes before"
    assert proposal([2, 6, 1, 2], 1, corpus=[[1, 2, 3]]) == [3], "the longer match of the corpus goes before"
    assert proposal([1, 2], 4, corpus=iter(past)) == [3, 4]
    assert proposal([4, 7], 1, corpus=past) == [8]
    drafter = NgramDrafter(corpus=past, least=0.0)
    drafter.begin(torch.tensor([[0, 1], [7, 8]]), torch.tensor([[False, True], [True, True]]), torch.tensor([2, 30]))
    assert drafter.evidence() == [2, -1]
    assert drafter.propose(2, Sampling()).n.tolist() == [2, 0]
    assert drafter.matches == [2, 0]


def test_padding_is_no_text() -> None:
    drafter = NgramDrafter(least=0.0)
    drafter.begin(torch.tensor([[0, 0, 5], [1, 0, 2]]), torch.tensor([[False, False, True], [True] * 3]), torch.tensor([0, 1]))
    out = drafter.propose(2, Sampling())
    assert out.n.tolist() == [0, 2]
    assert out.tokens[1].tolist() == [0, 2]


def test_text_without_repeats_costs_a_leaf_or_two_a_token() -> None:
    chance_, trie = random.Random(0), Suffixes(8)
    for _ in range(4000):
        trie.append(chance_.randrange(50000))
    assert len(trie._count) < 2 * 4000
    loop = Suffixes(8)
    for i in range(4000):
        loop.append(i % 7)
    assert len(loop._count) < 7 * 12, "a loop makes no new contexts"


def test_greedy_text_with_a_corpus_is_the_targets_own() -> None:
    prompts = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]
    wanted = [plain_greedy(TARGET, prompt, 30) for prompt in prompts]
    drafter = NgramDrafter(corpus=[prompt + text for prompt, text in zip(prompts, wanted, strict=True)])
    for k in range(1, 7):
        out = generate(TARGET, prompts, drafter, k=k, max_new_tokens=30)
        assert out.tokens == wanted
        if k == 6:
            assert sum(map(len, out.rounds)) < 45, "its own answers as corpus save most calls"


def test_settings_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match="1 <= shortest <= longest"):
        NgramDrafter(longest=2, shortest=3)
    with pytest.raises(ValueError, match="least is a chance"):
        NgramDrafter(least=1.0)
