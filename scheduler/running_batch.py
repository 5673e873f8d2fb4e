"""The running requests and their pages: who enters, who gives up their place, who forks.

It must not decide whose turn it is, nor know budgets or queues. The one invariant: a request runs exactly as long as it
has a page table, and every owned page belongs to a running request.

A protected request is never preempted. It enters only when all pages it may ever need could be its own, shares with
nobody on that account, keeps what it does not hold yet reserved, and takes what is lacking from anybody unprotected; so
all protected ones together fit. Beams are protected from the start, others when they have been preempted
`MAX_PREEMPTIONS` times. Of the rest, the oldest is preempted only for a protected one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..pager import OutOfPages, Pager, PageTable
from .beam import Survivor
from .cost import CostModel
from .request import Request, RequestSpec, State

MAX_PREEMPTIONS = 3  # then it comes back only with all the pages it may ever need


class RunningBatch:
    def __init__(self, pager: Pager, cost: CostModel) -> None:
        self.requests: dict[int, Request] = {}  # in order of admission; a beam is one beside its parent
        self.num_seqs = 0  # sequences, and those that a beam search will come to
        self.num_spilled = 0  # preemptions that kept their pages
        self.num_recomputed = 0  # preemptions that did not
        self._pager = pager
        self._cost = cost
        self._promised: int | None = None  # pages, as long as it is known
        self._num_beams = 0
        self._last_beam_id = 0  # below 0, where no request of a user is

    @property
    def num_requests(self) -> int:
        return len(self.requests) - self._num_beams

    @property
    def num_preemptions(self) -> int:
        return self.num_spilled + self.num_recomputed

    def pages_at_longest(self, request: Request) -> int:
        """What it may come to need, its beams included: each may copy its last pages while it still shares others."""
        pages = self._pager.pages_for(request.num_prompt_tokens + request.spec.max_tokens)
        return pages if request.beam is None else request.width * (pages + len(self._pager.windows))

    def enter(self, request: Request, now: float) -> None:
        """Run a request, with all pages found that it need not compute. Raises OutOfPages, changing nothing, unless all
        it knows fits beside what others have been promised.
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

    def leave(self, request: Request) -> None:
        """It does not run any more: its pages go back, its beams' too."""
        for beam in tuple(self._beams(request)):
            self._drop_beam(beam)
        table_of(request).release()
        self._remove(request)

    def preempt(self, request: Request, now: float) -> None:
        """Its pages go, into the store where that is cheaper than computing them again; its tokens stay."""
        table, computed = table_of(request), request.num_computed_tokens
        request.spilled = self._pager.spill(table, computed) if self._spilling_pays(request) else None
        if request.spilled is None:
            table.release()
            request.num_computed_tokens = 0
            self.num_recomputed += 1
        else:
            self.num_spilled += 1
        self._remove(request)
        request.preemptions += 1
        request.enter(State.PREEMPTED, now)

    def grow_prefill(self, request: Request, num_tokens: int) -> None:
        """Take slots for so many more of the tokens that it knows. Raises OutOfPages."""
        promised = self._promised_to(request)
        table_of(request).append(num_tokens)
        if self._promised is not None:
            self._promised += self._promised_to(request) - promised

    def begin_step(self) -> None:
        """What is promised is counted once per step, when it is first asked, and kept in step from there."""
        self._promised = None

    def forget(self, request: Request) -> None:
        """It ends while it is preempted: what was kept of it goes."""
        if request.spilled is not None:
            self._pager.discard(request.spilled)
            request.spilled = None

    def oldest(self) -> Request | None:
        return min(self.requests.values(), key=arrival_rank, default=None)

    def victims(self, request: Request) -> Iterator[Request]:
        """Whom `request` could take pages from."""
        spared = request if self.is_protected(request) else self.oldest()
        return (
            other
            for other in self.requests.values()
            if other is not request and other is not spared and not self.is_protected(other)
        )

    def is_protected(self, request: Request) -> bool:
        return request.beam_parent is not None or request.preemptions >= MAX_PREEMPTIONS

    def secure(self, request: Request) -> None:
        """Reserve for a protected request, whose tables have changed, what it does not hold of all it may need."""
        pager, tables = self._pager, [table_of(beam) for beam in self.beams_of(request)]
        for table in tables:
            table.reserve(0)
        lacking = request.pages_needed - _num_distinct(tables)
        for table in reversed(tables):  # one more token for every beam, the rest for the first
            wanted = table.pages_needed(1) if table is not tables[0] else lacking
            table.reserve(max(0, min(wanted, pager.pool.num_available)))
            lacking -= table.reserved

    def fork_beams(self, parent: Request, survivors: Sequence[Survivor], now: float) -> None:
        """Let the search's hypotheses continue as `survivors`; pages of the others are back when this returns."""
        beams = self.beams_of(parent)
        tables, contexts = [table_of(beam) for beam in beams], [beam.token_ids for beam in beams]
        computed = parent.num_computed_tokens
        for table in [table for index, table in enumerate(tables) if index not in {each.parent for each in survivors}]:
            table.release()
        while len(beams) < len(survivors):
            beams.append(self._new_beam(parent, now))
        for beam in beams[len(survivors) :]:
            beam.table = None
            self._drop_beam(beam)
        continued: set[int] = set()
        for beam, survivor in zip(beams, survivors, strict=False):
            table = tables[survivor.parent]
            beam.table = table.fork() if survivor.parent in continued else table
            beam.token_ids = [*contexts[survivor.parent], survivor.token.token_id]
            beam.num_computed_tokens = computed
            continued.add(survivor.parent)
        self.secure(parent)

    def beams_of(self, parent: Request) -> list[Request]:
        """The sequences of a beam search, its parent first."""
        return [parent, *self._beams(parent)]

    def _beams(self, parent: Request) -> Iterator[Request]:
        if parent.beam is None or not self._num_beams:
            return iter(())
        return (other for other in self.requests.values() if other.beam_parent is parent and other is not parent)

    def _new_beam(self, parent: Request, now: float) -> Request:
        self._last_beam_id -= 1
        spec = parent.spec
        beam = Request(
            RequestSpec(
                self._last_beam_id,
                spec.prompt_token_ids,
                max_tokens=spec.max_tokens,
                sampling=spec.sampling,
                tenant=spec.tenant,
            )
        )
        beam.beam_parent, beam.order = parent, parent.order
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

    def _remove(self, request: Request) -> None:
        self._promised = None
        request.table = None
        del self.requests[request.request_id]
        self.num_seqs -= request.width

    def _open(self, request: Request, spare_pages: int) -> PageTable:
        if self.is_protected(request) and request.pages_needed + spare_pages > self._pager.pool.num_available:
            raise OutOfPages(request.pages_needed + spare_pages, self._pager.pool.num_available)
        table = self._kept_pages(request, spare_pages) or self._fork_parent(request, spare_pages)
        if table is None:
            table = self._pager.open(request.token_ids, request.spec.tenant.encode(), spare_pages)
        return table

    def _kept_pages(self, request: Request, spare_pages: int) -> PageTable | None:
        """The pages it had when it was preempted; None if they were not kept, or did not survive it."""
        if request.spilled is None:
            return None
        pager, tokens, spilled = self._pager, request.token_ids, request.spilled
        spare_pages += pager.pages_for(len(tokens)) - pager.pages_for(spilled.num_tokens)  # for what it knows besides
        table = pager.restore(spilled, tokens, request.spec.tenant.encode(), spare_pages)
        request.spilled = None
        return table

    def _fork_parent(self, request: Request, spare_pages: int) -> PageTable | None:
        """A fork continues its source's prompt, all but the last token, which it computes for itself to sample."""
        parent, num_tokens = request.fork_parent, request.num_prompt_tokens - 1
        if request.state is not State.WAITING or parent is None or parent.table is None:
            return None
        if parent.num_computed_tokens < num_tokens or not parent.table.can_roll_back(num_tokens):
            return None
        table = parent.table.fork()
        table.rollback(num_tokens)
        needed = table.pages_needed(1) + spare_pages
        if needed > self._pager.pool.num_available:
            table.release()
            raise OutOfPages(needed, self._pager.pool.num_available)
        return table

    def _spilling_pays(self, request: Request) -> bool:
        table = table_of(request)
        seconds = self._pager.spill_seconds(table.num_pages)
        return seconds is not None and seconds < self._cost.predict_prefill(request.num_computed_tokens)

    def _pages_promised(self) -> int:
        """Pages that running requests still need for the tokens they know, and a little for those to come.

        Newcomers leave these alone: whoever is admitted too early is preempted soon, and its work is lost.
        """
        if self._promised is None:
            self._promised = sum(map(self._promised_to, self.requests.values()))
        return self._promised

    def _promised_to(self, request: Request) -> int:
        if self.is_protected(request):
            return 0  # it has reserved them
        table = table_of(request)
        soon = self._pager.pages_for(len(request.token_ids)) + len(table.pages)
        return max(0, min(soon, request.pages_needed) - table.num_pages)


def _num_distinct(tables: Sequence[PageTable]) -> int:
    """Pages that any of the tables lists. Of one table, which is nearly always all, it is known."""
    if len(tables) == 1:
        return tables[0].num_pages
    return len({page for table in tables for pages in table.pages for page in pages if page >= 0})


def arrival_rank(request: Request) -> int:
    return request.order


def table_of(request: Request) -> PageTable:
    """The pages of a running request."""
    if request.table is None:
        raise ValueError(f"request {request.request_id} is {request.state.name} and has no pages")
    return request.table
