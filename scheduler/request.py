"""One request in the scheduler: its tokens, its pages, its state and the time spent in each state.

Must not import text, sockets or samplers. A request changes state only along `TRANSITIONS`, and every second from its
arrival to its end is counted in exactly one state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Literal, NamedTuple

from ..pager import PageTable, Spilled
from .beam import BeamSearch, BeamSpec, Hypothesis
from .plan import EncodedText, PlacedImage, SampledToken

FinishReason = Literal["stop", "length", "cancelled"]


class State(IntEnum):
    """The place of a request between arrival and end."""

    WAITING = 0  # queued, never ran
    PREFILL = 1  # running, known tokens are still to be computed
    DECODE = 2  # running, one new token per step
    PREEMPTED = 3  # queued again, without pages
    ENDED = 4


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.ENDED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED, State.ENDED}),
    State.DECODE: frozenset({State.PREFILL, State.PREEMPTED, State.ENDED}),  # PREFILL: after a failed draft token
    State.PREEMPTED: frozenset({State.PREFILL, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The fields of a request as its user gave them. It never changes, and can be sent to another process."""

    request_id: int
    prompt_token_ids: Sequence[int] = field(repr=False)
    _: KW_ONLY
    max_tokens: int  # output tokens, including `echoed`
    min_tokens: int = 0  # output tokens, besides `echoed`, before stop tokens end the request
    stop_token_ids: frozenset[int] = frozenset()  # includes the end-of-sequence tokens unless they are ignored
    sampling: object = None  # passed on to the model runner
    tenant: str = ""
    cache_salt: str = ""  # only requests with the same tenant, salt and adapter share cached pages
    adapter: str = ""  # key of the adapter that changes the model: a name, @ and a digest
    conversation: bytes = b""  # name of the conversation, for routing: its requests share cached pages
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # seconds on the scheduler's clock
    pin_s: float | None = None  # seconds after the end for which the prompt stays pinned in the prefix cache
    echoed: tuple[int, ...] = field(default=(), repr=False)  # the first output tokens, which are not sampled
    images: tuple[PlacedImage, ...] = field(default=(), repr=False)  # images of the prompt, in order
    beam: BeamSpec | None = None  # beam search instead of sampling; `sampling` must ask for 2 * width top logprobs

    @property
    def prefix_salt(self) -> bytes:
        """The beginning of the keys of cached pages."""
        salt = f"{self.tenant}\0{self.cache_salt}" if self.cache_salt else self.tenant
        return (f"{self.adapter}\0{salt}" if self.adapter else salt).encode()  # no tenant's name has an @


@dataclass(frozen=True, slots=True)
class EncodeSpec:
    """Texts to encode: each runs through the encoder once and gets the encoder's values."""

    request_id: int
    texts: tuple[EncodedText, ...] = field(repr=False)
    _: KW_ONLY
    tenant: str = ""
    priority: int = 0  # lower runs earlier
    deadline: float | None = None  # seconds on the scheduler's clock
    is_continuation: bool = False  # the request was accepted before: the limits of the queue do not apply


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """The fields of all requests: an id, a state and the seconds spent in each state."""

    spec: RequestSpec | EncodeSpec

    request_id: int = field(init=False)
    state: State = field(default=State.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    order: int = field(default=0, init=False)  # number of requests that arrived before it
    arrival_time: float = field(default=0.0, init=False)
    first_token_time: float | None = field(default=None, init=False)
    state_since: float = field(default=0.0, init=False)
    seconds_in: list[float] = field(default_factory=lambda: [0.0] * len(State), init=False, repr=False)
    cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the prefix cache at the first admission
    recomputed_tokens: int = field(default=0, init=False)  # computed again after a preemption

    @property
    def width(self) -> int:
        """Sequence slots that it uses."""
        return 1

    def arrive(self, order: int, now: float) -> None:
        """Start to count time in the queue."""
        self.order = order
        self.arrival_time = self.state_since = now

    def enter(self, state: State, now: float) -> None:
        """Change state. Raises ValueError if `TRANSITIONS` does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"request {self.request_id} cannot go from {self.state.name} to {state.name}")
        self.seconds_in[self.state] += now - self.state_since
        self.state_since = now
        self.state = state

    def final_counters(self) -> FinalCounters:
        """Return the counters of an ended request for its last update."""
        return FinalCounters(tuple(self.seconds_in), self.cached_tokens, self.recomputed_tokens)


@dataclass(slots=True, eq=False)
class EncodeRequest(QueuedRequest):
    """Texts to encode, and their values so far. It is in PREFILL from its first batch on."""

    spec: EncodeSpec
    num_taken: int = field(default=0, init=False)  # leading texts that are in a batch, or were
    values: list[bytes] = field(default_factory=list, init=False, repr=False)  # values of the leading texts; f32

    def __post_init__(self) -> None:
        if not self.spec.texts or not all(text.token_ids for text in self.spec.texts):
            raise ValueError("a request needs at least 1 text, and each text at least 1 token")
        self.request_id = self.spec.request_id


@dataclass(slots=True, eq=False)
class Request(QueuedRequest):
    """A request and its progress, which only its scheduler changes.

    `generated` are output tokens that another scheduler has generated; the request continues after them.
    """

    spec: RequestSpec
    generated: Sequence[int] = field(default=(), repr=False)

    token_ids: list[int] = field(init=False, repr=False)  # all known tokens: prompt, then output
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)  # leading tokens whose keys and values are in `table`
    table: PageTable | None = field(default=None, init=False, repr=False)  # pages of a running request
    spilled: Spilled | None = field(default=None, init=False, repr=False)  # pages of a preempted request, if spilled
    beam: BeamSearch | None = field(default=None, init=False)
    beam_parent: Request | None = field(default=None, init=False, repr=False)  # a beam's searching request
    in_search: bool = field(default=False, init=False)  # the request is a beam, or searches
    fork_parent: Request | None = field(default=None, init=False, repr=False)  # request whose prompt pages it may fork
    hypotheses: list[Hypothesis] = field(default_factory=list, init=False, repr=False)  # results of an ended search

    pages_needed: int = field(default=0, init=False)  # pages of the request at its longest
    pages_to_pin: int | None = field(default=None, init=False)  # pages to pin at the end; None: none are pinned
    high_water_tokens: int = field(default=0, init=False)  # most tokens that were computed at any time
    preemptions: int = field(default=0, init=False)
    accepted_draft_tokens: int = field(default=0, init=False)
    forced: tuple[int, ...] = field(default=(), init=False)  # draft tokens for the next step, of the last sample

    def __post_init__(self) -> None:
        spec = self.spec
        generated = self.generated
        if not spec.prompt_token_ids:
            raise ValueError("a request needs at least 1 prompt token")
        if spec.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {spec.max_tokens}")
        if len(generated) >= spec.max_tokens:
            raise ValueError(
                f"generated must have fewer than max_tokens={spec.max_tokens} tokens, got {len(generated)}"
            )
        self.request_id = spec.request_id
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.token_ids = [*spec.prompt_token_ids, *generated]
        if spec.beam is not None:
            self.beam = BeamSearch(*spec.beam)
            self.in_search = True

    @property
    def width(self) -> int:
        """Sequence slots that it uses."""
        return self.beam.width if self.beam else 1

    @property
    def output_token_ids(self) -> list[int]:
        """Known tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of known tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int, now: float) -> None:
        """Add a sampled token to the known tokens."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.token_ids.append(token_id)

    def note_computed(self, num_tokens: int) -> int:
        """Record that the first `num_tokens` tokens are computed. Return how many of them were computed before."""
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
        """See `QueuedRequest.final_counters`."""
        hypotheses = tuple(self.hypotheses)
        return FinalCounters(tuple(self.seconds_in), self.cached_tokens, self.recomputed_tokens, hypotheses)

    def natural_end(self) -> FinishReason | None:
        """Return why the last output token ends the request, or None if it does not."""
        spec = self.spec
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if self.token_ids[-1] in spec.stop_token_ids:  # rare: most tokens skip the rest
            num_sampled = num_output_tokens - len(spec.echoed)
            if num_sampled > 0 and num_sampled >= spec.min_tokens:
                return "stop"
        return "length" if num_output_tokens >= spec.max_tokens else None


class Ending(NamedTuple):
    """How a request ends: for a reason, or with an error in words."""

    reason: FinishReason | None = None
    error: str | None = None


class FinalCounters(NamedTuple):
    """The report of a request's last update about all of its time in the scheduler."""

    seconds_in: tuple[float, ...] = (0.0,) * len(State)  # seconds per State
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def queue_s(self) -> float:
        """Seconds before it first ran."""
        return self.seconds_in[State.WAITING]

    @property
    def prefill_s(self) -> float:
        """Seconds in prefill."""
        return self.seconds_in[State.PREFILL]

    @property
    def decode_s(self) -> float:
        """Seconds in decode."""
        return self.seconds_in[State.DECODE]

    @property
    def stall_s(self) -> float:
        """Seconds spent preempted."""
        return self.seconds_in[State.PREEMPTED]


class RequestUpdate(NamedTuple):
    """An event of one request: its new tokens, and its end, if it ended (a reason, or an error in words).

    A stop token is among `tokens`. An encode request has one update, with the values of its texts or an error. The
    request is named by its id, so an update can be sent to another process.
    """

    request_id: int
    tokens: tuple[SampledToken, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    counters: FinalCounters | None = None  # None unless the request ended in the scheduler
    values: tuple[bytes, ...] = ()  # values of an encode request: f32, per text

    @property
    def ended(self) -> bool:
        """Whether this is the request's last update."""
        return self.finish_reason is not None or self.error is not None
