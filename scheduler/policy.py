"""In which order waiting requests are admitted.

A policy is the waiting queue itself. It must not know pages, budgets or running requests. The one invariant: a request
pushed is in the queue, once, until it is popped or removed, and `head` is stable as long as nothing else changes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from .request import Request


class Policy(Protocol):
    def push(self, request: Request) -> None:
        """A new request."""

    def push_front(self, request: Request) -> None:
        """A preempted request: it was already admitted once, so it comes before all that were not."""

    def head(self) -> Request | None:
        """The request to admit next."""

    def remove(self, request: Request) -> None:
        """Take a waiting request out: it was admitted or has ended."""

    def __len__(self) -> int: ...


class FirstComeFirstServed:
    """Admission in order of arrival. Every operation is O(1)."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        return next(iter(self._queue.values()), None)

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def __len__(self) -> int:
        return len(self._queue)
