"""Log probabilities in the form of chats and completions, in pieces that can be joined: each token is encoded once.

A piece is one JSON fragment per column, without brackets. In a chat, special tokens, which add nothing to the text,
have no entry; a completion has one entry per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ...common.types import TokenLogprobs
from ...engine.text import Token

LEAST = -9999.0  # instead of minus infinity, which JSON does not have

MAX_ALTERNATIVES = 20  # alternatives of one token, with their logprobs
MAX_KNOWN_TOKENS = 1 << 14

NewT = TypeVar("NewT")
Columns = Sequence[bytes]


class _Known(dict[int, NewT]):
    """The result of `make` for a token id, made once for the first `limit` ids."""

    def __init__(self, make: Callable[[int], NewT], limit: int = MAX_KNOWN_TOKENS) -> None:
        super().__init__()
        self._make = make
        self._limit = limit

    def __missing__(self, token_id: int) -> NewT:
        made = self._make(token_id)
        if len(self) < self._limit:
            self[token_id] = made
        return made


class Vocabulary:
    """The tokens of a model and their form in answers, which have 21 entries for each token with 20 logprobs."""

    def __init__(self, token: Callable[[int], Token]) -> None:
        self._token = token
        self.texts = _Known(lambda token_id: _unique_text(token(token_id)))
        self.entries = _Known(lambda token_id: _entry(token(token_id).data))  # chat's JSON around the logprob

    def __call__(self, token_id: int) -> Token:
        return self._token(token_id)


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}` of one choice."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        """With `as_ids`, tokens are named by their ids."""
        self._vocabulary = vocabulary
        self._entries = _ENTRIES_OF_IDS if as_ids else vocabulary.entries

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        entries = []
        for each in tokens:
            if not self._vocabulary(each.token_id).is_special:
                shown = [(each.token_id, each.logprob), *each.top]
                numbers = _fragment([LEAST if logprob < LEAST else logprob for _, logprob in shown]).split(b",")
                known = [self._entries[token_id] for token_id, _ in shown]
                own, *top = [begin + number + end for (begin, end), number in zip(known, numbers, strict=True)]
                entries.append(b'%b,"top_logprobs":[%b]}' % (own[:-1], b",".join(top)))
        return (b",".join(entries),)

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces; null without an entry, as in the chunks of a stream."""
        (content,) = _joined(pieces, 1)
        return b'{"content":[' + content + b'],"refusal":null}' if content else b"null"


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}` of one choice."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        """With `as_ids`, tokens are named by their ids."""
        self._vocabulary = vocabulary
        self._texts = _TEXTS_OF_IDS if as_ids else vocabulary.texts
        self.has_text = True  # the answer so far has text
        self._num_characters = 0  # characters that begin in the tokens so far

    def first(self, token_id: int) -> Columns:
        """Return the first token of an echoed prompt, which has no probability."""
        self.has_text = False
        self._count(self._vocabulary(token_id))
        return tuple(map(_fragment, ([self._texts[token_id]], [None], [None], [0])))

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        known = self._texts
        texts = []
        logprobs = []
        tops = []
        offsets = []
        for each in tokens:
            text = known[each.token_id]
            texts.append(text)
            logprobs.append(max(each.logprob, LEAST))
            others = {known[other]: LEAST if logprob < LEAST else logprob for other, logprob in each.top}
            tops.append({text: logprobs[-1]} | others)
            offsets.append(self._num_characters)
            self._count(self._vocabulary(each.token_id))
        return tuple(map(_fragment, (texts, logprobs, tops, offsets)))

    def _count(self, token: Token) -> None:
        """Add the characters that begin in the token."""
        self._num_characters += sum(byte & 0xC0 != 0x80 for byte in token.data_after(self.has_text))
        self.has_text |= bool(token.data) and not token.is_special

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces."""
        names = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[')
        columns = _joined(pieces, 4)
        return b"".join(name + column for name, column in zip(names, columns, strict=True)) + b"]}"


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _entry(data: bytes) -> tuple[bytes, bytes]:
    """Return the JSON before and after the logprob of a token of a chat."""
    text, values = (msgspec.json.encode(each) for each in (data.decode(errors="replace"), list(data)))
    return b'{"token":%b,"logprob":' % text, b',"bytes":%b}' % values


_TEXTS_OF_IDS = _Known(_id_text, limit=0)
_ENTRIES_OF_IDS = _Known(lambda token_id: _entry(_id_text(token_id).encode()), limit=0)


def _unique_text(token: Token) -> str:
    """Return the token's text, or its bytes for a part of a character: the keys of `top_logprobs` must be unique."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def shown_in_delta(tokens: Iterable[TokenLogprobs], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return logprobs in the form of the text events of `/v1/responses`: without bytes."""
    return [
        _named(each.token_id, each.logprob, vocabulary)
        | {"top_logprobs": [_named(other, logprob, vocabulary) for other, logprob in each.top]}
        for each in tokens
        if not vocabulary(each.token_id).is_special
    ]


def _named(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"token": vocabulary(token_id).data.decode(errors="replace"), "logprob": max(logprob, LEAST)}


def _fragment(values: object) -> bytes:
    return msgspec.json.encode(values)[1:-1]


def _joined(pieces: Iterable[Columns], num_columns: int) -> list[bytes]:
    columns = [b",".join(filter(None, column)) for column in zip(*pieces, strict=True)]
    return columns or [b""] * num_columns
