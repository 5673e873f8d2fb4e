"""Streaming decode of one request: token ids in, finished text out, stop strings found as they complete.

It must not know the engine or why a request ends. One invariant: the deltas, joined, are the whole decode cut at the
stop string; none of them ends inside a UTF-8 character or inside what may yet become a stop string. Each token costs
the same however long the stream is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from ...common.errors import InvalidRequest
from .tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """`push` tokens, send what it returns, look at `stopped`; `finish` when no more tokens come.

    A stop string that completes before `min_tokens` tokens were pushed is ordinary text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        self._text = _TextStream(tokenizer)
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._held = ""  # could be the start of a stop string
        self.num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the text
        self.stop_token_index: int | None = None  # of the token that completed it, counted from the first push

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Text these tokens finished. Tokens after one that completes a stop string are not looked at."""
        finished: list[str] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            finished.append(self._release(self._text.push(token_id)))
        return "".join(finished)

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD. Nothing after a stop."""
        if self.stopped:
            return ""
        rest = self._release(self._text.finish()) + self._held
        self._held = ""
        return rest

    def _release(self, piece: str) -> str:
        """Append `piece` to the held text and take off what is certain."""
        if self._matcher is None or not piece:
            return piece
        text = self._held + piece
        found = self._matcher.feed(piece, armed=self.num_tokens >= self._min_tokens)
        if found is None:
            certain = len(text) - self._matcher.pending
            self._held = text[certain:]
            return text[:certain]
        self.stop_string, end_in_piece = found
        self.stop_token_index = self.num_tokens - 1
        self._held = ""
        end = len(text) - len(piece) + end_in_piece
        return text[:end] if self._include_stop_str else text[: end - len(self.stop_string)]


class _TextStream:
    """Text of a token sequence, piece by piece, never ending inside a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _UTF8(errors="replace")
        self._previous: int | None = None  # last token that has text: the context of the next

    def push(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if raw == b"" or token_id in self._tokenizer.special_token_ids:
            return ""
        if raw is None or (self._previous is None and raw == b" "):
            text = self.finish() + self._text_in_context(token_id)
        else:
            text = self._utf8.decode(raw)
        self._previous = token_id
        return text

    def finish(self) -> str:
        """Close an unfinished character."""
        return self._utf8.decode(b"", final=True)

    def _text_in_context(self, token_id: int) -> str:
        """SentencePiece-style decoders drop a leading space at the start of a text only: show them one token before."""
        if self._previous is None:
            return self._tokenizer.decode([token_id])
        before = self._tokenizer.decode([self._previous])
        return self._tokenizer.decode([self._previous, token_id])[len(before) :]


class _StopMatcher:
    """Several stop strings searched at once, a character at a time, so text is never rescanned (Knuth, Morris, Pratt).

    The string that ends first wins, the longest of those that end together; where tokens begin makes no difference.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty")
        self._patterns = sorted(set(stop), key=len, reverse=True)
        self._borders = [_border_lengths(pattern) for pattern in self._patterns]
        self._matched = [0] * len(self._patterns)  # characters of each pattern that the text now ends with

    @property
    def pending(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._matched)

    def feed(self, piece: str, armed: bool) -> tuple[str, int] | None:
        """The stop string that `piece` completed and the offset in `piece` just after it. Unarmed: none is reported."""
        for offset, character in enumerate(piece, 1):
            for index, pattern in enumerate(self._patterns):
                if self._advance(index, pattern, character) and armed:
                    return pattern, offset
        return None

    def _advance(self, index: int, pattern: str, character: str) -> bool:
        borders = self._borders[index]
        matched = self._matched[index]
        while matched and pattern[matched] != character:
            matched = borders[matched - 1]
        if pattern[matched] == character:
            matched += 1
        complete = matched == len(pattern)
        self._matched[index] = borders[matched - 1] if complete else matched
        return complete


def _border_lengths(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
