"""The progress of loading a model: the plan in the log, and a bar on a terminal that is erased at the end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.memory import MemoryLimit
from quire.runtime.engine import EngineCore
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.files import files_bytes
from quire.runtime.workers import loading
from quire.runtime.workers.loading import ERASE_LINE, ModelLoading, bar_line, shown_loading
from structlog.testing import capture_logs

from tests.support.families import GOLDENS

CONFIG = EngineConfig(kv_cache_memory=1 << 20, threads=1)


async def load(config: EngineConfig, bar: io.StringIO | None = None) -> EngineCore:
    with shown_loading(config, bar) as planned:
        return await EngineCore.load(config, on_planned=planned)


async def test_the_log_has_the_plan_of_what_is_loaded() -> None:
    with capture_logs() as logs:
        core = await load(CONFIG)
    memory = core.runner.capacity.memory
    await core.close()
    assert logs == [
        {
            "event": "loading the model",
            "log_level": "info",
            "model": "bundled demo",
            "weights": "bf16",
            "weights_bytes": memory.weights_bytes,
            "kv_cache": "bf16",
            "kv_cache_bytes": 1 << 20,
            "max_model_len": 512,
            "total_bytes": memory.total_bytes,
        }
    ]


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        ({}, ["loading the model", "the prefix cache is off"]),
        ({"state_cache_memory": 0}, ["loading the model"]),
        ({"enable_prefix_caching": False}, ["loading the model"]),
    ],
    ids=str,
)
async def test_a_prefix_cache_that_can_keep_no_state_is_warned_of(settings: dict[str, Any], events: list[str]) -> None:
    """The KV cache has 6 states of 5,760 bytes, 3 of which run. A quarter of the rest holds none."""
    model = str(GOLDENS / "lfm2")
    with capture_logs() as logs:
        core = await load(EngineConfig(model=model, kv_cache_memory=34_560, max_num_seqs=3, threads=1, **settings))
    await core.close()
    assert [line["event"] for line in logs] == events
    assert (logs[0]["states"], logs[0]["states_kept"]) == (3, 0)


async def test_an_encoder_has_no_cache() -> None:
    with capture_logs() as logs:
        core = await load(EngineConfig(model=str(BUNDLED_MODEL.with_name("demo_embedding")), threads=1))
    await core.close()
    (line,) = logs
    assert line["event"] == "loading the model"
    assert "kv_cache" not in line


async def test_a_plan_beyond_the_free_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_memory_bytes", lambda: 5 << 20)
    monkeypatch.setattr(loading, "deciding_limit", lambda: MemoryLimit(6 << 20, 1 << 20, "/sys/fs/cgroup/memory.max"))
    with capture_logs() as logs:
        core = await load(CONFIG)
    await core.close()
    assert logs[1]["event"] == "the model takes more memory than is available"
    assert (logs[1]["available_bytes"], logs[1]["limit"]) == (5 << 20, "6,291,456 bytes in /sys/fs/cgroup/memory.max")


async def test_a_bar_on_a_terminal_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INTERVAL_S", 0.0)
    terminal = io.StringIO()
    core = await load(CONFIG, terminal)
    await core.close()
    assert terminal.getvalue().startswith(f"{ERASE_LINE}loading demo_model  [")
    assert terminal.getvalue().endswith(ERASE_LINE)


def test_the_bar() -> None:
    assert bar_line("m", 0.0) == f"{ERASE_LINE}loading m  [..............................]   0%"
    assert bar_line("m", 0.5) == f"{ERASE_LINE}loading m  [###############...............]  50%"
    assert bar_line("m", 1.0) == f"{ERASE_LINE}loading m  [##############################] 100%"


def test_what_is_read_and_taken_counts_up_to_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"read": 1000, "taken": 50}
    monkeypatch.setattr(loading, "_read_bytes", lambda: state["read"])
    monkeypatch.setattr(loading, "resident_bytes", lambda: state["taken"])
    progress = ModelLoading(100, 300)
    shares = []
    for state["read"], state["taken"] in ((1000, 50), (1100, 50), (1100, 150), (2000, 350), (2000, 40)):
        shares.append(progress.share)
    assert shares == [0.0, 0.25, 0.5, 1.0, 0.25]


def test_the_files_of_a_model() -> None:
    assert files_bytes(BUNDLED_MODEL) == sum(
        (BUNDLED_MODEL / name).stat().st_size for name in ("config.json", "model.safetensors")
    )
    assert files_bytes(BUNDLED_MODEL / "nowhere") == 0
