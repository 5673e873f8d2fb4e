"""A server that computes nothing and keeps its word: every token of every answer leaves at a moment known beforehand.

usage: fake_server.py [--protocol quire|openai] [--requests 100] [--seed 0]
                      [--ttft-ms 20 80] [--itl-ms 5 30] [--tokens 2 40]

Request i, whose prompt ends in the number i, is answered as `scripts(…)[i]` says: delays count from the moment its last
byte has arrived. What is measured against it is the harness, so it runs in a process of its own and keeps its times:
it sleeps until shortly before, then spins. It prints `ready HOST:PORT`, and when its standard input ends, as JSON when
every token really left: on a shared machine even who spins is held up now and then, and that is no error of a harness.

Quire's protocol or OpenAI's completions and chat completions, streamed; of both, what a client needs and no more.
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

Piece = Callable[[int, bool], bytes]  # of a token's index and whether it is the last: what leaves with it

SPIN_S = 0.002  # before a token is due: longer than the system may oversleep
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
class Range:
    """What scripts are drawn from, evenly: (lowest, highest)."""

    ttft_ms: tuple[float, float] = (20, 80)
    itl_ms: tuple[float, float] = (5, 30)
    tokens: tuple[int, int] = (2, 40)


def scripts(count: int, seed: int, drawn: Range = Range()) -> list[Script]:
    rng = random.Random(seed)
    return [
        Script(
            rng.uniform(*drawn.ttft_ms) / 1000,
            tuple(rng.uniform(*drawn.itl_ms) / 1000 for _ in range(rng.randint(*drawn.tokens) - 1)),
        )
        for _ in range(count)
    ]


def known_ms(answers: Sequence[Script]) -> dict[str, list[float]]:
    """What a harness must find, by vLLM's names of the metrics."""
    found = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers if answer.itls_s],
        "itl": [seconds for answer in answers for seconds in answer.itls_s],
        "e2el": [answer.e2el_s for answer in answers],
    }
    return {name: [1000 * value for value in values] for name, values in found.items()}


@contextmanager
def fake_server(protocol: str, count: int, seed: int, drawn: Range = Range()) -> Iterator[FakeServer]:
    """In a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--protocol", protocol, "--requests", str(count)]
    command += ["--seed", str(seed)]
    for name, pair in (("--ttft-ms", drawn.ttft_ms), ("--itl-ms", drawn.itl_ms), ("--tokens", drawn.tokens)):
        command += [name, *map(str, pair)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        server = FakeServer(scripts(count, seed, drawn), process.stdout.readline().removeprefix("ready ").strip())
        assert server.address, "the fake server did not start"
        try:
            yield server
        finally:
            process.stdin.close()
            left_s = json.loads(process.stdout.read())
            server.kept = [Script.of(times) for times in left_s if times]


@dataclass
class FakeServer:
    promised: list[Script]
    address: str
    kept: list[Script] = field(
        default_factory=list
    )  # once it has ended: what it really did, of answers it was asked for

    @property
    def lateness_ms(self) -> list[float]:
        """Of every token."""
        return [
            1000 * (kept - promised)
            for script, done in zip(self.promised, self.kept, strict=True)
            for promised, kept in zip(script.token_times, done.token_times, strict=True)
        ]


# The process


class Pacer:
    """Calls back at given times of perf_counter, in order, as exactly as one process can."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._order = itertools.count()
        self._earlier = asyncio.Event()  # something is due before what was waited for

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
    """What is to be answered, and when each token of it really left: seconds since its request had arrived."""

    def __init__(self, promised: Sequence[Script]) -> None:
        self.promised = promised
        self.left_s: list[list[float]] = [[] for _ in promised]
        self.pacer = Pacer()


class Answering(asyncio.Protocol):
    """What both protocols share: a script's tokens leave as their times come."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._gone: set[int] = set()  # cancelled requests, by id

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport.abort()

    def answer(self, request_id: int, prompt: str, received_s: float, piece: Piece) -> None:
        number = re.search(r"(\d+)$", prompt)
        assert number is not None, f"the prompt {prompt!r} does not say which request it is"
        script, left_s = self._answers.promised[int(number[1])], self._answers.left_s[int(number[1])]
        due_s = [received_s + after_s for after_s in script.token_times]

        def send(index: int) -> None:
            """One token, and only then the next is thought of: nothing may hold up the tokens of others."""
            if request_id in self._gone or self._transport.is_closing():
                return
            is_last = index == script.num_tokens - 1
            data = piece(index, is_last)
            left_s.append(time.perf_counter() - received_s)
            self._transport.write(data)
            if not is_last:
                self._answers.pacer.at(due_s[index + 1], partial(send, index + 1))

        self._answers.pacer.at(due_s[0], partial(send, 0))


class QuireConnection(Answering):
    """Tokens are sent when they are due, whatever the credit."""

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
                    self._gone.add(request_id)
                    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=0)
                    self._write(Done(request_id, "cancelled", usage))
                case ListModels(request_id):
                    self._write(Models(request_id, (MODEL,)))
                case Ping(nonce):
                    self._write(Pong(nonce))

    def _write(self, frame: Frame) -> None:
        self._transport.write(encode(frame))


def _frames_of(request_id: int) -> Piece:
    def piece(index: int, is_last: bool) -> bytes:
        tokens = encode(Tokens(request_id, index, (index,), f"{index} "))
        if not is_last:
            return tokens
        usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=index + 1)
        return tokens + encode(Done(request_id, "length", usage))

    return piece


class OpenAIConnection(Answering):
    """HTTP/1.1, one request after the other on a connection."""

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
        asked = json.loads(body)
        is_chat = path.endswith("chat/completions")
        prompt = asked["messages"][-1]["content"] if is_chat else asked["prompt"]
        self._transport.write(_head("text/event-stream", "Transfer-Encoding: chunked"))
        self.answer(next(self._ids), prompt, received_s, _events_of(is_chat))


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


def _events_of(is_chat: bool) -> Piece:
    def piece(index: int, is_last: bool) -> bytes:
        text = {"delta": {"content": f"{index} "}} if is_chat else {"text": f"{index} "}
        token = _event({"choices": [{"index": 0, **text, "finish_reason": "length" if is_last else None}]})
        if not is_last:
            return token
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": index + 1}
        return token + _event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + _chunk(b"")

    return piece


def _event(content: dict[str, object]) -> bytes:
    return _chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


PROTOCOLS = {"quire": QuireConnection, "openai": OpenAIConnection}


async def serve(protocol: str, answers: Answers) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    pacing = asyncio.create_task(answers.pacer.run())
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
    parser.add_argument("--ttft-ms", type=float, nargs=2, default=Range.ttft_ms)
    parser.add_argument("--itl-ms", type=float, nargs=2, default=Range.itl_ms)
    parser.add_argument("--tokens", type=int, nargs=2, default=Range.tokens)
    asked = parser.parse_args()
    drawn = Range(tuple(asked.ttft_ms), tuple(asked.itl_ms), tuple(asked.tokens))
    answers = Answers(scripts(asked.requests, asked.seed, drawn))
    asyncio.run(serve(asked.protocol, answers))
    print(json.dumps(answers.left_s))


if __name__ == "__main__":
    main()
