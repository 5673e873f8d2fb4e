"""Encodes frames to bytes and decodes bytes from the network: a length, then one msgpack array.

Decoding any bytes gives frames, `Malformed` or ProtocolError. It buffers at most one frame, whose declared length is
checked against the limit first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec

from ..common.errors import InvalidRequest, ProtocolError
from ..common.types import SamplingParams
from .frames import (
    CLIENT_FRAMES,
    MAX_FRAME_BYTES,
    MIN_FRAME_BYTES,
    SERVER_FRAMES,
    AskScores,
    AskVectors,
    Frame,
    Generate,
    Vectors,
)
from .framing import PREFIX_BYTES, next_payload, with_prefix

MAX_DEPTH = 8  # levels of nesting; TOKENS needs 5: frame, logprobs, token, alternatives, pair
MAX_ARRAY_LENGTH = 1 << 20
MAX_ARRAYS = 1 << 18  # per frame; logprobs of 8,192 tokens with 20 alternatives need 180,000
MAX_MAP_ENTRIES = 1 << 15  # entries of all maps in a frame, plus one per map; parsing them takes 15 ms
UNCHECKED_BYTES = 1 << 10  # shorter frames skip a check: false array lengths cost at most 3 MB and 2 ms there
MAX_ERROR_CHARACTERS = 500  # messages quote the peer's input

PARAMS_POSITION = 3  # position of the sampling parameters in GENERATE
_DEFAULT_PARAMS = msgspec.to_builtins(SamplingParams())
_DEFAULTS: dict[type[Frame], tuple[object, ...]] = {  # defaults of trailing fields of clients' frames, last field first
    frame: tuple({} if isinstance(default, SamplingParams) else default for default in frame.__struct_defaults__[::-1])
    for frame in CLIENT_FRAMES.values()
}
# Frame types with a field of msgpack's binary type, or with items of it -> the field's position in the array.
_BINARY = {
    "GENERATE": 1 + Generate.__struct_fields__.index("images"),
    "VECTORS": 1 + Vectors.__struct_fields__.index("values"),
}
_pack = msgspec.msgpack.Encoder().encode
_ARRAY = 0x90  # first byte of a msgpack array of up to 15 items; the number of items is added to it
_CONTAINERS = frozenset({tuple, dict})
_CHECKED_TYPES = _CONTAINERS | {bytes}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A GENERATE frame with a readable id whose other fields do not fit the schema; only that request fails."""

    request_id: int
    error: InvalidRequest


def encode(frame: Frame, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return a frame with its length. Raises InvalidRequest if a value has no msgpack form or the frame is too long."""
    short = _SHORT.get(type(frame))
    try:
        if short is None:
            payload = _pack(_as_array(frame))
        elif short.optional(frame) == short.all_defaults:
            payload = short.header + _pack(frame)[1 : short.end]
        else:
            payload = short.pack(frame)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"cannot be sent: {error}") from error
    if len(payload) > max_frame_bytes:
        raise InvalidRequest(f"needs a frame of {len(payload)} bytes, the limit is {max_frame_bytes}")
    return with_prefix(payload)


def _as_array(frame: Frame) -> list[Any]:
    """Return a client's frame as an array without default values, which a server of an earlier release may not know.

    Trailing fields and sampling parameters are left out.
    """
    array: list[Any] = msgspec.to_builtins(frame, builtin_types=(bytes,))
    if type(frame) is Generate:
        array[PARAMS_POSITION] = {
            name: value for name, value in array[PARAMS_POSITION].items() if value != _DEFAULT_PARAMS[name]
        }
    for default in _DEFAULTS[type(frame)]:
        if array[-1] != default:
            break
        array.pop()
    return array


@dataclass(frozen=True, slots=True)
class _Short:
    """The encoding of a frame type: packed whole, then cut before the trailing fields that have their defaults."""

    optional: Callable[[Frame], object]
    all_defaults: object  # result of `optional` if every field has its default
    header: bytes  # first byte in that case
    end: int | None  # place of the cut in that case, counted from the end of the packed frame
    defaults: dict[str, object]  # last field first

    @classmethod
    def of(cls, frame: type[Frame]) -> _Short:
        defaults = dict(zip(frame.__struct_fields__[::-1], frame.__struct_defaults__[::-1], strict=False))
        optional = attrgetter(*defaults) if defaults else lambda frame: None
        return cls(
            optional,
            optional(SimpleNamespace(**defaults)),
            bytes([_ARRAY + 1 + len(frame.__struct_fields__) - len(defaults)]),
            -sum(len(_pack(default)) for default in defaults.values()) or None,
            defaults,
        )

    def pack(self, frame: Frame) -> bytes:
        """Pack a frame that has optional fields without their defaults."""
        packed = _pack(frame)
        header = packed[0]
        end = len(packed)
        for name, default in self.defaults.items():
            if getattr(frame, name) != default:
                break
            header -= 1
            end -= len(_pack(default))
        return bytes([header]) + packed[1:end]


# For the server only: values from a client's user may have types that `msgspec.to_builtins` has to convert.
_SHORT = {frame: _Short.of(frame) for frame in SERVER_FRAMES.values()}


def check_limits(data: bytes) -> None:
    """Raise InvalidRequest if a `Decoder` would refuse `data`, one encoded frame, as a breach of the protocol.

    A user's values can nest too deeply or have too many items.
    """
    try:
        _unpack(data[PREFIX_BYTES:])
    except ProtocolError as error:
        raise InvalidRequest(f"cannot be sent: {error}") from error


class Decoder:
    """Incremental decoder for one direction of one connection.

    `max_frame_bytes` may be raised between two frames, also while the result of `feed` is being iterated. After a
    ProtocolError the frame boundaries are lost and the connection must be closed.
    """

    def __init__(self, schema: Mapping[str, type[Frame]], max_frame_bytes: int = MIN_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._schema = schema
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """Whether the bytes fed so far end inside a frame."""
        return bool(self._buffer)

    @property
    def num_buffered_bytes(self) -> int:
        """The received bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame | Malformed]:
        """Add `data` and iterate the complete frames. Raises ProtocolError at a breach, after the frames before it."""
        self._buffer += data
        while (payload := next_payload(self._buffer, self.max_frame_bytes)) is not None:
            yield parse_frame(_unpack(payload), self._schema)


def parse_frame(message: tuple[Any, ...], schema: Mapping[str, type[Frame]]) -> Frame | Malformed:
    """Return the frame of a decoded array. Raises ProtocolError if its type is unknown or its fields do not fit."""
    name = message[0] if message else None
    frame_type = schema.get(name) if isinstance(name, str) else None
    if frame_type is None:
        raise ProtocolError(f"unknown frame type {_quoted(name)}; known here: {', '.join(schema)}")
    try:
        return msgspec.convert(message, frame_type, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        reason = _with_field_name(frame_type, str(error))
        if frame_type in (Generate, AskVectors, AskScores) and (request_id := _readable_id(message)) is not None:
            return Malformed(request_id, InvalidRequest(reason[:MAX_ERROR_CHARACTERS]))
        raise ProtocolError(f"{name} does not fit its schema: {reason}"[:MAX_ERROR_CHARACTERS]) from error


def _with_field_name(frame_type: type[Frame], reason: str) -> str:
    """Return the reason with the field that msgspec gives as a position: "Expected `int` - at `$[5]`"."""
    what, at, where = reason.rpartition(" - at ")
    if not at:  # the number of fields is wrong
        return f"the frame: {_lowered(reason)}"
    fields = frame_type.__struct_fields__
    where = re.sub(r"\$\[(\d+)\]", lambda position: fields[int(position[1]) - 1], where.replace("`", ""), count=1)
    return f"{where}: {_lowered(what)}"


def _lowered(reason: str) -> str:
    return reason[:1].lower() + reason[1:].replace("`", "")


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
            strict_map_key=False,  # logit_bias has integer keys; _MapReader checks keys
            list_hook=_ArrayCounter() if len(payload) > MAX_ARRAYS else None,  # an array takes at least a byte
            object_pairs_hook=_MapReader(),
            ext_hook=_refuse_extension,
            max_str_len=len(payload),
            max_bin_len=len(payload),
            max_array_len=min(MAX_ARRAY_LENGTH, len(payload)),
            max_map_len=min(MAX_MAP_ENTRIES, len(payload)),
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    # msgpack documents no common base class: malformed, truncated, trailing and nested input raise different ones.
    except Exception as error:
        raise ProtocolError(
            f"a frame is not one msgpack value within limits: {error}"[:MAX_ERROR_CHARACTERS]
        ) from error
    if not isinstance(message, tuple):
        raise ProtocolError(f"a frame must be a msgpack array, not {type(message).__name__}")
    _check_contents(_without_binary(message), MAX_DEPTH)
    return message


def _without_binary(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the array of a frame without the binary values that its type may have."""
    name = message[0] if message else None
    position = _BINARY.get(name, len(message)) if isinstance(name, str) else len(message)
    if position >= len(message):
        return message
    values = message[position] if isinstance(message[position], tuple) else (message[position],)
    others = tuple([value for value in values if type(value) is not bytes])
    return (*message[:position], others, *message[position + 1 :])


def _check_complete(payload: bytes) -> None:
    """Raise an error unless `payload` holds one complete value, without building it.

    msgpack allocates an array with its declared length before it reads the items: 3 KB of a thousand nested arrays
    would take 80 MB and 86 ms before the frame is found incomplete.
    """
    walker = msgpack.Unpacker(max_buffer_size=len(payload))
    walker.feed(payload)
    walker.skip()


class _ArrayCounter:
    """Limits the number of arrays in one frame; four million would take a second and 200 MB."""

    def __init__(self) -> None:
        self._arrays = 0

    def __call__(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self._arrays += 1
        if self._arrays > MAX_ARRAYS:
            raise ProtocolError(f"a frame holds more than {MAX_ARRAYS} arrays")
        return items


class _MapReader:
    """Builds the maps of one frame; limits their entries, and allows only text and integers as keys, none twice."""

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
    """Raise ProtocolError if `value` nests too deeply or contains msgpack's binary type.

    Long flat arrays, the common case, need one pass over the types of their items, which runs in C.
    """
    if levels == 0:
        raise ProtocolError(f"a frame nests deeper than {MAX_DEPTH} levels")
    items = value.values() if isinstance(value, dict) else value
    if _CHECKED_TYPES.isdisjoint(map(type, items)):
        return
    for item in items:
        if type(item) in _CONTAINERS:
            _check_contents(item, levels - 1)
        elif type(item) is bytes:
            raise ProtocolError("msgpack's binary type is not part of this frame")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
