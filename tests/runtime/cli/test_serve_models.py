"""The models of `quire serve --config models.toml`: when each is loaded, its size, and its part of the ready line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.runtime.cli import serve_models
from quire.runtime.cli.ready_line import ready_json, ready_line
from quire.runtime.cli.serve_models import open_models
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.settings import Settings, resolve_settings

from tests.support.samples import INFO, STATS

KV_BYTES = 2 << 20
TABLES = """
[models.a]
[models.b]
load = "first-use"
[models.c]
model = "demo_embedding"
[aliases]
x = "b"
"""


class FakeEngine:
    info = INFO

    def stats(self) -> Any:
        return STATS

    def set_observer(self, observer: object) -> None: ...

    async def drain(self) -> None: ...


class Opened:
    """Opens fake engines, and notes the name, the served name and the KV cache of each."""

    def __init__(self) -> None:
        self.engines: list[tuple[str, str | None, int | None]] = []

    @asynccontextmanager
    async def __call__(self, settings: Settings, name: str) -> AsyncIterator[Any]:
        self.engines.append((name, settings.server.served_model_name, settings.engine.kv_cache_memory))
        yield FakeEngine()


def read(folder: Path, tables: str, **options: str) -> Settings:
    file = folder / "models.toml"
    lines = {"threads": "1", "kv_cache_memory": str(KV_BYTES), **options}
    file.write_text("\n".join(f"{name} = {value}" for name, value in lines.items()) + "\n" + tables)
    return resolve_settings({}, {}, file, takes_models=True)


async def test_without_a_limit_models_are_loaded_at_start_unless_their_table_says_otherwise(tmp_path: Path) -> None:
    opened = Opened()
    async with open_models(read(tmp_path, TABLES), opened) as catalog:
        assert opened.engines == [("a-engine", "a", KV_BYTES), ("c-engine", "c", None)]
        assert [catalog.state(model) for model in catalog.models] == ["ready", "unloaded", "ready"]
        assert [model.key for model in catalog.models] == ["", "b", "c"]
        assert catalog.aliases == {"x": "b"}


async def test_within_a_limit_models_are_loaded_on_first_use(tmp_path: Path) -> None:
    opened = Opened()
    async with open_models(read(tmp_path, TABLES, models_memory='"4GiB"'), opened) as catalog:
        assert [catalog.state(model) for model in catalog.models] == ["unloaded"] * 3
        await catalog.ready(catalog.models[1])
        assert opened.engines == [("b-engine", "b", KV_BYTES)]


async def test_engine_processes_of_a_model_share_its_kv_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    for num_processes in (1, 3):
        monkeypatch.setattr(serve_models, "place", lambda _, count=num_processes: [frozenset({0})] * count)
        async with open_models(read(tmp_path, "[models.a]"), cast(Any, Opened())) as catalog:
            sizes.append(catalog.residency.used_bytes)
    assert sizes[1] == 3 * sizes[0] - 2 * KV_BYTES


@pytest.mark.parametrize(
    ("option", "message"),
    [("load = 'start'", "that are loaded at start: 'a', 'b'"), ("pinned = true", "that are pinned: 'a', 'b'")],
)
async def test_models_that_are_always_loaded_must_fit_together(option: str, message: str, tmp_path: Path) -> None:
    settings = read(tmp_path, f"[models.a]\n{option}\n[models.b]\n{option}", models_memory='"130MiB"')
    with pytest.raises(
        ConfigError, match=rf"models_memory 136314880 is less than the \d+ bytes of the models {message}"
    ):
        async with open_models(settings, Opened()):
            pass


async def test_a_model_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'a': the model takes .* models_memory is 1048576"):
        async with open_models(read(tmp_path, "[models.a]", models_memory='"1MiB"'), Opened()):
            pass


async def test_the_ready_line_has_each_model_with_its_own_sizes(tmp_path: Path) -> None:
    settings = read(tmp_path, TABLES, models_memory='"4GiB"')
    server: Any = SimpleNamespace(address="h:1", operator_address="h:2", openai_address="h:3", ollama_address=None)
    async with open_models(settings, Opened()) as catalog:
        text = ready_line(settings, catalog, server)
        event = json.loads(ready_json(settings, catalog, server))
    generates = "bundled demo (bf16, KV bf16)  32 pages of 32 tokens"
    embeds = "demo_embedding (encoder, auto)  vectors of 256, texts of up to 512 tokens"
    assert f"/v1  model a: {generates}  model b: {generates}  model c: {embeds}  1 threads" in text
    assert event["model"] == "bundled demo"
    assert [(model["name"], model["model"]) for model in event["models"]] == [
        ("a", "bundled demo"),
        ("b", "bundled demo"),
        ("c", "demo_embedding"),
    ]
