"""A fake server that computes nothing: every token of every answer leaves at a time that is known in advance.

usage: fake_server.py [--protocol quire|openai] [--requests 100] [--seed 0]
                      [--ttft-ms 20 80] [--itl-ms 5 30] [--tokens 2 40]

Request i, whose prompt ends in the number i, is answered as `scripts(…)[i]` says; delays count from the arrival of its
last byte. The server measures the accuracy of load tests, so it runs in a process of its own and is exact: it sleeps
until shortly before a token is due, then spins. It prints `ready HOST:PORT` and, when its standard input ends, the
times at which every token really left, as JSON: on a shared machine even a spinning process is delayed at times, which
is not an error of the load test.

It implements as much of Quire's protocol, or of OpenAI's completions and chat completions, as a client needs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import itertools
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

from quire.runtime.common.types import Usage
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import (
    CLIENT_FRAMES,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Done,
    Frame,
    Generate,
    Hello,
    ListModels,
    Models,
    Ping,
    Pong,
    ServedModel,
    Tokens,
    Welcome,
)

Encode = Callable[[int, bool], bytes]  # (index of a token, whether it is the last) -> bytes to send

SPIN_S = 0.002  # spin for this long before a token is due: longer than the system oversleeps
PROMPT_TOKENS = 10
MODEL = ServedModel(name="fake", max_model_len=4096, vocab_size=1000, has_tokenizer=False, has_chat_template=False)


@dataclass(frozen=True)
class Script:
    """One answer: seconds from the request to its first token, and between each token and the next."""

    ttft_s: float
    itls_s: tuple[float, ...]

    @property
    def tpot_s(self) -> float:
        return sum(self.itls_s) / len(self.itls_s)

    @property
    def e2el_s(self) -> float:
        return self.ttft_s + sum(self.itls_s)

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.itls_s)

    @property
    def token_times(self) -> list[float]:
        """Seconds since the request."""
        return list(itertools.accumulate(self.itls_s, initial=self.ttft_s))

    @classmethod
    def of(cls, token_times: Sequence[float]) -> Script:
        return cls(token_times[0], tuple(after - before for before, after in itertools.pairwise(token_times)))


@dataclass(frozen=True)
class ScriptRanges:
    """The uniform distributions of scripts: (lowest, highest)."""

    ttft_ms: tuple[float, float] = (20, 80)
    itl_ms: tuple[float, float] = (5, 30)
    tokens: tuple[int, int] = (2, 40)


def scripts(count: int, seed: int, ranges: ScriptRanges = ScriptRanges()) -> list[Script]:
    rng = random.Random(seed)
    return [
        Script(
            rng.uniform(*ranges.ttft_ms) / 1000,
            tuple(rng.uniform(*ranges.itl_ms) / 1000 for _ in range(rng.randint(*ranges.tokens) - 1)),
        )
        for _ in range(count)
    ]


def known_ms(answers: Sequence[Script]) -> dict[str, list[float]]:
    """Return the true latencies, by vLLM's names of the metrics."""
    found = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.itls_s],
        "itl": [seconds for answer in answers for seconds in answer.itls_s],
        "e2el": [answer.e2el_s for answer in answers],
    }
    return {name: [1000 * value for value in values] for name, values in found.items()}


@contextmanager
def fake_server(protocol: str, count: int, seed: int, ranges: ScriptRanges = ScriptRanges()) -> Iterator[FakeServer]:
    """Run a fake server in a separate process."""
    command = [sys.executable, str(Path(__file__)), "--protocol", protocol, "--requests", str(count)]
    command += ["--seed", str(seed)]
    for name, pair in (("--ttft-ms", ranges.ttft_ms), ("--itl-ms", ranges.itl_ms), ("--tokens", ranges.tokens)):
        command += [name, *map(str, pair)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = FakeServer(scripts(count, seed, ranges), process.stdout.readline().removeprefix("ready ").strip())
        assert server.address, "the fake server did not start"
        try:
            yield server
        finally:
            process.stdin.close()
            left_s = json.loads(process.stdout.read())
            server.actual = [Script.of(times) for times in left_s if times]


@dataclass
class FakeServer:
    """A running fake server: its script, and after its end its actual times."""

    expected: list[Script]
    address: str
    actual: list[Script] = field(default_factory=list)  # scripts of the requests that arrived

    @property
    def lateness_ms(self) -> list[float]:
        """How late each token was sent."""
        return [
            1000 * (actual - expected)
            for script, done in zip(self.expected, self.actual, strict=True)
            for expected, actual in zip(script.token_times, done.token_times, strict=True)
        ]


# The process


class Timer:
    """Calls functions at given times of perf_counter, in order, as exactly as one process can."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()
        self._earlier = asyncio.Event()  # a call is due before the awaited one

    def at(self, due_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), call))
        if self._due[0][2] is call:
            self._earlier.set()

    async def run(self) -> None:
        while True:
            self._earlier.clear()
            left_s = self._due[0][0] - time.perf_counter() if self._due else None
            if left_s is not None and left_s <= 0:
                heapq.heappop(self._due)[2]()
            elif left_s is not None and left_s <= SPIN_S:
                await asyncio.sleep(0)
            else:
                await self._wait(None if left_s is None else left_s - SPIN_S)

    async def _wait(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._earlier.wait(), seconds)


class Answers:
    """The scripts, and when each token really left, in seconds since the arrival of its request."""

    def __init__(self, expected: Sequence[Script]) -> None:
        self.expected = expected
        self.left_s: list[list[float]] = [[] for _ in expected]
        self.timer = Timer()


class FakeConnection(asyncio.Protocol):
    """The parts that both protocols share: sending the tokens of a script when they are due."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._cancelled: set[int] = set()  # request ids

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport.abort()

    def answer(self, request_id: int, prompt: str, received_s: float, encode_token: Encode) -> None:
        number = re.search(r"(\d+)$", prompt)
        assert number is not None, f"the prompt {prompt!r} does not end in a number"
        script = self._answers.expected[int(number[1])]
        left_s = self._answers.left_s[int(number[1])]
        due_s = [received_s + after_s for after_s in script.token_times]

        def send(index: int) -> None:
            """Send one token, then schedule the next one, so that no answer delays another one."""
            if request_id in self._cancelled or self._transport.is_closing():
                return
            is_last = index == script.num_tokens - 1
            data = encode_token(index, is_last)
            left_s.append(time.perf_counter() - received_s)
            self._transport.write(data)
            if not is_last:
                self._answers.timer.at(due_s[index + 1], partial(send, index + 1))

        self._answers.timer.at(due_s[0], partial(send, 0))


class QuireConnection(FakeConnection):
    """A connection of Quire's protocol. Tokens are sent when they are due, whatever the credit."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._decoder = Decoder(CLIENT_FRAMES, MAX_FRAME_BYTES)

    def data_received(self, data: bytes) -> None:
        received_s = time.perf_counter()
        for frame in self._decoder.feed(data):
            match frame:
                case Hello():
                    self._write(Welcome(PROTOCOL_VERSION, (), MAX_FRAME_BYTES, "fake"))
                case Generate(request_id, str(prompt)):
                    self._write(Accepted(request_id, 0, 1, 1, 0.0))
                    self.answer(request_id, prompt, received_s, _frames_of(request_id))
                case Cancel(request_id):
                    self._cancelled.add(request_id)
                    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=0)
                    self._write(Done(request_id, "cancelled", usage))
                case ListModels(request_id):
                    self._write(Models(request_id, (MODEL,)))
                case Ping(nonce):
                    self._write(Pong(nonce))

    def _write(self, frame: Frame) -> None:
        self._transport.write(encode(frame))


def _frames_of(request_id: int) -> Encode:
    def encode_token(index: int, is_last: bool) -> bytes:
        tokens = encode(Tokens(request_id, index, (index,), f"{index} "))
        if not is_last:
            return tokens
        usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=index + 1)
        return tokens + encode(Done(request_id, "length", usage))

    return encode_token


class OpenAIConnection(FakeConnection):
    """A connection of HTTP/1.1, with one request after the other."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self._buffer = b""
        self._ids = itertools.count()

    def data_received(self, data: bytes) -> None:
        received_s = time.perf_counter()
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            self._buffer = rest[size:]
            self._respond(head.split(b" ", 2)[1].decode(), rest[:size], received_s)

    def _respond(self, path: str, body: bytes, received_s: float) -> None:
        if not path.endswith("/completions"):
            models = json.dumps({"object": "list", "data": [{"id": "fake", "object": "model"}]}).encode()
            self._transport.write(_head("application/json", f"Content-Length: {len(models)}") + models)
            return
        fields = json.loads(body)
        is_chat = path.endswith("chat/completions")
        prompt = fields["messages"][-1]["content"] if is_chat else fields["prompt"]
        self._transport.write(_head("text/event-stream", "Transfer-Encoding: chunked"))
        self.answer(next(self._ids), prompt, received_s, _events_of(is_chat))


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


def _events_of(is_chat: bool) -> Encode:
    def encode_token(index: int, is_last: bool) -> bytes:
        text = {"delta": {"content": f"{index} "}} if is_chat else {"text": f"{index} "}
        token = _event({"choices": [{"index": 0, **text, "finish_reason": "length" if is_last else None}]})
        if not is_last:
            return token
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": index + 1}
        return token + _event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + _chunk(b"")

    return encode_token


def _event(content: dict[str, object]) -> bytes:
    return _chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PROTOCOLS = {"quire": QuireConnection, "openai": OpenAIConnection}


async def serve(protocol: str, answers: Answers) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    pacing = asyncio.create_task(answers.timer.run())
    listening = await loop.create_server(lambda: PROTOCOLS[protocol](answers), "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    gc.disable()
    print(f"ready {host}:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    pacing.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="quire")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, nargs=2, default=ScriptRanges.ttft_ms)
    parser.add_argument("--itl-ms", type=float, nargs=2, default=ScriptRanges.itl_ms)
    parser.add_argument("--tokens", type=int, nargs=2, default=ScriptRanges.tokens)
    options = parser.parse_args()
    ranges = ScriptRanges(tuple(options.ttft_ms), tuple(options.itl_ms), tuple(options.tokens))
    answers = Answers(scripts(options.requests, options.seed, ranges))
    asyncio.run(serve(options.protocol, answers))
    print(json.dumps(answers.left_s))


if __name__ == "__main__":
    main()
