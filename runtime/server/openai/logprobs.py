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

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        entries = []
        for each in tokens:
            token = self._vocabulary(each.token_id)
            if not token.is_special:
                top = [_entry(self._vocabulary(other), logprob) for other, logprob in each.top]
                entries.append(_entry(token, each.logprob) | {"top_logprobs": top})
        return (_fragment(entries),)

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces."""
        (content,) = _joined(pieces, 1)
        return b'{"content":[' + content + b'],"refusal":null}'


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}` of one choice."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_characters = 0  # that begin in the tokens so far

    def first(self, token_id: int) -> Columns:
        """Return the first token of an echoed prompt, which has no probability."""
        token = self._vocabulary(token_id)
        self._count(token)
        return tuple(map(_fragment, ([_unique_text(token)], [None], [None], [0])))

    def piece(self, tokens: Iterable[TokenLogprobs]) -> Columns:
        """Return the next tokens of the choice."""
        texts, logprobs, tops, offsets = [], [], [], []
        for each in tokens:
            token = self._vocabulary(each.token_id)
            text = _unique_text(token)
            texts.append(text)
            logprobs.append(max(each.logprob, LEAST))
            others = {_unique_text(self._vocabulary(other)): max(logprob, LEAST) for other, logprob in each.top}
            tops.append({text: logprobs[-1]} | others)
            offsets.append(self._num_characters)
            self._count(token)
        return tuple(map(_fragment, (texts, logprobs, tops, offsets)))

    def _count(self, token: Token) -> None:
        """Add the characters that begin in the token."""
        if not token.is_special:
            self._num_characters += sum(byte & 0xC0 != 0x80 for byte in token.data)

    def join(self, pieces: Iterable[Columns]) -> bytes:
        """Return the JSON of the pieces."""
        names = (b'{"tokens":[', b'],"token_logprobs":[', b'],"top_logprobs":[', b'],"text_offset":[')
        columns = _joined(pieces, 4)
        return b"".join(name + column for name, column in zip(names, columns, strict=True)) + b"]}"


def _entry(token: Token, logprob: float) -> dict[str, Any]:
    return {
        "token": token.data.decode(errors="replace"),
        "logprob": max(logprob, LEAST),
        "bytes": list(token.data),
    }


def _unique_text(token: Token) -> str:
    """Return the token's text; of a part of a character its bytes, since texts are the keys of `top_logprobs`."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _fragment(values: object) -> bytes:
    return msgspec.json.encode(values)[1:-1]


def _joined(pieces: Iterable[Columns], num_columns: int) -> list[bytes]:
    columns: list[list[bytes]] = [[] for _ in range(num_columns)]
    for piece in pieces:
        for column, fragment in zip(columns, piece, strict=True):
            if fragment:
                column.append(fragment)
    return [b",".join(column) for column in columns]
