"""Compare Quire with llama.cpp's server on conversations: tokens computed again, and the time to the first token.

usage: python -m tests.bench.conversations MODEL.gguf [--llama-server PATH] [--turns 12] [--system 700]

Without PATH only Quire runs. The servers run one after the other. Both get the same prompts, as token ids: one turn of
each conversation after another one, all with one system prompt. Messages end with the model's end-of-sequence token. A
logit bias of 100 makes each answer the same token repeated, so prompts do not depend on the servers.
    computed again  prompt tokens that a server computes though this conversation, or for the system prompt an earlier
                    one, has computed them: the prompt without the cached and the new tokens
    attention       the same for a model without states that computes only the last part of a page again
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quire.runtime.model import read_spec

PAGE_SIZE = 32
LEAST_TOKEN = 1000  # prompts have random tokens from here on, so that none is special
ANSWER = 500  # token of which answers consist
FORCED = 100  # logit bias
START_S = 600


class Turn(NamedTuple):
    """A request of the trace."""

    conversation: int
    number: int
    prompt: list[int]
    known: int  # tokens at its start that were computed before, by this conversation or an earlier one


class Answer(NamedTuple):
    """The measurements of a request."""

    seconds: float  # time to the first token
    computed: int  # prompt tokens that the server computed


def main() -> None:
    arguments = _parse_arguments()
    spec = read_spec(arguments.model)
    trace = list(_trace(arguments, spec.eos_token_ids[0]))
    tokens = sum(len(turn.prompt) for turn in trace)
    new = sum(len(turn.prompt) - turn.known for turn in trace)
    attention = sum(min(turn.known, len(turn.prompt) - 1) % PAGE_SIZE for turn in trace)
    print(f"{len(trace)} requests with {tokens:,} prompt tokens, of which {new:,} are new; attention {attention:,}")
    print(f"{'':10}{'computed again':>16}{'first turns':>13}{'later turns':>13}{'p50 s':>8}{'p90 s':>8}{'total s':>9}")
    with _quire(arguments) as port:
        _report("Quire", trace, [_ask_quire(port, arguments, turn) for turn in trace])
    if arguments.llama_server:
        with _llama(arguments) as port:
            _report("llama.cpp", trace, [_ask_llama(port, arguments, turn) for turn in trace])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--system", type=int, default=700)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache-memory", default="1GiB")
    return parser.parse_args()


def _trace(arguments: argparse.Namespace, eos: int) -> Iterator[Turn]:
    random_token = random.Random(1)

    def message(length: int) -> list[int]:
        return [*(random_token.randrange(LEAST_TOKEN, 30_000) for _ in range(length - 1)), eos]

    system = message(arguments.system)
    texts = [system[:] for _ in range(arguments.conversations)]
    known = [0] * arguments.conversations
    for number in range(arguments.turns):
        for index, text in enumerate(texts):
            text += message(20 + 7 * index % 30)
            yield Turn(index, number, text[:], known[index])
            text += [ANSWER] * arguments.answer
            known = [max(each, len(system)) for each in known]
            known[index] = len(text) - 1


@contextmanager
def _quire(arguments: argparse.Namespace) -> Iterator[int]:
    port = _free_port()
    command = [Path(sys.executable).with_name("quire"), "serve", arguments.model, "--port", 0, "--operator-port", 0]
    command += ["--openai-port", port, "--threads", arguments.threads, "--max-num-seqs", arguments.conversations]
    command += ["--kv-cache-memory", arguments.kv_cache_memory, "--max-model-len", arguments.context]
    with _running(command, port, "/v1/models"):
        yield port


@contextmanager
def _llama(arguments: argparse.Namespace) -> Iterator[int]:
    port = _free_port()
    slots = arguments.conversations
    command = [arguments.llama_server, "-m", arguments.model, "--host", "127.0.0.1", "--port", port, "-np", slots]
    command += ["-c", slots * arguments.context, "-t", arguments.threads, "-tb", arguments.threads]
    with _running(command, port, "/health"):
        yield port


@contextmanager
def _running(command: list[Any], port: int, health: str) -> Iterator[None]:
    """Run a server whose libraries may lie beside it."""
    library_path = f"{Path(command[0]).parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    process = subprocess.Popen(
        list(map(str, command)),
        env=os.environ | {"LD_LIBRARY_PATH": library_path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + START_S
        while not _is_healthy(port, health):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait()


def _is_healthy(port: int, path: str) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False


def _ask_quire(port: int, arguments: argparse.Namespace, turn: Turn) -> Answer:
    body = {"prompt": turn.prompt, "max_tokens": arguments.answer, "stream_options": {"include_usage": True}}
    bias = {"logit_bias": {str(ANSWER): FORCED}, "ignore_eos": True, "temperature": 0}
    seconds, events = _stream(port, "/v1/completions", body | bias)
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    return Answer(seconds, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def _ask_llama(port: int, arguments: argparse.Namespace, turn: Turn) -> Answer:
    body = {"prompt": turn.prompt, "n_predict": arguments.answer, "cache_prompt": True, "temperature": 0}
    seconds, events = _stream(port, "/completion", body | {"logit_bias": [[ANSWER, FORCED]], "ignore_eos": True})
    return Answer(seconds, events[-1]["timings"]["prompt_n"])


def _stream(port: int, path: str, body: dict[str, Any]) -> tuple[float, list[Any]]:
    """Return the seconds until the first event, and all events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    start = time.perf_counter()
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status} {response.read()[:500]!r}")
    seconds = 0.0
    events = []
    for line in response:
        if line.startswith(b"data: {"):
            seconds = seconds or time.perf_counter() - start
            events.append(json.loads(line[len(b"data: ") :]))
    connection.close()
    return seconds, events


def _report(name: str, trace: list[Turn], answers: list[Answer]) -> None:
    again = [answer.computed - len(turn.prompt) + turn.known for turn, answer in zip(trace, answers, strict=True)]
    first = sum(tokens for turn, tokens in zip(trace, again, strict=True) if not turn.number)
    seconds = [answer.seconds for answer in answers]
    p90 = statistics.quantiles(seconds, n=10)[-1]
    counts = f"{sum(again):>16,}{first:>13,}{sum(again) - first:>13,}"
    print(f"{name:10}{counts}{statistics.median(seconds):>8.2f}{p90:>8.2f}{sum(seconds):>9.1f}", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
