"""Bad input: one typed ERROR per request, or a closed connection after a breach of the framing, without harm to others.

Every case here runs against the real engine while another user's long stream is under way; its bytes are compared.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, get_type_hints

import msgpack
import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import SamplingParams

from tests.support.bystanders import all_errors, framed, others_unharmed, refusals

Serving = Callable[..., AbstractAsyncContextManager[Any]]

MODEL_LEN = 2048  # context of the bundled model
NAN = math.nan
INF = math.inf

NOT_NUMBERS = [NAN, INF, -INF, -1e30, 1e30, -(2**63), 2**64 - 1, "1", [], {}, True]
TYPES = get_type_hints(SamplingParams)
FLOATS = [name for name, kind in TYPES.items() if kind is float]
INTEGERS = [name for name, kind in TYPES.items() if kind in (int, int | None)]
ALLOWED = [("seed", 2**64 - 1)]
TOO_MANY_TOKENS = [
    ("max_tokens", 2**64 - 1),
    ("max_tokens", MODEL_LEN + 1),
]  # OUT_OF_RANGE, as a prompt that is too long

BAD_PARAMS: list[dict[str, Any]] = [
    *({name: value} for name in FLOATS for value in NOT_NUMBERS),
    *(
        {name: value}
        for name in INTEGERS
        for value in [*NOT_NUMBERS, 1.5]
        if (name, value) not in [*ALLOWED, *TOO_MANY_TOKENS]
    ),
    {"temperature": -0.1},
    {"temperature": 100.1},
    {"top_p": 0},
    {"top_p": 1e-300},
    {"top_p": 1.01},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1e-300},
    {"max_tokens": 0},
    {"max_tokens": 2, "min_tokens": 3},
    {"min_tokens": 129},  # max_tokens is 128 by default
    {"min_tokens": 2047},
    {"top_k": -2},
    {"logprobs": 21},
    {"seed": -1},
    {"stop": "text"},
    {"stop": [""]},
    {"stop": ["x" * 257]},
    {"stop": ["x"] * 17},
    {"stop": [1]},
    {"stop_token_ids": [4096]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [2**63]},
    {"stop_token_ids": [1] * 1025},
    {"stop_token_ids": 5},
    {"logit_bias": {4096: 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {2**63: 1.0}},
    {"logit_bias": {1: NAN}},
    {"logit_bias": {1: INF}},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": {1: "x"}},
    {"logit_bias": {"x": 1.0}},
    {"logit_bias": {str(token): 1.0 for token in range(3)}},
    {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    {"ignore_eos": 1},
    {"include_stop_str_in_output": "yes"},
    *({name: 10**power} for name in ("n", "best_of", "beam_width") for power in (3, 6, 18)),
    {"n": 0},
    {"n": 3, "best_of": 2},
    {"n": 2, "beam_width": 1},
    {"beam_width": -1},
    {"beam_width": 17},
    {"beam_width": 2, "logit_bias": {1: 1.0}},
    *({name: "another tenant"} for name in ("tenant", "salt", "cache_salt", "user", "__class__")),
    {"priority": -1},
]

BAD_PROMPTS: list[Any] = [
    "",
    [],
    [-1],
    [4096],
    [2**31],
    [2**63],
    [2**64 - 1],
    [1, -(2**63)],
    [1.5],
    ["a"],
    [[1]],
    [True],
]
BAD_PROMPTS += [None, 5, 1.5, {}, {1: 2}, True]

TOO_LONG: list[Any] = [[1] * MODEL_LEN, [1] * 100_000, "word " * MODEL_LEN, "x" * 1_000_000]


async def test_bad_sampling_parameters(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        answers = await refusals(await real.raw(), [("hi", params) for params in BAD_PARAMS])
        all_errors(answers, BAD_PARAMS, "INVALID_ARGUMENT")


async def test_bad_prompts(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        answers = await refusals(await real.raw(), [(prompt, {"max_tokens": 4}) for prompt in BAD_PROMPTS])
        all_errors(answers, BAD_PROMPTS, "INVALID_ARGUMENT")


async def test_prompts_that_are_too_long(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        answers = await refusals(await real.raw(), [(prompt, {"max_tokens": 1}) for prompt in TOO_LONG])
        all_errors(answers, [len(prompt) for prompt in TOO_LONG], "OUT_OF_RANGE")
        answers = await refusals(await real.raw(), [("hi", {name: value}) for name, value in TOO_MANY_TOKENS])
        all_errors(answers, TOO_MANY_TOKENS, "OUT_OF_RANGE")
        just_fits = await refusals(await real.raw(), [([1] * (MODEL_LEN - 1), {"max_tokens": 1})])
        assert just_fits[0][0] == "ACCEPTED"


async def test_a_request_that_the_pool_cannot_hold(serving: Serving) -> None:
    """With four pages of 32 tokens, the limit of the model is 128 tokens."""
    async with serving(kv_cache_memory=4 * 65536) as real:
        (answer,) = await refusals(await real.raw(), [([1] * 100, {"max_tokens": 29})])
        assert answer[2:4] == ["OUT_OF_RANGE", "prompt of 100 tokens + max_tokens 29 exceed the limit of 128 tokens"]
        (answer,) = await refusals(await real.raw(), [([1] * 100, {"max_tokens": 28})])
        assert answer[0] == "ACCEPTED"


@pytest.mark.parametrize(("deadline_ms", "priority"), [(0, 0), (2**63, 0), (-1, 0), (1.5, 0), (1, 10**7), (1, NAN)])
async def test_bad_schedules(serving: Serving, deadline_ms: Any, priority: Any) -> None:
    async with serving() as real:
        peer = await real.raw()
        peer.send("GENERATE", 1, "hi", {}, deadline_ms, priority)
        assert (await peer.receive())[::2][:2] == ["ERROR", "INVALID_ARGUMENT"]
        peer.send("PING", 3)
        assert await peer.receive() == ["PONG", 3]


async def test_text_with_a_lone_surrogate_never_leaves_the_client(serving: Serving) -> None:
    async with serving() as real, AsyncClient(real.address) as client:
        with pytest.raises(InvalidRequest):
            await client.complete("a\ud800b")


SURROGATE = b"\x94" + b"".join(map(msgpack.packb, ("GENERATE", 1))) + b"\xa3\xed\xa0\x80" + b"\x80"
BREACHES = {
    "a length over the limit": struct.pack(">I", 0xFFFFFFFF),
    "an empty frame": framed(b""),
    "not msgpack": framed(b"\xc1"),
    "a truncated value": framed(msgpack.packb(["PING", 1])[:-1]),
    "two values": framed(msgpack.packb(["PING", 1]) * 2),
    "not an array": framed(msgpack.packb({"type": "PING"})),
    "an unknown type": framed(msgpack.packb(["FLY", 1])),
    "nested 10,000 deep": framed(b"\x91" * 10_000 + b"\xc0"),
    "maps nested 10,000 deep": framed(b"\x91" + b"\x81\xa1a" * 10_000 + b"\xc0"),
    "a false array length": framed(b"\xdd\xff\xff\xff\xff"),
    "a false string length": framed(b"\x91\xdb\xff\xff\xff\xff"),
    "an extension": framed(b"\x92\xa4PING" + b"\xd4\x01\x00"),
    "a lone surrogate": framed(SURROGATE),
    "an id that is not an id": framed(msgpack.packb(["GENERATE", -1, "hi", {}])),
    "a key twice": framed(b"\x94\xa8GENERATE\x01\xa2hi\x82\xa4seed\x01\xa4seed\x02"),
    "a server's frame": framed(msgpack.packb(["WELCOME", 1, [], 1 << 20, "m"])),
    "HELLO again": framed(msgpack.packb(["HELLO", [1]])),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


async def test_breaches_of_the_framing_close_only_their_connection(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        for name, data in BREACHES.items():
            peer = await real.raw()
            peer.send("GENERATE", 7, "hi", {"max_tokens": 1500, "ignore_eos": True})
            peer.writer.write(data)
            (*_, error) = await peer.until("ERROR")
            assert error[1:3] == [None, "INVALID_ARGUMENT"], name
            assert await peer.receive() == [], f"{name}: still open"


async def test_a_frame_that_never_ends(serving: Serving) -> None:
    async with serving() as real, others_unharmed(real):
        peer = await real.raw()
        peer.writer.write(struct.pack(">I", 1000) + b"half of it")
        peer.writer.write_eof()
        assert await peer.receive() == []


async def test_random_bytes(serving: Serving) -> None:
    chance = random.Random(5)
    async with serving() as real, others_unharmed(real):
        for _ in range(50):
            peer = await real.raw(hello=chance.random() < 0.7)
            peer.writer.write(chance.randbytes(chance.randrange(1, 300)))
            peer.writer.write_eof()
            async with asyncio.timeout(30):
                while await peer.receive():
                    pass


async def test_mutated_requests(serving: Serving) -> None:
    """Change a few bytes of a valid frame: it is answered, or its connection is closed."""
    chance = random.Random(6)
    good = bytearray(msgpack.packb(["GENERATE", 1, [5, 6, 7], {"max_tokens": 3, "temperature": 0.5, "stop": ["a"]}]))
    async with serving() as real, others_unharmed(real):
        for _ in range(100):
            mutant = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                mutant[chance.randrange(len(mutant))] = chance.randrange(256)
            peer = await real.raw()
            peer.writer.write(framed(bytes(mutant)))
            peer.writer.write_eof()
            async with asyncio.timeout(30):
                last = []
                while frame := await peer.receive():
                    last = frame
            assert not last or last[0] in ("ERROR", "ACCEPTED", "TOKENS", "DONE")
