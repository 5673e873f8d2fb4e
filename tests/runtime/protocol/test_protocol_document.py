"""PROTOCOL.md agrees with the code: every frame and field with its position, the constants, and the bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest
from quire.runtime.common import errors
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import ChatOptions, SamplingParams, ToolChoice, Usage
from quire.runtime.engine import validator
from quire.runtime.protocol import codec, frames
from quire.runtime.protocol import wire_errors as wire_errors
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import CLIENT_FRAMES, SERVER_FRAMES, ServedModel

TEXT = (Path(__file__).resolve().parents[3] / "runtime" / "protocol" / "PROTOCOL.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^#{2,3} ([^\n]+)\n(.*?)(?=^#{2,3} |\Z)", TEXT, re.M | re.S))
EITHER_WAY = (frames.Ping, frames.Pong)
FRAMES = {
    **{f"{name}, from the client": frame for name, frame in CLIENT_FRAMES.items() if frame not in EITHER_WAY},
    **{f"{name}, from the server": frame for name, frame in SERVER_FRAMES.items() if frame not in EITHER_WAY},
    "PING, either way": frames.Ping,
    "PONG, either way": frames.Pong,
}
MAPS = {
    "`params` of GENERATE": SamplingParams,
    "`chat` of GENERATE": ChatOptions,
    "`tool_choice` of `chat`": ToolChoice,
    "`usage` of DONE": Usage,
    "Each of MODELS": ServedModel,
}
EXAMPLES = re.findall(r"^    ([→←]) (.*)\n((?:      [0-9a-f ]+\n)+)", TEXT, re.M)


def rows(section: str) -> list[list[str]]:
    """Return the cells of a section's table rows, without headings and rules."""
    lines = [line for line in SECTIONS[section].splitlines() if re.match(r"\| [^|]", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def defaults(struct: type[Any]) -> list[tuple[str, str, bool]]:
    """Return each field's name, its default as the document writes it, and whether nil is allowed."""
    hints = get_type_hints(struct)
    found = []
    for field in msgspec.structs.fields(struct):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found.append((field.name, written(default), NoneType in get_args(hints[field.name])))
    return found


def written(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "–"
    if isinstance(default, SamplingParams | ToolChoice):
        return "{}"
    return "nil" if default is None else json.dumps(default)


def documented(table: list[list[str]]) -> list[tuple[str, str, bool]]:
    return [(name.strip("`"), default, "nil" in kind) for name, kind, default, *_ in table]


def test_every_frame_has_a_section() -> None:
    assert {title for title in SECTIONS if re.match(r"[A-Z]+, ", title)} == set(FRAMES)


@pytest.mark.parametrize("title", FRAMES)
def test_every_field_is_listed_with_its_position_and_default(title: str) -> None:
    table = rows(title)
    assert [row[0] for row in table] == [str(position) for position in range(1, len(table) + 1)]
    assert documented([row[1:] for row in table]) == defaults(FRAMES[title])


@pytest.mark.parametrize("title", MAPS)
def test_every_name_of_a_map_is_listed_with_its_default(title: str) -> None:
    assert documented(rows(title)) == defaults(MAPS[title])


def test_numbers_equal_the_constants() -> None:
    known = {"frames": frames, "codec": codec, "config": ServerConfig()}
    cited = re.findall(r"^\|.*\| (\d+) \| `(\w+)\.(\w+)` \|$", TEXT, re.M)
    assert len(cited) == 22
    assert {(owner, name): int(number) for number, owner, name in cited} == {
        (owner, name): getattr(known[owner], name) for _, owner, name in cited
    }


def test_limits_of_parameters_equal_those_of_the_validator() -> None:
    for name, text in {
        "deadline_ms": f"1 to {validator.MAX_DEADLINE_MS},",
        "priority": f"-{validator.MAX_PRIORITY} to {validator.MAX_PRIORITY},",
        "pin_ms": f"0 to {validator.MAX_PIN_MS}:",
        "logit_bias": f"at most {validator.MAX_BIASED_TOKENS} entries",
        "stop": f"at most {validator.MAX_STOP_STRINGS}, of 1 to {validator.MAX_STOP_CHARACTERS} characters",
        "stop_token_ids": f"at most {validator.MAX_STOP_TOKEN_IDS} ",
        "logprobs": f"0 to {validator.MAX_LOGPROBS}:",
        "n": f"to {validator.MAX_CHOICES} ",
        "beam_width": f"to {validator.MAX_BEAM_WIDTH} ",
        "message": f"at most {wire_errors.MAX_MESSAGE_CHARACTERS} characters",
    }.items():
        assert re.search(rf"\| `{name}` \|.*{re.escape(text)}", TEXT), name
    for prose, number in {
        "HELLO within 10 s": 10_000 - ServerConfig().handshake_timeout_ms,
        "up to 1024 by default": 1024 - ServerConfig().max_requests_per_connection,
        "one in 32 of them within 30 s": 30_000 - ServerConfig().credit_timeout_ms,
        "may be 8 MiB": (8 << 20) - ServerConfig().max_outgoing_bytes,
        "connections may be 128 MiB": (128 << 20) - ServerConfig().max_unsent_bytes,
        "no byte could be sent for 30 s": 30_000 - ServerConfig().write_timeout_ms,
        "outlives its connection for 60 s": 60_000 - ServerConfig().resume_timeout_ms,
        "is known for 600 s": 600_000 - ServerConfig().idempotency_window_ms,
        "a server keeps 128 MiB": (128 << 20) - ServerConfig().max_kept_bytes,
        "complete within 30 s of its first byte": 30_000 - ServerConfig().frame_timeout_ms,
        "nothing comes for 600 s": 600_000 - ServerConfig().idle_timeout_ms,
    }.items():
        assert prose in re.sub(r"\s+", " ", TEXT)
        assert number == 0, prose


def test_every_error_code_is_listed() -> None:
    classes = {(error.code, error.retryable) for error in (*wire_errors._CLASSES, errors.ProtocolError)}
    table = {(row[0].strip("`"), row[1] == "yes") for row in rows("Errors") if row[0].startswith("`")}
    assert table == classes | {(frames.ALREADY_EXISTS, False)}


def test_every_feature_is_described() -> None:
    for feature in frames.FEATURES:
        assert f"`{feature}`" in SECTIONS["Greeting"]


@pytest.mark.parametrize(("arrow", "message", "dump"), EXAMPLES, ids=[message[2:9] for _, message, _ in EXAMPLES])
def test_the_bytes_of_examples_decode_to_their_text(arrow: str, message: str, dump: str) -> None:
    data = bytes.fromhex(dump)
    assert int.from_bytes(data[:4]) == len(data) - 4
    assert msgpack.unpackb(data[4:]) == json.loads(message)
    (frame,) = Decoder(CLIENT_FRAMES if arrow == "→" else SERVER_FRAMES).feed(data)
    if arrow == "←":
        assert encode(frame) == data  # a client may leave fields out


def test_the_conversation_has_every_step() -> None:
    assert [json.loads(message)[0] for arrow, message, _ in EXAMPLES if arrow == "→"] == [
        "HELLO", "GENERATE", "CREDIT", "GENERATE", "CANCEL", "PING",
    ]  # fmt: skip
