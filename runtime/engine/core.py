"""The core protocol: an `Engine`'s interface to the part that runs sequences of token ids, and an encoder's texts.

A core must not import text, frames or sockets. It reports the end of every accepted request exactly once, unless the
`Engine` dropped the request. `EngineCore` runs them in this process, `workers.EnginePool` in others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...scheduler import AdmissionEstimate, EncodeRequest, FinalCounters, FinishReason, Request, RequestUpdate, StepPlan
from ..common.errors import QuireError
from .facade import CoreInfo, EngineStats, HostStatus, StepStats


class Prefilled(NamedTuple):
    """A request whose prefill continues after a step."""

    request_id: int
    num_tokens: int  # prompt tokens computed by now, or found in the prefix cache


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CoreListener:
    """The listener that a core calls on the event loop. The callables must not raise."""

    publish: Callable[[Sequence[RequestUpdate]], None] = _ignore
    # A request ended with an error that is not the scheduler's. The counters are the last known ones.
    fail: Callable[[int, QuireError, FinalCounters], None] = _ignore
    observe: Callable[[StepStats, Sequence[Prefilled]], None] = _ignore  # a step ended and its updates are published
    ended: Callable[[], None] = _ignore  # the core has published its last update
    begin: Callable[[StepPlan], None] = _ignore  # a step is about to be computed in this process
    begun: Callable[[Sequence[Prefilled]], None] = _ignore  # another process computes these requests for the first time
    interrupted: Callable[[Sequence[int]], None] = _ignore  # no process computes; another core may continue
    resumed: Callable[[], None] = _ignore  # a process computes again


class LoadedAdapter(NamedTuple):
    """An adapter that a core has loaded."""

    key: str
    nbytes: int
    evicted: tuple[str, ...] = ()  # keys of the adapters that left for it


class Core(Protocol):
    """Runs requests. The engine, its only user, calls it on the event loop."""

    @property
    def info(self) -> CoreInfo:
        """Model, limits and machine."""

    def start(self, listener: CoreListener) -> None:
        """Begin to run requests and report to `listener`."""

    def check_room(self, tenant: str, count: int) -> None:
        """Raise QueueFull or NotAccepting if `add` would: a cheap check before a prompt is prepared."""

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Queue a request, or the samples of one prompt. Raises Refused or NotAccepting, changing nothing."""

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Queue texts for the encoder. Raises Refused or NotAccepting, changing nothing."""

    def cancel(self, request_id: int) -> None:
        """End a request; its end is published. Allowed in every state, idempotent."""

    def drop(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> FinalCounters | None:
        """End a request without further updates. Idempotent.

        Return its counters; None for an unknown request and during a step that computes it.
        """

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        """Load an adapter, which may be loaded already, while requests run.

        The core keeps the adapters `kept`, keys of requests among them. Others may leave for it, last the adapters
        `leaving`, in order. Raises ConfigError if they leave too little room, ModelError for wrong files,
        InvalidRequest if this core loads none, and Unavailable.
        """

    def stats(self) -> EngineStats:
        """Return the current statistics. Raises Unavailable while nothing can be computed."""

    def host_statuses(self) -> Sequence[HostStatus] | None:
        """Return the state of each engine host; None if this core computes on this machine."""

    async def drain(self) -> None:
        """Refuse new requests and wait until every accepted one has ended."""

    async def stop(self) -> None:
        """End all requests now and compute nothing more. Idempotent."""

    async def close(self) -> None:
        """Stop, and free memory and threads. Idempotent."""
