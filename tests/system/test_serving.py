"""The whole system on the bundled model: many clients stream at once, cancel, disconnect and return; nothing leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from quire import LLM
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from quire.runtime.common.types import SamplingParams, join_chunks
from structlog.testing import capture_logs

Serving = Callable[..., AbstractAsyncContextManager[Any]]

PAGE_BYTES = 65536  # size of a page of the bundled model, 32 tokens in bf16
PROMPTS = [
    "This module provides",
    "If *timeout* is not ``None``, then",
    ".. class:: Task(coro)\n\n   A",
    "Changed in version 3.11: Added the",
    "Regular expressions can contain both special and",
    "The following example shows how to sort a list::\n\n",
    "Grüße aus 日本 – ",
    "This module provides",
]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=seed, ignore_eos=True, logprobs=1)
    for seed in range(len(PROMPTS))
]
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


async def test_eight_clients_receive_the_same_output_as_alone(serving: Serving, socket_path: Path) -> None:
    with LLM(kv_cache_memory=8 << 20, max_num_seqs=1) as llm:
        wanted = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for uds in (None, str(socket_path)):
        async with serving(uds=uds) as real, AsyncClient(real.address) as client:
            seen = await asyncio.gather(*map(client.complete, PROMPTS, PARAMS))
        for one, alone in zip(seen, wanted, strict=True):
            assert one.text == alone.text
            assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs)
            assert one.finish_reason == alone.finish_reason == "length"
            assert one.usage.seed == alone.usage.seed
    assert all(alone.text.isprintable() or "\n" in alone.text for alone in wanted)
    assert wanted[0].text != wanted[7].text, "the seed must matter"


async def test_text_arrives_while_it_is_generated(serving: Serving) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        chunks = [chunk async for chunk in client.generate(PROMPTS[0], PARAMS[0])]
        assert len(chunks) > 10
        assert [chunk.first_index for chunk in chunks] == sorted(chunk.first_index for chunk in chunks)


async def test_choices_over_the_wire_equal_those_of_an_llm_in_this_process(serving: Serving) -> None:
    several = [
        SamplingParams(max_tokens=30, temperature=0.9, seed=3, n=3, logprobs=1, ignore_eos=True, stop=("e ",)),
        SamplingParams(max_tokens=20, temperature=0.9, seed=3, n=2, best_of=4, ignore_eos=True),
        SamplingParams(max_tokens=12, beam_width=3, n=2, ignore_eos=True),
    ]
    with LLM(kv_cache_memory=8 << 20) as llm:
        wanted = llm.generate([PROMPTS[0]] * 3, several)
    async with serving(num_speculative_tokens=3) as real, AsyncClient(real.address) as client:
        seen = await asyncio.gather(*(client.complete(PROMPTS[0], params) for params in several))
        streamed = [chunk async for chunk in client.generate(PROMPTS[0], several[0])]
    assert [one.outputs for one in seen] == [one.outputs for one in wanted]
    assert [one.usage.completion_tokens for one in seen] == [one.usage.completion_tokens for one in wanted]
    assert join_chunks(streamed) == wanted[0].outputs
    assert {chunk.choice for chunk in streamed} == {0, 1, 2}
    assert all(choice.cumulative_logprob is not None for one in seen for choice in one.outputs)


async def test_a_tenant_cannot_pin_more_than_its_share(serving: Serving) -> None:
    """The pool has 128 pages, a prompt of 320 tokens pins 10, the share is 38."""
    async with serving(max_kv_share_per_tenant=0.3) as real, AsyncClient(real.address) as client:
        accepted: list[Any] = []
        for number in range(13):
            await client.complete(
                [number + 1] * 320, SamplingParams(max_tokens=1), pin_ms=60_000, on_accepted=accepted.append
            )
        assert [each.pin_refused for each in accepted] == [False] * 3 + [True] * 10
        assert real.engine.stats().pages_pinned == 30


def test_an_inter_token_target_that_cannot_be_met_is_logged_once() -> None:
    with capture_logs() as logs, LLM(kv_cache_memory=8 << 20, itl_target_ms=0.001) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"].startswith("inter-token target cannot be met")
    assert warning["target_ms"] == 0.001 < warning["decode_ms"]


# Many clients at random

SEEDS = [1, 2]
STORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculation and spilling": {
        "num_speculative_tokens": 4,
        "kv_spill_size": 1 << 20,
        "scheduling_policy": "priority",
    },
    "a latency target and quotas": {"itl_target_ms": 2, "scheduling_policy": "fair", "max_kv_share_per_tenant": 0.6},
}
CONNECTIONS = 5
REQUESTS_PER_CONNECTION = 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", STORMS.values(), ids=STORMS)
async def test_nothing_leaks_with_many_random_clients(serving: Serving, settings: dict[str, Any], seed: int) -> None:
    """Clients finish, cancel, disconnect with live requests and return, on a pool too small for all of them."""
    async with serving(kv_cache_memory=40 * PAGE_BYTES, max_num_seqs=12, max_num_waiting=24, **settings) as real:
        async with AsyncClient(real.address) as client:
            before = await client.complete(PROMPTS[0], PARAMS[0])
            await asyncio.gather(*(storm(real, random.Random(f"{seed} {index}")) for index in range(CONNECTIONS)))
            await real.idle()
            real.check_books()
            after = await client.complete(PROMPTS[0], PARAMS[0])
        assert (after.token_ids, after.text, after.logprobs) == (before.token_ids, before.text, before.logprobs)
        assert real.engine.stats().step > 0


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.8, "n": 2, "best_of": 5},
    {"beam_width": 3, "n": 2},
    {"stop": ["e "], "logprobs": 1},
]


async def storm(real: Any, chance: random.Random) -> None:
    """Act as one client: open a connection, use it for a while, abort it, and begin again."""
    left = REQUESTS_PER_CONNECTION
    while left:
        count = min(left, chance.randrange(1, 8))
        left -= count
        peer = await real.raw()
        for request_id in range(count):
            prompt: Any = PROMPTS[chance.randrange(len(PROMPTS))]
            if chance.random() < 0.5:
                prompt = [chance.randrange(4096) for _ in range(chance.randrange(1, 200))]
            params = {"max_tokens": chance.randrange(1, 60), "ignore_eos": True, **chance.choice(KINDS)}
            deadline_ms = chance.choice([None, None, 5, 50, 5000])
            peer.send(
                "GENERATE", request_id, prompt, params, deadline_ms, chance.randrange(-3, 4), chance.choice([None, 99])
            )
        for _ in range(chance.randrange(30)):
            frame = await peer.receive()
            if frame[0] == "TOKENS" and chance.random() < 0.2:
                peer.send("CANCEL", frame[1])
            if frame[0] in ("DONE", "ERROR"):
                count -= 1
            if count == 0:
                break
        if chance.random() < 0.7:
            peer.writer.transport.abort()  # a reset while data is under way
        else:
            peer.writer.close()


async def test_a_cancelled_request_has_its_finish_reason(serving: Serving) -> None:
    async with serving() as real:
        peer = await real.raw()
        peer.send("GENERATE", 1, PROMPTS[0], {"max_tokens": 1500, "ignore_eos": True})
        await peer.until("TOKENS")
        peer.send("CANCEL", 1)
        (*_, done) = await peer.until("DONE", "ERROR")
        assert done[:3] == ["DONE", 1, "cancelled"]
        assert 0 < done[3]["completion_tokens"] < 1500
        await real.idle()
        real.check_books()


# Ends that the engine decides


async def test_a_passed_deadline_ends_the_request(serving: Serving) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        with pytest.raises(DeadlineExceeded, match="deadline of 30 ms"):
            await client.complete(PROMPTS[0], LONG, deadline_ms=30)
        done = await client.complete(PROMPTS[0], SamplingParams(max_tokens=2), deadline_ms=60_000)
        assert len(done.token_ids) == 2


async def test_a_full_queue_refuses_without_harm_to_others(serving: Serving) -> None:
    async with serving(max_num_seqs=1, max_num_waiting=1) as real, AsyncClient(real.address) as client:
        wanted = await client.complete(PROMPTS[0], PARAMS[0])
        async with holding(client):
            waiting = asyncio.create_task(client.complete(PROMPTS[0], PARAMS[0]))
            await until_waiting(real, 1)
            with pytest.raises(Overloaded, match="the queue is full") as caught:
                await client.complete(PROMPTS[1])
            assert caught.value.code == "RESOURCE_EXHAUSTED"
            assert caught.value.retryable
        assert (await waiting).text == wanted.text


class holding:  # noqa: N801 - reads as a statement
    """Keeps one long request running inside the block, and cancels it at its end."""

    def __init__(self, client: AsyncClient) -> None:
        self.stream = client.generate(PROMPTS[0], LONG)

    async def __aenter__(self) -> None:
        await anext(self.stream)

    async def __aexit__(self, *_: object) -> None:
        await self.stream.aclose()


async def until_waiting(real: Any, count: int) -> None:
    """Wait until `count` requests wait and one runs."""
    async with asyncio.timeout(30):
        while (stats := real.engine.stats()).waiting < count or not stats.running:
            await asyncio.sleep(0.001)


async def test_a_drained_engine_finishes_its_requests_and_accepts_no_more(serving: Serving) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        running = asyncio.create_task(client.complete(PROMPTS[0], PARAMS[0]))
        async with asyncio.timeout(30):
            while not real.engine.stats().running:
                await asyncio.sleep(0.001)
        await real.engine.drain()
        assert len((await running).token_ids) == 60
        with pytest.raises(Unavailable, match="no new requests"):
            await client.complete(PROMPTS[0], PARAMS[0])


async def test_a_closed_engine_ends_open_streams(serving: Serving) -> None:
    async with serving(max_num_seqs=1) as real, AsyncClient(real.address) as client:
        running = asyncio.create_task(client.complete(PROMPTS[0], LONG))
        waiting = asyncio.create_task(client.complete(PROMPTS[1], LONG))
        await until_waiting(real, 1)
        await real.engine.close()
        for task in (running, waiting):
            with pytest.raises(Unavailable, match="the engine was closed"):
                await task
        with pytest.raises(Unavailable):
            await client.complete(PROMPTS[0])


async def test_closing_the_server_ends_streams_with_an_error(serving: Serving) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        stream: AsyncIterator[Any] = client.generate(PROMPTS[0], LONG)
        await anext(stream)
        await real.server.close()
        with pytest.raises((Unavailable, Cancelled), match="shutting down"):
            [chunk async for chunk in stream]
