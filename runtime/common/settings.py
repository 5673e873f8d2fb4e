"""From flags, environment and a TOML file to the frozen structs of `config.py`.

It must not know any setting by name: names, types and ranges are read from the structs. One invariant: the value of
the strongest source that sets a setting wins (flag, QUIRE_*, file, default), and a bad one is a ConfigError that names
the setting, where it was set and what is allowed.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from .config import EngineConfig, ServerConfig
from .errors import ConfigError

ENVIRONMENT_PREFIX = "QUIRE_"
S = TypeVar("S", bound=msgspec.Struct)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All configuration of one `quire` command."""

    engine: EngineConfig
    server: ServerConfig


def resolve_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], config_file: str | Path | None = None
) -> Settings:
    """`flags` by field name, None meaning not given. Text is parsed, so `kv_cache_memory="4GiB"` is fine everywhere.

    Raises ConfigError. An empty environment variable counts as not set; the file is flat, `max_num_seqs = 32`.
    """
    fields = _fields(EngineConfig) | _fields(ServerConfig)
    given: dict[str, tuple[object, str]] = {}  # setting -> value, where it was set; the stronger source comes later
    if config_file is not None:
        given |= {name: (value, f"{name} in {config_file}") for name, value in read_toml(Path(config_file)).items()}
    for name in fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            given[name] = environ[variable], f"{variable} in the environment"
    given |= {name: (value, flag_name(name)) for name, value in flags.items() if value is not None}

    values = _convert_all(given, fields)
    return Settings(engine=_build(EngineConfig, values), server=_build(ServerConfig, values))


def convert_table(struct: type[S], table: Mapping[str, object], where: str) -> S:
    """One table of a TOML file as `struct`, whose fields have defaults. Raises ConfigError that says `where`."""
    given = {name: (value, f"{name} of {where}") for name, value in table.items()}
    return _build(struct, _convert_all(given, _fields(struct)))


def flag_name(setting: str) -> str:
    """`max_num_seqs` as the command line spells it."""
    return "--" + setting.replace("_", "-")


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error


def _convert_all(given: Mapping[str, tuple[object, str]], fields: Mapping[str, inspect.Type]) -> dict[str, object]:
    """`given`: setting -> value, where it was set."""
    values: dict[str, object] = {}
    for name, (value, source) in given.items():
        if name not in fields:
            raise ConfigError(f"{source}: there is no such setting; known are {', '.join(sorted(fields))}")
        values[name] = _convert(value, fields[name], source)
    return values


def _fields(struct: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    described = cast(inspect.StructType, inspect.type_info(struct))
    return {field.name: field.type for field in described.fields}


def _build(struct: type[S], values: Mapping[str, object]) -> S:
    return struct(**{name: value for name, value in values.items() if name in struct.__struct_fields__})


# One value


def _convert(value: object, kind: inspect.Type, source: str) -> object:
    """`value`, parsed if it is text, as `kind`; ConfigError if it is not what `kind` allows."""
    kind, meaning = _plain(kind)
    is_bytes = meaning == "bytes"
    match kind:
        case inspect.IntType():
            converted: object = _integer(value, is_bytes)
            if isinstance(converted, int) and not _within(converted, kind):
                converted = None
        case inspect.FloatType():
            converted = _number(value)
            if converted is not None and not _within(converted, kind):
                converted = None
        case inspect.DictType():
            converted = _mapping(value, kind, source)
        case inspect.BoolType():
            converted = _BOOLEANS.get(value.lower()) if isinstance(value, str) else value
            converted = converted if isinstance(converted, bool) else None
        case inspect.LiteralType():
            converted = value if value in kind.values else None
        case _:
            converted = value if isinstance(value, str) else None
    if converted is None:
        shown = "this value" if meaning == "secret" else repr(value)
        raise ConfigError(f"{source}: {shown} is not allowed; allowed: {_allowed(kind, is_bytes)}")
    return converted


def _plain(kind: inspect.Type) -> tuple[inspect.Type, str | None]:
    """Without `| None` and description, and the description: `bytes`, `secret` or none."""
    if isinstance(kind, inspect.UnionType):
        (kind,) = (member for member in kind.types if not isinstance(member, inspect.NoneType))
    if isinstance(kind, inspect.Metadata):
        return kind.type, (kind.extra_json_schema or {}).get("description")
    return kind, None


def _integer(value: object, is_bytes: bool) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    if is_bytes:
        return _parse_size(value)
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()) else None


def _number(value: object) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _mapping(value: object, kind: inspect.DictType, source: str) -> dict[str, object] | None:
    """A table of a file, or `a=2,b=0.5`; no key twice."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        entries: dict[str, object] = {key.strip(): item.strip() for key, equals, item in pairs if equals}
        if len(entries) < len(pairs):
            return None
        value = entries
    if not isinstance(value, dict):
        return None
    return {key: _convert(item, kind.value_type, f"{source}, {key}") for key, item in value.items()}


def _parse_size(text: str) -> int | None:
    """`4GiB`, `1.5 GB`, `512M`, `4096`; with i powers of 1024, without powers of 1000."""
    found = _SIZE.fullmatch(text.strip())
    return round(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found and len(found[1]) <= 18 else None


def _within(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
    )


def _allowed(kind: inspect.Type, is_bytes: bool) -> str:
    match kind:
        case inspect.IntType():
            return _bounded("a size in bytes, such as 4294967296 or 4GiB" if is_bytes else "a whole number", kind)
        case inspect.FloatType():
            return _bounded("a number", kind)
        case inspect.DictType():
            return "names with a number each, such as a=2,b=0.5"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return ", ".join(str(choice) for choice in kind.values)
        case _:
            return "text"


def _bounded(what: str, kind: inspect.IntType | inspect.FloatType) -> str:
    limits = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le))
    return ", ".join([what, *(f"{word} {limit:.15g}" for word, limit in limits if limit is not None)])
