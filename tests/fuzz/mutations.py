"""Generate the cases of both frame fuzzers: valid frames of every client type, and ways to break them.

A case depends on its `random.Random` only, so a seed and a number identify it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack

LENGTH = struct.Struct(">I")
MAX_CHANGES = 4  # changes of one frame
EXTREMES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 127, 128, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -0.0, 1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf,
    "", "x", "日本", "\0", "x" * 300, "PING", b"", b"bytes",
    [], [[]], [0] * 100, {}, {"": None}, {0: 1}, {"a": {"b": {}}}, {"__proto__": 1}, msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1),
)  # fmt: skip
FALSE_HEADERS = (  # headers that declare more than follows, or are invalid
    b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff",  # text
    b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x9f",  # arrays
    b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x8f",  # maps
    b"\xc7\xff\x01", b"\xc8\xff\xff\x01", b"\xc9\xff\xff\xff\xff\x01", b"\xd8\x01", b"\xd6\xff",  # extensions
    b"\xc1", b"\xa1\xff", b"\xa3\xed\xa0\x80",  # the unused byte; text that is not UTF-8; half a surrogate pair
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    data: bytes
    framed: bool  # the declared length is right, so the frames that follow can be read


def mutated(rng: Random) -> Case:
    """Return a broken frame; sometimes only its length is wrong, rarely it is valid."""
    kind = rng.random()
    if kind < 0.05:
        return Case(framed(packed(message(rng))), framed=True)
    if kind < 0.45:
        return Case(framed(packed(_change_values(message(rng), rng))), framed=True)
    payload = packed(message(rng))
    for _ in range(rng.randint(1, MAX_CHANGES)):
        payload = rng.choice(BYTE_CHANGES)(payload, rng)
    if kind < 0.9:
        return Case(framed(payload), framed=True)
    length = rng.choice((0, 1, len(payload) - 1, len(payload) + 1, 1 << 16, 1 << 22, 2**31, 2**32 - 1))
    return Case(LENGTH.pack(max(0, length)) + payload, framed=False)


def message(rng: Random) -> list[Any]:
    """Return the fields of a valid frame. Few tokens are requested, so that the server is soon free again."""
    return [*MESSAGES[rng.choice(TYPES)](rng)]


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def _hello(rng: Random) -> Sequence[Any]:
    return "HELLO", [1], None, ["progress", "heartbeat"], 1 << 20, rng.choice((None, "no such session"))


def _generate(rng: Random) -> Sequence[Any]:
    prompt = rng.choice(("This module", [rng.randrange(4096) for _ in range(rng.randrange(1, 40))]))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    return (
        "GENERATE",
        rng.randrange(4),
        *rng.choice(((prompt,), (prompt, _params(rng), 1000, 0, 10, None, 4), (None, {}, None, 0, None, messages))),
    )


def _params(rng: Random) -> dict[str, Any]:
    full = {
        "max_tokens": rng.randrange(1, 8),
        "temperature": rng.random(),
        "top_k": 5,
        "top_p": 0.9,
        "seed": rng.getrandbits(64),
        "logit_bias": {3: 1.5, 70: -2.0},
        "stop": ["a", "bc"],
        "stop_token_ids": [5],
        "logprobs": 2,
        "n": 2,
        "repetition_penalty": 1.1,
    }
    return {name: full[name] for name in rng.sample(sorted(full), rng.randrange(len(full)))} | {
        "max_tokens": full["max_tokens"]
    }


MESSAGES: dict[str, Callable[[Random], Sequence[Any]]] = {
    "HELLO": _hello,
    "GENERATE": _generate,
    "CANCEL": lambda rng: ("CANCEL", rng.randrange(4)),
    "CREDIT": lambda rng: ("CREDIT", rng.randrange(4), rng.randrange(1, 9)),
    "RESUME": lambda rng: ("RESUME", rng.randrange(4), rng.randrange(9), None),
    "EMBED": lambda rng: ("EMBED", rng.randrange(4), ["a text", [5, 6]], 8, None, -1, 1000, 0, rng.randrange(1, 3)),
    "SCORE": lambda rng: (
        "SCORE",
        rng.randrange(4),
        "a query",
        ["a document", "b"],
        None,
        1000,
        0,
        rng.randrange(1, 3),
    ),
    "TOKENIZE": lambda rng: ("TOKENIZE", rng.randrange(4), "Grüße aus 日本", True),
    "MODELS": lambda rng: ("MODELS", rng.randrange(4)),
    "STATS": lambda rng: ("STATS", rng.randrange(4)),
    "PING": lambda rng: ("PING", rng.getrandbits(64)),
    "PONG": lambda rng: ("PONG", rng.getrandbits(64)),
}
TYPES = (*MESSAGES, *["GENERATE"] * len(MESSAGES))  # half of them


# Changes of values: the payload stays one msgpack value


def _change_values(value: list[Any], rng: Random) -> list[Any]:
    for _ in range(rng.randint(1, MAX_CHANGES)):
        value = _change_inside(value, rng)
    return value


def _change_inside(value: Any, rng: Random) -> Any:
    """Replace, insert or remove one item somewhere in `value`."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: _change_inside(value[key], rng)}
    if not isinstance(value, list) or not value:
        return rng.choice(EXTREMES)
    items = [*value]
    at = rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.7:
        items[at] = _change_inside(items[at], rng)
    elif kind < 0.8:
        items.insert(at, rng.choice(EXTREMES))
    elif kind < 0.9:
        del items[at]
    else:
        items[at] = _nested(items[at], rng.randint(1, 9))
    return items


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


# Changes of bytes, after which the payload may not be msgpack


def _set_byte(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _flip_bit(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _insert(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]


def _remove(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randint(1, 8) :]


def _repeat(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    count = rng.choice((2, 10, 1000))
    return data[:at] + data[at : at + rng.randint(1, 4)] * count + data[at:]


def _insert_false_header(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(FALSE_HEADERS) + data[at + rng.randrange(2) :]


def _nest(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice((b"\x91", b"\x81\xa1a")) * rng.choice((1, 9, 600, 10_000)) + data[at:]


def _splice(data: bytes, rng: Random) -> bytes:
    other = packed(message(rng))
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other)) :]


BYTE_CHANGES = (_set_byte, _flip_bit, _insert, _remove, _repeat, _insert_false_header, _nest, _splice)
