"""vllm-router before two servers, where it is installed (`pip install vllm-router`): it reads their KV events."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.model import BUNDLED_MODEL

from tests.fuzz.server_process import ServerProcess, free_port, start_server

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed")

ENGINE = ("--weights", "q8", "--kv-cache-memory", "16M", "--threads", "1", "--page-size", "32")
START_TIMEOUT_S = 60.0
NUM_HITS = 12  # hits in a row: a router that chose at random would hardly find as many


@pytest.fixture
def servers() -> Iterator[dict[str, ServerProcess]]:
    """Run two servers; return each with the endpoint of its KV events."""
    with contextlib.ExitStack() as stack:
        endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        yield {each: stack.enter_context(start_server(*ENGINE, "--kv-events", each)) for each in endpoints}


@pytest.fixture
async def router(servers: dict[str, ServerProcess], tmp_path: Path) -> AsyncIterator[str]:
    """Run the router; return the URL of its API."""
    port = free_port()
    urls = {endpoint: f"http://{server.openai_address}" for endpoint, server in servers.items()}
    sources = [part for endpoint, url in urls.items() for part in ("--kv-event-source", f"{url}={endpoint}")]
    command = (
        *(sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port()), "--worker-urls", *urls.values(), "--policy", "kv_aware", *sources),
        *("--kv-event-block-size", "32", "--kv-event-model", str(BUNDLED_MODEL)),
    )
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30).close()  # noqa: ASYNC210
                    break
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def completed(url: str, prompt: str) -> dict[str, Any]:
    body = {"model": "demo_model", "prompt": prompt, "max_tokens": 8, "seed": 1, "temperature": 0.9}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )

    def fetch() -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))

    return await asyncio.to_thread(fetch)


async def test_requests_go_to_the_server_whose_cache_has_their_prompt(
    servers: dict[str, ServerProcess], router: str
) -> None:
    urls = [f"http://{server.openai_address}" for server in servers.values()]
    num_hits = number = 0
    pause_s = 0.05
    async with asyncio.timeout(START_TIMEOUT_S):
        while num_hits < NUM_HITS:
            prompt = f"{number} The module provides a lock for the value of {number} " * 8
            direct = await completed(urls[number % 2], prompt)
            await asyncio.sleep(pause_s)  # time for the event to reach the router
            routed = await completed(router, prompt)
            assert routed["choices"] == direct["choices"]
            is_hit = routed["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            num_hits, pause_s = (num_hits + 1, pause_s) if is_hit else (0, 2 * pause_s)
            number += 1
