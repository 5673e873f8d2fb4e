"""Options as data: the description of an option in its config struct's field, and the parsing of its values.

A field declares its option with `option` in its annotation; `options_of` reads all options of a struct.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, cast

import msgspec
from msgspec import inspect

from .errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=1)]  # the type of most options
SPELLINGS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}  # vLLM's names of data types
NAMES_ELSEWHERE = {  # a name in vLLM, transformers or OpenAI's API -> the name here
    "dtype": "weights",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_beams": "beam_width",
    "params": "sampling_params",
}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]i?)?B?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SIZE_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def option(
    group: str,
    help: str,
    *,
    unit: str = "",
    default: str = "",
    alias: str = "",
    is_secret: bool = False,
    is_of_machine: bool = False,
) -> msgspec.Meta:
    """Describe the option of an annotated field.

    `group` is its heading in help texts. `unit` is the unit of a number or names a text's meaning (`file`); a number of
    `bytes` may be written as `4GiB`. `default` says in words what None stands for. `alias` is a second accepted name.
    Messages never quote the value of a secret. With `is_of_machine`, the variable belongs to the machine: the process
    that loads a model reads it, so it may be set where no model is loaded.
    """
    return msgspec.Meta(
        description=help,
        extra={
            "group": group,
            "unit": unit,
            "default_text": default,
            "alias": alias,
            "is_secret": is_secret,
            "is_of_machine": is_of_machine,
        },
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as the field of a config struct declares it."""

    name: str
    kind: inspect.Type  # type of a value, without `| None`
    default: object
    help: str = ""
    group: str = ""
    unit: str = ""
    default_text: str = ""
    alias: str = ""
    is_secret: bool = False
    is_of_machine: bool = False

    @property
    def flag(self) -> str:
        """The name of the option on the command line."""
        return flag_name(self.name)

    @property
    def is_switch(self) -> bool:
        """Whether the command line spells its values `--name` and `--no-name`."""
        return isinstance(self.kind, inspect.BoolType)

    def convert(self, value: object, where: str) -> object:
        """Return `value`, parsed if it is text. Raises ConfigError that says `where` it was set and what is allowed."""
        return _convert(value, self.kind, self, where)

    def allowed(self) -> str:
        """Return the rule for a value, such as `a whole number of at least 1`."""
        return _allowed(self.kind, self.unit)

    def default_as_text(self) -> str:
        """Return the default with its unit, or in words if it is decided at start; empty if there is none."""
        match self.default:
            case bool():
                return "on" if self.default else "off"
            case int() if self.unit == "bytes":
                return _size_as_text(self.default)
            case int() | float():
                return f"{self.default:.15g} {self.unit}".rstrip()
            case str():
                return self.default
        return self.default_text


def options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the options of a config struct by name, in its order."""
    described = cast(inspect.StructType, inspect.type_info(struct))
    return {field.name: _option_of(field) for field in described.fields}


def flag_name(option: str) -> str:
    """Return an option's name as the command line spells it: `max_num_seqs` becomes `--max-num-seqs`."""
    return "--" + option.replace("_", "-")


def suggestion(name: str, options: Iterable[str]) -> str:
    """Return ` (did you mean 'weights'?)` with the option closest to an unknown name, or an empty text."""
    nearest = nearest_name(name, options)
    return f" (did you mean {nearest!r}?)" if nearest else ""


def nearest_name(name: str, options: Iterable[str], least_similarity: float = 0.6) -> str | None:
    """Return the option closest to an unknown name, None if none is close. Similarities are 0 to 1."""
    options = list(options)
    known = NAMES_ELSEWHERE.get(name)
    return known if known in options else next(iter(get_close_matches(name, options, 1, least_similarity)), None)


def _option_of(field: inspect.Field) -> Option:
    kind = field.type
    said = {}
    if isinstance(kind, inspect.Metadata) and kind.extra is not None:
        said = {**kind.extra, "help": (kind.extra_json_schema or {}).get("description", "")}
        kind = kind.type
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Option(field.name, _without_none(kind), default, **said)


def _without_none(kind: inspect.Type) -> inspect.Type:
    if isinstance(kind, inspect.UnionType):
        (kind,) = (member for member in kind.types if not isinstance(member, inspect.NoneType))
    return kind


# Parsing a value


def _convert(value: object, kind: inspect.Type, option: Option, where: str) -> object:
    if isinstance(kind, inspect.DictType):
        entries = _entries(value)
        if entries is not None:
            return {key: _convert(item, kind.value_type, option, f"{where}: {key!r}") for key, item in entries.items()}
    elif (parsed := _parse(value, kind, option.unit)) is not None:
        return parsed
    shown = "the given value" if option.is_secret else repr(value)
    allowed = "below 10^18" if _is_too_large(value, kind) else _allowed(kind, option.unit)
    raise ConfigError(f"{where} must be {allowed}, not {shown}")


def _is_too_large(value: object, kind: inspect.Type) -> bool:
    """Return whether a whole number has more than 18 digits, which no option takes."""
    return isinstance(kind, inspect.IntType) and re.match(r"\s*\+?[0-9]{19}", str(value)) is not None


def _parse(value: object, kind: inspect.Type, unit: str) -> object:
    """Return the value as `kind`, None if it is not allowed."""
    match kind:
        case inspect.IntType():
            number: float | None = _integer(value, unit)
            return number if number is not None and _is_within(number, kind) else None
        case inspect.FloatType():
            number = _number(value)
            return number if number is not None and _is_within(number, kind) else None
        case inspect.BoolType():
            parsed = _BOOLEANS.get(value.lower()) if isinstance(value, str) else value
            return parsed if isinstance(parsed, bool) else None
        case inspect.LiteralType():
            name = SPELLINGS.get(value, value) if isinstance(value, str) else value
            named = [each for each in kind.values if each == name or str(each) == name]
            return named[0] if named else None
        case _:
            return value if isinstance(value, str) else None


def _integer(value: object, unit: str) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 10**18 else None
    if not isinstance(value, str):
        return None
    if unit == "bytes":
        return parse_size(value)
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()) else None


def _number(value: object) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _entries(value: object) -> dict[str, Any] | None:
    """Return the entries of a table or of text like `a=2,b=0.5`; None if the text has another form or a key twice."""
    if not isinstance(value, str):
        return value if isinstance(value, dict) else None
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    entries: dict[str, Any] = {key.strip(): item.strip() for key, equals, item in pairs if equals}
    return entries if len(entries) == len(pairs) else None


def parse_size(text: str) -> int | None:
    """Return the bytes of `4GiB`, `1.5 GB`, `512M` or `4096`; prefixes with an i are powers of 1024, others of 1000."""
    found = _SIZE.fullmatch(text.strip())
    return round(float(found[1]) * _SIZE_UNITS[(found[2] or "").lower()]) if found and len(found[1]) <= 18 else None


def _size_as_text(size: int) -> str:
    for name, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{name}"
    return str(size)


def _is_within(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
    )


# Saying what is allowed


def _allowed(kind: inspect.Type, unit: str) -> str:
    match kind:
        case inspect.IntType() if unit == "bytes":
            return f"a size in bytes{_range(kind)}, such as 4294967296 or 4GiB"
        case inspect.IntType():
            return f"a whole number{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.VarTupleType():
            return f"a list of {'texts' if isinstance(kind.item_type, inspect.StrType) else 'whole numbers'}"
        case inspect.DictType() if isinstance(kind.key_type, inspect.IntType):
            return "a map of whole numbers to numbers"
        case inspect.DictType() if isinstance(kind.value_type, inspect.StrType):
            return "names with a path each, such as a=path,b=path"
        case inspect.DictType():
            return "names with a number each, such as a=2,b=0.5"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            *names, last = map(str, kind.values)
            return f"{', '.join(names)} or {last}" if names else last
        case _:
            return "text"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:.15g} to {kind.le:.15g}"
    limits = [f"{word} {limit:.15g}" for word, limit in (("above", kind.gt), ("at most", kind.le)) if limit is not None]
    if kind.ge is not None:
        return f" of at least {kind.ge:.15g}"
    return f" {' and '.join(limits)}" if limits else ""
