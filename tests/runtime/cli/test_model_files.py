"""Commands that take a model by its name on a hub: pull, list, show, plan, rm, and the settings of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from quire.runtime.cli.flags import settings_from
from quire.runtime.cli.main import run
from quire.runtime.model import BUNDLED_MODEL, model_name

from tests.support.gguf_files import convert
from tests.support.hub_server import COMMIT, Hub, running_hub

LLAMA = Path(__file__).parents[2] / "goldens" / "llama"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    gguf = convert(LLAMA, tmp_path / "tiny.gguf", "Q8_0").read_bytes()
    models = {
        "org/demo": {name: (BUNDLED_MODEL / name).read_bytes() for name in FILES},
        "org/tiny-GGUF": {"tiny-Q8_0.gguf": gguf, "tiny-Q4_K_M.gguf": gguf},
    }
    with running_hub(models) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
        yield running


def test_models_are_pulled_listed_and_removed(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    assert run(["list"]) == 0
    assert [run(["pull", name]) for name in ("org/demo", "org/tiny-GGUF:Q8_0", "org/tiny-GGUF")] == [0, 0, 0]
    shown = capsys.readouterr()
    snapshot = cache / "models--org--tiny-GGUF" / "snapshots" / COMMIT
    assert shown.out.splitlines()[1:] == [str(snapshot / "tiny-Q8_0.gguf"), str(snapshot / "tiny-Q4_K_M.gguf")]
    assert "quire: downloading org/tiny-GGUF:Q8_0, 143,392 bytes" in shown.err
    assert run(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = [(each["name"], each["is_complete"]) for each in listed]
    assert names == [("org/demo", True), ("org/tiny-GGUF:Q4_K_M", True), ("org/tiny-GGUF:Q8_0", True)]
    assert run(["rm", "org/tiny-GGUF:Q8_0", "org/demo"]) == 0
    run(["list", "--json"])
    assert '"name": "org/tiny-GGUF:Q4_K_M"' in capsys.readouterr().out
    assert not (snapshot / "tiny-Q8_0.gguf").exists()
    assert run(["rm", "org/tiny-GGUF:q4_k_m"]) == 0
    assert not list(cache.glob("models--*"))
    assert run(["rm", "org/demo"]) == 2
    assert capsys.readouterr().err == f"quire: org/demo is not in the cache {cache}; `quire list` shows its models\n"


def test_a_table_of_models_says_which_are_incomplete(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(constants.HF_HUB_CACHE) / "models--org--part" / "blobs").mkdir(parents=True)
    (Path(constants.HF_HUB_CACHE) / "models--org--part" / "blobs" / "0.incomplete").write_bytes(b"1234")
    assert run(["list"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("org/part                4 B  ")
    assert line.endswith("  incomplete: `quire pull` continues\n")


@pytest.mark.parametrize("command", [["plan"], ["show"], ["simulate", "--num-requests", "1"]])
def test_a_plan_and_the_facts_of_a_model_need_its_headers_only(
    hub: Hub, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.hub.skeleton.FIRST_BYTES", 1 << 14)
    local, remote = ([command[0], name, *command[1:]] for name in (str(BUNDLED_MODEL), "org/demo"))
    if command[0] != "simulate":
        assert run(local) == 0
        expected = capsys.readouterr().out
        assert run(remote) == 0
        found = capsys.readouterr().out
        assert len(found.splitlines()) == len(expected.splitlines())
        shown = ["model       org/demo", "path        none: not downloaded"]
        assert found.splitlines()[:2] == (shown if command[0] == "show" else expected.splitlines()[:2])
    else:
        run(remote)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*"))
    assert all(" bytes=" in request or "tokenizer" in request for request in hub.downloads())


def test_a_command_gets_the_path_and_clients_the_name(hub: Hub) -> None:
    settings = settings_from("org/tiny-GGUF:Q8_0")
    assert settings.engine.model is not None
    assert Path(settings.engine.model).name == "tiny-Q8_0.gguf"
    assert settings.server.served_model_name == "org/tiny-GGUF:Q8_0"
    settings = settings_from("org/demo")
    assert settings.engine.model is not None
    assert model_name(Path(settings.engine.model)) == settings.server.served_model_name == "org/demo"


@pytest.mark.parametrize("source", ["argument", "variable", "file"])
def test_every_source_of_the_setting_may_name_a_model(
    hub: Hub, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quire.toml").write_text('model = "org/nothing"\n')
    if source == "variable":
        monkeypatch.setenv("QUIRE_MODEL", "org/nothing")
    arguments = {
        "argument": ["org/nothing", "x"],
        "variable": ["x"],
        "file": ["x", "--config", str(tmp_path / "quire.toml")],
    }
    assert run(["generate", *arguments[source]]) == 2
    assert "quire: there is no public model org/nothing at http" in capsys.readouterr().err


def test_a_download_that_cannot_fit_in_memory_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.runtime.cli.model_files.free_memory_bytes", lambda: 1000)
    for name in ("org/demo", "org/tiny-GGUF", "org/tiny-GGUF:Q8_0"):
        assert run(["generate", name, "x"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"quire: {name} needs ")
        assert "bytes of memory, 1,000 are free; nothing was downloaded: choose a smaller model" in error
    assert not [path for path in Path(constants.HF_HUB_CACHE).rglob("*") if path.suffix in (".gguf", ".safetensors")]


@pytest.mark.parametrize("name", ["./model", "/models/a", "name", "a/b/c", "models/x.gguf", "org/name:../x"])
def test_other_texts_are_paths(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", name]) == 2
    assert capsys.readouterr().err == (
        f"quire: {name} is not a name on the hub; write ORGANIZATION/NAME or ORGANIZATION/NAME:QUANTIZATION\n"
    )
