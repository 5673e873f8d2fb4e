"""Recorded streams of requests: Mooncake's JSONL, and the CSV files of Azure and BurstGPT, as published.

A malformed file raises a ConfigError that names file, line and field.

Mooncake (Qin et al., FAST 2025), one line per request: `{"timestamp": ms, "input_length": …, "output_length": …,
"hash_ids": […]}`. An id stands for 512 tokens and everything before them, so equal ids mean equal prefixes. The ids do
not cover the output: a follow-up request that repeats it shares only the earlier prompt.

Azure's LLM inference traces of 2023 and 2024: the first line is `TIMESTAMP,ContextTokens,GeneratedTokens`, the others
are for example `2023-11-16 18:15:46.6805900,374,44`.

BurstGPT (Wang et al., 2024): the first line names at least `Timestamp` (seconds), `Request tokens` and `Response
tokens`, in any order. Rows with 0 tokens are failed requests and are left out.
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

from ...common.errors import ConfigError
from .arrivals import MAX_LENGTH, Arrival

MOONCAKE_BLOCK = 512  # tokens
MAX_LINE = 16 << 20  # characters
AZURE_FIELDS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
BURSTGPT_FIELDS = ("Timestamp", "Request tokens", "Response tokens")

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]  # some are recorded as 0; a prefill still samples one


class _MooncakeLine(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[int | str]


def read_mooncake(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first `limit` requests, the first of them at time 0. Raises ConfigError."""
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    block_ids: dict[int | str, int] = {}  # hash id -> small number
    arrivals = []
    for number, text in islice(text_lines(path), limit):
        try:
            line = decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if len(line.hash_ids) > -(-line.input_length // MOONCAKE_BLOCK):
            raise ConfigError(
                f"{path}, line {number}: hash_ids names {len(line.hash_ids)} blocks of {MOONCAKE_BLOCK} tokens, "
                f"more than the input_length of {line.input_length} has"
            )
        blocks = tuple(block_ids.setdefault(hash_id, len(block_ids)) for hash_id in line.hash_ids)
        arrivals.append(
            Arrival(line.timestamp / 1000, line.input_length, max(1, line.output_length), "", blocks, MOONCAKE_BLOCK)
        )
    return _from_zero(path, arrivals)


def read_azure(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first `limit` requests, the first of them at time 0. Raises ConfigError."""
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


def read_burstgpt(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first `limit` requests that did not fail, the first of them at time 0. Raises ConfigError."""
    rows = _csv_rows(path)
    _, header = next(rows, (1, []))
    if missing := [field for field in BURSTGPT_FIELDS if field not in header]:
        raise ConfigError(f"{path}, line 1: must name the field {missing[0]!r}, is {','.join(header)[:100]!r}")
    columns = [header.index(field) for field in BURSTGPT_FIELDS]
    arrivals = (_burstgpt_arrival(f"{path}, line {number}", row, len(header), columns) for number, row in rows)
    return _from_zero(path, list(islice(filter(None, arrivals), limit)))


def _burstgpt_arrival(where: str, row: list[str], num_fields: int, columns: list[int]) -> Arrival | None:
    if len(row) != num_fields:
        raise ConfigError(f"{where}: has {len(row)} fields, must have {num_fields} as line 1")
    timestamp, request, response = (row[column] for column in columns)
    if not re.fullmatch(r"\s*[0-9]{1,12}(\.[0-9]{1,9})?\s*", timestamp):
        raise ConfigError(f"{where}: Timestamp must be seconds such as 45 or 45.5, is {timestamp[:40]!r}")
    prompt_tokens = _count(where, "Request tokens", request, 0)
    output_tokens = _count(where, "Response tokens", response, 0)
    return Arrival(float(timestamp), prompt_tokens, output_tokens) if prompt_tokens and output_tokens else None


def _count(where: str, field: str, text: str, least: int) -> int:
    value = int(text) if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else -1
    if not least <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {field} must be a whole number from {least} to {MAX_LENGTH}, is {text[:40]!r}")
    return value


def _from_zero(path: Path, arrivals: list[Arrival]) -> list[Arrival]:
    """Return the arrivals in order of time, which recorded files do not always keep, counted from the earliest."""
    if not arrivals:
        raise ConfigError(f"{path} has no requests")
    arrivals.sort(key=lambda arrival: arrival.time_s)
    first = arrivals[0].time_s
    return [
        Arrival(round(each.time_s - first, 6), each.prompt_tokens, each.output_tokens, "", each.blocks)
        for each in arrivals
    ]


# Text files


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and text of each line that is not empty. Raises ConfigError.

    A line longer than MAX_LINE is an error too.
    """
    return ((number, text) for number, text in _lines(path) if text.strip())


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and fields of each line that is not empty. Raises ConfigError."""
    reader = csv.reader(text for _, text in _lines(path))
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
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
        raise ConfigError(f"{path} cannot be read: {error}") from error
