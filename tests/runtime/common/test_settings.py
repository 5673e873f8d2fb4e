"""Settings: precedence flag > environment > file > default, and errors that name the setting and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.common.config import EngineConfig, ServerConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.settings import resolve_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.toml"


def test_nothing_given_is_the_defaults() -> None:
    settings = resolve_settings({"port": None}, {"PATH": "/bin"})
    assert settings.engine == EngineConfig()
    assert settings.server == ServerConfig()


def test_the_stronger_source_wins(file: Path) -> None:
    file.write_text("max_num_seqs = 1\nthreads = 1\nport = 1\n")
    settings = resolve_settings(
        {"max_num_seqs": 3}, {"QUIRE_MAX_NUM_SEQS": "2", "QUIRE_THREADS": "2", "QUIRE_DEBUG": "1"}, file
    )
    assert (settings.engine.max_num_seqs, settings.engine.threads, settings.server.port) == (3, 2, 1)


@pytest.mark.parametrize(("value", "number"), [("0.25", 0.25), (1, 1.0), (0.5, 0.5), (" 1e-3 ", 1e-3)])
def test_numbers(value: object, number: float) -> None:
    assert resolve_settings({"max_kv_share_per_tenant": value}, {}).engine.max_kv_share_per_tenant == number


def test_weights_of_tenants(file: Path) -> None:
    wanted = {"a": 2.0, "b c": 0.5}
    file.write_text('tenant_weights = { a = 2, "b c" = 0.5 }')
    assert resolve_settings({}, {}, file).engine.tenant_weights == wanted
    assert resolve_settings({"tenant_weights": "a=2, b c = 0.5,"}, {}).engine.tenant_weights == wanted
    assert resolve_settings({"tenant_weights": ""}, {}, file).engine.tenant_weights == {}


def test_an_empty_variable_is_not_set() -> None:
    assert resolve_settings({}, {"QUIRE_TOKEN": "", "QUIRE_PORT": ""}).server == ServerConfig()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("512M", 512_000_000),
        ("2kB", 2000),
        ("1T", 10**12),
        ("7B", 7),
    ],
)
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert resolve_settings({}, {"QUIRE_KV_CACHE_MEMORY": text}).engine.kv_cache_memory == size


@pytest.mark.parametrize(("text", "value"), [("true", True), ("ON", True), ("1", True), ("no", False), ("0", False)])
def test_switches(text: str, value: bool) -> None:
    assert resolve_settings({}, {"QUIRE_ENABLE_PREFIX_CACHING": text}).engine.enable_prefix_caching is value


BAD_FLAGS = [
    ({"max_num_seqs": 0}, r"--max-num-seqs: 0 is not allowed; allowed: a whole number, at least 1"),
    ({"max_num_seqs": "1.5"}, r"--max-num-seqs: '1.5' is not allowed"),
    ({"max_num_seqs": 1.0}, r"--max-num-seqs: 1.0 is not allowed"),
    ({"max_num_seqs": True}, r"--max-num-seqs: True is not allowed"),
    ({"max_num_seqs": "4GiB"}, r"--max-num-seqs: '4GiB' is not allowed"),
    ({"max_num_seqs": "9" * 5000}, r"--max-num-seqs"),
    ({"port": 65536}, r"--port: 65536 is not allowed; allowed: a whole number, at least 0, at most 65535"),
    ({"max_frame_bytes": 1}, r"--max-frame-bytes: 1 is not allowed; .* at least 65536, at most 1073741824$"),
    ({"kv_cache_memory": "4 gallons"}, r"--kv-cache-memory: '4 gallons' .* such as 4294967296 or 4GiB, at least 1"),
    ({"kv_cache_memory": "-1GiB"}, r"--kv-cache-memory"),
    ({"kv_cache_memory": "0.1B"}, r"--kv-cache-memory"),
    ({"weights": "int4"}, r"--weights: 'int4' is not allowed; allowed: bf16, f32, q8"),
    ({"enable_prefix_caching": "maybe"}, r"--enable-prefix-caching: 'maybe' is not allowed; allowed: true or false"),
    ({"enable_prefix_caching": 1}, r"--enable-prefix-caching: 1 "),
    ({"itl_target_ms": "0"}, r"--itl-target-ms: '0' is not allowed; allowed: a number, above 0"),
    ({"itl_target_ms": "nan"}, r"--itl-target-ms: 'nan' is not allowed"),
    ({"itl_target_ms": True}, r"--itl-target-ms: True is not allowed"),
    ({"itl_target_ms": 10**400}, r"--itl-target-ms"),
    ({"max_kv_share_per_tenant": 1.1}, r"--max-kv-share-per-tenant: 1.1 .* a number, above 0, at most 1"),
    ({"tenant_weights": "a=2,a=3"}, r"--tenant-weights: 'a=2,a=3' is not allowed; allowed: names with a number each"),
    ({"tenant_weights": "a"}, r"--tenant-weights: 'a' is not allowed"),
    ({"tenant_weights": "a=0"}, r"--tenant-weights, a: '0' is not allowed; allowed: a number, above 0"),
    ({"scheduling_policy": "lifo"}, r"--scheduling-policy: 'lifo' is not allowed; allowed: fair, fcfs, priority"),
    ({"num_speculative_tokens": 17}, r"--num-speculative-tokens: 17 is not allowed; .* at least 0, at most 16"),
    ({"kv_spill_size": "-1"}, r"--kv-spill-size: '-1' is not allowed; allowed: a size in bytes"),
    ({"model": 3}, r"--model: 3 is not allowed; allowed: text"),
    ({"modle": "x"}, r"--modle: there is no such setting; known are .*model"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_a_bad_flag_is_named_with_what_is_allowed(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(flags, {})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"QUIRE_THREADS in the environment: 'many' is not allowed"):
        resolve_settings({}, {"QUIRE_THREADS": "many"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("colour = 1", r"colour in .*quire\.toml: there is no such setting"),
        ("[engine]\nthreads = 1", r"engine in .*quire\.toml: there is no such setting"),
        ("threads = [1]", r"threads in .*quire\.toml: \[1\] is not allowed"),
        ("threads = ", r"config file .*quire\.toml cannot be read"),
    ],
)
def test_a_bad_file_is_named(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve_settings({}, {}, file)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve_settings({}, {}, file)


def test_a_secret_is_never_quoted(file: Path) -> None:
    file.write_text("token = 20261120")
    with pytest.raises(ConfigError, match=r"token in .*: this value is not allowed; allowed: text") as caught:
        resolve_settings({}, {}, file)
    assert "20261120" not in str(caught.value)
