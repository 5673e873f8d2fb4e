"""The merges of a SentencePiece vocabulary: every pair of tokens that makes a token, best score first.

A large vocabulary has half a million pairs among two million places at which a token can be divided. So the halves are
looked up by hashes, in arrays. Crafted texts with equal hashes only spoil the merges of their own vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = npt.NDArray[np.uint64]

GROUP_CHARACTERS = 1 << 17  # characters of the tokens that are divided at a time
BUCKET_BITS = 18  # bits of a hash: the table of buckets takes 2 MiB
MULTIPLIER = 0x9E3779B97F4A7C15  # odd: the hash of a text is the sum of (character + 1) · MULTIPLIER ** place
WORD = 1 << 64
_LENGTH_BITS = 20


def merges_by_score(
    texts: Sequence[str], scores: Sequence[float], *, max_merges: int, max_characters: int
) -> list[tuple[str, str]] | None:
    """Return the pairs of `texts`, which are distinct, whose concatenation is one of them.

    Pairs of equal score are ordered as Hugging Face's converter orders them: long left halves first, then long results,
    then by the index of the result in `texts`. Returns None if there are more than `max_merges` pairs, or if the pairs
    have more than `max_characters` characters.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    found: list[Integers] = []
    num_merges = num_characters = 0
    for pairs in _pairs(texts, lengths):
        found.append(pairs)
        num_merges += pairs.shape[1]
        num_characters += int(lengths[pairs[2]].sum())
        if num_merges > max_merges or num_characters > max_characters:
            return None
    lefts, rights, results = np.concatenate(found, axis=1)
    rank = np.unique(-np.asarray(scores, np.float64), return_inverse=True)[1]
    longest = (1 << _LENGTH_BITS) - 1
    order = np.lexsort((longest - lengths[results], (rank[results] << _LENGTH_BITS) | (longest - lengths[lefts])))
    halves = lefts[order].tolist(), rights[order].tolist()
    return [(texts[left], texts[right]) for left, right in zip(*halves, strict=True)]


def _pairs(texts: Sequence[str], lengths: Integers) -> Iterator[Integers]:
    """Yield int64 [3, pairs]: the places in `texts` of left halves, right halves and results, by result and middle."""
    powers = _powers(MULTIPLIER, int(lengths.max(initial=1)))
    inverse = _powers(pow(MULTIPLIER, -1, WORD), len(powers))
    bounds = [0, *(np.flatnonzero(np.diff(np.cumsum(lengths) // GROUP_CHARACTERS)) + 1).tolist(), len(texts)]
    groups = [slice(*group) for group in pairwise(bounds)]
    table = _HashTable(np.concatenate([_Prefixes(texts[group], powers).whole() for group in groups]))
    for group in groups:
        prefixes = _Prefixes(texts[group], powers)
        middles = np.flatnonzero(prefixes.places)
        owners = prefixes.owners[middles]
        kept, lefts = table.find(prefixes.hashes[middles] - prefixes.hashes[prefixes.begins[owners]])
        middles = middles[kept]
        owners = owners[kept]
        after = prefixes.hashes[prefixes.ends[owners]] - prefixes.hashes[middles]
        kept, rights = table.find(after * inverse[prefixes.places[middles] - 1])
        yield np.stack([lefts[kept], rights, owners[kept] + group.start])


class _Prefixes:
    """The characters of some texts, one text after the other, and the sums that hash every part of a text."""

    def __init__(self, texts: Sequence[str], powers: Hashes) -> None:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        self.ends = np.cumsum(lengths)  # int64 [texts]: index of the character after each text
        self.begins = self.ends - lengths
        self.owners = np.repeat(np.arange(len(texts)), lengths)  # int64 [characters]: index of the text
        characters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        self.places = np.arange(len(characters)) - self.begins[self.owners]  # int64 [characters]: position in the text
        self.hashes = np.zeros(len(characters) + 1, np.uint64)  # [characters + 1]: of all before, modulo 2 ** 64
        np.cumsum((characters + np.uint64(1)) * powers[self.places], out=self.hashes[1:])

    def whole(self) -> Hashes:
        """Return the hashes of the texts."""
        found: Hashes = self.hashes[self.ends] - self.hashes[self.begins]
        return found


class _HashTable:
    """Hashes in ascending order, with the first place of each bucket; the first bits of a hash are its bucket."""

    def __init__(self, hashes: Hashes) -> None:
        self._order = np.argsort(hashes)
        self._sorted = np.append(hashes[self._order], np.uint64(WORD - 1))  # the last entry ends each search
        counts = np.bincount(_buckets(hashes), minlength=1 << BUCKET_BITS)
        self._first = np.cumsum(counts) - counts

    def find(self, hashes: Hashes) -> tuple[Integers, Integers]:
        """Return the indices of the given hashes that the table has, and their indices in the list behind the table."""
        at = self._first[_buckets(hashes)]
        less = np.flatnonzero(self._sorted[at] < hashes)
        while len(less):
            at[less] += 1
            less = less[self._sorted[at[less]] < hashes[less]]
        kept = np.flatnonzero((self._sorted[at] == hashes) & (at < len(self._order)))
        return kept, self._order[at[kept]]


def _buckets(hashes: Hashes) -> Integers:
    return (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)


def _powers(base: int, count: int) -> Hashes:
    """Return base ** 1 to base ** count, modulo 2 ** 64."""
    powers = [base]
    while len(powers) < count:
        powers.append(powers[-1] * base % WORD)
    return np.array(powers, np.uint64)
