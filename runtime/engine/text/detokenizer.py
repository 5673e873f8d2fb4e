"""Streaming detokenizer of one sequence: token ids in, finished text out, up to the first stop string.

The prompt's text and the joined pieces equal the decoded prompt and sequence, cut at the stop string. No piece
ends inside a UTF-8 character or inside a possible stop string. The cost of a token does not depend on the length of the
stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from encodings.utf_8 import IncrementalDecoder
from itertools import islice

from ...common.errors import InvalidRequest
from ..markup.markup import MARK
from .tokenizer import Tokenizer

CONTEXT_TOKENS = 4  # context tokens before a sequence: a character has at most 4 bytes


class IncrementalDetokenizer:
    """Detokenizer of one sequence: `push` its tokens, and `finish` when it has ended. No piece ends inside a character.

    Special tokens add nothing to the text, except the ids in `markup`, which add MARK and their names. `context` are
    the tokens before the sequence: decoders drop a space at the start of a text, but not within it. With `as_bytes` the
    text has the bytes of each token that a grammar reads, independent of its context.
    """

    stop_string: str | None = None  # stop string that ended the text
    stop_token_index: int | None = None  # index of the token that completed the stop string

    def __init__(
        self,
        tokenizer: Tokenizer,
        markup: Collection[int] = (),
        *,
        context: Sequence[int] = (),
        as_bytes: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._utf8 = IncrementalDecoder(errors="replace")
        self._bytes_of = tokenizer.text_bytes if as_bytes else tokenizer.token_bytes
        self._may_drop_space = not as_bytes
        self._context = () if as_bytes else context  # tokens before the sequence; empty once read
        self._previous: int | None = None  # last token with text: the context of the next token
        self._begins_in_character = False  # the context ends with the first bytes of a character

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens finished."""
        if self._context:
            self._begin()
        finished: list[str] = []
        for token_id in token_ids:
            if token_id in self._markup:
                finished.append(self.finish() + MARK + self._tokenizer.token(token_id).data.decode())
                continue
            raw = self._bytes_of(token_id)
            if raw == b"" or token_id in self._tokenizer.special_token_ids:
                continue
            if raw is None or (self._previous is None and raw == b" " and self._may_drop_space):
                finished.append(self.finish() + self._tokenizer.text_after(self._previous, token_id))
            elif raw.isascii() and not self._utf8.buffer:
                finished.append(raw.decode())
            else:
                finished.append(self._without_context(self._utf8.decode(raw)))
            self._previous = token_id
        return "".join(finished)

    def finish(self) -> str:
        """Return the text that was held back: an unfinished character, as U+FFFD."""
        return self._without_context(self._utf8.decode(b"", final=True))

    def _begin(self) -> None:
        """Take the last tokens of the context, as far as the sequence's text depends on them."""
        with_text = islice(filter(self._tokenizer.adds_text, reversed(self._context)), CONTEXT_TOKENS)
        self._context = ()
        self.push(reversed(list(with_text)))
        self._begins_in_character = bool(self._utf8.buffer)

    def _without_context(self, text: str) -> str:
        """Return the text without the U+FFFD for a character that begins in the context and never ends."""
        if text and self._begins_in_character:
            self._begins_in_character = False
            return text.removeprefix("\ufffd")
        return text


class StopDetokenizer:
    """Detokenizer of one sequence that ends at the first stop string. No piece ends inside a possible stop string.

    A stop string counts only if its last token is the `min_tokens`-th or later; before that it is ordinary text.
    """

    def __init__(
        self, text: IncrementalDetokenizer, stop: Sequence[str], include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        self.stop_string: str | None = None  # stop string that ended the text
        self.stop_token_index: int | None = None  # index of the token that completed the stop string
        self._text = text
        self._matcher = _StopMatcher(stop)
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._held = ""  # text that could be the start of a stop string
        self._num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens finished. Tokens after a complete stop string are ignored."""
        finished: list[str] = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self._num_tokens += 1
            finished.append(self._release(self._text.push((token_id,))))
        return "".join(finished)

    def finish(self) -> str:
        """Return the text that was held back; an unfinished character becomes U+FFFD. Empty after a stop string."""
        if self.stop_string is not None:
            return ""
        rest = self._release(self._text.finish()) + self._held
        self._held = ""
        return rest

    def _release(self, piece: str) -> str:
        """Append `piece` to the held text, and return the part that cannot belong to a stop string."""
        if not piece:
            return piece
        text = self._held + piece
        found = self._matcher.feed(piece, armed=self._num_tokens >= self._min_tokens)
        if found is None:
            certain = len(text) - self._matcher.pending
            self._held = text[certain:]
            return text[:certain]
        self.stop_string, end_in_piece = found
        self.stop_token_index = self._num_tokens - 1
        self._held = ""
        end = len(text) - len(piece) + end_in_piece
        return text[:end] if self._include_stop_str else text[: end - len(self.stop_string)]


Detokenizer = IncrementalDetokenizer | StopDetokenizer


class _StopMatcher:
    """Search for several stop strings at once, one character at a time, without rescanning (Knuth, Morris, Pratt).

    The stop string that ends first wins, and the longest one if several end together. Token boundaries do not matter.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InvalidRequest("a stop string must not be empty")
        self._patterns = sorted(set(stop), key=len, reverse=True)
        self._borders = [_border_lengths(pattern) for pattern in self._patterns]
        self._matched = [0] * len(self._patterns)  # per pattern: length of its prefix that the text ends with

    @property
    def pending(self) -> int:
        """Length of the longest suffix of the text that is a proper prefix of a stop string."""
        return max(self._matched)

    def feed(self, piece: str, armed: bool) -> tuple[str, int] | None:
        """Return the stop string that `piece` completes and the offset after it. Unless `armed`, report none."""
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
    """Return for each prefix of `pattern` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
