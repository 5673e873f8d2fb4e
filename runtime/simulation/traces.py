"""Recorded streams of requests: Mooncake's JSONL and Azure's CSV, as their projects publish them.

It must not know the scheduler. One invariant: a file is either read as it is meant or refused with a ConfigError that
names file, line and field.

Mooncake (Qin et al., FAST 2025), a line each: `{"timestamp": ms, "input_length": …, "output_length": …, "hash_ids":
[…]}`. An id stands for 512 tokens and all before them, so equal ids mean equal prefixes. What a request generated is
no part of its ids: a next turn that repeats it shares only its prompt.

Azure's LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens` in the first line, then e.g.
`2023-11-16 18:15:46.6805900,374,44`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import ConfigError
from .arrivals import MAX_LENGTH, Arrival

MOONCAKE_BLOCK = 512  # tokens
MAX_LINE = 16 << 20  # characters
AZURE_FIELDS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]  # 0, as some are recorded: a prefill samples one


class _MooncakeLine(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[int | str]


def read_mooncake(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests, the first of them at time 0. Raises ConfigError."""
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    numbers: dict[int | str, int] = {}  # hash id -> a small number
    arrivals = []
    for number, text in islice(((number, text) for number, text in _lines(path) if text.strip()), limit):
        try:
            line = decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if len(line.hash_ids) > -(-line.input_length // MOONCAKE_BLOCK):
            raise ConfigError(
                f"{path}, line {number}: hash_ids names {len(line.hash_ids)} blocks of {MOONCAKE_BLOCK} tokens, "
                f"more than the input_length of {line.input_length} has"
            )
        blocks = tuple(numbers.setdefault(hash_id, len(numbers)) for hash_id in line.hash_ids)
        arrivals.append(
            Arrival(line.timestamp / 1000, line.input_length, max(1, line.output_length), "", 0, blocks, MOONCAKE_BLOCK)
        )
    return _from_zero(path, arrivals)


def read_azure(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests, the first of them at time 0. Raises ConfigError."""
    rows = _csv_rows(path)
    _, header = next(rows, (1, []))
    if header != AZURE_FIELDS:
        raise ConfigError(f"{path}, line 1: must be {','.join(AZURE_FIELDS)}, is {','.join(header)[:100]!r}")
    return _from_zero(path, [_azure_arrival(f"{path}, line {number}", row) for number, row in islice(rows, limit)])


def _azure_arrival(where: str, row: list[str]) -> Arrival:
    if len(row) != len(AZURE_FIELDS):
        raise ConfigError(f"{where}: has {len(row)} fields, must have {len(AZURE_FIELDS)}: {','.join(AZURE_FIELDS)}")
    try:
        time = datetime.fromisoformat(row[0])
    except ValueError:
        raise ConfigError(
            f"{where}: TIMESTAMP {row[0][:40]!r} is not a time such as 2023-11-16 18:15:46.6805900"
        ) from None
    prompt_tokens = _count(where, "ContextTokens", row[1], 1)
    output_tokens = _count(where, "GeneratedTokens", row[2], 0)
    seconds = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return Arrival(seconds, prompt_tokens, max(1, output_tokens))


def _count(where: str, field: str, text: str, least: int) -> int:
    value = int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else -1
    if not least <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {field} must be a whole number from {least} to {MAX_LENGTH}, is {text[:40]!r}")
    return value


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line numbers and fields of all lines that are not empty."""
    reader = csv.reader(text for _, text in _lines(path))
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1; none longer than MAX_LINE."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number in count(1):
                text = file.readline(MAX_LINE)
                if not text:
                    return
                if len(text) == MAX_LINE:
                    raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE} characters")
                yield number, text
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error


def _from_zero(path: Path, arrivals: list[Arrival]) -> list[Arrival]:
    """In order of time, which recorded files nearly are, counted from the earliest."""
    if not arrivals:
        raise ConfigError(f"--trace {path} has no requests")
    arrivals.sort(key=lambda arrival: arrival.time_s)
    first = arrivals[0].time_s
    return [
        Arrival(round(each.time_s - first, 6), each.prompt_tokens, each.output_tokens, "", 0, each.blocks)
        for each in arrivals
    ]
