"""The Dynamo worker behind Dynamo's own frontend, where that is installed.

`pip install --no-deps ai-dynamo ai-dynamo-runtime` is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from quire import LLM, SamplingParams

from tests.deploy.queries import DEPLOY
from tests.fuzz.server_process import free_port

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="ai-dynamo is not installed")

PROMPT = "This module provides"
START_TIMEOUT_S = 120.0


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[str]:
    """Run a frontend and a worker that find each other through files; return the URL of the API."""
    url = f"http://127.0.0.1:{free_port()}/v1"
    planes = ("--discovery-backend", "file", "--request-plane", "tcp")
    names = {"THREADS": "1", "WEIGHTS": "q8", "KV_CACHE_MEMORY": "16MiB", "KV_EVENTS": f"tcp://127.0.0.1:{free_port()}"}
    environment = (
        os.environ | {f"QUIRE_{name}": value for name, value in names.items()} | {"DYN_FILE_KV": str(tmp_path)}
    )
    worker = (str(DEPLOY / "dynamo" / "quire_dynamo.py"), "--endpoint-types", "completions", "--served-model-name", "m")
    router = ("-m", "dynamo.frontend", "--http-port", url.split(":")[2].removesuffix("/v1"), "--router-mode", "kv")
    with (tmp_path / "log").open("wb") as log:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, *command, *planes, env=environment, stdout=log, stderr=log
            )
            for command in (worker, (*router, "--event-plane", "zmq"))
        ]
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (await ask(url, "models")).get("data"):
                    await asyncio.sleep(0.2)
            yield url
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()


async def ask(url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    def fetch() -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/{path}", data, {"content-type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.load(answer))
        return {}

    return await asyncio.to_thread(fetch)


async def test_the_frontend_answers_with_the_text_of_quire(frontend: str) -> None:
    params = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "frequency_penalty": 0.5}
    with LLM(weights="q8", kv_cache_memory="16MiB", threads=1) as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(**params))  # type: ignore[arg-type]
    for _ in range(2):  # the second one finds its prompt in the prefix cache
        answer = await ask(frontend, "completions", {"model": "m", "prompt": PROMPT, **params})
        assert [choice["text"] for choice in answer["choices"]] == [expected.text]
        assert answer["usage"]["completion_tokens"] == 24
