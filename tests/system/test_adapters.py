"""Adapters that an operator loads and unloads over HTTP, while streams use them and engine processes are killed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import Engine
from quire.runtime.server import Server
from quire.runtime.server.tenancy.auth import hash_key
from quire.runtime.workers import EnginePool

from tests.support.adapters import write_adapter
from tests.support.http_client import HTTPClient, Reply, connection

from .conftest import FREE_PORTS
from .test_survival import engine_pool, kill, restarted

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class Site:
    """A server whose engine process has places for two adapters."""

    client: HTTPClient  # connection of the operator

    def __init__(self, engine: Engine[EnginePool], server: Server) -> None:
        self.engine, self.server = engine, server

    async def load(self, name: str, path: str, **fields: Any) -> Reply:
        return await self.client.ask("POST", LOAD, {"lora_name": name, "lora_path": path, **fields})

    async def unload(self, name: str) -> Reply:
        return await self.client.ask("POST", UNLOAD, {"lora_name": name})

    async def cards(self) -> dict[str, Any]:
        """Return the state of each adapter in the list of models."""
        models = (await self.client.ask("GET", "/v1/models")).json["data"]
        return {each["id"]: each["adapter"] for each in models if "parent" in each}

    async def complete(self, model: str, **fields: Any) -> Reply:
        body = {"model": model, "prompt": "This module", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        async with connection(self) as client:
            return await client.ask("POST", "/v1/completions", {**body, **fields})

    async def text(self, model: str, **fields: Any) -> str:
        reply = await self.complete(model, **fields)
        assert reply.status == 200, reply.content
        text: str = reply.json["choices"][0]["text"]
        return text


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    async with engine_pool(max_lora_rank=16, **settings) as engine:
        server = Server()
        await server.start(engine, ServerConfig(**FREE_PORTS, served_model_name="base"))
        try:
            here = Site(engine, server)
            async with connection(here) as here.client:
                yield here
        finally:
            await server.close()


@pytest.mark.usefixtures("slow_engine")
async def test_streams_keep_their_adapter_while_others_come_and_go_and_the_process_is_killed(tmp_path: Path) -> None:
    paths = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate("abc")}
    async with site(lora={"a": paths["a"]}, max_loras=2) as here:
        alone = {"base": await here.text("base"), "a": await here.text("a")}
        long = await here.text("a", max_tokens=300)
        streaming = asyncio.create_task(here.text("a", max_tokens=300))
        reply = await here.load("b", paths["b"])
        assert (reply.status, reply.content) == (200, b"Success: LoRA adapter 'b' added successfully.")
        alone["b"] = await here.text("b")
        assert (await here.load("c", paths["c"])).status == 200
        alone["c"] = await here.text("c")
        assert len(set(alone.values())) == 4
        states = await here.cards()
        assert [(name, state["loaded"]) for name, state in states.items()] == [("a", True), ("b", False), ("c", True)]
        assert states["a"]["requests"] == 1
        assert (await here.unload("a")).content == b"Success: LoRA adapter 'a' removed successfully."
        assert (await here.complete("a")).error["code"] == "model_not_found"
        kill(here.engine)
        await restarted(here.engine)
        assert await streaming == long
        assert {name: await here.text(name) for name in ("base", "b", "c")} == {
            name: text for name, text in alone.items() if name != "a"
        }


async def test_a_restarted_process_fails_only_the_requests_of_an_adapter_whose_files_are_gone(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1)
    async with site(lora={"a": path}, max_loras=2) as here:
        base = await here.text("base")
        shutil.rmtree(path)
        kill(here.engine)
        await restarted(here.engine)
        reply = await here.complete("a")
        assert reply.status == 503
        assert "could not be loaded again after the engine was restarted; load it again" in reply.error["message"]
        assert await here.text("base") == base
        write_adapter(Path(path), 1)
        assert (await here.load("a", path, load_inplace=True)).status == 200
        assert (await here.complete("a")).status == 200


async def test_refusals_name_the_field_and_the_reason(serving: Any, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1)
    async with serving(lora={"a": path}, max_loras=1, max_lora_rank=16) as here, connection(here) as client:
        for fields, status, param, message in (
            ({"lora_path": path}, 400, "lora_name", "lora_name is missing"),
            ({"lora_name": "b"}, 400, "lora_path", "lora_path is missing"),
            ({"lora_name": 5, "lora_path": path}, 400, "lora_name", "lora_name must be text, not 5"),
            ({"lora_name": "a", "lora_path": path}, 400, "lora_name", "lora_name 'a' is loaded already"),
            ({"lora_name": "quire", "lora_path": path}, 400, "lora_name", "'quire' is the name of a model"),
            ({"lora_name": "a b", "lora_path": path}, 400, "lora_name", "must be 1 to 128 letters"),
            ({"lora_name": "b", "lora_path": str(tmp_path)}, 404, "lora_path", "is no folder with an adapter_config"),
            ({"lora_name": "b", "lora_path": "a\0"}, 404, "lora_path", "is no folder with an adapter_config"),
        ):
            reply = await client.ask("POST", LOAD, fields)
            assert (reply.status, reply.error["param"]) == (status, param), fields
            assert message in reply.error["message"]
        reply = await client.ask("POST", UNLOAD, {"lora_name": "b"})
        assert (reply.status, reply.error["param"]) == (404, "lora_name")


async def test_only_an_operator_may_load_and_unload(serve: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    tables = [f'[{name}]\nkeys = ["{hash_key(name).hex()}"]\n' for name in ("ann", "bob")]
    keys.write_text(f"{tables[0]}operator = true\n{tables[1]}")
    system = await serve(auth_tokens=str(keys))
    async with connection(system) as client:
        statuses = {}
        for name in ("ann", "bob"):
            headers = {"authorization": f"Bearer {name}"}
            replies = [
                await client.ask("POST", path, {"lora_name": "a", "lora_path": "a"}, headers) for path in (LOAD, UNLOAD)
            ]
            statuses[name] = [reply.status for reply in replies]
        assert statuses == {"ann": [200, 200], "bob": [403, 403]}
