"""Hostile frames, each during another client's stream, whose bytes must not change.

A bad request ends alone, in a typed ERROR; a breach of the protocol ends its connection. Bad parameters
and prompts are in test_bad_input.py, the same bytes against the codec alone in tests/runtime/protocol/test_codec.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgpack

from tests.support.bystanders import framed, others_unharmed

Serving = Callable[..., AbstractAsyncContextManager[Any]]

QUICK = {"max_tokens": 2}
NOT_IDS = [-1, -(2**63), 1.0, 1.8446744073709552e19, math.nan, math.inf, True, None, "1", [1], {}]
WITH_ID = {
    "GENERATE": ["hi", QUICK],
    "CANCEL": [],
    "CREDIT": [1],
    "RESUME": [0],
    "TOKENIZE": ["hi"],
    "MODELS": [],
    "STATS": [],
    "PING": [],
    "PONG": [],
}
HEADERS = {
    "text": [b"\xbf", b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff"],
    "bytes": [b"\xc4\xff", b"\xc5\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc4\x00", b"\xc4\x01x"],
    "array": [b"\x9f", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x10\x00\x00" * 1000],
    "map": [b"\x8f", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xde\xff\xff\x01" * 1000],
    "extension": [b"\xd4\x01\x00", b"\xc7\x00\x01", b"\xc9\xff\xff\xff\xff\x01", b"\xd6\xff\x00\x00\x00\x00"],
}
NOT_TEXT = [
    b"\xa1\xff",
    b"\xa2\xc0\x80",
    b"\xa3\xed\xa0\x80",
    b"\xa4\xf5\x80\x80\x80",
]  # surrogates, overlong, too large


def packed(*values: object) -> list[bytes]:
    return [msgpack.packb(value) for value in values]


def generate(*fields: bytes) -> bytes:
    """Return a GENERATE of these fields, one msgpack value each, valid or not."""
    return framed(bytes([0x91 + len(fields)]) + b"".join([*packed("GENERATE"), *fields]))


def nested(levels: int) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


BREACHES: dict[str, bytes] = {
    **{
        f"{name} of {value!r}": framed(msgpack.packb([name, value, *fields]))
        for name, fields in WITH_ID.items()
        for value in NOT_IDS
    },
    **{
        f"{name} with a field too many": framed(msgpack.packb([name, 1, *[None] * 12]))
        for name in WITH_ID
        if name != "GENERATE"
    },
    **{
        f"{kind} {header[:6].hex()} for a prompt": generate(*packed(1), header)
        for kind, headers in HEADERS.items()
        for header in headers
    },
    **{f"a prompt of {data.hex()}": generate(*packed(1), data) for data in NOT_TEXT},
    **{f"a stop string of {data.hex()}": generate(*packed(1, "x"), b"\x81\xa4stop\x91" + data) for data in NOT_TEXT},
    "a message nested too deep": generate(*packed(1, None, {}, None, 0, None, [{"content": nested(9)}])),
    "a message nested 10,000 deep": generate(*packed(1, None, {}, None, 0, None), b"\x91\x81\xa1a" + b"\x91" * 10_000),
    "a role twice": generate(*packed(1, None, {}, None, 0, None), b"\x91\x82\xa4role\xa1a\xa4role\xa1b"),
    "a bias twice": generate(*packed(1, "x"), b"\x81\xaalogit_bias\x82\x01\xca\x00\x00\x00\x00\x01\xc0"),
    "a message with a key that is not a string": generate(*packed(1, None, {}, None, 0, None), b"\x91\x81\xc0\x01"),
    "more messages than a frame may hold": generate(*packed(1, None, {}, None, 0, None, [{}] * 40_000)),
    "credit of 0": framed(msgpack.packb(["CREDIT", 1, 0])),
    "credit below 0": framed(msgpack.packb(["CREDIT", 1, -5])),
    "credit of a fraction": framed(msgpack.packb(["CREDIT", 1, 0.5])),
    "a resumption at index -1": framed(msgpack.packb(["RESUME", 1, -1])),
}

REFUSED: dict[str, tuple[list[Any], str]] = {
    "no prompt and no messages": ([None, QUICK], "INVALID_ARGUMENT"),
    "a prompt and messages": (["x", QUICK, None, 0, None, [{"role": "user", "content": "x"}]], "INVALID_ARGUMENT"),
    "a field too many": (["x", QUICK, None, 0, None, None, None, None, False, "tenant"], "INVALID_ARGUMENT"),
    "a parameter of the wrong kind": (["x", QUICK, "soon"], "INVALID_ARGUMENT"),
    "a deadline of infinity": (["x", QUICK, math.inf], "INVALID_ARGUMENT"),
    "a pin without end": (["x", QUICK, None, 0, 2**63], "INVALID_ARGUMENT"),
    "a priority of -2^63": (["x", QUICK, None, -(2**63)], "INVALID_ARGUMENT"),
    "credit below 0": (["x", QUICK, None, 0, None, None, -1], "INVALID_ARGUMENT"),
    "credit of NaN": (["x", QUICK, None, 0, None, None, math.nan], "INVALID_ARGUMENT"),
    "an empty key": (["x", QUICK, None, 0, None, None, None, ""], "INVALID_ARGUMENT"),
    "a key of a million characters": (["x", QUICK, None, 0, None, None, None, "k" * 1_000_000], "INVALID_ARGUMENT"),
    "resumable as a number": (["x", QUICK, None, 0, None, None, None, None, 1], "INVALID_ARGUMENT"),
    "an empty list of messages": ([None, QUICK, None, 0, None, []], "INVALID_ARGUMENT"),
    "a message that is a string": ([None, QUICK, None, 0, None, ["hi"]], "INVALID_ARGUMENT"),
    "a message at the depth limit": ([None, QUICK, None, 0, None, [{"content": nested(4)}]], "INVALID_ARGUMENT"),
    "a message that is a template": (
        [None, QUICK, None, 0, None, [{"role": "{{ [].__class__ }}"}]],
        "INVALID_ARGUMENT",
    ),
}

GREETINGS: dict[str, list[Any]] = {
    "no versions": [[]],
    "20,000 versions": [list(range(2, 20_000))],
    "a version that is a string": [["1"]],
    "a version beyond u64": [[1.8446744073709552e19]],
    "a frame limit too small": [[1], None, [], 65_535],
    "a frame limit below 0": [[1], None, [], -1],
    "a token that is a number": [[1], 5],
    "features of numbers": [[1], None, [1, 2]],
    "a field for the tenant": [[1], None, [], 1 << 20, None, "tenant"],
}


async def test_breaches_end_their_connection_only(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        for name, data in BREACHES.items():
            peer = await real.raw()
            peer.writer.write(data)
            last = await peer.receive()
            assert last[:3] == ["ERROR", None, "INVALID_ARGUMENT"], f"{name}: {last}"
            assert "extra data" not in last[3], f"{name} is another breach than the intended one: {last}"
            assert await peer.receive() == [], f"{name}: still open"


async def test_bad_requests_end_alone(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        peer = await real.raw()
        for request_id, (name, (fields, code)) in enumerate(REFUSED.items()):
            peer.send("GENERATE", request_id, *fields)
            answer = await peer.receive()
            assert answer[:3] == ["ERROR", request_id, code], f"{name}: {answer}"
        peer.send("PING", 2**64 - 1)
        assert await peer.receive() == ["PONG", 2**64 - 1]


async def test_bad_hellos_are_refused(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        for name, fields in GREETINGS.items():
            peer = await real.raw(hello=False)
            peer.send("HELLO", *fields)
            assert (await peer.receive())[:3] == ["ERROR", None, "INVALID_ARGUMENT"], name
            assert await peer.receive() == []


async def test_the_largest_numbers_are_accepted(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        peer = await real.raw()
        last = 2**64 - 1
        peer.send("GENERATE", last, [1], {**QUICK, "seed": last}, None, 0, None, None, last)
        peer.send("CREDIT", last, last)
        peer.send("CREDIT", last - 1, last)
        done = (await peer.until("DONE"))[-1]
        assert (done[1], done[3]["seed"]) == (last, last)


async def test_requests_of_other_sessions_cannot_be_resumed(serving: Serving) -> None:
    async with serving() as real:
        owner = await real.raw()
        owner.send("GENERATE", 1, "hi", QUICK, None, 0, None, None, None, None, True)
        await owner.until("DONE")
        thief = await real.raw()
        for next_index in (0, 1, 2**64 - 1):
            thief.send("RESUME", 1, next_index)
            assert (await thief.receive())[:3] == ["ERROR", 1, "NOT_FOUND"]
