"""`NoEmbedder`: the null object in place of an `Embedder` in an engine without an encoder."""

from __future__ import annotations

from ....scheduler import RequestUpdate
from ...common.errors import InvalidRequest, QuireError
from ..facade import Embeddings, EmbedRequest, EngineObserver, SilentObserver


class NoEmbedder:
    """An embedder that refuses every request, so it never has streams."""

    observer: EngineObserver = SilentObserver()

    def check(self, request: EmbedRequest) -> None:
        """Raise InvalidRequest."""
        raise _refusal()

    async def accept(self, request: EmbedRequest) -> Embeddings:
        """Raise InvalidRequest."""
        raise _refusal()

    def receive(self, update: RequestUpdate) -> None:
        """Ignore the update of a sequence whose request has failed."""

    def fail(self, request_id: int, error: QuireError) -> None:
        """Ignore the error of a sequence whose request has failed."""

    def fail_all(self) -> None:
        """Fail no request."""

    def close(self) -> None:
        """End no stream."""

    async def drain(self) -> None:
        """Wait for no request."""


def _refusal() -> InvalidRequest:
    return InvalidRequest("this server has no embedding model; `quire serve --embedding-model FOLDER` adds one")
