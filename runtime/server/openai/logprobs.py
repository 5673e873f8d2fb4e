"""Log probabilities as chats and completions show them, in pieces that join: each token is encoded once.

A piece is one JSON fragment per column, without brackets. In a chat, special tokens, which add nothing to the text,
have no entry; a completion has one entry per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ...common.types import TokenLogprobs
from ...engine.text import Token

LEAST = -9999.0  # instead of minus infinity, which JSON does not have

Vocabulary = Callable[[int], Token]
Columns = Sequence[bytes]


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}` of one choice."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        """With `as_ids`, tokens are named by their ids."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        entries = []
        for each in tokens:
            if not self._vocabulary(each.token_id).is_special:
                top = [self._entry(other, logprob) for other, logprob in each.top]
                entries.append(self._entry(each.token_id, each.logprob) | {"top_logprobs": top})
        return (_fragment(entries),)

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = _id_text(token_id).encode() if self._as_ids else self._vocabulary(token_id).data
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(data)}

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces: null without an entry, as in a stream, whose chunks have none then."""
        (content,) = _joined(pieces, 1)
        return b'{"content":[' + content + b'],"refusal":null}' if content else b"null"


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}` of one choice."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool = False) -> None:
        """With `as_ids`, tokens are named by their ids."""
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        self._num_characters = 0  # that begin in the tokens so far

    def first(self, token_id: int) -> Columns:
        """Return the first token of an echoed prompt, which has no probability."""
        self._count(self._vocabulary(token_id))
        return tuple(map(_fragment, ([self._text(token_id)], [None], [None], [0])))

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        texts, logprobs, tops, offsets = [], [], [], []
        for each in tokens:
            text = self._text(each.token_id)
            texts.append(text)
            logprobs.append(max(each.logprob, LEAST))
            others = {self._text(other): max(logprob, LEAST) for other, logprob in each.top}
            tops.append({text: logprobs[-1]} | others)
            offsets.append(self._num_characters)
            self._count(self._vocabulary(each.token_id))
        return tuple(map(_fragment, (texts, logprobs, tops, offsets)))

    def _text(self, token_id: int) -> str:
        return _id_text(token_id) if self._as_ids else _unique_text(self._vocabulary(token_id))

    def _count(self, token: Token) -> None:
        """Add the characters that begin in the token."""
        if not token.is_special:
            self._num_characters += sum(byte & 0xC0 != 0x80 for byte in token.data)

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces."""
        names = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[')
        columns = _joined(pieces, 4)
        return b"".join(name + column for name, column in zip(names, columns, strict=True)) + b"]}"


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _unique_text(token: Token) -> str:
    """Return the token's text; of a part of a character its bytes, since texts are the keys of `top_logprobs`."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def shown_in_delta(tokens: Iterable[TokenLogprobs], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return logprobs as the text events of `/v1/responses` show them: without bytes."""
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
    columns: list[list[bytes]] = [[] for _ in range(num_columns)]
    for piece in pieces:
        for column, fragment in zip(columns, piece, strict=True):
            if fragment:
                column.append(fragment)
    return [b",".join(column) for column in columns]
