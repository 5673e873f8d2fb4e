"""Every request that this server has in the engine, whichever way its tokens leave.

It must not know frames, sockets or what is kept. One invariant: a request counts for its tenant and is listed from
`submit` until `end`, which has an effect once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from itertools import islice

from ..common.errors import QuireError
from ..engine.facade import EngineFacade, GenerateRequest, Generation
from .monitoring import CancelCause, PrometheusObserver, RequestState, RequestStatus
from .tenants import Tenant


class LiveRequests:
    """Of one server."""

    def __init__(self, engine: EngineFacade, observer: PrometheusObserver) -> None:
        self._engine = engine
        self._observer = observer
        self._all: dict[LiveRequest, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._all)

    def submit(self, tenant: Tenant, request_id: int, request: GenerateRequest) -> LiveRequest:
        """Raises what `Tenant.enter` and the engine refuse with; nothing is counted then."""
        self._admit(tenant.enter)
        try:
            submission = self._engine.submit(request)
        except BaseException:
            tenant.leave()
            raise
        live = LiveRequest(submission, tenant, request_id, self._observer, self._all.pop)
        self._all[live] = None
        return live

    def count_replay(self, tenant: Tenant) -> None:
        """A request that an earlier one answers. Raises what `Tenant.replay` refuses with."""
        self._admit(tenant.replay)

    def oldest(self, limit: int) -> list[RequestStatus]:
        return [live.status() for live in islice(self._all, limit)]

    def _admit(self, enter: Callable[[], None]) -> None:
        try:
            enter()
        except QuireError as error:
            self._observer.on_rejected(error)
            raise


class LiveRequest:
    """A request from its submission on; it can be cancelled before the engine has answered.

    Whoever iterates what `accepted` returns counts its tokens in `generated`, and calls `end` when done with it.
    """

    def __init__(
        self,
        submission: Awaitable[Generation],
        tenant: Tenant,
        request_id: int,
        observer: PrometheusObserver,
        on_end: Callable[[LiveRequest], object],
    ) -> None:
        self.generated = 0
        self.on_prefill: Callable[[int, int], None] | None = None  # gets computed and prompt tokens
        self.is_cancelled = False
        self._submission: Awaitable[Generation] | None = submission
        self._tenant = tenant
        self._request_id = request_id
        self._observer = observer
        self._on_end = on_end
        self._started = time.monotonic()
        self._generation: Generation | None = None
        self._prompt_tokens: int | None = None
        self._prefilled: int | None = None
        self._ended = False

    async def accepted(self) -> Generation:
        """The engine's stream. Await it once; raises what the engine refuses with."""
        assert self._submission is not None, "awaited once, before the end"
        generation = await self._submission
        self._generation = generation
        self._prompt_tokens = len(generation.prompt_token_ids)
        generation.watch_prefill(self._note_prefill)
        if self.is_cancelled:
            generation.cancel()
        return generation

    def cancel(self, cause: CancelCause) -> None:
        """Only the first cause counts."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        self._observer.on_cancelled(cause)
        if self._generation is not None:
            self._generation.cancel()

    def leave(self, cause: CancelCause) -> None:
        """The connection is lost: nobody else waits for this one."""
        self.cancel(cause)

    def end(self) -> None:
        """Also lets go of the engine's stream, which holds the prompt."""
        if not self._ended:
            self._ended = True
            self._generation = self._submission = None
            self._tenant.leave()
            self._on_end(self)

    def status(self) -> RequestStatus:
        state: RequestState = "queued"
        if self.generated:
            state = "decode"
        elif self._prefilled is not None:
            state = "prefill"
        return RequestStatus(
            tenant=self._tenant.name,
            request_id=str(self._request_id),
            age_s=time.monotonic() - self._started,
            state=state,
            prompt_tokens=self._prompt_tokens,
            prefilled=self._prompt_tokens if self.generated else self._prefilled,
            generated=self.generated,
        )

    def _note_prefill(self, computed_tokens: int) -> None:
        self._prefilled = computed_tokens
        if self.on_prefill is not None and self._prompt_tokens is not None:
            self.on_prefill(computed_tokens, self._prompt_tokens)
