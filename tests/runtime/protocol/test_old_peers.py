"""Today's frames, read by a peer of an earlier release, which lacks the newest field or sampling parameter."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from quire.runtime.common.types import SamplingParams
from quire.runtime.protocol import frames
from quire.runtime.protocol.codec import Decoder, Malformed, encode
from quire.runtime.protocol.frames import CLIENT_FRAMES, SERVER_FRAMES, Frame, Generate

NODE_CLIENT = Path(__file__).parents[3] / "deploy" / "clients" / "node"
WITH_DEFAULTS = [
    frames.Hello((1,)),
    Generate(1, "hi"),
    frames.Resume(1, 5),
    frames.Tokenize(1, "hi"),
    frames.AskVectors(1, ("hi", (5,))),
    frames.AskScores(1, "hi", ("a",)),
    frames.Welcome(1, (), 1 << 20, "model"),
    frames.Accepted(1, 0, 1, 4),
    frames.Tokens(1, 0, (3,), "a"),
    frames.Error(1, "CANCELLED", "x"),
    frames.Goaway(1, 30_000),
]


def older(struct: type[Any], missing: str) -> type[Any]:
    """Return `struct` as it was before the field `missing` was added."""
    hints = get_type_hints(struct, include_extras=True)
    fields = [
        (field.name, hints[field.name], *([] if field.default is msgspec.NODEFAULT else [field.default]))
        for field in msgspec.structs.fields(struct)
        if field.name != missing
    ]
    config = struct.__struct_config__
    return msgspec.defstruct(
        struct.__name__,
        fields,
        frozen=True,
        tag=config.tag,
        array_like=config.array_like,
        forbid_unknown_fields=config.forbid_unknown_fields,
        kw_only=not config.array_like,
    )


def decoded(data: bytes, frame_type: type[Any]) -> Frame | Malformed:
    (frame,) = Decoder({frame_type.__struct_config__.tag: frame_type}, 4 << 20).feed(data)
    return frame


@pytest.mark.parametrize("frame", WITH_DEFAULTS, ids=lambda frame: type(frame).__name__)
def test_a_frame_without_its_newest_field_is_read_by_an_older_peer(frame: Frame) -> None:
    old = decoded(encode(frame), older(type(frame), type(frame).__struct_fields__[-1]))
    assert not isinstance(old, Malformed)
    assert old.__struct_fields__ == type(frame).__struct_fields__[:-1]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_a_sampling_parameter_with_its_default_is_not_sent(name: str) -> None:
    default = getattr(SamplingParams(), name)
    given = SamplingParams(**{name: float(str(default)) if isinstance(default, float) else default})
    old_params = older(SamplingParams, name)
    old_generate = msgspec.defstruct(
        "Generate",
        [("request_id", int), ("prompt", str), ("params", old_params, old_params()), ("deadline_ms", int | None, None)],
        frozen=True,
        tag="GENERATE",
        array_like=True,
        forbid_unknown_fields=True,
    )
    for frame in (Generate(1, "hi", given), Generate(1, "hi", given, 100)):
        assert not isinstance(decoded(encode(frame), old_generate), Malformed)


def test_parameters_other_than_the_defaults_are_sent() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",), seed=0)
    (frame,) = Decoder(CLIENT_FRAMES).feed(encode(Generate(1, "hi", params, credit=3)))
    assert frame == Generate(1, "hi", params, credit=3)


def test_a_heartbeat_has_a_nonce() -> None:
    """Earlier clients expect one, and a default is not sent."""
    assert encode(frames.Ping(frames.HEARTBEAT_NONCE))[4:] == b"\x92\xa4PING\x01"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not (NODE_CLIENT / "node_modules").is_dir(), reason="msgpackr is not installed")
async def test_the_node_client_sends_no_defaults() -> None:
    received: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder({"HELLO": frames.Hello, "GENERATE": older(Generate, "resumable")}, 4 << 20)
        while data := await reader.read(65536):
            for frame in decoder.feed(data):
                received.append(frame)
                hello = isinstance(frame, frames.Hello)
                writer.write(encode(frames.Welcome(1, (), 1 << 20, "m") if hello else frames.Error(1, "INTERNAL", "x")))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    program = f"""
        import {{ Client }} from "{NODE_CLIENT / "quire.mjs"}";
        const client = await Client.connect("127.0.0.1:{port}");
        try {{ for await (const chunk of client.generate("hi", {{ max_tokens: 3 }})) console.log(chunk); }}
        catch (error) {{ console.log(error.code); }}
        client.close();
    """
    async with server:
        node = await asyncio.create_subprocess_exec(
            *("node", "--input-type=module", "--eval", program), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await node.communicate()
    assert output == b"INTERNAL\n"
    assert [type(frame).__name__ for frame in received] == ["Hello", "Generate"]
    assert received[1].params == SamplingParams(max_tokens=3)


def test_every_frame_with_a_default_is_tried() -> None:
    known = {*CLIENT_FRAMES.values(), *SERVER_FRAMES.values()} - {frames.Ping, frames.Pong}
    assert {frame for frame in known if frame.__struct_defaults__} == {type(frame) for frame in WITH_DEFAULTS}
