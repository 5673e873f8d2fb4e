"""Test a client, written in any language, against a real server with the cases of script.json.

usage: run.py [--case WORDS] python | node | COMMAND ARGUMENTS…

A driver runs the client: a program that reads commands from standard input, one JSON object per line, and answers each
with a line on standard output, {"ok": …} or {"error": {"code", "retryable", "message"}}. Seeds and other 64-bit
integers are decimal strings. The commands:

    {"do": "connect", "address", "token"?, "ca"?, "first_id"?}   make a new client; ca: trusted PEM file, implies TLS;
                                           address: a text, or several, of which the first that answers is used
    {"do": "start", "stream", "request"}   start a stream by name; request: prompt | messages, chat?, params,
                                           resumable?, idempotency_key?, deadline_ms?; the `image` of a part of a
                                           message is base64
    {"do": "read", "stream", "tokens"}     read until N tokens of all outputs came; answer with the outcome so far
    {"do": "finish", "stream"}             read to the end; answer with the outcome
    {"do": "leave", "stream"}              stop reading, so that the client cancels the request
    {"do": "embed", "inputs"}              answer with an array of numbers for each text or array of ids
    {"do": "score", "query", "documents"}  answer with a number for each document
    {"do": "run", "requests"}              read all requests to the end at the same time; answer with their outcomes

An outcome is {"choices": [{"token_ids", "text", "logprobs", "finish_reason", "deltas"?}], "usage"}. The model in this
process gives the expected outcomes. A proxy between client and server counts tokens and credit, and cuts connections.
The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from proxy import Proxy, proxying
from quire import LLM, RequestOutput, SamplingParams

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DRIVERS = {
    "python": [sys.executable, "-W", "error", str(HERE / "driver_python.py")],
    "node": ["node", str(ROOT / "deploy" / "clients" / "node" / "conformance.mjs")],
}
TOKEN = "a token for this run"
CERTIFICATE = ROOT / "tests" / "data" / "tls" / "cert.pem"
KEY = ROOT / "tests" / "data" / "tls" / "key.pem"
SMALL = (
    "--port",
    "0",
    "--operator-port",
    "0",
    "--openai-port",
    "0",
    "--threads",
    "1",
    "--kv-cache-memory",
    "16MiB",
    "--tool-call-parser",
    "hermes",
)
EMBEDDING_MODEL = str(ROOT / "tests" / "goldens" / "encoders" / "bert")
GUARDED = ("--in-process", "--token", TOKEN, "--tls-cert", str(CERTIFICATE), "--tls-key", str(KEY))
CASE_TIMEOUT_S = 60.0
MAX_REASON_CHARACTERS = 2000


class Failed(Exception):
    """A client's answer differs from the expected one."""


def main() -> int:
    """Run the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="run only cases whose name contains WORDS")
    parser.add_argument("driver", nargs="+", help="python, node, or a command")
    options = parser.parse_args()
    command = DRIVERS.get(options.driver[0], options.driver)
    failures = asyncio.run(conform(command, json.loads((HERE / "script.json").read_text("utf-8")), options.case))
    return 1 if failures else 0


async def conform(command: list[str], script: dict[str, Any], only: str = "") -> list[str]:
    """Print every case with its result and return the names of failed ones."""
    failures = []
    async with AsyncExitStack() as stack:
        plain, guarded, wanted = await asyncio.gather(
            stack.enter_async_context(_serving(*SMALL, "--embedding-model", EMBEDDING_MODEL)),
            stack.enter_async_context(_serving(*SMALL, *GUARDED)),
            asyncio.to_thread(_references, script["requests"]),
        )
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        run = _Run(
            plain=plain,
            guarded=guarded,
            proxy=await stack.enter_async_context(proxying(Path(folder))),
            driver=await stack.enter_async_context(_driving(command)),
            requests=script["requests"],
            wanted=wanted,
        )
        for case in script["cases"]:
            if only not in case["name"]:
                continue
            try:
                async with asyncio.timeout(CASE_TIMEOUT_S):
                    await run.try_case(case)
            except (Failed, TimeoutError) as error:
                failures.append(case["name"])
                print(f"FAILED  {case['name']}: {error!r}"[:MAX_REASON_CHARACTERS], flush=True)
            else:
                print(f"passed  {case['name']}", flush=True)
    return failures


class _Server:
    """A `quire serve` process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address


class _Driver:
    """A driver process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        if not (line := await stdout.readline()):
            raise Failed(f"the driver ended at {command}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Run:
    """The servers, the driver, the proxy between them, and the expected outcomes."""

    def __init__(
        self,
        plain: _Server,
        guarded: _Server,
        proxy: Proxy,
        driver: _Driver,
        requests: dict[str, Any],
        wanted: dict[str, Any],
    ) -> None:
        self._plain = plain
        self._guarded = guarded
        self._proxy = proxy
        self._driver = driver
        self._requests = requests
        self._wanted = wanted
        self._streams: dict[str, str] = {}  # stream -> name of its request
        self._remembered: dict[str, Any] = {}

    async def try_case(self, case: dict[str, Any]) -> None:
        versions = case.get("versions")
        self._proxy.reset(None if versions is None else tuple(versions))
        self._proxy.server = self._plain.address
        connect = dict(case.get("connect", {}))
        expected = connect.pop("expect", {})
        answer = await self._driver.ask(
            {"do": "connect", **connect, **self._target(case.get("server", "plain"), connect)}
        )
        _compare_error(answer, expected)
        for step in case["steps"]:
            await self._try_step(step)
        if self._proxy.breach is not None:
            raise Failed(self._proxy.breach)

    def _target(self, server: str, connect: dict[str, Any]) -> dict[str, Any]:
        match server:
            case "guarded":
                token = {"token": TOKEN} if connect.get("token") == "TOKEN" else {}
                return {"address": self._guarded.address, "ca": str(CERTIFICATE), **token}
            case "several":
                return {"address": ["127.0.0.1:1", self._proxy.address, self._proxy.unix_address]}
            case "unix":
                return {"address": self._proxy.unix_address}
            case "none":
                self._proxy.server = "127.0.0.1:1"
        return {"address": self._proxy.address}

    async def _try_step(self, step: dict[str, Any]) -> None:
        expected = step.get("expect", {})
        match step["do"]:
            case "await":
                await self._proxy.wait_for(step["what"])
            case "cut":
                self._proxy.cut(step["after_tokens"])
            case "lose":
                self._proxy.lose(step["after_tokens"])
            case "drain":
                self._plain.process.send_signal(signal.SIGTERM)
            case "start":
                self._streams[step["stream"]] = step["request"]
                _compare_error(await self._driver.ask({**step, "request": self._requests[step["request"]]}), expected)
            case "read" | "finish" | "leave":
                answer = await self._driver.ask(step)
                self._compare(answer, [self._streams[step["stream"]]], expected, lambda outcome: [outcome])
            case "embed" | "score":
                answer = await self._driver.ask(step)
                _compare_error(answer, expected)
                if expected.get("reference") and answer["ok"] != (wanted := _values(step)):
                    raise Failed(f"{answer['ok']} is not {wanted}")
            case "run":
                named = step["requests"]
                requests = [request if isinstance(request, dict) else self._requests[request] for request in named]
                answer = await self._driver.ask({"do": "run", "requests": requests})
                self._compare(answer, named, expected, lambda outcomes: outcomes)
                if "remember" in step:
                    self._remembered[step["remember"]] = answer["ok"]

    def _compare(self, answer: dict[str, Any], named: list[Any], expected: dict[str, Any], outcomes_of: Any) -> None:
        _compare_error(answer, expected)
        if "same_as" in expected and answer["ok"] != self._remembered[expected["same_as"]]:
            raise Failed(f"{answer['ok']} is not {self._remembered[expected['same_as']]}")
        if expected.get("reference") or expected.get("prefix"):
            for name, outcome in zip(named, outcomes_of(answer["ok"]), strict=True):
                compare = _compare_whole if expected.get("reference") else _compare_prefix
                compare(name, outcome, self._wanted[name])
        if "calls" in expected:
            for outcome in outcomes_of(answer["ok"]):
                _compare_calls(outcome["choices"][0], expected)
        if "connections" in expected and self._proxy.connections != expected["connections"]:
            raise Failed(f"{self._proxy.connections} connections, not {expected['connections']}")
        if "ids_from" in expected:
            first = int(expected["ids_from"])
            if sorted(self._proxy.ids) != list(range(first, first + len(named))):
                raise Failed(f"ids {self._proxy.ids} do not count from {first}")


def _compare_error(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    error = answer.get("error")
    if error is None and "error" in expected:
        raise Failed(f"no error, expected {expected['error']}")
    if error is not None and (error["code"], error["retryable"]) != (expected.get("error"), expected.get("retryable")):
        raise Failed(f"{error}, expected {expected.get('error', 'no error')}")


def _compare_whole(name: str, outcome: dict[str, Any], wanted: dict[str, Any]) -> None:
    if outcome["choices"] != wanted["choices"]:
        raise Failed(f"{name}: {outcome['choices']}, not {wanted['choices']}")
    for what, value in wanted["usage"].items():
        if (outcome["usage"] or {}).get(what) != value:
            raise Failed(f"{name}: usage {outcome['usage']}, expected {what} {value}")


def _compare_calls(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    deltas: list[tuple[str, str]] = choice.get("deltas", [])
    calls: list[list[str]] = []
    for kind, text in deltas:
        if kind == "call":
            calls.append([text, ""])
        elif kind == "arguments":
            calls[-1][1] += text
    found = [[name, json.loads(arguments)] for name, arguments in calls]
    if (choice["text"], found) != (expected["text"], expected["calls"]):
        raise Failed(f"{choice}, expected {expected}")


def _compare_prefix(name: str, outcome: dict[str, Any], wanted: dict[str, Any]) -> None:
    (came,) = outcome["choices"]
    whole = wanted["choices"][0]
    if not came["token_ids"] or came["token_ids"] != whole["token_ids"][: len(came["token_ids"])]:
        raise Failed(f"{name}: {came['token_ids']} does not begin {whole['token_ids']}")
    if not whole["text"].startswith(came["text"]):
        raise Failed(f"{name}: {came['text']!r} does not begin {whole['text']!r}")


def _references(requests: dict[str, Any]) -> dict[str, Any]:
    """Return the outcomes of the model in this process, except for samples without a seed."""
    with LLM(kv_cache_memory=16 << 20, threads=1) as llm:
        return {
            name: _outcome(llm.generate(request["prompt"], _params(request["params"]))[0], request["params"])
            for name, request in requests.items()
            if "prompt" in request and ("seed" in request["params"] or not request["params"].get("temperature"))
        }


def _values(step: dict[str, Any]) -> list[Any]:
    """Return the vectors or scores of the embedding model in this process."""
    with LLM(EMBEDDING_MODEL, threads=1) as llm:
        if step["do"] == "embed":
            values: list[Any] = llm.embed(step["inputs"]).tolist()
        else:
            values = llm.score(step["query"], step["documents"]).tolist()
        return values


def _params(params: dict[str, Any]) -> SamplingParams:
    return msgspec.convert(params, SamplingParams, strict=False, str_keys=True)


def _outcome(output: RequestOutput, params: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome as drivers write it, with the seed if the request has one."""
    fields = ("token_ids", "text", "logprobs", "finish_reason")
    choices = [{field: msgspec.to_builtins(getattr(choice, field)) for field in fields} for choice in output.outputs]
    usage = {"completion_tokens": output.usage.completion_tokens, "prompt_tokens": output.usage.prompt_tokens}
    if "seed" in params:
        usage["seed"] = params["seed"]
    wanted: dict[str, Any] = json.loads(json.dumps({"choices": choices, "usage": usage}))
    return wanted


@asynccontextmanager
async def _serving(*flags: str) -> AsyncIterator[_Server]:
    command = [str(Path(sys.executable).with_name("quire")), "serve", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(CASE_TIMEOUT_S):
            ready = re.search(r"clients (\S+)", (await process.stdout.readline()).decode())
        if ready is None:
            raise Failed("the server did not start")
        yield _Server(process, ready[1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _driving(command: list[str]) -> AsyncIterator[_Driver]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    try:
        yield _Driver(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    sys.exit(main())
