"""The flags of commands that run an engine, generated from the options in `runtime/common/`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import asdict, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import msgspec
from cyclopts import Parameter
from msgspec import inspect

from ..common.config import MEMORY, SCHEDULING, EngineConfig
from ..common.errors import ConfigError
from ..common.options import Option, flag_name, options_of
from ..common.server_config import HOST, LIMITS, MACHINES, SERVER, ServerConfig
from ..common.settings import Settings, resolve_settings, unknown_variables
from .model_files import with_model_files

_OPTIONS = options_of(EngineConfig) | options_of(ServerConfig)
_NAMES = tuple(_OPTIONS)
HOST_OPTIONS = (  # server options of an engine host
    "tls_cert", "tls_key", "prefix_snapshot", "shutdown_timeout", "engine_processes", "log_format", "log_level",
    "stall_timeout_ms", "engine_heartbeat_timeout_ms", "engine_restart_timeout_ms", "secret_file",
)  # fmt: skip
SCORING_OPTIONS = (  # options of `quire perplexity`, and options that it sets itself and refuses
    "weights", "kv_cache_dtype", "state_dtype", "page_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "kv_cache_memory", "threads", "isa",
)  # fmt: skip
ModelFolder = Annotated[
    str | None,
    Parameter(
        help="The model: a folder in Hugging Face's format, a GGUF file, or ORGANIZATION/NAME[:QUANTIZATION] on a hub. "
        "Default: the bundled model.",
        metavar="MODEL",
    ),
]
Json = Annotated[bool, Parameter(help="Print the results as JSON.")]
MAX_CHOICES_SHOWN = 30  # characters next to a flag; a longer text would narrow the column of help texts
CONFIG_HELP = "TOML file of options; QUIRE_* variables override it, flags override both."


def settings_from(model: str | None, *flags: Any, takes_models: bool = False) -> Settings:
    """Return the settings of a command that loads a model; a model on a hub is downloaded if it is not in the cache."""
    return with_model_files(read_settings(model, *flags, takes_models=takes_models))


def read_settings(model: str | None, *flags: Any, takes_models: bool = False) -> Settings:
    """Return the settings of a command: flags before QUIRE_* variables before --config before defaults."""
    given: dict[str, Any] = {"model": model}
    for group in flags:
        given |= asdict(group) if group is not None else {}
    for warning in unknown_variables(os.environ):
        print(f"quire: warning: {warning}", file=sys.stderr)
    return resolve_settings(given, os.environ, given.pop("config", None), takes_models=takes_models)


def refuse_flags(command: str, names: Collection[str], what: str, *flags: Any) -> None:
    """Raise ConfigError if `flags` set an option in `names`: `command` sets these options itself, for its `what`."""
    for name in names:
        if any(getattr(group, name, None) is not None for group in flags):
            raise ConfigError(f"{name} cannot be given to {command}, which sets it for its {what}")


def warn_of_ignored(command: str, config: EngineConfig, names: Collection[str]) -> None:
    """Print a warning if shared variables or a file set options that `command` sets itself."""
    default = EngineConfig()
    ignored = sorted(name for name in names if getattr(config, name) != getattr(default, name))
    if ignored:
        listed = ", ".join(ignored)
        print(f"quire: warning: {command} sets {listed} itself; other values are ignored", file=sys.stderr)


def typed_flags(struct: type[msgspec.Struct], group: str, *, without: Collection[str]) -> type:
    """Return a dataclass of flags with the types and defaults of a struct's options."""
    types = get_type_hints(struct)
    fields: list[tuple[str, Any, Any]] = []
    for option in options_of(struct).values():
        parameter = Parameter(help=option.help, show_default=option.default_as_text() or False)
        if option.name not in without:
            fields.append((option.name, Annotated[types[option.name], parameter], option.default))
    return _flag_class(group, fields)


def _flag(option: Option) -> Any:
    names = [flag_name(name) for name in (option.name, option.alias) if name]
    choices = _choices(option)
    help_text = (
        option.help if len(choices) <= MAX_CHOICES_SHOWN else f"{option.help} One of {choices.replace('|', ', ')}."
    )
    parameter = Parameter(
        name=names,
        help=with_flags(help_text, _NAMES),
        show_default=with_flags(option.default_as_text(), _NAMES) or False,
        metavar=_metavar(option),
    )
    return Annotated[bool | None if option.is_switch else str | None, parameter]


def _metavar(option: Option) -> str:
    """Return the placeholder of the value in help texts."""
    if choices := _choices(option):
        return choices if len(choices) <= MAX_CHOICES_SHOWN else "NAME"
    match option.kind:
        case inspect.IntType() | inspect.FloatType():
            return "SIZE" if option.unit == "bytes" else "N"
    return (option.unit or "text").upper()


def _choices(option: Option) -> str:
    """Return the allowed values of an option; empty unless they are a few names."""
    match option.kind:
        case inspect.LiteralType():
            return "|".join(map(str, option.kind.values))
    return ""


def with_flags(message: str, options: Collection[str]) -> str:
    """Return `message` with the names of `options` as flags: `max_num_seqs` becomes `--max-num-seqs`.

    A name of one word is replaced only at the beginning and in backquotes, since it may be an English word elsewhere.
    Text in single quotes comes from a user and stays.
    """
    every = "|".join(options)
    long = "|".join(name for name in options if "_" in name)
    pattern = rf"""
        (?<!\w) '[^']*'
        | `(?P<quoted>{every})`
        | ^(?P<first>{every})(?= \ (must|needs|is|has|cannot)\b | :)
        | (?<![\w/.-]) (?P<long>{long}) (?![\w/] | [.-]\w)
    """
    return re.sub(pattern, _as_flag, message, flags=re.VERBOSE)


def _as_flag(match: re.Match[str]) -> str:
    name = match["quoted"] or match["first"] or match["long"]
    return flag_name(name) if name else match[0]


def _flags(group: str, others: Collection[str] = (), only: Collection[str] = _NAMES) -> type:
    """Return a dataclass with one flag per option of the group that `only` names, and per option of `others`.

    None means that a flag was not given.
    """
    named = [each for each in _OPTIONS.values() if (each.group == group and each.name in only) or each.name in others]
    options = [option for option in named if option.name != "model"]
    fields: list[tuple[str, Any, Any]] = [(option.name, _flag(option), None) for option in options]
    if group == MEMORY:
        fields.append(("config", Annotated[Path | None, Parameter(help=CONFIG_HELP)], None))
    return _flag_class(group, fields)


def _flag_class(group: str, fields: list[tuple[str, Any, Any]]) -> type:
    module = {"__module__": __name__}  # cyclopts treats classes of the standard library as single values
    return Parameter(name="*", group=group)(make_dataclass("Flags", fields, namespace=module))


if TYPE_CHECKING:
    MemoryFlags: TypeAlias = Any
    SchedulingFlags: TypeAlias = Any
    ServerFlags: TypeAlias = Any
    LimitFlags: TypeAlias = Any
    MachineFlags: TypeAlias = Any
    HostFlags: TypeAlias = Any
    InfoFlags: TypeAlias = Any
    ScoringFlags: TypeAlias = Any
    BatchFlags: TypeAlias = Any
    DraftFlags: TypeAlias = Any
else:
    MemoryFlags, SchedulingFlags, ServerFlags, LimitFlags = map(_flags, (MEMORY, SCHEDULING, SERVER, LIMITS))
    MachineFlags = _flags(MACHINES)
    HostFlags = _flags(HOST, HOST_OPTIONS)
    InfoFlags = _flags(MEMORY, only=("embedding_model", "threads", "isa"))
    ScoringFlags = _flags(MEMORY, only=SCORING_OPTIONS)
    BatchFlags = _flags(SERVER, only=("served_model_name", "in_process", "engine_processes"))
    DraftFlags = _flags(SCHEDULING, only=("num_speculative_tokens", "draft_model"))
