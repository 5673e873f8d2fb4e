"""The running requests and their pages: admission, preemption, forks and beams.

Must not import the queue, budgets or the planner. A request runs exactly as long as it has a page table, and every
owned page belongs to a running request.

A protected request is never preempted. It is admitted only when the pool could supply all pages that it may ever need
besides shared ones. The pages that it does not hold yet stay reserved for it, and missing pages are taken from
unprotected requests. So all protected requests fit together. Beam searches are protected from the start, other requests
after `MAX_PREEMPTIONS` preemptions. The oldest unprotected request is preempted only for a protected one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..pager import OutOfPages, Pager, PageTable
from .beam import Survivor
from .cost import CostModel
from .request import Request, State

MAX_PREEMPTIONS = 3  # preemptions after which a request runs again only with all pages it may ever need


class RunningBatch:
    """Requests that hold pages, in order of admission."""

    def __init__(self, pager: Pager, cost: CostModel) -> None:
        self.requests: dict[int, Request] = {}  # request id -> request; each beam has an entry next to its parent's
        self.num_seqs = 0  # sequence slots in use, counting the full width of beam searches
        self.num_spilled = 0  # preemptions whose pages were spilled
        self.num_recomputed = 0  # preemptions whose pages were dropped
        self._pager = pager
        self._cost = cost
        self._promised: int | None = None  # see `_pages_promised`; None: not counted yet
        self._num_beams = 0
        self._last_beam_id = 0  # ids of beams are negative, those of user requests are not

    @property
    def num_requests(self) -> int:
        """Running requests; the beams of one search count as one."""
        return len(self.requests) - self._num_beams

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self.num_spilled + self.num_recomputed

    def pages_at_longest(self, request: Request) -> int:
        """Return the most pages that a request can need; each beam may copy its last pages and share the others."""
        pages = self._pager.pages_for(request.num_prompt_tokens + request.spec.max_tokens)
        return pages if request.beam is None else request.width * (pages + len(self._pager.windows))

    def admit(self, request: Request, now: float) -> None:
        """Run a request, starting with its cached, spilled or shared pages.

        Raises OutOfPages, changing nothing, unless its known tokens fit in the pages not promised to running requests.
        """
        promised = self._pages_promised()
        table = self._open(request, promised)
        if request.state is State.WAITING:
            request.cached_tokens = request.high_water_tokens = table.num_tokens
        request.table = table
        request.num_computed_tokens = table.num_tokens
        request.enter(State.PREFILL, now)
        self.requests[request.request_id] = request
        self.num_seqs += request.width
        self._promised = promised + self._promised_to(request)
        if self.is_protected(request):
            self.secure(request)

    def remove(self, request: Request) -> None:
        """Release the pages of a request that has ended, and of its beams."""
        for beam in tuple(self._beams(request)):
            self._drop_beam(beam)
        table_of(request).release()
        self._drop(request)

    def preempt(self, request: Request, now: float) -> None:
        """Take a request's pages and state, spilling them where that is faster than computing; its tokens are kept."""
        table = table_of(request)
        computed = request.num_computed_tokens
        table.withdraw(computed)
        request.spilled = self._pager.spill(table, computed) if self._spilling_pays(request) else None
        if request.spilled is None:
            table.release()
            request.num_computed_tokens = 0
            self.num_recomputed += 1
        else:
            self.num_spilled += 1
        self._drop(request)
        request.preemptions += 1
        request.enter(State.PREEMPTED, now)

    def discard_spilled(self, request: Request) -> None:
        """Drop the spilled pages and state of a preempted request that has ended."""
        if request.spilled is not None:
            self._pager.discard(request.spilled)
            request.spilled = None

    def next_end(self, request: Request) -> int:
        """Return where the next chunk of a request's known tokens should end at the latest."""
        return self._pager.next_end(table_of(request), request.num_computed_tokens, len(request.token_ids))

    def grow_prefill(self, request: Request, num_tokens: int) -> None:
        """Add slots for `num_tokens` more known tokens of a request. Raises OutOfPages."""
        promised = self._promised_to(request)
        table_of(request).append(num_tokens)
        if self._promised is not None:
            self._promised += self._promised_to(request) - promised

    def begin_step(self) -> None:
        """Forget the promised pages, which are counted again in each step when they are first needed."""
        self._promised = None

    def oldest(self) -> Request | None:
        """Return the running request that arrived first."""
        return min(self.requests.values(), key=lambda request: request.order, default=None)

    def victims(self, request: Request) -> Iterator[Request]:
        """Iterate over the running requests that `request` may preempt."""
        spared = request if self.is_protected(request) else self.oldest()
        return (
            other
            for other in self.requests.values()
            if other is not request and other is not spared and not self.is_protected(other)
        )

    def is_protected(self, request: Request) -> bool:
        """Return whether the request must not be preempted."""
        return request.in_search or request.preemptions >= MAX_PREEMPTIONS

    def secure(self, request: Request) -> None:
        """Reserve the pages that a protected request may still need, after its tables have changed."""
        tables = [table_of(beam) for beam in self.beams_of(request)]
        for table in tables:
            table.reserve(0)
        missing = request.pages_needed - _num_distinct(tables)
        for table in reversed(tables):  # one more token for every beam, the remaining pages for the first
            wanted = table.pages_needed(1) if table is not tables[0] else missing
            table.reserve(max(0, min(wanted, self._pager.pool.num_available)))
            missing -= table.reserved

    def fork_beams(self, parent: Request, survivors: Sequence[Survivor], now: float) -> None:
        """Continue the hypotheses of a search as `survivors`, and release the pages of the others."""
        beams = self.beams_of(parent)
        tables = [table_of(beam) for beam in beams]
        contexts = [beam.token_ids for beam in beams]
        computed = parent.num_computed_tokens
        continued = {survivor.parent for survivor in survivors}
        for index, table in enumerate(tables):
            if index not in continued:
                table.release()
        while len(beams) < len(survivors):
            beams.append(self._new_beam(parent, now))
        for beam in beams[len(survivors) :]:
            beam.table = None
            self._drop_beam(beam)
        taken: set[int] = set()
        for beam, survivor in zip(beams, survivors, strict=False):
            table = tables[survivor.parent]
            beam.table = table.fork() if survivor.parent in taken else table
            beam.token_ids = [*contexts[survivor.parent], survivor.token.token_id]
            beam.num_computed_tokens = computed
            taken.add(survivor.parent)
        self.secure(parent)

    def beams_of(self, parent: Request) -> list[Request]:
        """Return the sequences of a beam search, the parent first."""
        return [parent, *self._beams(parent)]

    def _beams(self, parent: Request) -> Iterator[Request]:
        if parent.beam is None or not self._num_beams:
            return iter(())
        return (other for other in self.requests.values() if other.beam_parent is parent)

    def _new_beam(self, parent: Request, now: float) -> Request:
        self._last_beam_id -= 1
        beam = Request(replace(parent.spec, request_id=self._last_beam_id, beam=None))
        beam.beam_parent = parent
        beam.in_search = True
        beam.order = parent.order
        beam.enter(State.PREFILL, now)
        beam.enter(State.DECODE, now)
        self.requests[beam.request_id] = beam
        self._num_beams += 1
        return beam

    def _drop_beam(self, beam: Request) -> None:
        if beam.table is not None:
            beam.table.release()
        del self.requests[beam.request_id]
        self._num_beams -= 1

    def _drop(self, request: Request) -> None:
        self._promised = None
        request.table = None
        del self.requests[request.request_id]
        self.num_seqs -= request.width

    def _open(self, request: Request, spare_pages: int) -> PageTable:
        available = self._pager.pool.num_available
        if self.is_protected(request) and request.pages_needed + spare_pages > available:
            raise OutOfPages(request.pages_needed + spare_pages, available)
        table = self._restore(request, spare_pages) or self._fork_parent(request, spare_pages)
        if table is None:
            spec = request.spec
            table = self._pager.open(request.token_ids, spec.prefix_salt, spare_pages, spec.images)
        return table

    def _restore(self, request: Request, spare_pages: int) -> PageTable | None:
        """Return the table of a preempted request that was spilled; None if it was not, or is damaged in the store."""
        if request.spilled is None:
            return None
        pager = self._pager
        tokens = request.token_ids
        spilled = request.spilled
        spare_pages += pager.pages_for(len(tokens)) - pager.pages_for(spilled.num_tokens)  # pages of other known tokens
        spec = request.spec
        table = pager.restore(spilled, tokens, spec.prefix_salt, spare_pages, spec.images)
        request.spilled = None
        return table

    def _fork_parent(self, request: Request, spare_pages: int) -> PageTable | None:
        """Return a fork of the parent's prompt without the last token, which the fork computes itself to sample.

        None if the request is no fork, or if its parent's pages can no longer be forked.
        """
        parent = request.fork_parent
        num_tokens = request.num_prompt_tokens - 1
        if request.state is not State.WAITING or parent is None or parent.table is None:
            return None
        if parent.num_computed_tokens < num_tokens or not parent.table.can_roll_back(num_tokens):
            return None
        table = parent.table.fork()
        table.rollback(num_tokens)
        needed = table.pages_needed(1) + spare_pages
        available = self._pager.pool.num_available
        if needed > available:
            table.release()
            raise OutOfPages(needed, available)
        return table

    def _spilling_pays(self, request: Request) -> bool:
        table = table_of(request)
        seconds = self._pager.spill_seconds(table.num_pages)
        return seconds is not None and seconds < self._cost.predict_prefill(request.num_computed_tokens)

    def _pages_promised(self) -> int:
        """Return the pages that running requests still need for their known tokens and a few more.

        New requests must not take these pages: a request that is admitted too early is preempted soon, and its work is
        lost.
        """
        if self._promised is None:
            self._promised = sum(map(self._promised_to, self.requests.values()))
        return self._promised

    def _promised_to(self, request: Request) -> int:
        if self.is_protected(request):
            return 0  # the request's pages are reserved
        table = table_of(request)
        soon = self._pager.pages_for(len(request.token_ids)) + len(table.pages)
        return max(0, min(soon, request.pages_needed) - table.num_pages)


def table_of(request: Request) -> PageTable:
    """Return the page table of a running request."""
    if request.table is None:
        raise ValueError(f"request {request.request_id} is {request.state.name} and has no pages")
    return request.table


def _num_distinct(tables: Sequence[PageTable]) -> int:
    """Return how many different pages the tables list. With a single table, the usual case, this is `num_pages`."""
    if len(tables) == 1:
        return tables[0].num_pages
    return len({page for table in tables for pages in table.pages for page in pages if page >= 0})
