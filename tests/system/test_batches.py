"""`/v1/files` and `/v1/batches` with OpenAI's client: same bytes, tenants, quota, expiry, restarts, full disks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import QuotaExceeded
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import Engine, LocalEngine
from quire.runtime.server import Server
from quire.runtime.server.batches import store, worker
from quire.runtime.server.openai import batch_door
from quire.runtime.server.tenancy.auth import hash_key

from .conftest import FREE_PORTS
from .test_run_batch import CHAT, requests, without_times

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for batches, and at their state, without pauses."""
    for name in ("BATCH_POLL_S", "BATCH_RETRY_S"):
        monkeypatch.setattr(worker, name, 0.02)


@asynccontextmanager
async def running_engine() -> AsyncIterator[LocalEngine]:
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20, max_num_seqs=8))
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def served(engine: LocalEngine, folder: Path, **settings: Any) -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
    """Serve an engine with a folder of batches; yield the client of each tenant."""
    keys = folder.parent / "keys.toml"
    keys.write_text("".join(f'[{name}]\nkeys = ["{hash_key(key).hex()}"]\n' for name, key in KEYS.items()))
    keys.chmod(0o600)
    server = Server()
    try:
        await server.start(
            engine, ServerConfig(**FREE_PORTS, auth_tokens=str(keys), batch_folder=str(folder), **settings)
        )
        url = f"http://{server.openai_address}/v1"
        clients = {
            name: openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) for name, key in KEYS.items()
        }
        yield clients
        for client in clients.values():
            await client.close()
    finally:
        await server.close()


def chats(count: int) -> bytes:
    """Return lines of which every fifth is an error."""
    lines = (json.loads(line) for line in requests(5 * count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines if line["url"] == CHAT)


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def create(client: openai.AsyncOpenAI, file_id: str, **options: Any) -> Any:
    return await client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", **options)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def test_a_batch_from_its_file_to_its_answers(tmp_path: Path) -> None:
    content = chats(2)
    async with running_engine() as engine, served(engine, tmp_path / "batches") as clients:
        ann, bob = clients["ann"], clients["bob"]
        file = await ann.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (len(content), "in.jsonl", "batch", "file")
        assert (await ann.files.content(file.id)).content == content
        batch = await create(ann, file.id, metadata={"a": "b"})
        assert (batch.status, batch.metadata, batch.object) == ("validating", {"a": "b"}, "batch")
        batch = await ended(ann, batch.id)
        assert (batch.status, batch.errors) == ("completed", None)
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (6, 4, 2)
        answers = (await ann.files.content(batch.output_file_id)).content.splitlines()
        errors = (await ann.files.content(batch.error_file_id)).content.splitlines()
        assert [json.loads(line)["error"]["message"] for line in errors] == [
            "max_tokens must be between 1 and 2048, not 0"
        ] * 2
        for line, answer in zip(
            [each for each in content.splitlines() if b'"max_tokens": 0' not in each], answers, strict=True
        ):
            found = json.loads(answer)
            asked = json.loads(line)
            assert found["custom_id"] == asked["custom_id"]
            if asked["body"].get("temperature") == 0:
                single = await ann.chat.completions.create(model="quire", **asked["body"])
                assert found["response"]["body"]["choices"] == [
                    each.model_dump(exclude_unset=True) for each in single.choices
                ]
        # Lists, and nothing of another tenant.
        assert {each.id async for each in ann.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
        assert [each.id async for each in ann.files.list(purpose="batch")] == [file.id]
        assert [each.id async for each in ann.batches.list()] == [batch.id]
        assert [each async for each in bob.files.list()] == [each async for each in bob.batches.list()] == []
        for refused in (
            bob.files.retrieve(file.id),
            bob.files.content(file.id),
            bob.files.delete(file.id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            create(bob, file.id),
            ann.files.retrieve("file_../../keys"),
            ann.batches.retrieve(file.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        with pytest.raises(openai.BadRequestError, match="the batch is completed"):
            await ann.batches.cancel(batch.id)
        assert (await ann.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await ann.files.content(file.id)


async def test_a_batch_continues_after_a_restart_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "batches"
    content = chats(8)
    async with running_engine() as engine:
        async with served(engine, folder) as clients:
            whole = await ended(
                clients["ann"], (await create(clients["ann"], await upload(clients["ann"], content))).id
            )
            expected = (await clients["ann"].files.content(whole.output_file_id)).content
            file_id = await upload(clients["bob"], content)
            batch = await create(clients["bob"], file_id)
            answers = folder / "tenant-bob" / f"{batch.id}.answers"
            while not answers.exists() or not answers.stat().st_size:
                await asyncio.sleep(0.005)
        assert not list((folder / "tenant-bob").glob("*.new"))
        failures = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))] * 3)
        real_fsync = os.fsync

        def full(file: int) -> None:
            if (failure := next(failures, None)) is not None:
                raise failure
            real_fsync(file)

        monkeypatch.setattr(store.os, "fsync", full)
        async with served(engine, folder) as clients:
            found = await ended(clients["bob"], batch.id)
            assert found.status == "completed"
            output = (await clients["bob"].files.content(found.output_file_id)).content
        assert without_times(output) == without_times(expected)


def raise_quota(*_: object) -> None:
    raise QuotaExceeded("no room")


async def test_batches_that_are_cut_keep_their_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(
        {
            "custom_id": "a",
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [], "max_tokens": 1900, "ignore_eos": True},
        }
    ).replace("[]", '[{"role": "user", "content": "a"}]')
    async with running_engine() as engine, served(engine, tmp_path / "batches") as clients:
        ann = clients["ann"]
        file_id = await upload(ann, chats(1) + b"".join(f"{line}\n".encode() for _ in range(20)))
        batch = await create(ann, file_id)
        while (await ann.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.02)
        assert (await ann.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(ann, batch.id)
        assert batch.status == "cancelled"
        assert batch.output_file_id is not None
        batch = await create(ann, file_id)
        while (await ann.batches.retrieve(batch.id)).request_counts.completed < 1:
            await asyncio.sleep(0.02)
        with monkeypatch.context() as full:
            full.setattr(store.BatchStore, "check_quota", raise_quota)
            batch = await ended(ann, batch.id)
        assert batch.status == "failed"
        assert [(error.code, error.message) for error in batch.errors.data] == [("resource_exhausted", "no room")]
        first, *_ = (await ann.files.content(batch.output_file_id)).content.splitlines()
        assert json.loads(first)["response"]["status_code"] == 200
        monkeypatch.setattr(batch_door, "WINDOW_S", -1)
        assert (await ended(ann, (await create(ann, file_id)).id)).status == "expired"


async def test_refusals_of_files_and_batches(tmp_path: Path) -> None:
    async with (
        running_engine() as engine,
        served(engine, tmp_path / "batches", max_batch_bytes=2000, batch_window_ms=1) as clients,
    ):
        ann = clients["ann"]
        with pytest.raises(openai.RateLimitError, match="2000 bytes that a tenant may keep"):
            await upload(ann, b"x" * 2001)
        with pytest.raises(openai.BadRequestError, match="purpose must be batch, not 'fine-tune'"):
            await ann.files.create(file=("a", b"{}"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match=r"expires_after.seconds must be 3600 to 2592000, not '5'"):
            await ann.files.create(
                file=("a", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
            )
        file_id = await upload(ann, b"\n")
        refused: Any = [
            ({"endpoint": "/v1/files"}, "endpoint must be one of"),
            ({"completion_window": "1h"}, "completion_window must be 24h, not '1h'"),
            ({"metadata": {"a": "b" * 513}}, "metadata must be an object"),
            ({"extra_body": {"more": 1}}, "more is not a field of a batch"),
        ]
        for fields, message in refused:
            options = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
            with pytest.raises(openai.BadRequestError, match=message):
                await ann.batches.create(**options)
        failed = await ended(ann, (await create(ann, file_id)).id)
        assert failed.status == "failed"
        assert "the input file has 0 lines" in failed.errors.data[0].message
        with pytest.raises(openai.BadRequestError, match="limit must be 1 to 10000, not '0'"):
            await ann.files.list(extra_query={"limit": 0})
        store.BatchStore(tmp_path / "batches", 1, 1).remove_expired("ann")
        assert [each async for each in ann.files.list()] == []
