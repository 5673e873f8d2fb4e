"""A client of chats over OpenAI's HTTP API, for commands at the keyboard.

Leaving a stream early closes its connection, and the server cancels the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ..common.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QuireError,
    Unauthenticated,
    Unavailable,
)

MAX_EVENT_BYTES = 1 << 24  # size of one event
THOUGHTS = ("reasoning", "reasoning_content")  # names of a delta's reasoning, in different servers


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A piece of an answer: text or reasoning, or at the end the number of tokens."""

    text: str = ""
    reasoning: str = ""
    completion_tokens: int | None = None


class ChatAPI:
    """One server by its base URL, such as http://127.0.0.1:8000/v1. Raises ConfigError for another form."""

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"--url must be a URL such as http://127.0.0.1:8000/v1, not {url!r}")
        self.url = url.rstrip("/")
        self._is_tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def models(self, timeout_s: float = 10) -> list[Mapping[str, Any]]:
        """Return the cards of the served models. Raises Unavailable, Unauthenticated or ProtocolError."""
        with closing(self._connect(timeout_s)) as connection:
            response = self._ask(connection, "GET", "/models")
            cards = self._json(response.read(MAX_EVENT_BYTES)).get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise ProtocolError(f"{self.url} does not list models; is it the base URL of OpenAI's API?")
        return cards

    def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Iterator[ChatPiece]:
        """Stream the answer to a chat. Raises the server's error as a QuireError."""
        body = {
            **options,
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with closing(self._connect(None)) as connection:
            response = self._ask(connection, "POST", "/chat/completions", json.dumps(body).encode())
            try:
                yield from self._pieces(response)
            except (OSError, HTTPException) as error:
                raise Unavailable(f"{self.url}: the answer was cut: {error}") from error

    def _connect(self, timeout_s: float | None) -> HTTPConnection:
        assert self._host is not None, "checked before"
        kind = HTTPSConnection if self._is_tls else HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _ask(self, connection: HTTPConnection, method: str, path: str, body: bytes | None = None) -> HTTPResponse:
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            content = response.read(MAX_EVENT_BYTES)
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self.url} does not answer: {error}") from error
        raise self._error(response.status, content)

    def _pieces(self, response: HTTPResponse) -> Iterator[ChatPiece]:
        while line := response.readline(MAX_EVENT_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = self._json(data)
            if event.get("error"):
                raise Unavailable(_message(event) or "the server ended the answer with an error")
            try:
                event_pieces = list(_event_pieces(event))
            except (AttributeError, TypeError) as error:
                raise ProtocolError(f"{self.url} does not answer as OpenAI's API does") from error
            yield from event_pieces
        raise Unavailable(f"{self.url}: the answer was cut")

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.url} does not answer in JSON; is it the base URL of OpenAI's API?") from error
        if not isinstance(content, dict):
            raise ProtocolError(f"{self.url} does not answer as OpenAI's API does")
        return content

    def _error(self, status: int, content: bytes) -> QuireError:
        try:
            message = _message(self._json(content))
        except ProtocolError:
            message = ""
        text = message or f"{self.url} answers with status {status}"
        if status in (401, 403):
            return Unauthenticated(f"{text}; set QUIRE_TOKEN to the server's key")
        if status in (429, 529):
            return Overloaded(text)
        return Unavailable(text) if status >= 500 else InvalidRequest(text)


def _event_pieces(event: Mapping[str, Any]) -> Iterator[ChatPiece]:
    """Yield the pieces of one event. Raises AttributeError or TypeError for another form."""
    usage = event.get("usage") or {}
    if "completion_tokens" in usage:
        yield ChatPiece(completion_tokens=usage["completion_tokens"])
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = next((delta[name] for name in THOUGHTS if delta.get(name)), "")
        text = delta.get("content") or ""
        if not (isinstance(text, str) and isinstance(reasoning, str)):
            raise TypeError("a delta has no text")
        yield ChatPiece(text=text, reasoning=reasoning)


def _message(content: Mapping[str, Any]) -> str:
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
