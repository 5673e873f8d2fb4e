"""Engine processes, listeners and time that a test sets by hand."""

from __future__ import annotations

import asyncio
import selectors
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from quire.runtime.common.errors import QuireError
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import CoreInfo, CoreListener, EngineStats, Prefilled, StepStats
from quire.runtime.engine.stats import NO_STATS
from quire.runtime.model.runner import SamplingSpec
from quire.runtime.workers.engine_link import (
    AddAnswer,
    AddEncoding,
    AddRequests,
    EngineReady,
    FromEngine,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    StartEngine,
    StatsReport,
    StepReport,
    ToEngine,
)
from quire.scheduler import (
    AdmissionEstimate,
    EncodedText,
    EncodeRequest,
    EncodeSpec,
    FinalCounters,
    FinishReason,
    Request,
    RequestSpec,
    RequestUpdate,
    SampledToken,
    State,
)

from tests.support.clock import FakeClock

HEARTBEAT_S = 0.2
MAX_VIRTUAL_S = 600.0
STEP_STATS = StepStats(
    duration_s=0.5, prefill_tokens=0, decode_tokens=1, context_tokens=(4,), schedule_s=0.0, commit_s=0.0, publish_s=0.0
)
ESTIMATE = AdmissionEstimate(0, 1, 9)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when no task can run: a test waits for nothing."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(_JumpingSelector(self.clock))

    def time(self) -> float:
        return self.clock()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self._end = clock.now + MAX_VIRTUAL_S

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout != 0:
            assert timeout is not None, "every task waits for something that will never happen"
            self._clock.now += timeout
            assert self._clock.now < self._end, f"the test waited for {MAX_VIRTUAL_S} virtual seconds"
        return ready


async def until(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until `condition` holds."""
    while not condition():
        await asyncio.sleep(0.01)


def loop_clock() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


class FakeProcess:
    """An engine process and its link, as the server sees them: `sent` holds its messages, the test answers them."""

    def __init__(
        self, pid: int, start: StartEngine, receive: Callable[[FromEngine], None], on_heartbeat: Callable[[bool], None]
    ) -> None:
        self.pid = pid
        self.start = start
        self.sent: list[ToEngine] = []
        self.answers_adds = True  # adds are answered at once, each with `estimate`
        self.estimate = ESTIMATE
        self.heartbeats = True
        self.is_stopped = False  # SIGSTOP has stopped the process
        self.exit_delay_s = 0.0  # delay between the end of its link and its exit
        self.was_asked_to_stop = False
        self.stop_problem: str | None = None  # result of `stop`
        self.was_killed = False
        self.status: int | None = None  # exit status
        self.step = 0
        self.closed = asyncio.Event()
        self.link = self
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._receive = receive
        self._on_heartbeat = on_heartbeat
        self._beat()

    # As EngineProcess and EngineLink

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, AddRequests | AddEncoding) and self.answers_adds:
            first = message.requests[0] if isinstance(message, AddRequests) else message.request
            asyncio.get_running_loop().call_soon(self.accept, first.request_id)

    async def stop(self) -> str | None:
        self.was_asked_to_stop = True
        await self.kill()
        return self.stop_problem

    async def wait_after_close(self) -> None:
        await asyncio.sleep(self.exit_delay_s)

    async def kill(self) -> int:
        self.was_killed = True
        self.exit(-signal.SIGKILL)
        assert self.status is not None
        return self.status

    # For tests

    def exit(self, status: int) -> None:
        """End with `status`, unless it has ended before."""
        if self.status is None:
            self.status = status
            self.closed.set()

    def reply(self, message: FromEngine) -> None:
        if self.status is None:
            self._receive(message)

    def accept(self, request_id: int) -> None:
        self.reply(AddAnswer(request_id, self.estimate, 0))

    def refuse(self, request_id: int, refusal: str, estimate: AdmissionEstimate | None = ESTIMATE) -> None:
        self.reply(AddAnswer(request_id, estimate, 0, refusal, "no"))

    def tell_stats(self, **changes: Any) -> None:
        self.reply(StatsReport(engine_stats(**changes)))

    def tell_broken(self) -> None:
        self.reply(StatsReport(None))

    def begin(self, *request_ids: int) -> None:
        """Announce that these are computed for the first time."""
        self.reply(RequestsBegun(tuple(Prefilled(request_id, 0) for request_id in request_ids)))

    def generate(self, request_id: int, *token_ids: int) -> None:
        """Report tokens of a step."""
        self._report(RequestUpdate(request_id, _tokens(request_id, token_ids)))

    def finish(self, request_id: int, *token_ids: int, reason: FinishReason = "length") -> None:
        counters = FinalCounters((0.0,) * len(State), 0, 0, ())
        self._report(RequestUpdate(request_id, _tokens(request_id, token_ids), reason, None, counters))

    def finish_step(self, *updates: RequestUpdate, num_waiting: int = 0) -> None:
        """Report a step with its statistics."""
        self.step += 1
        self.reply(StepReport(updates, num_waiting, self.step, STEP_STATS, (Prefilled(9, 2),)))

    def sent_ids(self) -> list[int]:
        """Ids of the requests that it received, in order."""
        ids = []
        for message in self.sent:
            if isinstance(message, AddRequests):
                ids += [spec.request_id for spec in message.requests]
            elif isinstance(message, AddEncoding | ReadmitEncoding | ReadmitRequest):
                ids.append(message.request.request_id)
        return ids

    def _report(self, update: RequestUpdate) -> None:
        self.step += 1
        self.reply(StepReport((update,), 0, self.step))

    def _beat(self) -> None:
        if self.status is None:
            if self.heartbeats:
                self._on_heartbeat(False)
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)


class FakeSpawner:
    """Takes the place of the class `EngineProcess`; `started` holds all processes, the running one last."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.num_attempts = 0
        self.error: BaseException | None = None  # error that keeps processes from starting
        self.makes_ready = True  # each, once it has started
        self.answers_adds = True
        self.info = core_info()
        self._num_returned = 1  # processes returned by `next`; the first is there after the launch

    async def spawn(
        self, start: StartEngine, receive: Callable[[FromEngine], None], on_heartbeat: Callable[[bool], None]
    ) -> FakeProcess:
        self.num_attempts += 1
        process = FakeProcess(1000 + self.num_attempts, start, receive, on_heartbeat)
        process.answers_adds = self.answers_adds
        self.started.append(process)
        if self.error is not None:
            process.ready.set_exception(self.error)
        elif self.makes_ready:
            self.make_ready(process)
        return process

    def make_ready(self, process: FakeProcess) -> None:
        process.ready.set_result(EngineReady(self.info, 8 << 20))

    @property
    def last(self) -> FakeProcess:
        return self.started[-1]

    def of(self, name: str) -> FakeProcess:
        """Return the latest process of the engine with this name."""
        return [process for process in self.started if process.start.name == name][-1]

    async def next(self) -> FakeProcess:
        """Wait until the process after the one returned last has started, and a moment for it to be used."""
        self._num_returned += 1
        await until(lambda: len(self.started) >= self._num_returned)
        await asyncio.sleep(0.01)
        return self.started[self._num_returned - 1]


@dataclass
class FakeListener:
    """The messages of a core to its `Engine`."""

    updates: list[RequestUpdate] = field(default_factory=list)
    failures: dict[int, QuireError] = field(default_factory=dict)
    steps: list[tuple[StepStats, Sequence[Prefilled], int]] = field(default_factory=list)  # steps, updates before them
    num_ended: int = 0

    def listener(self) -> CoreListener:
        return CoreListener(self._publish, self._fail, self._observe, self._note_end)

    def tokens(self, request_id: int) -> list[int]:
        return [token.token_id for update in self.updates if update.request_id == request_id for token in update.tokens]

    def ends(self) -> dict[int, str]:
        """Reason or error of each ended request. Fails for one that ended twice."""
        ended = [update for update in self.updates if update.ended]
        ids = [update.request_id for update in ended] + list(self.failures)
        assert len(set(ids)) == len(ids), f"a request ended twice: {sorted(ids)}"
        return {update.request_id: update.finish_reason or str(update.error) for update in ended} | {
            request_id: type(error).__name__ for request_id, error in self.failures.items()
        }

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        self.updates += updates

    def _fail(self, request_id: int, error: QuireError, _: FinalCounters) -> None:
        assert request_id not in self.failures
        self.failures[request_id] = error

    def _observe(self, step: StepStats, prefilled: Sequence[Prefilled]) -> None:
        self.steps.append((step, prefilled, len(self.updates)))

    def _note_end(self) -> None:
        self.num_ended += 1


def new_requests(*ids: int, prompt: Iterable[int] = (1, 2, 3), **options: Any) -> list[Request]:
    sampling = SamplingSpec(SamplingParams(), 0, frozenset())
    options = {"max_tokens": 10, "sampling": sampling, **options}
    return [Request(RequestSpec(request_id, tuple(prompt), **options)) for request_id in ids]


def new_encoding(request_id: int, **options: Any) -> EncodeRequest:
    return EncodeRequest(EncodeSpec(request_id, (EncodedText((1, 2), (0, 1)), EncodedText((3,))), **options))


def core_info(**changes: Any) -> CoreInfo:
    values: dict[str, Any] = {
        "vocab_size": 100,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "num_pages": 50,
        "page_size": 16,
        "eos_token_ids": frozenset({0}),
        "isa": "fake",
        "threads": 2,
        "threads_reason": "fake",
    }
    return CoreInfo(**values | changes)


def engine_stats(**changes: Any) -> EngineStats:
    return msgspec.structs.replace(NO_STATS, **changes)


def _tokens(request_id: int, token_ids: Iterable[int]) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(request_id, token_id) for token_id in token_ids)
