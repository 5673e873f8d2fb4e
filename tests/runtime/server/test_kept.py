"""What is kept and for how long, with streams that a test writes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from quire.runtime.common.config import ServerConfig
from quire.runtime.common.errors import (
    Cancelled,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestNotFound,
    Unavailable,
)
from quire.runtime.common.types import OutputChunk, TokenLogprobs, Usage
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.server.kept import Kept
from quire.runtime.server.live import LiveRequests
from quire.runtime.server.monitoring import PrometheusObserver
from quire.runtime.server.tenants import Limits, Tenant
from quire.scheduler import AdmissionEstimate
from structlog.testing import capture_logs

REQUEST = GenerateRequest(prompt="hi")
ANN = Tenant("ann")


def chunk(first: int, count: int = 1, text: str = "x", last: bool = False) -> OutputChunk:
    ids = tuple(range(first, first + count))
    return OutputChunk(
        first_index=first,
        token_ids=ids,
        text=text,
        logprobs=tuple(TokenLogprobs(i, -0.1 * i, ((i, -0.5), (i + 1, float("-inf")))) for i in ids),
        finish_reason="length" if last else None,
        usage=Usage(prompt_tokens=1, completion_tokens=first + count) if last else None,
    )


class Script:
    """A generation whose chunks the test puts."""

    admission = AdmissionEstimate(position=0, pages_needed=1, pages_free=1)
    prompt_token_ids = (1,)

    def __init__(self) -> None:
        self.items: asyncio.Queue[OutputChunk | Exception] = asyncio.Queue()
        self.is_cancelled = False

    async def put(self, *items: OutputChunk | Exception) -> None:
        for item in items:
            self.items.put_nowait(item)
        await settle()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.items.put_nowait(Cancelled("cancelled"))

    def watch_prefill(self, callback: Callable[[int], None]) -> None: ...

    async def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        while True:
            item = await self.items.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.usage is not None:
                return


class Engine:
    def __init__(self) -> None:
        self.scripts: list[Script] = []

    async def submit(self, request: GenerateRequest) -> Script:
        self.scripts.append(Script())
        return self.scripts[-1]


class House:
    """`Kept` over an engine of scripts."""

    def __init__(self, **settings: Any) -> None:
        self.engine = Engine()
        self.requests = LiveRequests(self.engine, PrometheusObserver())  # type: ignore[arg-type]
        self.kept = Kept(self.requests, ServerConfig(**settings))

    def begin(
        self, request_id: int = 1, session: str | None = None, key: str | None = None, tenant: Tenant = ANN
    ) -> Any:
        return self.kept.begin(tenant, request_id, REQUEST, session=session, idempotency_key=key)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def read(follower: Any) -> list[OutputChunk]:
    """To the end, as a delivery does."""
    try:
        return [each async for each in await follower.accepted()]
    finally:
        follower.end()


async def test_followers_see_the_same_chunks_at_their_own_pace() -> None:
    house = House()
    first = house.begin(key="k")
    await settle()
    chunks = [chunk(0), chunk(1, 2), chunk(3, 0, ""), chunk(3, 1, last=True)]
    early = asyncio.create_task(read(first))
    await house.engine.scripts[0].put(*chunks[:2])
    late = asyncio.create_task(read(house.begin(2, key="k")))
    await house.engine.scripts[0].put(*chunks[2:])
    assert await early == await late == await read(house.begin(3, key="k")) == chunks


async def test_a_tenant_is_left_when_the_request_ends_whoever_follows() -> None:
    house = House()
    follower = house.begin(key="k")
    await settle()
    assert len(house.requests) == 1
    await house.engine.scripts[0].put(chunk(0, last=True))
    assert len(house.requests) == 0
    await read(follower)
    await read(house.begin(2, key="k"))
    assert len(house.requests) == 0


async def test_resumed_after_the_last_token_there_is_still_an_end() -> None:
    house = House()
    follower = house.begin(session="s")
    await settle()
    await house.engine.scripts[0].put(chunk(0, 2), chunk(2, 1, last=True))
    await read(follower)
    (end,) = await read(house.kept.resume("ann", "s", 1, 3))
    assert (end.token_ids, end.text, end.logprobs, end.finish_reason) == ((), "", None, "length")
    assert end.usage is not None
    with pytest.raises(InvalidRequest):
        house.kept.resume("ann", "s", 1, 1)


async def test_a_stream_over_the_limit_holds_no_more_than_is_unread() -> None:
    house = House(max_kept_bytes=10_000)
    slow = house.begin(session="s", key="k")
    await settle()
    script = house.engine.scripts[0]
    await script.put(*(chunk(index, text="x" * 1000) for index in range(20)))
    with pytest.raises(RequestNotFound):
        house.kept.resume("ann", "s", 1, 0)
    received = []
    async for each in await slow.accepted():
        received.append(each)
        assert len(slow.stream._chunks) <= 21 - len(received)
        if len(received) == 20:
            await script.put(chunk(20, last=True))
    assert [each.first_index for each in received] == list(range(21))
    assert len(slow.stream._chunks) == 0


async def test_a_stream_over_the_limit_that_nobody_follows_is_cancelled() -> None:
    house = House(max_kept_bytes=10_000)
    follower = house.begin(session="s")
    await settle()
    follower.leave("disconnect")
    follower.end()
    script = house.engine.scripts[0]
    assert not script.is_cancelled
    await script.put(*(chunk(index, text="x" * 1000) for index in range(20)))
    assert script.is_cancelled


async def test_what_is_kept_without_a_chunk_counts_too() -> None:
    house = House(max_kept_bytes=20_000)
    for index in range(10):
        follower = house.begin(index, session="s")
        await settle()
        await house.engine.scripts[-1].put(Unavailable("gone"))
        with pytest.raises(Unavailable):
            await read(follower)
        assert 0 < house.kept._num_bytes <= 20_000
    house.kept.resume("ann", "s", 9, 0).end()
    with pytest.raises(RequestNotFound):
        house.kept.resume("ann", "s", 0, 0)


@pytest.mark.parametrize("ended", [True, False])
async def test_each_id_that_may_be_resumed_counts(ended: bool) -> None:
    house = House(max_kept_bytes=20_000)
    first = house.begin(0, session="s", key="k")
    await settle()
    await house.engine.scripts[0].put(chunk(0, last=ended))
    for index in range(1, 40):
        follower = house.begin(index, session="s", key="k")
        await settle()
        follower.leave("disconnect")
        follower.end()
        assert house.kept._num_bytes <= 20_000
    assert len(house.engine.scripts) > 1, "the first was not kept for ever"
    first.end()
    await house.kept.close()


async def test_a_replay_counts_for_the_rate_and_not_as_a_live_request() -> None:
    house, tenant = House(), Tenant("ann", Limits(max_concurrent_requests=1, requests_per_minute=2))
    for _ in range(2):
        house.begin(key="k", tenant=tenant)
        await settle()
    with pytest.raises(Overloaded, match="2 requests per minute"):
        house.begin(key="k", tenant=tenant)
    assert len(house.requests) == 1
    await house.kept.close()


async def test_the_books_balance_when_everything_is_gone() -> None:
    house = House(resume_timeout_ms=1, idempotency_window_ms=1)
    for index in range(4):
        follower = house.begin(index, session="s", key=f"k{index}")
        await settle()
        await house.engine.scripts[-1].put(chunk(0), chunk(1, last=True) if index % 2 else Unavailable("gone"))
        if index % 2:
            await read(follower)
        else:
            with pytest.raises(Unavailable):
                await read(follower)
    async with asyncio.timeout(5):
        while house.kept._streams:
            await asyncio.sleep(0.002)
    kept = house.kept
    assert (kept._num_bytes, kept._unused, kept._sessions, kept._outcomes, kept.tasks) == (0, {}, {}, {}, set())


async def test_what_ended_in_an_error_does_not_hold_its_prompt() -> None:
    house = House()
    follower = house.begin(session="s")
    await settle()
    await house.engine.scripts[0].put(Unavailable("gone"))
    assert follower.stream.error.__traceback__ is None
    with pytest.raises(Unavailable, match="gone"):
        await read(follower)


async def test_a_bug_is_logged_once_and_told_as_one() -> None:
    house = House()
    follower = house.begin(session="s")
    await settle()
    with capture_logs() as logs:
        await house.engine.scripts[0].put(UnicodeDecodeError("utf-8", b"", 0, 1, "a bug"))
        with pytest.raises(GenerationFailed, match="internal error"):
            await read(follower)
    assert [log["event"] for log in logs] == ["request failed"]


async def test_closing_lets_go_of_everything() -> None:
    house = House()
    followers = [house.begin(index, session="s", key=f"k{index}") for index in range(3)]
    await settle()
    await house.engine.scripts[0].put(chunk(0, last=True))
    await read(followers[0])
    await house.kept.close()
    kept = house.kept
    assert (kept._num_bytes, kept._sessions, kept._outcomes, kept.tasks) == (0, {}, {}, set())
    assert len(house.requests) == 0
