"""Frames to bytes and back: u32 big-endian length, then one msgpack array. The only parser of foreign bytes.

It must not know sockets or requests. One invariant: whatever the bytes, decoding gives frames, `Malformed` or
ProtocolError, and never holds more than one frame's declared length, itself checked against the limit first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec

from ..common.errors import InvalidRequest, ProtocolError
from .frames import MAX_FRAME_BYTES, MIN_FRAME_BYTES, Frame, Generate
from .framing import PREFIX_BYTES, next_payload, with_prefix

MAX_DEPTH = 8  # TOKENS needs 5: frame, logprobs, token, alternatives, pair
MAX_ARRAY_LENGTH = 1 << 20
MAX_ARRAYS = 1 << 18  # per frame; logprobs of 8,192 tokens with 20 alternatives need 180,000
MAX_MAP_ENTRIES = 1 << 15  # of all maps in a frame, each map counting as one more: 15 ms of reading
UNCHECKED_BYTES = 1 << 10  # a shorter frame can claim what it likes: it costs 3 MB and 2 ms at most
MAX_ERROR_CHARACTERS = 500  # messages may quote what was sent

_CONTAINERS = frozenset({tuple, dict})
_WANT_A_LOOK = _CONTAINERS | {bytes}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A well-framed GENERATE with a readable id whose body does not fit the schema: that request's failure only."""

    request_id: int
    error: InvalidRequest


def encode(frame: Frame, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame with its length. Raises InvalidRequest when a value has no msgpack form or the frame is too long."""
    try:
        payload: bytes = msgpack.packb(msgspec.to_builtins(frame))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"cannot be sent: {error}") from error
    if len(payload) > max_frame_bytes:
        raise InvalidRequest(f"needs a frame of {len(payload)} bytes, the limit is {max_frame_bytes}")
    return with_prefix(payload)


def check_limits(data: bytes) -> None:
    """Of one frame as `encode` gives it. Raises InvalidRequest for what a `Decoder` calls a breach of the protocol: a
    user's values may nest deeper, or be more, than a connection may carry."""
    try:
        _unpack(data[PREFIX_BYTES:])
    except ProtocolError as error:
        raise InvalidRequest(f"cannot be sent: {error}") from error


class Decoder:
    """An incremental decoder of one direction of one connection.

    `max_frame_bytes` may be raised between two frames, also while one `feed` is being iterated. After a ProtocolError
    the stream has lost its framing and the connection must be closed.
    """

    def __init__(self, schema: Mapping[str, type[Frame]], max_frame_bytes: int = MIN_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._schema = schema
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """Whether the bytes fed so far end inside a frame."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame | Malformed]:
        """Take `data`, iterate the frames it completes. Raises ProtocolError at the breach, after the good frames."""
        self._buffer += data
        return self._complete_frames()

    def _complete_frames(self) -> Iterator[Frame | Malformed]:
        while (payload := next_payload(self._buffer, self.max_frame_bytes)) is not None:
            yield parse_frame(_unpack(payload), self._schema)


def parse_frame(message: tuple[Any, ...], schema: Mapping[str, type[Frame]]) -> Frame | Malformed:
    """The frame a decoded array stands for. Raises ProtocolError for an unknown type or a body that does not fit."""
    name = message[0] if message else None
    frame_type = schema.get(name) if isinstance(name, str) else None
    if frame_type is None:
        raise ProtocolError(f"unknown frame type {_quoted(name)}; known here: {', '.join(schema)}")
    try:
        return msgspec.convert(message, frame_type, strict=True)
    except msgspec.ValidationError as error:
        reason = f"{name} does not fit its schema: {error}"[:MAX_ERROR_CHARACTERS]
        if frame_type is Generate and (request_id := _readable_id(message)) is not None:
            return Malformed(request_id, InvalidRequest(reason))
        raise ProtocolError(reason) from error


def _readable_id(message: tuple[Any, ...]) -> int | None:
    if len(message) > 1 and type(message[1]) is int and message[1] >= 0:
        return message[1]
    return None


def _unpack(payload: bytes) -> tuple[Any, ...]:
    try:
        if len(payload) > UNCHECKED_BYTES:
            _check_complete(payload)
        message = msgpack.unpackb(
            payload,
            use_list=False,
            strict_map_key=False,  # logit_bias has integer keys; _MapReader is the stricter judge
            list_hook=_ArrayCounter() if len(payload) > MAX_ARRAYS else None,  # each has a byte at least
            object_pairs_hook=_MapReader(),
            ext_hook=_refuse_extension,
            max_str_len=len(payload),
            max_bin_len=0,
            max_array_len=min(MAX_ARRAY_LENGTH, len(payload)),
            max_map_len=min(MAX_MAP_ENTRIES, len(payload)),
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    # The library documents no common base: malformed, truncated, trailing and nested input differ by type.
    except Exception as error:
        raise ProtocolError(
            f"a frame is not one msgpack value within limits: {error}"[:MAX_ERROR_CHARACTERS]
        ) from error
    if not isinstance(message, tuple):
        raise ProtocolError(f"a frame must be a msgpack array, not {type(message).__name__}")
    _check_contents(message, MAX_DEPTH)
    return message


def _check_complete(payload: bytes) -> None:
    """Walk it without building anything. Arrays are built as long as they say they are, before their items are read:
    3 KB of a thousand, each in the one before, cost 80 MB and 86 ms to be found incomplete."""
    walker = msgpack.Unpacker(max_buffer_size=len(payload))
    walker.feed(payload)
    walker.skip()


class _ArrayCounter:
    """Passes the arrays of one frame on: a bounded number. Four million would cost a second, and 200 MB."""

    def __init__(self) -> None:
        self._arrays = 0

    def __call__(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self._arrays += 1
        if self._arrays > MAX_ARRAYS:
            raise ProtocolError(f"a frame holds more than {MAX_ARRAYS} arrays")
        return items


class _MapReader:
    """Builds the maps of one frame: not too much of them together, keys strings or integers, none twice."""

    def __init__(self) -> None:
        self._entries = 0

    def __call__(self, pairs: list[tuple[Any, Any]]) -> dict[str | int, Any]:
        self._entries += 1 + len(pairs)
        if self._entries > MAX_MAP_ENTRIES:
            raise ProtocolError(f"the maps of a frame hold more than {MAX_MAP_ENTRIES} entries")
        entries: dict[str | int, Any] = {}
        for key, value in pairs:
            if type(key) is not str and type(key) is not int:
                raise ProtocolError(f"a map key is a {type(key).__name__}; keys are strings or integers")
            if key in entries:
                raise ProtocolError(f"a map has the key {_quoted(key)} twice")
            entries[key] = value
        return entries


def _refuse_extension(code: int, data: bytes) -> None:
    raise ProtocolError(f"msgpack extension type {code} is not part of the protocol")


def _check_contents(value: tuple[Any, ...] | dict[Any, Any], levels: int) -> None:
    """Long flat arrays, the common case, are cleared by one C-speed pass over their items' types."""
    if levels == 0:
        raise ProtocolError(f"a frame nests deeper than {MAX_DEPTH} levels")
    items = value.values() if isinstance(value, dict) else value
    if _WANT_A_LOOK.isdisjoint(map(type, items)):
        return
    for item in items:
        if type(item) in _CONTAINERS:
            _check_contents(item, levels - 1)
        elif type(item) is bytes:  # empty: max_bin_len lets no other through
            raise ProtocolError("msgpack's binary type is not part of the protocol")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
