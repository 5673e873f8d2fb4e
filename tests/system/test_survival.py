"""An engine process may die at any moment: every stream goes on, with the same bytes, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, DeadlineExceeded, ModelError, Overloaded, Quarantined, Unavailable
from quire.runtime.common.types import OutputChunk
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor
from quire.runtime.model import model_folder
from quire.runtime.workers import EnginePool, HealthTimeouts, engine_process

from .bits import asked, bits, prompt, running, together
from .poisoned_engine import FATAL_TO_ADD, FATAL_TO_COMPUTE

SETTINGS: dict[str, Any] = {"kv_cache_memory": 8 << 20}
TEXT_PROCESSOR = TextProcessor.load(model_folder(None))


@asynccontextmanager
async def engine_pool(
    timeouts: HealthTimeouts | None = None, num_processes: int = 1, **settings: Any
) -> AsyncIterator[Engine[EnginePool]]:
    """An engine over processes; afterwards every page is back and every process gone."""
    core = await EnginePool.launch(EngineConfig(**SETTINGS | settings), timeouts, num_processes=num_processes)
    engine = Engine(core, TEXT_PROCESSOR)
    try:
        yield engine
        await engine.drain()
        await settled(engine)
        pids = [member.pid for member in core.members]
    finally:
        await engine.close()
    assert not any(pid and is_there(pid) for pid in pids)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def settled(engine: Engine[EnginePool]) -> None:
    """Until there is an engine, and it has told that it owns nothing: it says so four times a second."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(Unavailable):
                stats = engine.stats()
                if not (stats.pages_owned or stats.running or stats.waiting):
                    return
            await asyncio.sleep(0.02)


async def restarted(engine: Engine[EnginePool], times: int = 1) -> None:
    async with asyncio.timeout(20):
        while engine.core.members[0].num_restarts < times:
            await asyncio.sleep(0.02)


def strike(engine: Engine[EnginePool], number: signal.Signals = signal.SIGKILL, member: int = 0) -> None:
    pid = engine.core.members[member].pid
    assert pid is not None
    os.kill(pid, number)


def mixed_requests() -> list[GenerateRequest]:
    """Greedy, drawn, penalised, several choices, ranked, searched, stopped by a string, with a shared beginning."""
    shared = prompt(70, 9)
    plain = [asked(prompt(20 + 7 * i, i), max_tokens=60, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    return [
        *plain,
        asked(shared + prompt(5, 1), max_tokens=50, presence_penalty=0.7, repetition_penalty=1.2),
        asked(shared + prompt(6, 2), max_tokens=50, n=2, temperature=1.0, seed=5),
        asked(shared, max_tokens=30, best_of=3, n=2, temperature=1.0, seed=6),
        asked(prompt(12, 3), max_tokens=20, beam_width=3, n=2, logprobs=0),
        asked("This module provides", max_tokens=60, temperature=0.9, seed=1, stop=("the", "a"), min_tokens=9),
    ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
async def test_every_stream_goes_on_with_the_same_bytes(number: signal.Signals) -> None:
    requests = mixed_requests()
    async with running(**SETTINGS) as undisturbed:
        wanted = await together(undisturbed, requests)
    async with engine_pool(HealthTimeouts(heartbeat_timeout_s=0.5)) as engine:
        for moment in (0.0, 0.03) if number is signal.SIGKILL else (0.02,):
            restarts = engine.core.members[0].num_restarts
            streams = asyncio.create_task(together(engine, requests))  # type: ignore[arg-type]
            await asyncio.sleep(moment)
            strike(engine, number)
            assert await streams == wanted
            await restarted(engine, restarts + 1)
        assert engine.stats().quarantined_requests == 0


async def test_the_same_streams_through_many_crashes() -> None:
    requests = [asked(prompt(30, i), max_tokens=120, temperature=0.7, seed=i) for i in range(8)]
    async with running(**SETTINGS) as undisturbed:
        wanted = await together(undisturbed, requests)
    async with engine_pool() as engine:
        streams = [asyncio.create_task(collect(engine, request)) for request in requests]
        for death in range(3):
            await tokens_flow(engine)
            strike(engine, signal.SIGSEGV)
            await restarted(engine, death + 1)
        outputs = await asyncio.gather(*streams)
        assert [bits(output) for output in outputs] == wanted
        usage = outputs[0][-1].usage
        assert usage is not None
        assert usage.recomputed_tokens > 0
        assert usage.stall_ms > 0


async def collect(engine: Engine[Any], request: GenerateRequest) -> list[OutputChunk]:
    return [chunk async for chunk in await engine.submit(request)]


async def tokens_flow(engine: Engine[EnginePool]) -> None:
    """Everybody has gained two tokens in this life, so nobody is on trial any more."""
    async with asyncio.timeout(20):
        log = engine.core.members[0]._tokens
        known = [len(request.token_ids) for request in log.requests()]
        while not known or any(
            len(request.token_ids) < before + 2 for request, before in zip(log.requests(), known, strict=False)
        ):
            await asyncio.sleep(0.005)
            known = known or [len(request.token_ids) for request in log.requests()]


@pytest.fixture
def can_be_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).with_name("poisoned_engine.py")
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", str(script)))


@pytest.mark.usefixtures("can_be_poisoned")
async def test_who_kills_it_by_being_taken_on_is_told_and_nobody_else() -> None:
    async with engine_pool() as engine:
        stream = await engine.submit(asked(prompt(9), max_tokens=60))
        bad, good = [
            asyncio.create_task(collect(engine, asked((7, token), max_tokens=4))) for token in (FATAL_TO_ADD, 8)
        ]
        with pytest.raises(Quarantined, match="crashed twice over taking this request on"):
            await bad
        assert (await good)[-1].finish_reason == "length"
        assert (await drained(stream))[-1].finish_reason == "length"
        assert engine.stats().restarts == 2


@pytest.mark.usefixtures("can_be_poisoned")
async def test_who_kills_it_twice_is_quarantined_and_nobody_else() -> None:
    others = [asked(prompt(25, i), max_tokens=80, seed=i, temperature=0.5) for i in range(5)]
    async with running(**SETTINGS) as undisturbed:
        wanted = await together(undisturbed, others)
    async with engine_pool() as engine:
        streams = asyncio.create_task(together(engine, others))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        poisoned = await engine.submit(asked((5, FATAL_TO_COMPUTE, 6)))
        with pytest.raises(Quarantined, match="crashed twice while it computed this request"):
            [chunk async for chunk in poisoned]
        assert await streams == wanted
        stats = engine.stats()
        assert (stats.restarts, stats.quarantined_requests) == (2, 1)
        with pytest.raises(Quarantined):
            [chunk async for chunk in await engine.submit(asked((5, FATAL_TO_COMPUTE, 6)))]


async def test_cancels_deadlines_and_newcomers_while_there_is_no_engine() -> None:
    async with engine_pool() as engine:
        kept, cancelled = [await engine.submit(asked(prompt(9, i), max_tokens=200)) for i in range(2)]
        late = await engine.submit(
            GenerateRequest(
                prompt=prompt(9, 2), sampling_params=asked(prompt(3), max_tokens=300).sampling_params, deadline_ms=150
            )
        )
        outputs = [asyncio.create_task(drained(stream)) for stream in (kept, cancelled, late)]
        await asyncio.sleep(0.03)
        strike(engine)
        await asyncio.sleep(0.05)
        cancelled.cancel()
        newcomer = asyncio.create_task(collect(engine, asked(prompt(11, 5), max_tokens=5)))
        left = asyncio.create_task(collect(engine, asked(prompt(11, 6), max_tokens=5)))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="restarted"):
            engine.stats()
        left.cancel()
        ended, given_up, overdue = await asyncio.gather(*outputs, return_exceptions=True)
        assert isinstance(ended, list)
        assert ended[-1].finish_reason == "length"
        assert isinstance(given_up, list)
        assert given_up[-1].finish_reason == "cancelled"
        assert isinstance(overdue, DeadlineExceeded)
        assert len([token for chunk in await newcomer for token in chunk.token_ids]) == 5


async def drained(stream: Any) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


async def test_a_full_queue_is_told_at_once_and_limits_do_not_refuse_who_was_accepted() -> None:
    async with engine_pool(max_num_seqs=2, max_num_waiting=3) as engine:
        streams = [await engine.submit(asked(prompt(9, i), max_tokens=100)) for i in range(2)]
        outputs = [asyncio.create_task(drained(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        waiting = [await engine.submit(asked(prompt(9, i), max_tokens=5)) for i in range(3)]
        outputs += [asyncio.create_task(drained(stream)) for stream in waiting]
        with pytest.raises(Overloaded, match="the queue is full"):
            engine.submit(asked(prompt(9)))
        strike(engine)  # five are replayed where three may wait
        for output in await asyncio.gather(*outputs):
            assert output[-1].finish_reason == "length"


async def test_an_engine_that_cannot_come_back_ends_everything_with_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine_pool() as engine:
        stream = await engine.submit(asked(prompt(9), max_tokens=400))
        output = asyncio.create_task(drained(stream))
        await asyncio.sleep(0.02)
        command = engine_process.COMMAND
        monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
        strike(engine)
        with pytest.raises(Unavailable, match="the engine cannot be restarted"):
            await output
        with pytest.raises(Unavailable, match="cannot be restarted"):
            engine.submit(asked(prompt(9)))
        monkeypatch.setattr(engine_process, "COMMAND", command)
        await restarted(engine)
        assert (await collect(engine, asked(prompt(9), max_tokens=3)))[-1].finish_reason == "length"


async def test_what_keeps_it_from_starting_is_typed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        await EnginePool.launch(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="page_size"):
        await EnginePool.launch(EngineConfig(page_size=7))


async def test_several_processes_are_one_engine() -> None:
    requests = mixed_requests()
    async with running(**SETTINGS) as undisturbed:
        wanted = await together(undisturbed, requests)
    async with engine_pool(num_processes=min(2, len(os.sched_getaffinity(0))), kv_cache_memory=16 << 20) as engine:
        streams = asyncio.create_task(together(engine, requests))  # type: ignore[arg-type]
        await asyncio.sleep(0.03)
        strike(engine, member=random.randrange(len(engine.core.members)))
        assert await streams == wanted
        assert engine.info.num_pages == sum(member.info.num_pages for member in engine.core.members)
