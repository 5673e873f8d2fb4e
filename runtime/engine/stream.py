"""One accepted request's output, from the engine's loop to whoever iterates it.

It must not know the scheduler; ending a request early is a callback. One invariant: after the last chunk or the error
nothing follows, and `put` never waits, so a slow reader cannot slow a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from ...scheduler import AdmissionEstimate
from ..common.errors import QuireError
from ..common.types import OutputChunk


class Stream:
    """Implements `facade.Generation`. Holds at most the request's own `n * max_tokens` chunks."""

    admission: AdmissionEstimate  # set before anybody but the engine sees the stream

    def __init__(self, prompt_token_ids: tuple[int, ...], cancel: Callable[[], None]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self._prefill_watcher: Callable[[int], None] | None = None
        self._cancel = cancel
        self._items: asyncio.Queue[OutputChunk | QuireError] = asyncio.Queue()
        self._ended = False
        self._iterated = False

    def put(self, item: OutputChunk | QuireError) -> None:
        if not self._ended:
            self._ended = isinstance(item, QuireError) or item.usage is not None
            self._items.put_nowait(item)

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        self._prefill_watcher = callback

    def note_prefill(self, num_tokens: int) -> None:
        if self._prefill_watcher is not None:
            self._prefill_watcher(min(num_tokens, len(self.prompt_token_ids)))

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
