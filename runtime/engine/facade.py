"""The Engine facade: all that the server, the offline `LLM` and the tests know of an engine.

It must not know sockets, frames or metrics libraries. One invariant: a submitted request ends in exactly one way, its
last chunk with `usage`, or a `QuireError` raised from its iterator.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import QuireError
from ..common.types import FinishReason, OutputChunk, SamplingParams, Usage


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: text or token ids, and how to sample. `tenant` comes from authentication, never from its body."""

    prompt: str | tuple[int, ...] | None
    sampling_params: SamplingParams = SamplingParams()
    messages: tuple[dict[str, Any], ...] | None = None  # instead of a prompt; rendered by the model's chat template
    tenant: str = ""
    priority: int = 0  # lower runs earlier
    deadline_ms: int | None = None  # from submission
    pin_ms: int | None = None  # keep the prompt's pages in the prefix cache so long after the request ends


class Generation(Protocol):
    """An accepted request's stream. Iterate it once; closing the iterator early cancels the request."""

    @property
    def admission(self) -> AdmissionEstimate: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...
    def cancel(self) -> None:
        """Legal in every state, idempotent; every page is returned before the next step."""

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        """Call back from the event loop, at every step that leaves prefill unfinished, with the number of prompt tokens
        that are computed by now. Must not raise."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while an engine runs."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int  # of all engine processes together
    page_size: int  # tokens
    isa: str
    threads: int
    threads_reason: str
    has_tokenizer: bool
    has_chat_template: bool
    num_processes: int = 0  # 0: it runs in this one


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics, health and tests. Counters count from the start."""

    step: int  # counter of finished steps; readiness is that it advances while work exists
    running: int
    waiting: int
    pages_total: int  # = owned + cached + free
    pages_owned: int  # referenced by live requests
    pages_cached: int  # free to evict, content still indexed
    pages_free: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    waiting_by_reason: dict[str, int] = {}
    pages_reserved: int = 0  # of the cached and free: kept for certain running requests
    pages_pinned: int = 0  # of the cached: evicted last
    pages_spilled: int = 0  # outside the pool, in the spill file
    preemptions_spilled: int = 0  # their pages were kept in the spill file
    recomputed_tokens: int = 0  # lost to preemption and computed again
    draft_tokens: int = msgspec.field(default=0, name="guessed_tokens")  # verified; the protocol's name for them
    accepted_draft_tokens: int = msgspec.field(default=0, name="right_guesses")
    restarts: int = 0  # of engine processes
    replayed_requests: int = 0  # that went on in a new engine process
    quarantined_requests: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step, for an observer. The step itself took `duration_s`; the other times were spent around it."""

    duration_s: float
    prefill_tokens: int  # computed, so without what the prefix cache held
    decode_tokens: int
    context_tokens: tuple[int, ...]  # per sequence: tokens in the KV cache after it
    schedule_s: float
    commit_s: float
    publish_s: float  # detokenizing included


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request, for an observer. Times in seconds; None where it never got that far."""

    tenant: str
    finish_reason: FinishReason | None  # None: it ended in `error`
    error: QuireError | None
    prompt_tokens: int
    usage: Usage | None
    e2e_s: float
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None = None  # mean after the first, of the sequence that decoded longest


class EngineObserver(Protocol):
    """Told what happens, synchronously, from the event loop. Must be cheap and must not raise."""

    def on_step(self, stats: StepStats) -> None: ...
    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        """`count` tokens of one request were published, `since_last_s` after its previous ones (None: the first)."""

    def on_rejected(self, error: QuireError) -> None: ...
    def on_finished(self, stats: RequestStats) -> None: ...


class EngineFacade(Protocol):
    def submit(self, request: GenerateRequest) -> Awaitable[Generation]:
        """Validate, then tokenize and queue when awaited. The call itself refuses what needs no tokens to be refused,
        so that a full queue costs its server no task. Raises InvalidRequest, ContextLengthExceeded, Overloaded,
        QuotaExceeded, DeadlineExceeded or Unavailable before any work; nothing of a rejected request remains."""

    @property
    def info(self) -> EngineInfo: ...
    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises InvalidRequest without a tokenizer or for a text that cannot be a prompt."""

    def stats(self) -> EngineStats: ...
    def set_observer(self, observer: EngineObserver) -> None: ...
    async def drain(self) -> None:
        """Stop admitting (Unavailable) and wait until every accepted request has ended."""

    async def close(self) -> None:
        """End everything now: open streams get Unavailable. Idempotent."""
