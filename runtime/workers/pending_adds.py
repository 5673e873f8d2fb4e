"""Requests that an engine process has not answered for yet: who waits to ask, who has asked, and what becomes of both
when the process dies.

Pure but for the futures their askers wait on. One invariant: every asker gets an answer or an error, once.

Who got no answer because the process died asks the next one anew, and alone: then it is known whose fault it is if that
one dies of it too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...scheduler import NotAccepting, Request
from ..common.errors import Quarantined
from .engine_link import Answer


@dataclass(slots=True, eq=False)
class PendingAdd:
    """A request, or the samples of one."""

    requests: Sequence[Request]
    answer: asyncio.Future[Answer]
    was_lost: bool = False  # with a process that it was sent to, and that was not killed from outside

    @property
    def first_id(self) -> int:
        """What its answer will name."""
        return self.requests[0].request_id


class PendingAdds:
    def __init__(self) -> None:
        self._waiting: deque[PendingAdd] = deque()
        self._sent: dict[int, PendingAdd] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def num_sequences(self) -> int:
        return sum(len(asked.requests) for asked in self._all())

    def add(self, requests: Sequence[Request]) -> PendingAdd:
        asked = PendingAdd(requests, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        return asked

    def send(self) -> Iterator[PendingAdd]:
        """Who may ask now, one after another."""
        while self._waiting and not any(asked.was_lost for asked in self._sent.values()):
            asked = self._waiting.popleft()
            self._sent[asked.first_id] = asked
            yield asked

    def answered(self, first_id: int) -> PendingAdd | None:
        """Who asked. None if nobody waits for it."""
        return self._sent.pop(first_id, None)

    def leave(self, asked: PendingAdd) -> bool:
        """Its asker wants no more, or has been answered. Whether the engine may still have it."""
        if asked in self._waiting:
            self._waiting.remove(asked)
            return False
        return self._sent.pop(asked.first_id, None) is not None

    def on_process_exit(self, by_others: bool) -> int:
        """The process died, perhaps killed by others. How many must not ask again."""
        num_quarantined = 0
        for asked in reversed(self._sent.values()):
            if asked.answer.done():
                continue
            if asked.was_lost and not by_others:
                num_quarantined += 1
                why = "the engine crashed twice over taking this request on; it is not tried again"
                asked.answer.set_exception(Quarantined(why))
            else:
                asked.was_lost = asked.was_lost or not by_others
                self._waiting.appendleft(asked)
        self._sent.clear()
        return num_quarantined

    def refuse(self, why: str) -> None:
        """All of them."""
        for asked in self._all():
            if not asked.answer.done():
                asked.answer.set_exception(NotAccepting(why))
        self._waiting.clear()
        self._sent.clear()

    def _all(self) -> list[PendingAdd]:
        return [*self._sent.values(), *self._waiting]
