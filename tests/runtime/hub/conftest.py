"""A hub with small models, an empty cache for each test, and pauses that take no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from quire.runtime.hub import transfer

from tests.support.gguf_files import convert
from tests.support.hub_server import Hub, running_hub

LLAMA = Path(__file__).parents[2] / "goldens" / "llama"
NOT_READ = ("README.md", "pytorch_model.bin", "onnx/model.onnx", "original/params.json", "vocab.json")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Return a folder, and a repository of GGUF files."""
    folder = tmp_path_factory.mktemp("gguf")
    kinds = {"F16": "F16", "Q8_0": "Q8_0", "Q4_K_M": "Q4_0"}
    files = {name: convert(LLAMA, folder / f"{name}.gguf", kind).read_bytes() for name, kind in kinds.items()}
    ggufs = {f"tiny-{name}.gguf": content for name, content in files.items()}
    plain = {name: (LLAMA / name).read_bytes() for name in ("config.json", "model.safetensors")}
    return {
        "org/tiny": {**plain, **dict.fromkeys(NOT_READ, b"x" * 1000)},
        "org/tiny-GGUF": {**ggufs, "mmproj-F16.gguf": b"x", "README.md": b"x"},
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    }


@pytest.fixture
def hub(
    models: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> Iterator[Hub]:
    with running_hub(models) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
        yield running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of the pauses before a request is repeated; nothing waits."""
    made: list[float] = []
    wait: Callable[[float], None] = made.append
    monkeypatch.setattr(transfer.time, "sleep", wait)
    return made
