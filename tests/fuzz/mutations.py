"""Valid frames of every type that a client may send, and ways to break them: what both frame fuzzers feed on.

It must not know who decodes them. One invariant: every case follows from its `random.Random` alone, so that a seed
and a case's number name it for good.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack
from quire.runtime.protocol.frames import CLIENT_FRAMES

LENGTH = struct.Struct(">I")
MAX_CHANGES = 4  # of one frame
EXTREMES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 127, 128, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf,
    "", "x", "日本", "\0", "x" * 300, "PING", b"", b"bytes",
    [], [[]], [0] * 100, {}, {"": None}, {0: 1}, {"a": {"b": {}}}, {"__proto__": 1}, msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1),
)  # fmt: skip
LYING_HEADERS = (
    b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff",  # text
    b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x9f",  # arrays
    b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x8f",  # maps
    b"\xc7\xff\x01", b"\xc8\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x01", b"\xd8\x01", b"\xd6\xff",  # extensions
    b"\xc1", b"\xa1\xff", b"\xa3\xed\xa0\x80",  # the unused byte; text that is no UTF-8; half a surrogate pair
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    data: bytes
    framed: bool  # every declared length is right: whoever reads it can read what follows


def mutated(chance: Random) -> Case:
    """One broken frame, sometimes one that is broken in its length only, rarely a good one."""
    kind = chance.random()
    if kind < 0.05:
        return Case(framed(packed(message(chance))), framed=True)
    if kind < 0.45:
        return Case(framed(packed(_change_values(message(chance), chance))), framed=True)
    payload = packed(message(chance))
    for _ in range(chance.randint(1, MAX_CHANGES)):
        payload = chance.choice(BYTE_CHANGES)(payload, chance)
    if kind < 0.9:
        return Case(framed(payload), framed=True)
    lie = chance.choice((0, 1, len(payload) - 1, len(payload) + 1, 1 << 16, 1 << 22, 2**31, 2**32 - 1))
    return Case(LENGTH.pack(max(0, lie)) + payload, framed=False)


def message(chance: Random) -> list[Any]:
    """What a client may say. Generated text is short, so that a fuzzed server has time for the next frame."""
    return [*MESSAGES[chance.choice(TYPES)](chance)]


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def _hello(chance: Random) -> Sequence[Any]:
    return "HELLO", [1], None, ["progress", "heartbeat"], 1 << 20, chance.choice((None, "no such session"))


def _generate(chance: Random) -> Sequence[Any]:
    prompt = chance.choice(("This module", [chance.randrange(4096) for _ in range(chance.randrange(1, 40))]))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    return (
        "GENERATE",
        chance.randrange(4),
        *chance.choice(
            ((prompt,), (prompt, _params(chance), 1000, 0, 10, None, 4), (None, {}, None, 0, None, messages))
        ),
    )


def _params(chance: Random) -> dict[str, Any]:
    full = {
        "max_tokens": chance.randrange(1, 8),
        "temperature": chance.random(),
        "top_k": 5,
        "top_p": 0.9,
        "seed": chance.getrandbits(64),
        "logit_bias": {3: 1.5, 70: -2.0},
        "stop": ["a", "bc"],
        "stop_token_ids": [5],
        "logprobs": 2,
        "n": 2,
        "repetition_penalty": 1.1,
    }
    return {name: full[name] for name in chance.sample(sorted(full), chance.randrange(len(full)))} | {
        "max_tokens": full["max_tokens"]
    }


MESSAGES: dict[str, Callable[[Random], Sequence[Any]]] = {
    "HELLO": _hello,
    "GENERATE": _generate,
    "CANCEL": lambda chance: ("CANCEL", chance.randrange(4)),
    "CREDIT": lambda chance: ("CREDIT", chance.randrange(4), chance.randrange(1, 9)),
    "RESUME": lambda chance: ("RESUME", chance.randrange(4), chance.randrange(9), None),
    "TOKENIZE": lambda chance: ("TOKENIZE", chance.randrange(4), "Grüße aus 日本", True),
    "MODELS": lambda chance: ("MODELS", chance.randrange(4)),
    "STATS": lambda chance: ("STATS", chance.randrange(4)),
    "PING": lambda chance: ("PING", chance.getrandbits(64)),
    "PONG": lambda chance: ("PONG", chance.getrandbits(64)),
}
TYPES = (*MESSAGES, *["GENERATE"] * len(MESSAGES))  # half of them
assert MESSAGES.keys() == CLIENT_FRAMES.keys(), "a frame type that is not fuzzed"


# Changes of values: the frame stays one msgpack value


def _change_values(value: list[Any], chance: Random) -> list[Any]:
    for _ in range(chance.randint(1, MAX_CHANGES)):
        value = _change_inside(value, chance)
    return value


def _change_inside(value: Any, chance: Random) -> Any:
    """Somewhere in `value`: an item becomes something else, or appears, or goes."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        return {**value, key: _change_inside(value[key], chance)}
    if not isinstance(value, list) or not value:
        return chance.choice(EXTREMES)
    items, at, kind = [*value], chance.randrange(len(value)), chance.random()
    if kind < 0.7:
        items[at] = _change_inside(items[at], chance)
    elif kind < 0.8:
        items.insert(at, chance.choice(EXTREMES))
    elif kind < 0.9:
        del items[at]
    else:
        items[at] = _nested(items[at], chance.randint(1, 9))
    return items


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


# Changes of bytes: it may be no msgpack at all


def _set_byte(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]


def _flip_bit(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) or 1)
    return data[:at] + bytes(byte ^ 1 << chance.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _insert(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.randint(1, 8)) + data[at:]


def _remove(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + data[at + chance.randint(1, 8) :]


def _repeat(data: bytes, chance: Random) -> bytes:
    at, count = chance.randrange(len(data) + 1), chance.choice((2, 10, 1000))
    return data[:at] + data[at : at + chance.randint(1, 4)] * count + data[at:]


def _lie(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(LYING_HEADERS) + data[at + chance.randrange(2) :]


def _nest(data: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice((b"\x91", b"\x81\xa1a")) * chance.choice((1, 9, 600, 10_000)) + data[at:]


def _splice(data: bytes, chance: Random) -> bytes:
    other = packed(message(chance))
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other)) :]


BYTE_CHANGES = (_set_byte, _flip_bit, _insert, _remove, _repeat, _lie, _nest, _splice)
