"""The tables of models in a TOML file: their options, and errors that name the key, its line and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.model_tables import ResidencyOptions
from quire.runtime.common.settings import Settings, resolve_settings

MODELS = """\
threads = 2
port = 0

[models.qwen]
model = "/models/qwen"
kv_cache_memory = "1GiB"
default_sampling = {temperature = 0.7, top_k = 20}
system_prompt = "Be brief."
lora = {sql = "/adapters/sql"}

[models."org/embed:q8"]
model = "/models/embed"
threads = 1

[aliases]
gpt-4o-mini = "qwen"
text2sql = "sql"
"""


def read(tmp_path: Path, text: str, flags: dict[str, object] | None = None, **environ: str) -> Settings:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return resolve_settings(flags or {}, environ, file, takes_models=True)


def test_a_table_is_a_model_with_the_options_of_an_engine(tmp_path: Path) -> None:
    settings = read(tmp_path, MODELS)
    assert settings.server.port == 0
    assert settings.aliases == {"gpt-4o-mini": "qwen", "text2sql": "sql"}
    assert [model.name for model in settings.models] == ["qwen", "org/embed:q8"]
    assert settings.models[0].engine == EngineConfig(
        model="/models/qwen",
        threads=2,
        kv_cache_memory=1 << 30,
        default_sampling={"temperature": 0.7, "top_k": 20},
        system_prompt="Be brief.",
        lora={"sql": "/adapters/sql"},
    )
    assert settings.models[1].engine == EngineConfig(model="/models/embed", threads=1)


def test_a_table_says_when_its_model_is_loaded(tmp_path: Path) -> None:
    text = "[models.a]\nload = 'operator'\nidle_timeout = 60\npinned = true\n[models.b]"
    first, second = read(tmp_path, text).models
    assert first.residency == ResidencyOptions(load="operator", idle_timeout=60.0, pinned=True)
    assert second.residency == ResidencyOptions(load=None, idle_timeout=None, pinned=False)


def test_variables_and_flags_are_stronger_than_tables(tmp_path: Path) -> None:
    settings = read(tmp_path, MODELS, {"threads": 4}, QUIRE_THREADS="3", QUIRE_WEIGHTS="q8")
    assert [(model.engine.threads, model.engine.weights) for model in settings.models] == [(4, "q8")] * 2


def test_a_file_without_tables_has_no_models(tmp_path: Path) -> None:
    assert read(tmp_path, "threads = 2").models == ()


def test_other_commands_refuse_tables_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(MODELS)
    with pytest.raises(ConfigError, match=r"has tables of several models, which only `quire serve` takes"):
        resolve_settings({}, {}, file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nwieghts = 'q8'", r"'wieghts' of \[models.a\] in .*, line 2 is not .* \(did you mean 'weights'"),
        ("\n[models.a]\n\nweights = 'q3'", r"'weights' of \[models.a\] in .*, line 4 must be auto, bf16"),
        ("[models.'a b']\nthreads = 0", r"'threads' of \[models.a b\] in .*, line 2 must be a whole number of"),
        ("models.a.threads = 'x'", r"'threads' of \[models.a\] in .*, line 1 must be a whole number"),
        ("[models.a]\nport = 1", r"line 2 is an option of the server: write it above the first table"),
        ("[models.a]\nkv_cache_memory = '1XB'", r"line 2 must be a size in bytes"),
        ("[models.a.default_sampling]\ntemperature = 'hot'", r"must be names with a number each|must be a number"),
        ("[models.a]\nload = 'later'", r"line 2 must be first-use, operator or start, not 'later'"),
        ("[models.a]\nidle_timeout = -1", r"line 2 must be a number from 0 to 1000000, not -1"),
        ("[models.a]\npinned = 'x'", r"line 2 must be true or false, not 'x'"),
        ("models = 1", r"'models' in .*, line 1 must be tables such as \[models.NAME\], not 1"),
        ("[models]", r"has no model; add a table such as \[models.NAME\]"),
        ("[aliases]\na = 'b'", r"has no model; add a table such as \[models.NAME\]"),
        ("[models]\na = 1", r"'a' of \[models\] in .*, line 2 must be a table \[models.a\], not 1"),
        ("[models.'']", r"must have a name of 1 to 200 printable characters"),
        ("[models.' a']", r"must have a name of 1 to 200 printable characters"),
        ("[models.a]\n[aliases]\nb = 'c'", r"'b' of \[aliases\] in .*, line 3 must be the name of .*: 'a'; not 'c'"),
        ("[models.a]\n[aliases]\nb = 1", r"line 3 must be the name of a model or an adapter: 'a'; not 1"),
        ("[models.a]\n[aliases]\nb = ['a']", r"line 3 must be the name of a model or an adapter: 'a'; not \['a'\]"),
        ("[models.a]\n[aliases]\na = 'a'", r"line 3 is the name of a model or an adapter; choose another alias"),
        ("aliases = 1\n[models.a]", r"'aliases' in .*, line 1 must be a table of names, not 1"),
        (
            "[models.a]\nlora = {x = 'p'}\n[models.b]\nlora = {x = 'q'}",
            r"'lora' of \[models.b\] in .*, line 4 has 'x', which is the name of an adapter of 'a'",
        ),
        ("[models.a]\nlora = {b = 'p'}\n[models.b]", r"line 2 has 'b', which is the name of a model"),
        ("[models.a]\nlora = 'x=p'\n[models.b]\nlora = 'x=q'", r"has 'x', which is the name of an adapter of 'a'"),
        ("model = '/m'\n[models.a]", r"model cannot be given beside tables of models; write it into the table"),
        ("lora = {x = 'p'}\n[models.a]", r"lora cannot be given beside tables of models"),
        ("in_process = true\n[models.a]", r"in_process cannot be given with tables of models"),
        ("served_model_name = 'x'\n[models.a]", r"served_model_name cannot be given with tables of models"),
    ],
)  # fmt: skip
def test_errors_name_the_key_its_line_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("line", ["[a = {b = 1, c = 2} #]", "[a = {} #]"])
def test_a_line_of_a_text_may_look_like_a_table(tmp_path: Path, line: str) -> None:
    (model,) = read(tmp_path, f'[models.a]\nsystem_prompt = """\n{line}\n"""').models
    assert model.engine.system_prompt == f"{line}\n"


def test_an_alias_may_stand_for_an_adapter_whose_path_is_given_as_text(tmp_path: Path) -> None:
    text = "[models.a]\nlora = 'sql=/adapters/sql'\n[aliases]\ntext2sql = 'sql'"
    assert read(tmp_path, text).aliases == {"text2sql": "sql"}


def test_a_model_on_the_command_line_excludes_tables(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model cannot be given beside tables of models"):
        read(tmp_path, MODELS, {"model": "/m"})
