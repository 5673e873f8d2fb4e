"""Driver of `AsyncClient` for run.py, which describes the commands and answers."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import ssl
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from quire import AsyncClient, ChatOptions, OutputChunk, QuireError, SamplingParams, ToolChoice


class Stream:
    """A stream of chunks and its outcome so far."""

    def __init__(self, chunks: AsyncGenerator[OutputChunk, None]) -> None:
        self.chunks = chunks
        self._tokens = 0
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] | None = None

    async def read(self, tokens: float) -> dict[str, Any]:
        """Read until `tokens` tokens were received, or to the end; return the outcome."""
        while self._tokens < tokens and (chunk := await anext(self.chunks, None)) is not None:
            self._add(chunk)
        return {"choices": [self._choices[index] for index in sorted(self._choices)], "usage": self._usage}

    def _add(self, chunk: OutputChunk) -> None:
        nothing = {"token_ids": [], "text": "", "logprobs": None, "finish_reason": None}
        choice = self._choices.setdefault(chunk.choice, nothing)
        choice["token_ids"] += chunk.token_ids
        choice["text"] += chunk.text
        if chunk.logprobs is not None:
            choice["logprobs"] = (choice["logprobs"] or []) + list(msgspec.to_builtins(chunk.logprobs))
        if chunk.deltas is not None:
            choice.setdefault("deltas", []).extend(chunk.deltas)
        choice["finish_reason"] = chunk.finish_reason
        if chunk.usage is not None:
            self._usage = msgspec.to_builtins(chunk.usage) | {"seed": str(chunk.usage.seed)}
        self._tokens += len(chunk.token_ids)


class Driver:
    """One client and its streams by name."""

    def __init__(self) -> None:
        self._client: AsyncClient | None = None
        self._streams: dict[str, Stream] = {}

    async def execute(self, command: dict[str, Any]) -> Any:
        """Execute one command and return its answer."""
        match command:
            case {"do": "connect"}:
                await self._connect(**{name: value for name, value in command.items() if name != "do"})
            case {"do": "start", "stream": name, "request": request}:
                self._streams[name] = self._begin(**request)
            case {"do": "read", "stream": name, "tokens": tokens}:
                return await self._streams[name].read(tokens)
            case {"do": "finish", "stream": name}:
                return await self._streams[name].read(float("inf"))
            case {"do": "leave", "stream": name}:
                await self._streams[name].chunks.aclose()
            case {"do": "embed", "inputs": inputs}:
                return (await self._connected().embed(inputs)).tolist()
            case {"do": "score", "query": query, "documents": documents}:
                return (await self._connected().score(query, documents)).tolist()
            case {"do": "run", "requests": requests}:
                return await asyncio.gather(*(self._begin(**request).read(float("inf")) for request in requests))
        return None

    async def _connect(
        self, address: str | list[str], token: str | None = None, ca: str | None = None, first_id: str | None = None
    ) -> None:
        if self._client is not None:
            await self._client.close()
        self._streams = {}
        client = AsyncClient(address, token, tls=ssl.create_default_context(cafile=ca) if ca else False)
        if first_id is not None:
            client._ids = itertools.count(int(first_id))  # not public, because only this test needs it
        self._client = await client.__aenter__()

    def _begin(self, *, prompt: Any = None, params: dict[str, Any], **options: Any) -> Stream:
        params = dict(params)
        if "seed" in params:
            params["seed"] = int(params["seed"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
        for name in ("stop", "stop_token_ids"):
            params[name] = tuple(params.get(name, ()))
        if "chat" in options:
            choice = ToolChoice(**options["chat"].get("tool_choice", {}))
            options["chat"] = ChatOptions(**{**options["chat"], "tool_choice": choice})
        for part in [part for each in options.get("messages", ()) for part in each["content"] if type(part) is dict]:
            part["image"] = base64.b64decode(part["image"])
        return Stream(self._connected().generate(prompt, SamplingParams(**params), **options))

    def _connected(self) -> AsyncClient:
        assert self._client is not None, "connect first"
        return self._client


async def main() -> None:
    """Execute the commands on standard input."""
    driver = Driver()
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = {"ok": await driver.execute(json.loads(line))}
        except QuireError as error:
            answer = {"error": {"code": error.code, "retryable": error.retryable, "message": str(error)}}
        print(json.dumps(answer), flush=True)


asyncio.run(main())
