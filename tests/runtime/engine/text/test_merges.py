"""The merges of a SentencePiece vocabulary, compared with a search through all pairs of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from quire.runtime.engine.text import merges
from quire.runtime.engine.text.merges import merges_by_score

NO_LIMITS = {"max_merges": 1 << 20, "max_characters": 1 << 24}
ALPHABETS = ("ab", "▁xé", "😀漢\u0301", "a\U0010ffff\x00")


def all_pairs(texts: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the expected result of `merges_by_score`, by its definition."""
    places = {text: place for place, text in enumerate(texts)}
    found = [(left, right) for left in texts for right in texts if left + right in places]

    def rank(pair: tuple[str, str]) -> tuple[float, int, int, int]:
        result = places["".join(pair)]
        return -scores[result], -len(pair[0]), -len("".join(pair)), result

    return sorted(found, key=rank)


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_the_merges_are_all_pairs_of_tokens_that_make_a_token(alphabet: str) -> None:
    generator = random.Random(1)
    for num_scores in (1, 3, 1000):
        texts = list({"".join(generator.choices(alphabet, k=generator.randint(1, 7))) for _ in range(150)})
        scores = [float(-generator.randrange(num_scores)) for _ in texts]
        expected = all_pairs(texts, scores)
        assert len(expected) > 100
        assert merges_by_score(texts, scores, **NO_LIMITS) == expected


def test_tokens_are_divided_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merges, "GROUP_CHARACTERS", 5)
    texts = ["a", "b", "ab", "abab", "aba", "bab", "a" * 9, "aa"]
    scores = [float(-place) for place in range(len(texts))]
    assert merges_by_score(texts, scores, **NO_LIMITS) == all_pairs(texts, scores)


def test_long_tokens_are_divided_everywhere() -> None:
    texts = ["a" * length for length in (1, 2, 511, 512, 1023, 1024)]
    lengths = [(len(left), len(right)) for left, right in merges_by_score(texts, [0.0] * 6, **NO_LIMITS) or ()]
    assert lengths == [(1023, 1), (512, 512), (512, 511), (511, 512), (511, 1), (1, 1023), (1, 511), (1, 1)]


@pytest.mark.parametrize("texts", [[], ["a"], ["ab", "cd"]])
def test_a_vocabulary_without_pairs_has_no_merges(texts: list[str]) -> None:
    assert merges_by_score(texts, [0.0] * len(texts), **NO_LIMITS) == []


def test_a_vocabulary_beyond_a_limit_has_none() -> None:
    texts = ["a", "b", "ab", "ba"]  # two pairs of two characters
    scores = [0.0] * 4
    assert merges_by_score(texts, scores, max_merges=2, max_characters=4) == [("a", "b"), ("b", "a")]
    assert merges_by_score(texts, scores, max_merges=1, max_characters=4) is None
    assert merges_by_score(texts, scores, max_merges=2, max_characters=3) is None
