"""`AsyncClient` and `Client` against a real server: streams, early cancellation, errors and lost connections."""

from __future__ import annotations

import asyncio
import re
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from quire.runtime.client import AsyncClient, Client
from quire.runtime.common.errors import (
    ConfigError,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    NotOpen,
    Overloaded,
    ProtocolError,
    TLSError,
    Unauthenticated,
    Unavailable,
)
from quire.runtime.common.types import SamplingParams
from quire.runtime.net.address import TCPAddress
from quire.runtime.net.connecting import tls_error
from quire.runtime.server.requests.output_log import CHUNK_BYTES

Serve = Callable[..., Awaitable[Any]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

TLS = Path(__file__).parent.parent / "data" / "tls"
THREE = SamplingParams(max_tokens=3)
MESSAGE = {"role": "user", "content": "hi"}
ENDLESS = SamplingParams(max_tokens=1_000_000)


@pytest.fixture
async def client(system: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(system.address) as client:
        yield client


# Streams


async def test_an_argument_of_another_type_ends_no_other_stream(client: AsyncClient) -> None:
    stream = client.generate("This module", SamplingParams(max_tokens=30, ignore_eos=True))
    received = [await anext(stream)]
    wrong: list[Any] = [(None,), (5,), (b"x",), ("a", 5)]
    for arguments in wrong:
        with pytest.raises(InvalidRequest, match="tokenize takes text and a bool"):
            await client.tokenize(*arguments)
    received += [chunk async for chunk in stream]
    assert sum(len(chunk.token_ids) for chunk in received) == 30


async def test_chunks_arrive_in_order_and_the_last_has_the_usage(client: AsyncClient) -> None:
    chunks = [chunk async for chunk in client.generate("hi", THREE)]
    assert [(chunk.first_index, chunk.token_ids, chunk.text) for chunk in chunks] == [
        (0, (0, 1), " hi:0é日"),
        (2, (2,), " hi:2é日"),
        (3, (), ""),
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_a_completion_is_the_chunks_joined(client: AsyncClient) -> None:
    completion = await client.complete("hi", SamplingParams(max_tokens=3, logprobs=0))
    assert completion.token_ids == (0, 1, 2)
    assert completion.text == " hi:0é日 hi:2é日"
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == [0, 1, 2]
    assert completion.finish_reason == "length"
    assert (await client.complete("hi", THREE)).logprobs is None


async def test_the_engine_receives_the_request_as_it_was_sent(system: Any, client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=1, stop=("a", "b"), logit_bias={3: -1.5}, seed=2**64 - 1, temperature=0.5)
    await client.complete([5, 6], params, deadline_ms=1234, priority=-7)
    (request,) = system.engine.requests
    assert request.prompt == (5, 6)
    assert request.sampling_params == params
    assert (request.deadline_ms, request.priority) == (1234, -7)


async def test_many_streams_share_one_connection(client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=40)
    alone = {f"p{index}": await client.complete(f"p{index}", params) for index in range(3)}
    together = await asyncio.gather(*(client.complete(f"p{index}", params) for index in range(100)))
    assert [completion.token_ids for completion in together] == [tuple(range(40))] * 100
    assert {f"p{index}": together[index] for index in range(3)} == alone


async def test_ping(client: AsyncClient) -> None:
    assert await client.ping() > 0
    assert all(await asyncio.gather(*(client.ping() for _ in range(10))))


async def test_over_a_unix_socket(serve: Serve, socket_path: Path) -> None:
    await serve(uds=str(socket_path))
    async with AsyncClient(f"unix:{socket_path}") as client:
        assert (await client.complete("hi", THREE)).token_ids == (0, 1, 2)


async def test_over_tls(serve: Serve) -> None:
    system = await serve(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem"))
    for trusting in (ssl.create_default_context(cafile=TLS / "cert.pem"), TLS / "cert.pem", str(TLS / "cert.pem")):
        async with AsyncClient(system.address, tls=trusting) as client:
            assert (await client.complete("hi", THREE)).token_ids == (0, 1, 2)


async def test_a_certificate_that_is_not_trusted_is_an_error_that_no_retry_changes(serve: Serve) -> None:
    system = await serve(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem"))
    advice = "is not trusted: self-signed certificate; pass the file of its CA, or of the certificate itself, as tls="
    with pytest.raises(TLSError, match=advice) as error:
        async with AsyncClient(system.address, tls=True):
            pass
    assert not error.value.retryable


@pytest.mark.parametrize(
    ("code", "advice"), [(62, "connect by a name in the certificate"), (64, "connect by a name"), (10, "renew it")]
)
def test_other_faults_of_a_certificate_have_advice(code: int, advice: str) -> None:
    fault = ssl.SSLCertVerificationError("certificate verify failed")
    fault.verify_code = code
    fault.verify_message = "the fault"
    error = tls_error(TCPAddress("host", 1), fault)
    assert str(error).startswith(f"the certificate of host:1 is not trusted: the fault; {advice}")


async def test_tls_to_a_server_without_tls(system: Any) -> None:
    with pytest.raises(TLSError, match="the server may not use TLS: leave out tls="):
        async with AsyncClient(system.address, tls=TLS / "cert.pem"):
            pass


async def test_no_tls_to_a_server_with_tls(serve: Serve) -> None:
    system = await serve(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem"))
    with pytest.raises(Unavailable, match="before its greeting; if the server uses TLS, pass tls="):
        async with AsyncClient(system.address):
            pass


async def test_the_port_of_operators_is_named(system: Any) -> None:
    with pytest.raises(ProtocolError, match="this is an HTTP port; use the address after `clients`"):
        async with AsyncClient(system.server.operator_address):
            pass


def test_a_ca_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for ca_file, reason in (("/nowhere.pem", "No such file"), (tmp_path / "empty.pem", "it has no certificate in PEM")):
        with pytest.raises(ConfigError, match=f"tls: the CA file .* cannot be read: {reason}"):
            Client("localhost:7070", tls=ca_file)
    with pytest.raises(ConfigError, match="tls must be True, the path of a CA file or an"):
        AsyncClient("localhost:7070", tls=5)  # type: ignore[arg-type]


async def test_over_ipv6(serve: Serve) -> None:
    system = await serve(host="::1")
    assert system.address.startswith("[::1]:")
    async with AsyncClient(system.address) as client:
        await client.ping()


async def test_chunks_of_several_outputs_carry_their_index(client: AsyncClient) -> None:
    params = SamplingParams(max_tokens=3, n=3)
    chunks = [chunk async for chunk in client.generate("hi", params)]
    assert [(chunk.choice, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, (0, 1), None),
        (0, (2,), None),
        (0, (), "length"),
        (1, (0, 1, 2), "length"),
        (2, (0, 1, 2), None),
        (2, (), "length"),
    ]
    assert [chunk.first_index for chunk in chunks] == [0, 2, 3, 0, 0, 3]
    assert [chunk.usage is not None for chunk in chunks] == [False] * 5 + [True]
    whole = await client.complete("hi", params)
    assert [choice.text for choice in whole.outputs] == [" hi:0é日 hi:2é日", "choice 1", "choice 2"]
    assert [choice.token_ids for choice in whole.outputs] == [(0, 1, 2)] * 3
    assert [choice.finish_reason for choice in whole.outputs] == ["length"] * 3
    assert [choice.cumulative_logprob for choice in whole.outputs] == [None, -1.5, -1.5]
    assert (whole.text, whole.token_ids, whole.usage.completion_tokens) == (whole.outputs[0].text, (0, 1, 2), 9)


async def test_the_cumulative_logprob_is_the_sum_if_outputs_are_not_ranked(client: AsyncClient) -> None:
    whole = await client.complete("hi", SamplingParams(max_tokens=3, logprobs=0))
    assert whole.outputs[0].cumulative_logprob == -1.5


async def test_the_server_refuses_too_many_outputs(client: AsyncClient) -> None:
    with pytest.raises(Overloaded):
        await client.complete("full", SamplingParams(n=2**40))


async def test_pin_ms_is_sent(system: Any, client: AsyncClient) -> None:
    await client.complete("hi", THREE, pin_ms=5000)
    assert [request.pin_ms for request in system.engine.requests] == [5000]


async def test_messages_are_sent_instead_of_a_prompt(system: Any, client: AsyncClient) -> None:
    await client.complete(sampling_params=THREE, messages=[{"role": "user", "content": "hi"}])
    (request,) = system.engine.requests
    assert (request.prompt, request.messages) == (None, ({"role": "user", "content": "hi"},))


async def test_callbacks_receive_accepted_and_progress(client: AsyncClient) -> None:
    received: list[tuple[Any, ...]] = []
    await client.complete(
        "prefill",
        THREE,
        on_accepted=lambda accepted: received.append((accepted.position, accepted.pages_needed)),
        on_progress=lambda progress: received.append((progress.computed_tokens, progress.prompt_tokens)),
    )
    assert received == [(1, 2), (1, 3), (2, 3)]


async def test_a_reader_that_pauses_receives_no_more_than_its_credit(
    serve: Serve, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.CREDIT_TOKENS", 10)
    system = await serve()
    async with AsyncClient(system.address) as client:
        stream = client.generate("hi", SamplingParams(max_tokens=100))
        chunks = [await anext(stream)]
        await eventually(lambda: not system.engine.live)
        await client.ping()
        assert system.server.live_requests()[0].generated == 100
        (unsent,) = system.server._context.unsent.tenants.values()
        assert unsent.num_bytes > 45 * CHUNK_BYTES, "90 tokens wait, two in a chunk"
        chunks += [chunk async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(100))


async def test_a_reader_that_pauses_too_long_gets_deadline_exceeded(
    serve: Serve, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.runtime.client.stream.CREDIT_TOKENS", 4)
    system = await serve(credit_timeout_ms=20)
    async with AsyncClient(system.address) as client:
        stream = client.generate("endless", ENDLESS)
        chunks = [await anext(stream)]
        await eventually(lambda: not system.engine.live)
        with pytest.raises(DeadlineExceeded, match="wait for credit"):
            chunks += [chunk async for chunk in stream]
        assert (await client.complete("hi", THREE)).token_ids == (0, 1, 2)


async def test_a_retry_with_the_same_key_returns_the_first_stream(system: Any, client: AsyncClient) -> None:
    first = await client.complete("hi", THREE, idempotency_key="k")
    assert await client.complete("hi", THREE, idempotency_key="k") == first
    assert len(system.engine.requests) == 1


# Cancellation before the end


async def test_leaving_the_loop_cancels(system: Any, client: AsyncClient, eventually: Eventually) -> None:
    async for chunk in client.generate("endless", ENDLESS):
        if chunk.first_index >= 10:
            break
    await eventually(lambda: not system.engine.live)
    assert (await client.complete("hi", THREE)).token_ids == (0, 1, 2)


async def test_a_cancelled_task_cancels_its_request(system: Any, client: AsyncClient, eventually: Eventually) -> None:
    task = asyncio.create_task(client.complete("hold", ENDLESS))
    await eventually(lambda: bool(system.engine.live))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not system.engine.live)
    await client.ping()


async def test_closing_the_client_cancels_everything(system: Any, eventually: Eventually) -> None:
    async with AsyncClient(system.address) as client:
        streams = [asyncio.create_task(client.complete("hold", ENDLESS)) for _ in range(3)]
        await eventually(lambda: len(system.engine.live) == 3)
    for stream in streams:
        with pytest.raises(Unavailable, match="closed"):
            await stream
    await eventually(lambda: not system.engine.live)
    with pytest.raises(NotOpen, match=r"closed; use `async with AsyncClient\(…\) as client:`$"):
        await client.complete("hi")


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["waits", "is cancelled"])
async def test_close_does_not_hang_if_the_server_does_not_read(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """Neither `close` nor the requests whose bytes are unsent may hang."""
    monkeypatch.setattr("quire.runtime.client.connection.CLOSE_TIMEOUT_S", 60.0 if is_cancelled else 0.05)
    writers: list[asyncio.StreamWriter] = []

    async def stop_reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(framed("WELCOME", 1, [], 4 << 20, "m"))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writers.append(writer)

    server = await asyncio.start_server(stop_reading, "127.0.0.1", 0)
    client = await AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}").__aenter__()
    await eventually(lambda: bool(writers))
    streams = [asyncio.create_task(client.complete("x" * (3 << 20))) for _ in range(5)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.close())
    if is_cancelled:
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    else:
        await closing
    await client.close()
    for stream in streams:
        with pytest.raises(Unavailable, match="closed"):
            await stream
    writers[0].transport.abort()
    server.close()
    await server.wait_closed()


def test_clients_work_on_uvloop(serve: Serve, eventually: Eventually) -> None:
    """Run streams, cancellation and closing on the event loop that `quire serve` installs."""

    async def scenario() -> None:
        system = await serve()
        async with AsyncClient(system.address) as client:
            completions = await asyncio.gather(*(client.complete(f"p{index}", THREE) for index in range(20)))
            assert [completion.text for completion in completions] == [f" p{i}:0é日 p{i}:2é日" for i in range(20)]
            assert await client.ping() > 0
            async for _ in client.generate("hold", ENDLESS):
                break
            await eventually(lambda: not system.engine.live)
            left = asyncio.create_task(client.complete("hold", ENDLESS))
            await eventually(lambda: bool(system.engine.live))
            await system.server.close()
            with pytest.raises(Unavailable, match="shutting down"):
                await left

    uvloop.run(scenario())


# Errors


@pytest.mark.parametrize(
    ("prompt", "error_class", "message"),
    [("full", Overloaded, "the queue is full"), ("fail", GenerationFailed, "the logits are NaN")],
)
async def test_errors_of_the_server_keep_their_class(
    client: AsyncClient, prompt: str, error_class: type[Exception], message: str
) -> None:
    with pytest.raises(error_class, match=message) as caught:
        await client.complete(prompt, SamplingParams(max_tokens=9))
    if isinstance(caught.value, Overloaded):
        assert caught.value.retry_after_ms == 250
    await client.ping()


@pytest.mark.parametrize("prompt", ["\ud800", "x" * (5 << 20), [2**70]], ids=["surrogate", "too long", "beyond u64"])
async def test_a_request_that_cannot_be_encoded_is_refused(client: AsyncClient, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        await client.complete(prompt)
    await client.ping()


def nested(depth: int) -> list[Any]:
    return [] if depth == 1 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {"messages": [{**MESSAGE, "other": nested(6)}]}),
        (None, {"messages": [{**MESSAGE, 1.5: "hi"}]}),
        ("hi", {"sampling_params": SamplingParams(logit_bias=dict.fromkeys(range(40_000), 1.0))}),
        ([1] * ((1 << 20) + 1), {}),
    ],
    ids=["nested too deep", "a float as key", "too many entries", "too many ids"],
)
async def test_a_request_beyond_the_limits_of_the_protocol_fails_alone(
    client: AsyncClient, prompt: Any, options: dict[str, Any]
) -> None:
    stream = client.generate("hold", ENDLESS)
    await anext(stream)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        await client.complete(prompt, **options)
    await client.ping()
    following = asyncio.create_task(anext(stream))
    assert (await client.complete("hi", THREE)).token_ids == (0, 1, 2)
    assert not following.done()
    following.cancel()


async def test_a_request_at_the_limits_of_the_protocol_is_sent(system: Any, client: AsyncClient) -> None:
    await client.complete(sampling_params=THREE, messages=[{**MESSAGE, "other": nested(5)}])
    assert len(system.engine.requests) == 1


async def test_a_connection_is_replaced_after_a_breach() -> None:
    """The server reports a breach on the first connection."""
    num_connections = 0

    async def report_breach_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.read(1024)
        writer.write(WELCOME)
        await reader.read(1024)
        writer.write(
            framed("PONG", 2) if num_connections > 1 else framed("ERROR", None, "INVALID_ARGUMENT", "a breach")
        )
        await reader.read()
        writer.close()

    server = await asyncio.start_server(report_breach_once, "127.0.0.1", 0)
    async with AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(ProtocolError, match="a breach"):
            await client.ping()
        await client.ping()
    server.close()
    await server.wait_closed()


async def test_the_frame_limit_of_the_server_is_respected(serve: Serve) -> None:
    system = await serve(max_frame_bytes=100_000)
    async with AsyncClient(system.address) as client:
        with pytest.raises(InvalidRequest, match="the limit is 100000"):
            await client.complete("x" * 100_001)
        await client.complete("x" * 90_000, THREE)


async def test_a_wrong_token(serve: Serve) -> None:
    system = await serve(token="secret")
    with pytest.raises(Unauthenticated, match="not valid"):
        async with AsyncClient(system.address, token="wrong"):
            pass
    async with AsyncClient(system.address, token="secret") as client:
        await client.ping()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nonexistent/quire.sock", "no such host:1"])
async def test_unavailable_if_no_server_listens(address: str) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        async with AsyncClient(address):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1"])
async def test_a_refused_connection_names_its_address_once(address: str) -> None:
    with pytest.raises(Unavailable, match=f"^cannot connect to {address}: Connection refused$"):
        async with AsyncClient(address):
            pass


def test_a_bad_address() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        AsyncClient("localhost")
    with pytest.raises(ConfigError, match="TLS is not supported over a unix socket"):
        AsyncClient("unix:/run/quire.sock", tls=True)
    with pytest.raises(ConfigError, match=r"address must be text such as '127.0.0.1:7070', or several, not None"):
        AsyncClient(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token must be text or None, not int"):
        AsyncClient("localhost:7070", token=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"max_tokens": 3}, "no argument 'max_tokens'; write sampling_params=SamplingParams(max_tokens=…)"),
        ({"max_new_tokens": 3}, "no argument 'max_new_tokens'; write sampling_params=SamplingParams(max_tokens=…)"),
        ({"params": THREE}, "no argument 'params'; did you mean sampling_params=…?"),
        ({"resumeable": True}, "no argument 'resumeable'; did you mean resumable=…?"),
        ({"color": "red"}, "no argument 'color'; the arguments are prompt, sampling_params, messages, chat,"),
    ],
    ids=["max_tokens", "max_new_tokens", "params", "resumeable", "color"],
)
async def test_an_unknown_argument_is_a_type_error_that_names_the_right_one(
    system: Any, client: AsyncClient, options: dict[str, Any], advice: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(advice)):
        client.generate("def f", **options)  # raised by the call, before the loop
    with pytest.raises(TypeError, match=re.escape(advice)):
        await client.complete("def f", **options)
    assert system.engine.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "hello"}, "messages must be a list of at least one map such as"),
        ({"messages": [{"content": "hello"}]}, "messages[0] has no 'role'"),
        ({"prompt": 5}, "a prompt is text or a sequence of token ids, not 5"),
        ({"prompt": "hi", "sampling_params": {"max_tokens": 3}}, "sampling_params must be a SamplingParams"),
        ({"prompt": "hi", "on_accepted": "x"}, "on_accepted must be a function or None, not 'x'"),
        ({"prompt": "hi", "on_progress": 5}, "on_progress must be a function or None, not 5"),
    ],
    ids=["messages", "content", "prompt", "sampling_params", "on_accepted", "on_progress"],
)
async def test_arguments_of_another_form_are_refused(
    system: Any, client: AsyncClient, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        client.generate(**arguments)
    assert system.engine.requests == []


async def test_text_parts_are_sent_as_text(system: Any, client: AsyncClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await client.complete(sampling_params=THREE, messages=[{"role": "user", "content": parts}])
    (request,) = system.engine.requests
    assert request.messages == ({"role": "user", "content": "one\ntwo"},)


async def test_a_client_must_be_entered(system: Any) -> None:
    for start in (AsyncClient(system.address).ping(), AsyncClient(system.address).complete("hi")):
        with pytest.raises(NotOpen, match=r"not connected; use `async with AsyncClient\(…\) as client:`$"):
            await start
    for use in (Client(system.address).ping, lambda: Client(system.address).generate("hi")):
        with pytest.raises(NotOpen, match=r"not connected; use `with Client\(…\) as client:`$"):
            use()


def test_a_client_that_could_not_connect_is_not_connected() -> None:
    client = Client("unix:/nowhere")
    with pytest.raises(Unavailable, match="cannot connect to unix:/nowhere"), client:
        pass
    for use in (client.ping, lambda: client.generate("hi")):
        with pytest.raises(NotOpen, match=r"not connected; use `with Client\(…\) as client:`$"):
            use()


async def test_a_server_that_closes_ends_every_stream(system: Any, client: AsyncClient, eventually: Eventually) -> None:
    streams = [asyncio.create_task(client.complete("hold", ENDLESS)) for _ in range(3)]
    await eventually(lambda: len(system.engine.live) == 3)
    await system.server.close()
    for stream in streams:
        with pytest.raises(Unavailable, match="shutting down"):
            await stream
    with pytest.raises(Unavailable, match="cannot connect"):
        await client.ping()


# Servers that break the protocol


def framed(*message: object) -> bytes:
    payload: bytes = msgpack.packb(message)
    return struct.pack(">I", len(payload)) + payload


WELCOME = framed("WELCOME", 1, [], 1 << 20, "m")


@pytest.mark.parametrize(
    ("answer", "error_class"),
    [
        (WELCOME, Unavailable),
        (WELCOME + b"\x00\x00\x00\x01\xc1", ProtocolError),
        (WELCOME + WELCOME, ProtocolError),
        (WELCOME + framed("TOKENS", 1, "x"), ProtocolError),
        (b"HTTP/1.1 400 Bad Request\r\n", ProtocolError),
        (b"", Unavailable),
    ],
    ids=["leaves", "garbage", "two welcomes", "bad tokens", "http", "silent close"],
)
async def test_a_server_that_breaks_the_protocol_raises_an_error(answer: bytes, error_class: type[Exception]) -> None:
    async def send_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(send_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(error_class):
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await client.complete("hi")
    server.close()
    await server.wait_closed()


# The client without asyncio


@pytest.fixture
def address(serve: Serve) -> Iterator[tuple[str, Any]]:
    """Return the address and the engine of a server on another thread, for clients without asyncio."""
    started: list[Any] = []
    ready = threading.Event()
    stop: list[Callable[[], None]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        started.append(await serve())
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        ready.set()
        await done.wait()
        await started[0].server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    yield started[0].address, started[0].engine
    stop[0]()
    thread.join()


def test_the_blocking_client_streams(address: tuple[str, Any]) -> None:
    with Client(address[0]) as client:
        assert [chunk.token_ids for chunk in client.generate("hi", THREE)] == [(0, 1), (2,), ()]
        assert client.complete("hi", THREE).text == " hi:0é日 hi:2é日"
        assert client.ping() > 0


def test_the_blocking_client_sends_tokenize_models_and_stats(address: tuple[str, Any]) -> None:
    with Client(address[0]) as client:
        assert client.tokenize("h") == (0, 104)
        assert [model.vocab_size for model in client.models()] == [256]
        assert client.stats()["pages_total"] == 10


def test_leaving_a_blocking_loop_cancels(address: tuple[str, Any]) -> None:
    with Client(address[0]) as client:
        for _ in client.generate("hold", ENDLESS):
            break
        while address[1].live:
            client.ping()


def test_many_threads_share_one_blocking_client(address: tuple[str, Any]) -> None:
    with Client(address[0]) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda index: client.complete(f"p{index}", THREE).text, range(40)))
    assert texts == [f" p{index}:0é日 p{index}:2é日" for index in range(40)]


def test_closing_a_blocking_client_frees_other_threads(address: tuple[str, Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        client = Client(address[0]).__enter__()
        waiting = pool.submit(client.complete, "hold", ENDLESS)
        while not address[1].live:
            client.ping()
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            waiting.result(60)
    client.close()
    with pytest.raises(NotOpen, match="this client is closed"):
        client.ping()


def test_the_blocking_client_raises_the_same_errors(address: tuple[str, Any]) -> None:
    with Client(address[0]) as client, pytest.raises(Overloaded, match="the queue is full"):
        client.complete("full")
    with pytest.raises(Unavailable), Client("127.0.0.1:1"):
        pass
    with pytest.raises(ConfigError):
        Client("nowhere")
