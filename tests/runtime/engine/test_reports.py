"""The end of a request is reported once to its stream and once to the observer, whatever ended it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from quire.runtime.common.errors import GenerationFailed, Quarantined, QuireError, Unavailable
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest
from quire.scheduler import FinalCounters, RequestUpdate, SampledToken

from .conftest import FakeCore, FakeObserver


def request(**params: Any) -> GenerateRequest:
    return GenerateRequest(prompt=(1, 2), sampling_params=SamplingParams(**{"max_tokens": 9, **params}), tenant="ann")


async def outcome(stream: Any) -> str:
    """Return the finish reason, or the error as text."""
    try:
        return [chunk.finish_reason async for chunk in stream][-1]
    except QuireError as error:
        return f"{type(error).__name__}: {error}"


async def test_requests_lost_with_the_loop_are_reported(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    streams = [await engine.submit(request(n=count)) for count in (1, 3)]
    core.listener.publish([RequestUpdate(core.requests[0].request_id, (SampledToken(0, 7),))])
    core.listener.ended()
    core.listener.ended()
    wanted = "GenerationFailed: the engine stopped unexpectedly"
    assert [await outcome(stream) for stream in streams] == [wanted] * 2
    assert [str(stats.error) for stats in observer.finished] == ["the engine stopped unexpectedly"] * 2
    first = observer.finished[0]
    assert (first.tenant, first.finish_reason, first.prompt_tokens) == ("ann", None, 2)
    assert first.usage is not None
    assert first.usage.completion_tokens == 1


async def test_times_count_from_the_submission_and_from_the_tokens_before(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    for module in ("engine", "live_outputs"):
        monkeypatch.setattr(f"quire.runtime.engine.{module}.time", clock)
    await engine.submit(request())
    (queued,) = core.requests
    for clock.now, reason in ((103.0, None), (103.5, None), (105.0, "length")):
        core.listener.publish([RequestUpdate(queued.request_id, (SampledToken(0, 7),), reason)])
    assert observer.gaps_s == [None, 0.5, 1.5]
    assert [(stats.e2e_s, stats.time_to_first_token_s) for stats in observer.finished] == [(5.0, 3.0)]


async def test_requests_lost_with_an_engine_process_are_reported(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    streams = [await engine.submit(request(n=2)) for _ in range(2)]
    one, other, *left = core.requests
    core.listener.fail(other.request_id, Quarantined("two crashes"), FinalCounters())
    core.listener.fail(one.request_id, Quarantined("two crashes"), FinalCounters())
    assert await outcome(streams[0]) == "Quarantined: two crashes"
    assert [(type(stats.error), stats.finish_reason) for stats in observer.finished] == [(Quarantined, None)]
    assert core.dropped == [0, 1], "its other sequence ends too"
    core.listener.publish([RequestUpdate(each.request_id, (SampledToken(0, 7),), "length") for each in left])
    assert await outcome(streams[1]) == "length"
    assert [stats.finish_reason for stats in observer.finished] == [None, "length"]


async def test_requests_ended_by_closing_are_reported(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    stream = await engine.submit(request())
    await engine.close()
    assert (await outcome(stream)).startswith("Unavailable: the engine was closed")
    assert [type(stats.error) for stats in observer.finished] == [Unavailable]


async def test_an_update_after_the_end_changes_nothing(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    stream = await engine.submit(request(n=2))
    one, other = core.requests
    core.listener.publish(
        [
            RequestUpdate(one.request_id, (), None, "NaN"),
            RequestUpdate(other.request_id, (SampledToken(1, 7),), "length"),
        ]
    )
    assert await outcome(stream) == "GenerationFailed: NaN"
    core.listener.publish([RequestUpdate(other.request_id, (SampledToken(1, 7),), "length")])
    core.listener.ended()
    assert len(observer.finished) == 1
    assert observer.tokens == []


async def test_an_error_that_an_observer_keeps_does_not_keep_the_request(
    engine: Engine[FakeCore], core: FakeCore, observer: FakeObserver
) -> None:
    """An exception refers to its traceback, whose frames refer to the stream, its prompt and its output."""
    lost, failed = [await engine.submit(request()) for _ in range(2)]
    bad = SampledToken(1, "no id")  # type: ignore[arg-type]  # the detokenizer fails
    core.listener.publish([RequestUpdate(core.requests[1].request_id, (bad,))])
    core.listener.fail(core.requests[0].request_id, Unavailable("no engine process"), FinalCounters())
    streams = [weakref.ref(stream) for stream in (lost, failed)]
    for stream in (lost, failed):
        await outcome(stream)
    del lost, failed, stream
    gc.collect()
    assert [type(stats.error) for stats in observer.finished] == [GenerationFailed, Unavailable]
    assert [stream() for stream in streams] == [None, None]
