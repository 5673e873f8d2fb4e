"""The tables `[models.NAME]` and `[aliases]` of a TOML file: the models that one server serves.

A key of a model's table is an option of its engine. Errors name the key, its line and the allowed values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from .config import EngineConfig
from .errors import ConfigError
from .options import option, options_of, suggestion
from .prompts import shown
from .server_config import Seconds, ServerConfig

MODEL_TABLES, ALIAS_TABLE = "models", "aliases"
MAX_NAME = 200  # characters of the name of a model or an alias
# Options that one model cannot share with another: they are keys of its table.
OWN_OPTIONS = (
    "model", "embedding_model", "draft_model", "lora", "chat_template", "system_prompt", "default_sampling",
    "kv_events", "kv_events_replay",
)  # fmt: skip
# Options of a server whose engine it starts itself and names itself.
ONE_MODEL_OPTIONS = ("served_model_name", "prefix_snapshot", "in_process", "engine_hosts")


_option = partial(option, "Model of a table")


class ResidencyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a model's table that are no options of its engine."""

    load: Annotated[
        Literal["start", "first-use", "operator"] | None,
        _option("When the model is loaded.", default="first-use with models_memory, else start"),
    ] = None
    idle_timeout: Annotated[
        Seconds | None, _option("Time without requests after which the model is unloaded.", unit="seconds")
    ] = None
    pinned: Annotated[bool, _option("Keep the model loaded.")] = False


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a server."""

    name: str
    engine: EngineConfig
    residency: ResidencyOptions = ResidencyOptions()


class ModelsFile:
    """The tables of one file that declare models, checked except for the values of options."""

    def __init__(self, content: Mapping[str, Any], text: str, file: str) -> None:
        """`content` is the file's, and `text` its characters. Raises ConfigError."""
        self._file = file
        self._lines = _lines_of_keys(text)
        self.tables = self._tables(content)
        self.aliases = self._aliases(content.get(ALIAS_TABLE, {}))

    def where(self, *path: str) -> str:
        """Return the place of a key in messages: `'threads' of [models.a] in models.toml, line 7`."""
        *table, key = path
        line = self._lines.get(path)
        of = f" of [{'.'.join(table)}]" if table else ""
        return f"{key!r}{of} in {self._file}" + ("" if line is None else f", line {line}")

    def options(self, name: str) -> Iterator[tuple[str, object, str]]:
        """Yield the name, the value and the place of each option of a model. Raises ConfigError for another key."""
        known = options_of(EngineConfig)
        names = {each for option in known.values() for each in (option.name, option.alias) if each}
        names |= options_of(ResidencyOptions).keys()
        for key, value in self.tables[name].items():
            where = self.where(MODEL_TABLES, name, key)
            if key in options_of(ResidencyOptions):
                continue
            if key in options_of(ServerConfig):
                raise ConfigError(f"{where} is an option of the server: write it above the first table")
            if key not in names:
                allowed = suggestion(key, names) or f"; the options are {', '.join(sorted(names))}"
                raise ConfigError(f"{where} is not an option of a model{allowed}")
            yield key, value, where

    def residency(self, name: str) -> ResidencyOptions:
        """Return the keys of a model's table about its loading. Raises ConfigError."""
        options = options_of(ResidencyOptions)
        given = {key: value for key, value in self.tables[name].items() if key in options}
        values: dict[str, Any] = {
            key: options[key].convert(value, self.where(MODEL_TABLES, name, key)) for key, value in given.items()
        }
        return ResidencyOptions(**values)

    def _tables(self, content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        tables = content.get(MODEL_TABLES, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"{self.where(MODEL_TABLES)} must be tables such as [models.NAME], not {shown(tables)}")
        if not tables:
            raise ConfigError(f"{self._file} has no model; add a table such as [models.NAME]")
        for name, table in tables.items():
            where = self.where(MODEL_TABLES, name)
            if not isinstance(table, dict):
                raise ConfigError(f"{where} must be a table [models.{name}], not {shown(table)}")
            _check_name(name, where)
        return tables

    def _aliases(self, aliases: object) -> dict[str, str]:
        if not isinstance(aliases, dict):
            raise ConfigError(f"{self.where(ALIAS_TABLE)} must be a table of names, not {shown(aliases)}")
        targets = {*self.tables, *self._adapters()}
        for alias, target in aliases.items():
            where = self.where(ALIAS_TABLE, alias)
            _check_name(alias, where)
            if alias in targets:
                raise ConfigError(f"{where} is the name of a model or an adapter; choose another alias")
            if not isinstance(target, str) or target not in targets:
                known = ", ".join(map(repr, sorted(targets)))
                raise ConfigError(f"{where} must be the name of a model or an adapter: {known}; not {shown(target)}")
        return aliases

    def _adapters(self) -> dict[str, str]:
        """Return the model of each adapter by the adapter's name. Raises ConfigError for a name that is taken."""
        found: dict[str, str] = {}
        option = options_of(EngineConfig)["lora"]
        for name, table in self.tables.items():
            where = self.where(MODEL_TABLES, name, "lora")
            lora: Any = option.convert(table.get("lora", {}), where)
            for adapter in lora:
                if adapter in found or adapter in self.tables:
                    raise ConfigError(
                        f"{where} has {adapter!r}, which is the name of "
                        f"{'an adapter of ' + repr(found[adapter]) if adapter in found else 'a model'}"
                    )
                found[adapter] = name
        return found


def _check_name(name: str, where: str) -> None:
    if not (0 < len(name) <= MAX_NAME and name.isprintable() and name == name.strip()):
        raise ConfigError(f"{where} must have a name of 1 to {MAX_NAME} printable characters, without spaces around it")


def _lines_of_keys(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each key and each table that begins a line, by its path; the first one counts."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            table = _path(header[1])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=", line):
            lines.setdefault((*table, *_path(key[1])), number)
    return lines


def _path(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key."""
    path = []
    try:
        found: Any = tomllib.loads(f"{key} = 0")
        while isinstance(found, dict):
            ((name, found),) = found.items()
            path.append(name)
    except (ValueError, RecursionError):  # a line of a longer text, which only looks like a key
        return (key.strip(),)
    return tuple(path)
