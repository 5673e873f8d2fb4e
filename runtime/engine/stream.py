"""One accepted request's output, from the engine's loop to whoever iterates it.

It must not know the scheduler; ending a request early is a callback. One invariant: after the last chunk or the error
nothing follows, and `put` never waits, so a slow reader cannot slow a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from ..errors import QuireError
from ..generation import OutputChunk
from .facade import Admission


class Stream:
    """Implements `facade.Generation`. Holds at most the request's own `n * max_tokens` chunks."""

    def __init__(self, admission: Admission, prompt_token_ids: tuple[int, ...], cancel: Callable[[], None]) -> None:
        self.admission = admission
        self.prompt_token_ids = prompt_token_ids
        self._cancel = cancel
        self._items: asyncio.Queue[OutputChunk | QuireError] = asyncio.Queue()
        self._ended = False
        self._iterated = False

    def put(self, item: OutputChunk | QuireError) -> None:
        if not self._ended:
            self._ended = isinstance(item, QuireError) or item.usage is not None
            self._items.put_nowait(item)

    def cancel(self) -> None:
        if not self._ended:
            self._cancel()

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        if self._iterated:
            raise RuntimeError("a stream can be iterated once; nothing more would ever come")
        self._iterated = True
        try:
            while True:
                item = await self._items.get()
                if isinstance(item, QuireError):
                    raise item
                yield item
                if item.usage is not None:
                    return
        finally:
            self.cancel()
