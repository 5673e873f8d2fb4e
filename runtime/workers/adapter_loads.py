"""The adapters that an engine process is loading, and the adapters that the next process must have.

Pure, except for the futures of callers: every caller gets one answer or one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..common import errors
from ..common.errors import Unavailable
from ..engine import LoadedAdapter
from .engine_link import AdapterAnswer, LoadAdapter


class AdapterLoads:
    def __init__(self, adapters: dict[str, str]) -> None:
        """Keep `adapters`, key -> folder, equal to those of the process."""
        self._adapters = adapters
        self._pending: dict[int, asyncio.Future[AdapterAnswer]] = {}
        self._next_number = 0

    async def load(
        self, send: Callable[[LoadAdapter], None], name: str, path: str, kept: Sequence[str], leaving: Sequence[str]
    ) -> LoadedAdapter:
        """Ask the process to load an adapter. Raises its refusal, or Unavailable if it ends first."""
        number = self._next_number
        self._next_number += 1
        answered: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._pending[number] = answered
        send(LoadAdapter(number, name, path, tuple(kept), tuple(leaving)))
        try:
            answer = await answered
        finally:
            self._pending.pop(number, None)
        if answer.loaded is None:
            raise getattr(errors, answer.error, Unavailable)(answer.message)
        self._adapters[answer.loaded.key] = path
        for key in answer.loaded.evicted:
            self._adapters.pop(key, None)
        return answer.loaded

    def answered(self, answer: AdapterAnswer) -> None:
        """Pass an answer to its caller, if that still waits."""
        pending = self._pending.get(answer.number)
        if pending is not None and not pending.done():
            pending.set_result(answer)

    def fail_all(self, reason: str) -> None:
        """Raise Unavailable in every caller."""
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(Unavailable(reason))
