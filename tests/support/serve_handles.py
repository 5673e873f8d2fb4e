"""The results of Serve's handles, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Pieces:
    """The response of a streaming call, as Serve's: it can be cancelled, and its replica can be lost."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self.is_cancelled = False
        self._queue = asyncio.Queue[bytes | BaseException]()  # Ray has no limit either
        self._running = asyncio.create_task(self._run(pieces))

    async def _run(self, pieces: AsyncIterator[bytes]) -> None:
        async for piece in pieces:
            self._queue.put_nowait(piece)
        self._queue.put_nowait(StopAsyncIteration())

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        if isinstance(found := await self._queue.get(), BaseException):
            raise found
        return found

    def lose(self, error: Exception) -> None:
        self._running.cancel()
        self._queue.put_nowait(error)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._running.cancel()
