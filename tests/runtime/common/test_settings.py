"""Settings: precedence flag > environment > file > default, and errors that name the option and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.cli.flags import with_flags
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.options import options_of
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import resolve_settings, unknown_variables


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "quire.toml"


def test_defaults_hold_if_nothing_is_given() -> None:
    settings = resolve_settings({"port": None}, {"PATH": "/bin"})
    assert settings.engine == EngineConfig()
    assert settings.server == ServerConfig()


def test_the_stronger_source_wins(file: Path) -> None:
    file.write_text("max_num_seqs = 1\nthreads = 1\nport = 1\n")
    settings = resolve_settings(
        {"max_num_seqs": 3}, {"QUIRE_MAX_NUM_SEQS": "2", "QUIRE_THREADS": "2", "QUIRE_DEBUG": "1"}, file
    )
    assert (settings.engine.max_num_seqs, settings.engine.threads, settings.server.port) == (3, 2, 1)


def test_variables_of_the_machine_are_left_to_the_process_that_loads_a_model(file: Path) -> None:
    file.write_text('isa = "avx2"\ntune = "full"\n')
    assert resolve_settings({}, {"QUIRE_ISA": ""}, file).engine == EngineConfig(isa="avx2", tune="full")
    environ = {"QUIRE_ISA": "scalar", "QUIRE_TUNE": "off"}
    assert resolve_settings({}, environ, file).engine == EngineConfig()
    assert resolve_settings({"isa": "avx512"}, environ, file).engine == EngineConfig(isa="avx512")


@pytest.mark.parametrize(("value", "dtype"), [("bfloat16", "bf16"), ("float32", "f32"), ("q8", "q8")])
def test_data_types_have_vllms_names_too(value: str, dtype: str) -> None:
    assert resolve_settings({"weights": value}, {}).engine.weights == dtype
    assert resolve_settings({}, {"QUIRE_WEIGHTS": value}).engine.weights == dtype


def test_page_size_has_vllms_name_too(file: Path) -> None:
    file.write_text("block_size = 16")
    assert resolve_settings({}, {}, file).engine.page_size == 16
    assert resolve_settings({}, {"QUIRE_BLOCK_SIZE": "64"}, file).engine.page_size == 64
    assert resolve_settings({"block_size": 32}, {"QUIRE_BLOCK_SIZE": "64"}).engine.page_size == 32


def test_both_names_of_an_option_in_one_source_are_refused(file: Path) -> None:
    both = {"block_size": 16, "page_size": 32}
    with pytest.raises(ConfigError, match=r"^block_size and page_size are two names of one option"):
        resolve_settings(both, {})
    with pytest.raises(ConfigError, match="QUIRE_PAGE_SIZE and QUIRE_BLOCK_SIZE are two names"):
        resolve_settings({}, {"QUIRE_BLOCK_SIZE": "16", "QUIRE_PAGE_SIZE": "32"})
    file.write_text("block_size = 16\npage_size = 32")
    with pytest.raises(ConfigError, match=r"'block_size' in .* and 'page_size' in .* are two names"):
        resolve_settings({}, {}, file)


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


BAD_VALUES = [
    ({"max_num_seqs": 0}, r"^max_num_seqs must be a whole number of at least 1, not 0$"),
    ({"max_num_seqs": "1.5"}, r"^max_num_seqs must be .*, not '1.5'$"),
    ({"max_num_seqs": 1.0}, r"max_num_seqs must be .*, not 1.0$"),
    ({"max_num_seqs": True}, r"max_num_seqs must be .*, not True$"),
    ({"max_num_seqs": "4GiB"}, r"max_num_seqs must be .*, not '4GiB'$"),
    ({"max_num_seqs": "9" * 5000}, r"max_num_seqs"),
    ({"port": 65536}, r"port must be a whole number from 0 to 65535, not 65536$"),
    ({"max_frame_bytes": 1}, r"max_frame_bytes must be a size in bytes from 65536 to 1073741824, such as .*, not 1$"),
    ({"kv_cache_memory": "4 gallons"}, r"must be a size in bytes of at least 1, such as 4294967296 or 4GiB, not '4 g"),
    ({"kv_cache_memory": "-1GiB"}, r"kv_cache_memory"),
    ({"kv_cache_memory": "0.1B"}, r"kv_cache_memory"),
    ({"weights": "int4"}, r"weights must be auto, bf16, f32, q4 or q8, not 'int4'"),
    ({"metrics_compat": "x"}, r"metrics_compat must be vllm, not 'x'"),
    ({"enable_prefix_caching": "maybe"}, r"enable_prefix_caching must be true or false, not 'maybe'"),
    ({"enable_prefix_caching": 1}, r"enable_prefix_caching must be .* not 1$"),
    ({"itl_target_ms": "0"}, r"itl_target_ms must be a number above 0, not '0'"),
    ({"itl_target_ms": "nan"}, r"itl_target_ms must be .* not 'nan'"),
    ({"itl_target_ms": True}, r"itl_target_ms must be .* not True"),
    ({"itl_target_ms": 10**400}, r"itl_target_ms"),
    ({"shutdown_timeout": -1}, r"shutdown_timeout must be a number from 0 to 1000000, not -1"),
    ({"max_kv_share_per_tenant": 1.1}, r"max_kv_share_per_tenant must be a number above 0 and at most 1, not 1.1"),
    ({"tenant_weights": "a=2,a=3"}, r"tenant_weights must be names with a number each, such as .*, not 'a=2,a=3'"),
    ({"tenant_weights": "a"}, r"tenant_weights must be .*, not 'a'"),
    ({"tenant_weights": "a=0"}, r"tenant_weights: 'a' must be a number above 0, not '0'"),
    ({"scheduling_policy": "lifo"}, r"scheduling_policy must be fair, fcfs or priority, not 'lifo'"),
    ({"num_speculative_tokens": 17}, r"num_speculative_tokens must be a whole number from 0 to 16, not 17"),
    ({"kv_spill_size": "-1"}, r"kv_spill_size must be a size in bytes of at least 0, .*, not '-1'"),
    ({"model": 3}, r"model must be text, not 3"),
    ({"modle": "x"}, r"modle is not an option \(did you mean 'model'\?\)$"),
    ({"xyzzy": "x"}, r"xyzzy is not an option; the options are .*'model'"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_VALUES)
def test_a_bad_value_names_its_option_and_what_is_allowed(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(flags, {})


def test_unknown_names_of_a_file_list_keys_in_quotes(file: Path) -> None:
    """Text in quotes stays as it is where the command line turns names into flags."""
    file.write_text("xyzzy = 3")
    with pytest.raises(ConfigError, match=r"is not an option; the options are .*'max_num_seqs', ") as error:
        resolve_settings({}, {}, file)
    assert with_flags(str(error.value), list(options_of(EngineConfig))) == str(error.value)


def test_unknown_variables_are_named_with_the_nearest_option() -> None:
    environ = {
        "QUIRE_MAX_SEQS": "3",
        "QUIRE_THREADS": "2",
        "QUIRE_BLOCK_SIZE": "16",
        "HOME": "/",
        "QUIRE_DEBUG": "1",
        "QUIRE_XYZZY": "",
    }
    assert unknown_variables(environ) == [
        "QUIRE_MAX_SEQS has no effect: it is not an option (did you mean QUIRE_MAX_NUM_SEQS?)",
        "QUIRE_XYZZY has no effect: it is not an option",
    ]


@pytest.mark.parametrize("value", ["24", 24, "0"])
def test_the_sizes_of_a_page_are_listed(value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^page_size must be 16, 32 or 64, not {value!r}$"):
        resolve_settings({"page_size": value}, {})


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^QUIRE_THREADS must be a whole number of at least 1, not 'many'$"):
        resolve_settings({}, {"QUIRE_THREADS": "many"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("color = 1", r"'color' in .*quire\.toml is not an option"),
        ("[engine]\nthreads = 1", r"'engine' in .*quire\.toml is not an option"),
        ("threads = [1]", r"'threads' in .*quire\.toml must be a whole number of at least 1, not \[1\]"),
        ("threads = ", r"quire\.toml cannot be read: Invalid value"),
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
    with pytest.raises(ConfigError, match=r"'token' in .* must be text, not the given value") as caught:
        resolve_settings({}, {}, file)
    assert "20261120" not in str(caught.value)
