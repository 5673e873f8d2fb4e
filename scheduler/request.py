"""One request as the scheduler sees it: its tokens, its pages, its state and where its time went.

It must not know text, sockets or how a token is sampled; `sampling` is carried for the executor, never looked into. The
one invariant: a request moves only along `TRANSITIONS`, and every second of its life is counted in exactly one state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from ..pager import PageTable, Spilled
from .beam import BeamSearch, BeamSpec, Hypothesis
from .ngrams import NGramIndex
from .plan import SampledToken

FinishReason = Literal["stop", "length", "cancelled"]


class State(IntEnum):
    WAITING = 0  # queued, never ran
    PREFILL = 1  # running: tokens it knows are still to be computed
    DECODE = 2  # running: one token per step
    PREEMPTED = 3  # queued again, pages given back
    ENDED = 4


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.ENDED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED, State.ENDED}),
    State.DECODE: frozenset({State.PREFILL, State.PREEMPTED, State.ENDED}),  # PREFILL: after a guess gone wrong
    State.PREEMPTED: frozenset({State.PREFILL, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a request asks for. It never changes, and crosses to another process as it is."""

    request_id: int
    prompt_token_ids: Sequence[int] = field(repr=False)
    _: KW_ONLY
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence tokens among them, unless they are to be ignored
    sampling: object = None  # for the model runner; not read here
    tenant: str = ""
    priority: int = 0  # lower is earlier
    deadline: float | None = None  # seconds of the scheduler's clock
    pin_s: float | None = None  # how long the prompt's pages stay findable after the end
    beam: BeamSpec | None = None  # search instead of sampling; `sampling` must give 2 * width top logprobs


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress, which only the scheduler writes.

    `generated` is output that the request has already, from another scheduler: it goes on behind that.
    """

    spec: RequestSpec
    generated: Sequence[int] = field(default=(), repr=False)

    request_id: int = field(init=False)
    state: State = field(default=State.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    token_ids: list[int] = field(init=False, repr=False)  # every token known so far: prompt, then output
    num_prompt_tokens: int = field(init=False)
    beam: BeamSearch | None = field(default=None, init=False)
    num_computed_tokens: int = field(default=0, init=False)  # leading tokens whose keys and values are in `table`
    table: PageTable | None = field(default=None, init=False, repr=False)  # while running

    spilled: Spilled | None = field(default=None, init=False, repr=False)  # while preempted, if its pages were kept
    ngrams: NGramIndex | None = field(default=None, init=False, repr=False)  # from its first guess on
    hypotheses: list[Hypothesis] = field(default_factory=list, init=False, repr=False)
    beam_parent: Request | None = field(default=None, init=False, repr=False)  # of a beam: the request it belongs to
    fork_parent: Request | None = field(default=None, init=False, repr=False)  # of a fork: whose pages it may fork

    order: int = field(default=0, init=False)  # rank by arrival
    pages_needed: int = field(default=0, init=False)  # at its longest
    arrival_time: float = field(default=0.0, init=False)
    first_token_time: float | None = field(default=None, init=False)
    state_since: float = field(default=0.0, init=False)
    seconds_in: list[float] = field(default_factory=lambda: [0.0] * len(State), init=False, repr=False)
    cached_tokens: int = field(default=0, init=False)  # of the prompt, found in the prefix cache when first admitted
    recomputed_tokens: int = field(default=0, init=False)  # computed again after a preemption
    high_water_tokens: int = field(default=0, init=False)  # the most that were ever computed
    preemptions: int = field(default=0, init=False)
    accepted_draft_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        spec, generated = self.spec, self.generated
        if not spec.prompt_token_ids:
            raise ValueError("a request needs at least 1 prompt token")
        if spec.max_tokens < 1:
            raise ValueError(f"a request needs max_tokens of at least 1, got {spec.max_tokens}")
        if len(generated) >= spec.max_tokens:
            raise ValueError(f"a request that has generated {len(generated)} of {spec.max_tokens} tokens has ended")
        self.request_id = spec.request_id
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.token_ids = [*spec.prompt_token_ids, *generated]
        if spec.beam is not None:
            self.beam = BeamSearch(*spec.beam)
            self.beam_parent = self

    @property
    def width(self) -> int:
        """Sequences it runs at once."""
        return self.beam.width if self.beam else 1

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def queue_s(self) -> float:
        """Seconds before it first ran."""
        return self.seconds_in[State.WAITING]

    @property
    def prefill_s(self) -> float:
        return self.seconds_in[State.PREFILL]

    @property
    def decode_s(self) -> float:
        return self.seconds_in[State.DECODE]

    @property
    def stall_s(self) -> float:
        """Seconds spent preempted."""
        return self.seconds_in[State.PREEMPTED]

    def arrive(self, order: int, now: float) -> None:
        self.order = order
        self.arrival_time = self.state_since = now

    def enter(self, state: State, now: float) -> None:
        """Change state. Raises ValueError if the table of transitions does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.request_id} cannot go from {self.state.name} to {state.name}")
        self.seconds_in[self.state] += now - self.state_since
        self.state_since = now
        self.state = state

    def append(self, token_id: int, now: float) -> None:
        """Take a sampled token as known."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.token_ids.append(token_id)

    def note_computed(self, num_tokens: int) -> int:
        """The first `num_tokens` tokens are computed now. How many of them were, once before."""
        high_water = self.high_water_tokens
        again = 0
        if self.num_computed_tokens < high_water:
            again = max(0, min(num_tokens, high_water) - self.num_computed_tokens)
            self.recomputed_tokens += again
        self.num_computed_tokens = num_tokens
        if num_tokens > high_water:
            self.high_water_tokens = num_tokens
        return again

    def final_counters(self) -> FinalCounters:
        return FinalCounters(tuple(self.seconds_in), self.cached_tokens, self.recomputed_tokens, tuple(self.hypotheses))

    def natural_end(self) -> FinishReason | None:
        """Why the last output token ends the request, if it does."""
        num_output_tokens = self.num_output_tokens
        if num_output_tokens >= self.spec.min_tokens and self.token_ids[-1] in self.spec.stop_token_ids:
            return "stop"
        return "length" if num_output_tokens >= self.spec.max_tokens else None


class FinalCounters(NamedTuple):
    """What a request's last update says about its whole life."""

    seconds_in: tuple[float, ...]  # by State
    cached_tokens: int
    recomputed_tokens: int
    hypotheses: tuple[Hypothesis, ...]


class RequestUpdate(NamedTuple):
    """New tokens of one request, or its end (a reason, or an error in words), or both.

    A stop token is among `tokens`. It names the request by its id, so that it can be sent to another process as it is.
    """

    request_id: int
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: FinalCounters | None = None  # of a request that ended in the scheduler

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None
