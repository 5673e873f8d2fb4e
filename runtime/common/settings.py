"""Read options from flags, environment variables and a TOML file into the structs of both configs.

This file names no option. The strongest source that sets an option wins: flag, QUIRE_* variable, file, default. A
variable that belongs to the machine is read where the model is loaded; here it only overrides the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .config import EngineConfig
from .errors import ConfigError
from .model_tables import ALIAS_TABLE, MODEL_TABLES, ONE_MODEL_OPTIONS, OWN_OPTIONS, ModelEntry, ModelsFile
from .options import Option, nearest_name, options_of, suggestion
from .server_config import ServerConfig

ENVIRONMENT_PREFIX = "QUIRE_"
OTHER_VARIABLES = {"QUIRE_DEBUG"}  # variables that are read and are not options
S = TypeVar("S", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All options of one `quire` command."""

    engine: EngineConfig
    server: ServerConfig
    models: tuple[ModelEntry, ...] = ()  # models of a server with several; their options include those of `engine`
    aliases: dict[str, str] = {}  # further name of a model -> its name


def resolve_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_file: str | Path | None = None,
    *,
    takes_models: bool = False,
) -> Settings:
    """Return the settings that `flags`, the environment and the file give.

    `flags` are by option name; None means that the flag was not given. Text is parsed, so `kv_cache_memory="4GiB"` is
    accepted from every source. An empty environment variable counts as not set. The file is flat: `max_num_seqs = 32`.
    If the command `takes_models`, the file may have tables `[models.NAME]`, which override its other options.
    Raises ConfigError.
    """
    options = options_of(EngineConfig) | options_of(ServerConfig)
    content: dict[str, Any] = {}
    tables: ModelsFile | None = None
    if config_file is not None:
        content, text = _read_toml(Path(config_file))
        if content.keys() & {MODEL_TABLES, ALIAS_TABLE}:
            if not takes_models:
                raise ConfigError(f"{config_file} has tables of several models, which only `quire serve` takes")
            tables = ModelsFile(content, text, str(config_file))
            content = {name: content[name] for name in content if name not in (MODEL_TABLES, ALIAS_TABLE)}
    shared = [(name, value, f"{name!r} in {config_file}") for name, value in content.items()]
    values = _resolve(options, flags, environ, shared)
    engine, server = _build(EngineConfig, values), _build(ServerConfig, values)
    if tables is None:
        return Settings(engine=engine, server=server)
    _check_shared(engine, server)
    entries = []
    for name in tables.tables:
        of_model = _resolve(options, flags, environ, shared, tables.options(name))
        entries.append(ModelEntry(name=name, engine=_build(EngineConfig, of_model), residency=tables.residency(name)))
    return Settings(engine=engine, server=server, models=tuple(entries), aliases=tables.aliases)


def _check_shared(engine: EngineConfig, server: ServerConfig) -> None:
    """Raise ConfigError for an option outside the tables of models that belongs into them, or that they exclude."""
    for name in OWN_OPTIONS:
        if getattr(engine, name) != getattr(EngineConfig(), name):
            raise ConfigError(f"{name} cannot be given beside tables of models; write it into the table of a model")
    for name in ONE_MODEL_OPTIONS:
        if getattr(server, name) != getattr(ServerConfig(), name):
            raise ConfigError(f"{name} cannot be given with tables of models")


def _resolve(
    options: Mapping[str, Option],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *from_files: Iterable[tuple[str, object, str]],
) -> dict[str, Any]:
    """Return the values of options by name; a later one of `from_files` is stronger. Raises ConfigError."""
    given: dict[str, tuple[object, str]] = {}  # option name -> value, where it was set; a stronger source comes later
    for source in from_files:
        given |= _one_source(source, options)
    names = [name for option in options.values() for name in (option.name, option.alias) if name]
    variables = [(name, ENVIRONMENT_PREFIX + name.upper()) for name in names]
    set_ones = ((name, environ[variable], variable) for name, variable in variables if environ.get(variable))
    from_environ = _one_source(set_ones, options)
    given |= from_environ
    for name in from_environ:
        if options[name].is_of_machine:
            del given[name]
    given |= _one_source(((name, value, name) for name, value in flags.items() if value is not None), options)
    return {name: options[name].convert(value, where) for name, (value, where) in given.items()}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each QUIRE_* variable that is not an option, with the nearest name."""
    options = (options_of(EngineConfig) | options_of(ServerConfig)).values()
    known = {name for option in options for name in (option.name, option.alias) if name}
    sentences = []
    for variable in sorted(environ.keys() - OTHER_VARIABLES):
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable.startswith(ENVIRONMENT_PREFIX) and name not in known:
            nearest = nearest_name(name, known)
            advice = f" (did you mean {ENVIRONMENT_PREFIX}{nearest.upper()}?)" if nearest else ""
            sentences.append(f"{variable} has no effect: it is not an option{advice}")
    return sentences


def convert_table(struct: type[S], table: Mapping[str, object], where: str) -> S:
    """Return one table of a TOML file as `struct`, whose fields have defaults. Raises ConfigError that says `where`."""
    options = options_of(struct)
    values: dict[str, object] = {}
    for name, value in table.items():
        source = f"{name!r} of {where}"
        values[name] = _find(name, options, source).convert(value, source)
    return struct(**values)


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError that says `what` it is if it cannot be read."""
    return _read_toml(path, what)[0]


def _read_toml(path: Path, what: str = "") -> tuple[dict[str, Any], str]:
    """Return the content of a TOML file, and its text. Raises ConfigError."""
    name = f"{what} {path}".lstrip()
    try:
        text = path.read_text("utf-8")
        return tomllib.loads(text), text
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _one_source(
    entries: Iterable[tuple[str, object, str]], options: Mapping[str, Option]
) -> dict[str, tuple[object, str]]:
    """Return option name -> value, where it was set, for the (name, value, where) of one source.

    Raises ConfigError for an unknown option, and for one that is set under both of its names.
    """
    given: dict[str, tuple[object, str]] = {}
    for name, value, where in entries:
        option = _find(name, options, where)
        if option.name in given:
            raise ConfigError(f"{given[option.name][1]} and {where} are two names of one option; give one of them")
        given[option.name] = value, where
    return given


def _find(name: str, options: Mapping[str, Option], where: str) -> Option:
    found = options.get(name) or next((option for option in options.values() if option.alias == name), None)
    if found is None:
        known = ", ".join(f"'{each}'" for each in sorted(options))  # quoted keys of a file, not flags
        raise ConfigError(f"{where} is not an option{suggestion(name, options) or f'; the options are {known}'}")
    return found


def _build(struct: type[S], values: Mapping[str, object]) -> S:
    return struct(**{name: value for name, value in values.items() if name in struct.__struct_fields__})
