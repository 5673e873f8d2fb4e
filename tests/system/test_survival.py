"""Engine processes are killed at any moment: every stream continues with the same bytes.

Rules of replay and quarantine are tested without processes in `tests/runtime/workers/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, DeadlineExceeded, ModelError, Overloaded, Quarantined, Unavailable
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import OutputChunk, SamplingParams
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor
from quire.runtime.model import model_path
from quire.runtime.server import Server
from quire.runtime.workers import EnginePool, HealthTimeouts, engine_process
from quire.runtime.workers.supervisor import RESTART_TIMEOUT_S

from tests.support.bits import asked, bits, prompt, running, together
from tests.support.golden_images import golden_images
from tests.support.http_client import HTTPClient

from .poisoned_engine import FATAL_TO_ADD, FATAL_TO_COMPUTE

pytestmark = pytest.mark.usefixtures("forked_engines")

SETTINGS: dict[str, Any] = {"kv_cache_memory": 8 << 20}
TEXT_PROCESSOR = TextProcessor.load(model_path(None))
LONG = 1500  # tokens that take longer than anything that a test does in the meantime
PATIENT = HealthTimeouts(heartbeat_s=30.0)  # a busy machine may delay a heartbeat, and that must not cause a restart


@asynccontextmanager
async def engine_pool(
    timeouts: HealthTimeouts = PATIENT,
    num_processes: int = 1,
    restart_timeout_s: float = RESTART_TIMEOUT_S,
    **settings: Any,
) -> AsyncIterator[Engine[EnginePool]]:
    """Run an engine over processes; check that every page is released and every process gone at the end."""
    core = await EnginePool.launch(
        EngineConfig(**SETTINGS | settings), timeouts, num_processes=num_processes, restart_timeout_s=restart_timeout_s
    )
    engine = Engine(core, TEXT_PROCESSOR)
    try:
        yield engine
        await engine.drain()
        await all_pages_released(engine)
        pids = [member.pid for member in core.members]
    finally:
        await engine.close()
    assert not any(pid and is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def all_pages_released(engine: Engine[EnginePool]) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                stats = engine.stats()
                if not (stats.pages_owned or stats.running or stats.waiting):
                    return
            await asyncio.sleep(0.02)


async def restarted(engine: Engine[EnginePool], times: int = 1) -> None:
    async with asyncio.timeout(60):
        while engine.core.members[0].num_restarts < times:
            await asyncio.sleep(0.02)


def kill(engine: Engine[EnginePool], number: signal.Signals = signal.SIGKILL, member: int = 0) -> None:
    pid = engine.core.members[member].pid
    assert pid is not None
    os.kill(pid, number)


class Reader:
    """Reads a stream to its end."""

    def __init__(self, engine: Engine[EnginePool], request: GenerateRequest) -> None:
        self.chunks: list[OutputChunk] = []
        self.task = asyncio.create_task(self._read(engine, request))

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def _read(self, engine: Engine[EnginePool], request: GenerateRequest) -> list[OutputChunk]:
        async for chunk in await engine.submit(request):
            self.chunks.append(chunk)
        return self.chunks


async def each_gains(readers: Sequence[Reader], num_tokens: int) -> None:
    """Wait until each stream that has not ended has received that many more tokens."""
    before = [reader.num_tokens for reader in readers]
    async with asyncio.timeout(60):
        while any(
            not reader.task.done() and reader.num_tokens < former + num_tokens
            for reader, former in zip(readers, before, strict=True)
        ):
            await asyncio.sleep(0.005)


async def read(stream: Any) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


def mixed_requests() -> list[GenerateRequest]:
    """One request for each way of sampling and delivering, some with a shared beginning."""
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
        expected = await together(undisturbed, requests)
    async with engine_pool(PATIENT if number is signal.SIGKILL else HealthTimeouts(heartbeat_s=2.0)) as engine:
        for delay_s in (0.0, 0.03) if number is signal.SIGKILL else (0.02,):
            restarts = engine.core.members[0].num_restarts
            streams = asyncio.create_task(together(engine, requests))  # type: ignore[arg-type]
            await asyncio.sleep(delay_s)
            kill(engine, number)
            assert await streams == expected
            await restarted(engine, restarts + 1)
        assert engine.stats().quarantined_requests == 0


@pytest.mark.usefixtures("slow_engine")
async def test_streams_go_on_through_many_crashes() -> None:
    requests = [asked(prompt(30, i), max_tokens=120, temperature=0.7, seed=i) for i in range(8)]
    async with running(**SETTINGS) as undisturbed:
        expected = await together(undisturbed, requests)
    async with engine_pool() as engine:
        readers = [Reader(engine, request) for request in requests]
        for num_crashes in range(1, 4):
            await each_gains(readers, 2)  # a gain clears every suspect
            kill(engine, signal.SIGSEGV)
            await restarted(engine, num_crashes)
        outputs = await asyncio.gather(*(reader.task for reader in readers))
        assert [bits(output) for output in outputs] == expected
        usage = outputs[0][-1].usage
        assert usage is not None
        assert usage.recomputed_tokens > 0
        assert usage.stall_ms > 0


@pytest.mark.usefixtures("slow_engine")
async def test_a_prompt_with_images_goes_on_after_a_crash() -> None:
    """The positions of its tokens follow from the sizes of the images, which reach the new process with the request."""
    golden = golden_images("qwen2_5_vl")
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.7, seed=3)
    request = GenerateRequest(prompt=tuple(golden.prompt), images=tuple(golden.images), sampling_params=params)
    settings: dict[str, Any] = {"model": str(golden.folder), "kv_cache_memory": 1 << 20}
    async with running(**settings) as undisturbed:
        expected = [token async for chunk in await undisturbed.submit(request) for token in chunk.token_ids]
    async with engine_pool(**settings) as engine:
        reader = Reader(engine, request)
        await each_gains([reader], 2)
        kill(engine, signal.SIGSEGV)
        assert [token for chunk in await reader.task for token in chunk.token_ids] == expected
        stats = engine.stats()
        assert (stats.restarts, stats.quarantined_requests) == (1, 0)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).with_name("poisoned_engine.py")
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", str(script)))


@pytest.mark.usefixtures("poisoned")
async def test_only_the_request_whose_adding_crashes_two_processes_is_quarantined() -> None:
    async with engine_pool() as engine:
        stream = await engine.submit(asked(prompt(9), max_tokens=60))
        fatal, harmless = [Reader(engine, asked((7, token), max_tokens=4)) for token in (FATAL_TO_ADD, 8)]
        with pytest.raises(Quarantined, match="crashed twice while it accepted this request"):
            await fatal.task
        assert (await harmless.task)[-1].finish_reason == "length"
        assert (await read(stream))[-1].finish_reason == "length"
        assert engine.stats().restarts == 2


@pytest.mark.usefixtures("poisoned")
async def test_only_the_request_whose_computation_crashes_two_processes_is_quarantined() -> None:
    others = [asked(prompt(25, i), max_tokens=80, seed=i, temperature=0.5) for i in range(5)]
    async with running(**SETTINGS) as undisturbed:
        expected = await together(undisturbed, others)
    async with engine_pool() as engine:
        streams = asyncio.create_task(together(engine, others))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        fatal = await engine.submit(asked((5, FATAL_TO_COMPUTE, 6)))
        with pytest.raises(Quarantined, match="crashed twice while it computed this request"):
            await read(fatal)
        assert await streams == expected
        async with asyncio.timeout(60):
            while (counters := engine.core.members[0].counters()).restarts < 2:  # the streams may have ended before
                await asyncio.sleep(0.01)
        assert (counters.restarts, counters.quarantined_requests) == (2, 1)
        with pytest.raises(Quarantined):
            await read(await engine.submit(asked((5, FATAL_TO_COMPUTE, 6))))


async def test_requests_are_cancelled_expire_and_are_added_while_no_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_start = tmp_path / "may_start"
    script = (
        "import os, time\n"
        f"while not os.path.exists({str(may_start)!r}): time.sleep(0.01)\n"
        "from quire.runtime.workers.engine_main import main\n"
        "main()"
    )
    async with engine_pool() as engine:
        params = asked(prompt(3), max_tokens=LONG).sampling_params
        streams = [await engine.submit(asked(prompt(9, i), max_tokens=count)) for i, count in enumerate((200, LONG))]
        streams.append(
            await engine.submit(GenerateRequest(prompt=prompt(9, 2), sampling_params=params, deadline_ms=2000))
        )
        kept, cancelled, late = [asyncio.create_task(read(stream)) for stream in streams]
        monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", "-c", script))
        kill(engine)
        with pytest.raises(DeadlineExceeded):
            await late
        with pytest.raises(Unavailable, match="restarted"):
            engine.stats()
        streams[1].cancel()
        assert (await cancelled)[-1].finish_reason == "cancelled"
        new, left = [Reader(engine, asked(prompt(11, i), max_tokens=5)) for i in (5, 6)]
        await asyncio.sleep(0.01)
        left.task.cancel()
        may_start.touch()
        assert (await kept)[-1].finish_reason == "length"
        await new.task
        assert new.num_tokens == 5


async def test_a_full_queue_refuses_at_once_and_replays_are_not_refused() -> None:
    async with engine_pool(max_num_seqs=2, max_num_waiting=3) as engine:
        streams = [await engine.submit(asked(prompt(9, i), max_tokens=LONG)) for i in range(2)]
        async with asyncio.timeout(60):
            while engine.stats().running < 2:
                await asyncio.sleep(0.02)
        streams += [await engine.submit(asked(prompt(9, i), max_tokens=5)) for i in range(3)]
        outputs = [asyncio.create_task(read(stream)) for stream in streams]
        with pytest.raises(Overloaded, match="the queue is full"):
            engine.submit(asked(prompt(9)))
        kill(engine)  # five are replayed where three may wait
        for output in await asyncio.gather(*outputs):
            assert output[-1].finish_reason == "length"


async def test_requests_fail_when_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_pool(restart_timeout_s=0.5) as engine:
        reader = Reader(engine, asked(prompt(9), max_tokens=LONG))
        await each_gains([reader], 1)
        command = engine_process.COMMAND
        monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
        kill(engine)
        with pytest.raises(Unavailable, match="the engine cannot be restarted"):
            await reader.task
        with pytest.raises(Unavailable, match="cannot be restarted"):
            engine.submit(asked(prompt(9)))
        monkeypatch.setattr(engine_process, "COMMAND", command)
        await restarted(engine)
        assert (await read(await engine.submit(asked(prompt(9), max_tokens=3))))[-1].finish_reason == "length"


async def test_an_engine_that_cannot_start_raises_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        await EnginePool.launch(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="isa"):
        await EnginePool.launch(EngineConfig(isa="mmx"))


async def test_several_processes_are_one_engine() -> None:
    requests = mixed_requests()
    async with running(**SETTINGS) as undisturbed:
        expected = await together(undisturbed, requests)
    async with engine_pool(num_processes=min(2, len(os.sched_getaffinity(0))), kv_cache_memory=16 << 20) as engine:
        streams = asyncio.create_task(together(engine, requests))  # type: ignore[arg-type]
        await asyncio.sleep(0.03)
        kill(engine, member=random.randrange(len(engine.core.members)))
        assert await streams == expected
        assert engine.info.num_pages == sum(member.info.num_pages for member in engine.core.members)


@pytest.mark.parametrize("echo", [{}, {"echo": True, "logprobs": 0}])
async def test_an_http_stream_outlives_its_engine_process(slow_engine: None, echo: dict[str, Any]) -> None:
    """A prompt that is echoed with its logprobs continues where it was, too."""
    body = {"prompt": [7 * i % 4000 for i in range(40)], "max_tokens": 40, "seed": 5, "ignore_eos": True, **echo}
    async with engine_pool() as engine:
        server = Server()
        await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
        client = await HTTPClient.open(server.openai_address)
        whole = (await client.ask("POST", "/v1/completions", body)).json["choices"][0]
        client.send("POST", "/v1/completions", {**body, "stream": True})
        first = await client.read_until(b"\n\n")
        kill(engine)
        rest = await client.read_until(b"[DONE]")
        client.writer.transport.abort()
        await server.close()
        assert engine.core.members[0].num_restarts == 1
    events = [json.loads(line[6:]) for line in (first + rest).split(b"\n") if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    logprobs = [each for choice in choices for each in (choice["logprobs"] or {}).get("token_logprobs", ())]
    assert logprobs == (whole["logprobs"] or {}).get("token_logprobs", [])


async def test_a_stream_of_messages_outlives_its_engine_process(slow_engine: None) -> None:
    message = {"role": "user", "content": "What is a queue?"}
    body = {"model": "quire", "messages": [message], "max_tokens": 40, "temperature": 0}
    async with engine_pool() as engine:
        server = Server()
        await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
        client = await HTTPClient.open(server.openai_address)
        whole = (await client.ask("POST", "/v1/messages", body)).json
        client.send("POST", "/v1/messages", {**body, "stream": True})
        first = await client.read_until(b"text_delta")
        kill(engine)
        rest = await client.read_until(b'{"type":"message_stop"}')
        client.writer.transport.abort()
        await server.close()
        assert engine.core.members[0].num_restarts == 1
    events = [json.loads(line[6:]) for line in (first + rest).split(b"\n") if line.startswith(b"data: {")]
    assert (
        "".join(event["delta"]["text"] for event in events if "text" in event.get("delta", ()))
        == (whole["content"][0]["text"])
    )
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 1


async def test_a_stored_stream_is_resumed_over_a_crash_of_its_engine_process(slow_engine: None) -> None:
    body = {"input": "What is a queue?", "max_output_tokens": 40, "store": True, "stream": True, "ignore_eos": True}
    async with engine_pool() as engine:
        server = Server()
        await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
        client = await HTTPClient.open(server.openai_address)
        client.send("POST", "/v1/responses", body, {"idempotency-key": "k"})
        first = await client.read_until(b"response.output_text.delta")
        kill(engine)
        client.writer.transport.abort()
        client = await HTTPClient.open(server.openai_address)
        name = json.loads(first.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        resumed = await client.ask("GET", f"/v1/responses/{name}", headers={"last-event-id": "3"})
        again = await client.ask("POST", "/v1/responses", body, {"idempotency-key": "k"})
        client.writer.transport.abort()
        await server.close()
        assert engine.core.members[0].num_restarts == 1
    seen = re.findall(rb"id: \d+\n.+?\n\n", first, re.DOTALL)  # events without the framing of HTTP
    assert len(seen) == 4
    assert again.content.startswith(b"".join(seen))
    assert again.content.endswith(resumed.content)
    assert resumed.content.startswith(b"id: 4\n")
    assert b"response.completed" in resumed.content or b"response.incomplete" in resumed.content
