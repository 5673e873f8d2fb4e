"""The codec: any split of the bytes gives the same frames, any bytes give frames or errors, and limits hold."""

from __future__ import annotations

import contextlib
import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.runtime.common.errors import InvalidRequest, ProtocolError
from quire.runtime.common.types import SamplingParams, TokenLogprobs, Usage
from quire.runtime.protocol import frames
from quire.runtime.protocol.codec import (
    MAX_ARRAYS,
    MAX_DEPTH,
    MAX_MAP_ENTRIES,
    UNCHECKED_BYTES,
    Decoder,
    Malformed,
    check_limits,
    encode,
)
from quire.runtime.protocol.frames import CLIENT_FRAMES, MIN_FRAME_BYTES, SERVER_FRAMES, Frame, Generate

from tests.fuzz.mutations import MESSAGES

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=30)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(-(2**63), 2**63),
    temperature=st.floats(allow_nan=False),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 5000), st.floats(allow_nan=False), max_size=4),
    seed=st.none() | U64,
    stop=st.lists(TEXT, max_size=3).map(tuple),
    n=st.integers(-(2**63), 2**63),
    best_of=st.none() | st.integers(-(2**63), 2**63),
    length_penalty=st.floats(allow_nan=False),
)
CLIENT_FRAME = st.one_of(
    st.builds(frames.Hello, st.just((1, 2)), st.none() | TEXT, st.just(("x",)), session=st.none() | TEXT),
    st.builds(
        frames.Generate,
        U64,
        TEXT | st.lists(U64, max_size=9).map(tuple),
        PARAMS,
        st.none() | st.integers(0, 2**63),
        st.integers(-(2**63), 2**63),
        st.none() | st.integers(0, 2**63),
    ),
    st.builds(
        frames.Generate,
        U64,
        st.none(),
        messages=st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=20).map(tuple),
        credit=st.none() | U64,
        idempotency_key=st.none() | st.text(min_size=1, max_size=256),
        resumable=st.booleans(),
    ),
    st.builds(frames.Cancel, U64),
    st.builds(frames.Credit, U64, st.integers(1, 2**63)),
    st.builds(frames.Resume, U64, U64, st.none() | U64),
    st.builds(frames.Tokenize, U64, TEXT, st.booleans()),
    st.builds(frames.ListModels, U64),
    st.builds(frames.AskStats, U64),
    st.builds(frames.Ping, U64),
    st.builds(frames.Pong, U64),
)
LOGPROBS = (TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.5))), TokenLogprobs(4, -math.inf))
MODEL = frames.ServedModel(name="m", max_model_len=100, vocab_size=50, has_tokenizer=True, has_chat_template=False)
SERVER_FRAME = st.sampled_from(
    [
        frames.Welcome(1, (), 1 << 20, "model"),
        frames.Welcome(1, ("heartbeat",), 1 << 20, "model", "session", 15_000),
        frames.Progress(7, 512, 4000),
        frames.Goaway(None, 30_000),
        frames.Tokenized(7, (1, 2)),
        frames.Models(7, (MODEL,)),
        frames.Stats(7, {"running": 3}),
        frames.Accepted(7, 2, 10, 90, 12.5),
        frames.Tokens(7, 0, (3, 4), "日本", LOGPROBS),
        frames.Accepted(7, 2, 10, 90, pin_refused=True),
        frames.Tokens(7, 0, (3,), ""),
        frames.Tokens(7, 0, (3,), "", LOGPROBS, 1),
        frames.Tokens(7, 0, (3,), "", choice=1),
        frames.Tokens(7, 0, (3,), "", None, 2, "stop", -1.25),
        frames.Done(7, "length", Usage(prompt_tokens=3, completion_tokens=2, seed=2**64 - 1)),
        frames.Error(None, "UNAVAILABLE", "gone", True, 100),
        frames.Pong(2**64 - 1),
    ]
)


def decode_all(data: bytes, schema: dict[str, type[Frame]] = CLIENT_FRAMES) -> list[Frame | Malformed]:
    return list(Decoder(schema, 4 << 20).feed(data))


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def packed(message: object) -> bytes:
    return framed(msgpack.packb(message))


def test_a_frame_is_a_length_and_an_array_that_begins_with_the_type() -> None:
    """Compare with fixed bytes, because clients in other languages depend on them."""
    assert encode(frames.Cancel(5)) == b"\x00\x00\x00\x09\x92\xa6CANCEL\x05"
    assert encode(frames.Error(None, "CANCELLED", "x")) == packed(["ERROR", None, "CANCELLED", "x"])


@given(frame=CLIENT_FRAME)
def test_client_frames_are_decoded_as_encoded(frame: Frame) -> None:
    assert decode_all(encode(frame)) == [frame]


@given(frame=SERVER_FRAME)
def test_server_frames_are_decoded_as_encoded(frame: Frame) -> None:
    assert decode_all(encode(frame), SERVER_FRAMES) == [frame]


@given(frame=SERVER_FRAME)
def test_trailing_defaults_of_server_frames_are_not_sent(frame: Frame) -> None:
    array = msgspec.to_builtins(frame)
    for default in type(frame).__struct_defaults__[::-1]:
        if array[-1] != default:
            break
        array.pop()
    assert encode(frame) == packed(array)


def test_trailing_fields_with_defaults_may_be_omitted() -> None:
    assert decode_all(packed(["GENERATE", 1, "hi"])) == [frames.Generate(1, "hi")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_the_validator(value: float) -> None:
    (frame,) = decode_all(encode(frames.Generate(1, "x", SamplingParams(temperature=value, logit_bias={3: value}))))
    assert isinstance(frame, frames.Generate)
    assert frame.params.logit_bias is not None
    for arrived in (frame.params.temperature, frame.params.logit_bias[3]):
        assert math.isnan(arrived) if math.isnan(value) else arrived == value


@settings(max_examples=40)  # every boundary of every example
@given(sent=st.lists(CLIENT_FRAME, min_size=1, max_size=3))
def test_any_split_gives_the_same_frames(sent: list[Frame]) -> None:
    data = b"".join(encode(frame) for frame in sent)
    for boundary in range(len(data) + 1):
        decoder = Decoder(CLIENT_FRAMES)
        assert [*decoder.feed(data[:boundary]), *decoder.feed(data[boundary:])] == sent
    decoder = Decoder(CLIENT_FRAMES)
    assert [frame for byte in data for frame in decoder.feed(bytes([byte]))] == sent


# Any input


def decodes_or_refuses(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        for frame in decode_all(data):
            assert isinstance(frame, frames.ClientFrame | Malformed)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@given(payload=st.binary(max_size=200))
def test_any_payload_is_decoded_or_refused(payload: bytes) -> None:
    decodes_or_refuses(framed(payload))


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=3))


@given(name=st.sampled_from([*CLIENT_FRAMES, "TOKENS", 3]), body=st.lists(VALUES, max_size=6))
@example(name="GENERATE", body=[1, "x", {"logit_bias": {"a": 1.0}}])
def test_any_body_is_decoded_or_refused(name: object, body: list[object]) -> None:
    decodes_or_refuses(packed([name, *body]))


@given(frame=CLIENT_FRAME, position=st.integers(0, 200), byte=st.integers(0, 255))
def test_any_mutated_frame_is_decoded_or_refused(frame: Frame, position: int, byte: int) -> None:
    data = bytearray(encode(frame))
    data[position % len(data)] = byte
    decodes_or_refuses(bytes(data))


# Breaches of the protocol


def nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


BREACHES: dict[str, tuple[bytes, str]] = {
    "empty frame": (framed(b""), "not one msgpack value"),
    "truncated value": (framed(b"\x92\xa4PING"), "not one msgpack value"),
    "trailing bytes": (framed(b"\x92\xa4PING\x01\x00"), "not one msgpack value"),
    "not an array": (packed({"a": 1}), "must be a msgpack array"),
    "empty array": (packed([]), "unknown frame type"),
    "unknown type": (packed(["FROB", 1]), "unknown frame type 'FROB'; known here: HELLO, GENERATE, CANCEL"),
    "server's type": (packed(["WELCOME", 1]), "unknown frame type"),
    "type not text": (packed([["PING"], 1]), "unknown frame type"),
    "10k levels": (framed(nested(10_000)), "within limits"),
    "one level too many": (framed(nested(MAX_DEPTH + 1)), "nests deeper"),
    "too many maps": (packed(["PING", *[{}] * (MAX_MAP_ENTRIES + 1)]), "maps of a frame hold more than 32768 entries"),
    "too many entries": (
        packed(["PING", *[{1: 1, 2: 2, 3: 3}] * (MAX_MAP_ENTRIES // 4 + 1)]),
        "more than 32768 entries",
    ),
    "maps in maps": (framed(b"\x92\xa4PING" + b"\x81\xa1a" * 10_000 + b"\xc0"), "within limits"),
    "duplicate key": (framed(b"\x92\xa4PING\x82\xa1a\x01\xa1a\x02"), "key 'a' twice"),
    "map key nil": (packed(["PING", {None: 1}]), "key is a NoneType"),
    "map key float": (packed(["PING", {1.0: 1}]), "key is a float"),
    "map key true": (packed(["PING", {True: 1}]), "key is a bool"),
    "map key array": (framed(b"\x92\xa4PING\x81\x90\x01"), "key is a tuple"),
    "extension": (framed(b"\x92\xa4PING\xd4\x05\x00"), "within limits"),
    "empty extension": (framed(b"\x92\xa4PING\xc7\x00\x05"), "extension type 5"),
    "timestamp": (framed(b"\x92\xa4PING\xd6\xff\x00\x00\x00\x00"), "within limits"),
    "binary": (packed(["PING", b"x"]), "binary type is not part"),
    "binary in the wrong field": (packed(["GENERATE", 1, b"x"]), "binary type is not part"),
    "binary in a message beside images": (
        packed(["GENERATE", 1, *[None] * 5, [{"role": b"x"}], *[None] * 7, [b"x"]]),
        "binary type is not part",
    ),
    "binary in an array of images": (packed(["GENERATE", 1, *[None] * 13, [[b"x"]]]), "binary type is not part"),
    "empty binary": (packed(["PING", b""]), "binary type is not part"),
    "empty binary in a message": (packed(["GENERATE", 1, None, {}, None, 0, None, [{"role": b""}]]), "binary type"),
    "map key binary": (framed(b"\x92\xa4PING\x81\xc4\x00\x01"), "key is a bytes"),
    "never-used byte": (framed(b"\xc1"), "not one msgpack value"),
    "text not UTF-8": (framed(b"\x92\xa4PING\xa1\xff"), "not one msgpack value"),
    "array longer than its bytes": (framed(b"\xdd\xff\xff\xff\xff"), "within limits"),
    "map longer than its bytes": (framed(b"\xdf\xff\xff\xff\xff"), "within limits"),
    "text longer than its bytes": (framed(b"\xdb\xff\xff\xff\xff"), "within limits"),
    "binary longer than its bytes": (framed(b"\xc6\xff\xff\xff\xff"), "within limits"),
    "extension longer than its bytes": (framed(b"\xc9\xff\xff\xff\xff\x01"), "within limits"),
    "half a surrogate pair": (framed(b"\x92\xa4PING\xa3\xed\xa0\x80"), "not one msgpack value"),
    "wrong field": (packed(["PING", "x"]), "PING does not fit its schema"),
    "too many fields": (packed(["CANCEL", 1, 2]), "CANCEL does not fit its schema"),
    "small max_frame_bytes": (packed(["HELLO", [1], None, [], 100]), "HELLO does not fit its schema"),
    "no credit to add": (packed(["CREDIT", 1, 0]), "CREDIT does not fit its schema"),
    "credit taken away": (packed(["CREDIT", 1, -5]), "CREDIT does not fit its schema"),
    "resumed before the start": (packed(["RESUME", 1, -1]), "RESUME does not fit its schema"),
    "id unreadable": (packed(["GENERATE", "one", "x"]), "GENERATE does not fit its schema"),
    "id negative": (packed(["GENERATE", -1, "x"]), "GENERATE does not fit its schema"),
    "id true": (packed(["GENERATE", True, "x"]), "GENERATE does not fit its schema"),
    "id missing": (packed(["GENERATE"]), "GENERATE does not fit its schema"),
}


@pytest.mark.parametrize(("data", "message"), BREACHES.values(), ids=BREACHES)
def test_a_breach_raises_after_the_frames_before_it(data: bytes, message: str) -> None:
    arriving = Decoder(CLIENT_FRAMES).feed(encode(frames.Ping(1)) + data)
    assert next(arriving) == frames.Ping(1)
    with pytest.raises(ProtocolError, match=message):
        next(arriving)


def test_too_many_arrays_are_a_breach() -> None:
    with pytest.raises(ProtocolError, match=f"more than {MAX_ARRAYS} arrays"):
        decode_all(packed([[], *[[[[]]]] * (MAX_ARRAYS // 3)]))


@pytest.mark.parametrize(
    "items", [[[]] * (MAX_ARRAYS - 1), [dict.fromkeys(range(MAX_MAP_ENTRIES - 1))]], ids=["arrays", "map entries"]
)
def test_as_many_items_as_allowed_are_decoded(items: list[object]) -> None:
    with pytest.raises(ProtocolError, match="unknown frame type 'FROB'"):
        decode_all(packed(["FROB", *items]))


@pytest.mark.parametrize("header", [b"\xdc\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xde\xff\xff\x01"])
@pytest.mark.parametrize("levels", [300, 1000, 12_000])
def test_nested_containers_longer_than_the_frame_allocate_nothing(header: bytes, levels: int) -> None:
    assert bytes_to_refuse(header * levels) < 1 << 20


@pytest.mark.parametrize("levels", [UNCHECKED_BYTES // 3 + 1, 1000, 12_000])
def test_nested_arrays_as_long_as_the_frame_allocate_nothing(levels: int) -> None:
    """Each array claims as many items as the frame has bytes, which no length limit refuses; none is complete."""
    claimed = min(3 * levels, 0xFFFF)
    assert bytes_to_refuse((b"\xdc" + struct.pack(">H", claimed)) * levels) < 1 << 20


def test_a_frame_too_short_to_be_checked_allocates_little() -> None:
    levels = UNCHECKED_BYTES // 3
    assert bytes_to_refuse((b"\xdc" + struct.pack(">H", 3 * levels)) * levels) < 4 << 20


def bytes_to_refuse(payload: bytes) -> int:
    """Return the peak of memory, in bytes, that the decoder allocates before it refuses `payload`."""
    data = framed(payload)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="not one msgpack value"):
            decode_all(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_deepest_allowed_level_is_decoded() -> None:
    with pytest.raises(ProtocolError, match="unknown frame type"):
        decode_all(framed(nested(MAX_DEPTH)))


@pytest.mark.parametrize("length", [MIN_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_the_payload(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"declares {length} bytes, the limit is {MIN_FRAME_BYTES}"):
        list(Decoder(CLIENT_FRAMES).feed(struct.pack(">I", length)))


def test_a_frame_of_exactly_the_limit_is_sent_and_received() -> None:
    frame = frames.Tokenize(1, "x" * 5000)
    num_bytes = len(encode(frame)) - 4
    data = encode(frame, num_bytes)
    assert list(Decoder(CLIENT_FRAMES, num_bytes).feed(data)) == [frame]
    with pytest.raises(ProtocolError, match=f"declares {num_bytes} bytes, the limit is {num_bytes - 1}"):
        list(Decoder(CLIENT_FRAMES, num_bytes - 1).feed(data))
    with pytest.raises(InvalidRequest, match=f"a frame of {num_bytes} bytes, the limit is {num_bytes - 1}"):
        encode(frame, num_bytes - 1)


def test_the_limit_may_be_raised_between_two_frames() -> None:
    large = frames.Generate(1, "x" * MIN_FRAME_BYTES)
    decoder = Decoder(CLIENT_FRAMES)
    received = []
    for frame in decoder.feed(encode(frames.Hello((1,))) + encode(large)):
        received.append(frame)
        decoder.max_frame_bytes = 1 << 20
    assert received == [frames.Hello((1,)), large]


def test_a_chat_of_thousands_of_messages_is_within_the_limits() -> None:
    messages = tuple({"role": "user", "content": "x", "name": "y"} for _ in range(4096))
    (frame,) = decode_all(encode(frames.Generate(1, None, messages=messages)))
    assert isinstance(frame, frames.Generate)
    assert frame.messages == messages


# A GENERATE frame whose fields do not fit


MALFORMED: dict[str, list[Any]] = {
    "prompt missing": [],
    "prompt of the wrong type": [1.5],
    "prompt of negative text": [["a"]],
    "unknown parameter": ["x", {"temprature": 1.0}],
    "parameter of the wrong type": ["x", {"temperature": "hot"}],
    "whole parameter as float": ["x", {"max_tokens": 1.5}],
    "text key in logit_bias": ["x", {"logit_bias": {"5": 1.0}}],
    "parameters not a map": ["x", [1]],
    "negative deadline": ["x", {}, -1],
    "negative pin": ["x", {}, None, 0, -1],
    "negative credit": ["x", {}, None, 0, None, None, -1],
    "one field too many": ["x", {}, None, 0, None, None, None, None, False, 0],
    "messages that are not maps": [None, {}, None, 0, None, ["hi"]],
    "an empty key": ["x", {}, None, 0, None, None, None, ""],
    "a key too long": ["x", {}, None, 0, None, None, None, "k" * 257],
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_generate_fails_its_own_request_only(body: list[Any]) -> None:
    malformed, following = decode_all(packed(["GENERATE", 9, *body]) + encode(frames.Ping(1)))
    assert isinstance(malformed, Malformed)
    assert malformed.request_id == 9
    assert isinstance(malformed.error, InvalidRequest)
    assert "$[" not in str(malformed.error)
    assert following == frames.Ping(1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (["x", {}, None, 0, None, None, None, ""], "idempotency_key: expected str of length >= 1"),
        (["x", {}, "5"], "deadline_ms: expected int | null, got str"),
        (["x", {}, None, None], "priority: expected int, got null"),
        (["x", {"stop": [5]}], "params.stop[0]: expected str, got int"),
        (["x", {" - at `$[99]`": 1}], "params: object contains unknown field  - at $[99]"),
        (
            ["x", {}, None, 0, None, None, None, None, False, None, None, [], "", [], "", "", 0],
            "the frame: expected array of at most length 17, got 18",
        ),
    ],
)
def test_a_malformed_generate_names_the_field(body: list[Any], message: str) -> None:
    (malformed,) = decode_all(packed(["GENERATE", 9, *body]))
    assert isinstance(malformed, Malformed)
    assert str(malformed.error) == message


def test_error_messages_have_a_greatest_length() -> None:
    (malformed,) = decode_all(packed(["GENERATE", 9, "x", {"y" * 100_000: 1}]))
    assert isinstance(malformed, Malformed)
    assert len(str(malformed.error)) <= 500


# Frames that cannot be encoded


UNSENDABLE: dict[str, Callable[[], Frame]] = {
    "integer beyond u64": lambda: frames.Generate(1, "x", SamplingParams(max_tokens=2**70)),
    "half a surrogate pair": lambda: frames.Generate(1, "\ud800"),
    "too long": lambda: frames.Generate(1, "x" * (5 << 20)),
}


@pytest.mark.parametrize("frame", UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_frame_that_cannot_be_encoded_is_an_invalid_request(frame: Callable[[], Frame]) -> None:
    with pytest.raises(InvalidRequest):
        encode(frame())


def test_images_are_binary_and_nothing_else_is() -> None:
    messages = ({"role": "user", "content": ({"type": "image"},)},)
    frame = Generate(5, None, messages=messages, images=(b"\x89PNG", b"\xff\xd8"))
    assert decode_all(encode(frame)) == [frame]
    check_limits(encode(frame))
    assert encode(frame).endswith(b"\x92\xc4\x04\x89PNG\xc4\x02\xff\xd8")
    for images in (["text"], b"\x89PNG", [b"x"] * 257):
        fields = [5, "hi", {}, None, 0, None, None, None, None, False, None, None, [], "", images]
        (refused,) = decode_all(packed(["GENERATE", *fields]))
        assert isinstance(refused, Malformed)
        assert str(refused.error).startswith("images")


def test_every_frame_of_a_client_is_fuzzed() -> None:
    assert MESSAGES.keys() == CLIENT_FRAMES.keys()
