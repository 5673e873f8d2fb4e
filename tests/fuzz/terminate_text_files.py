"""Send SIGTERM to servers of models with hostile text files, while they load the files and while requests use them.

usage: terminate_text_files.py [--moments 300] [--seed 1] [--first 0]

A model has the files of fuzz_text_files.py, and tiny random weights. Each round starts one server. The
server gets SIGTERM at a random moment of its start, or while clients send texts and chats that need the tokenizer, the
template and the settings; most files are refused, so that these rounds take cases that fuzz_text_files.py could use. A
round whose server has refused its files before SIGTERM does not count.

Exit status 1 if a process of a server lives for longer than `LIMIT_S` after SIGTERM, or after the drain if there are
requests, or if an exit status is unexpected, or a log has a traceback. The clock of the limit is this process: a wait
of `POLL_S` counts as `POLL_S`, also on a machine that has no time for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import uvloop
from campaign import CampaignReport
from fuzz_text_files import CHAT, TEXTS, kind_of, write_case
from kill_at_shutdown import DRAIN_S, Round, print_times, start
from quire.runtime.model import read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.bench.checkpoint import write_safetensors
from server_process import descendants

LIMIT_S = 2.0
POLL_S = 0.01
LATE_S = 20.0  # wall time until a late server is killed
READY_S = 120.0  # limit for a server to be ready, or to refuse its files
LOADING_S = 0.6  # time after the start of the engine process, which loads the files
START_S = 2.0
USE_S = 1.5
NUM_CLIENTS = 6
WEIGHTS = "model.safetensors"
REFUSED = 2  # exit status
FUZZER = Path(__file__).with_name("fuzz_text_files.py")
TRIED_AT_ONCE = 60
REFUSED_AT_LOAD = ("breach", "refused: CorruptCheckpoint", "refused: UnsupportedModel", "refused: ModelNotFound")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
LONG = ("a" * 60_000 + "!", " \n\t" * 20_000, "naïve 日本語 👧\u0301\ufdfa" * 4000, "Hello world. " * 5000)
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def write_weights(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    with (folder / WEIGHTS).open("wb") as file:
        write_safetensors(file, list(expected_tensors(read_spec(folder))))


class UsableCases:
    """Cases of fuzz_text_files.py whose files load, of each kind in turn. They are tried there in other processes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._next = 0  # case to try
        self._found: dict[str, deque[int]] = {kind: deque() for kind in map(kind_of, range(3))}

    async def take(self, number: int) -> int:
        """Return a case for the round with this number."""
        cases = self._found[kind_of(number)]
        while not cases:
            await self._try_some()
        return cases.popleft()

    async def _try_some(self) -> None:
        arguments = (FUZZER, "--first", self._next, "--cases", self._next + TRIED_AT_ONCE, "--seed", self._seed)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *map(str, arguments)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate()
        outcomes = [json.loads(line)[0] for line in output.splitlines()]
        for case, outcome in enumerate(outcomes, self._next):
            if outcome not in REFUSED_AT_LOAD:
                self._found[kind_of(case)].append(case)
        self._next += max(1, len(outcomes))  # the process ends at a case that hangs


def write_model(folder: Path, weights: Path, case: int, seed: int) -> None:
    """Write the text files of a case, and the tiny model with the case's sizes of the vocabulary and end ids."""
    write_case(folder, Random(f"{seed} {case}"), kind_of(case))
    config = folder / "config.json"
    with contextlib.suppress(ValueError):
        config.write_text(json.dumps({**SHAPE, **json.loads(config.read_bytes())}))
    shutil.copy(weights / WEIGHTS, folder)


def bodies(random: Random) -> list[tuple[str, dict[str, Any]]]:
    """Return requests for everything that the files are for, each with its path."""
    text = random.choice((*TEXTS, *LONG))
    prompt = {"prompt": text, "max_tokens": 40}
    chat = {"messages": [*CHAT, {"role": "user", "content": text}], "max_tokens": 40}
    return [
        ("/v1/completions", prompt),
        ("/v1/completions", {**prompt, "stream": True, "stop": ["!", "ab"]}),
        ("/v1/completions", {**prompt, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [FUNCTION], "tool_choice": "required"}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": chat["messages"]}),
        ("/detokenize", {"tokens": [random.randrange(400) for _ in range(2000)]}),
    ]


async def use(address: str, random: Random) -> None:
    """Send requests until the server is gone."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        while True:
            path, body = random.choice(bodies(random))
            data = json.dumps({"model": "quire", **body}).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            while await reader.read(1 << 16):
                pass
            writer.close()


async def wait(this: Round, limit_s: float) -> tuple[bool, float]:
    """Wait until no process of the server lives. Return whether that took at most `limit_s`, and the time it took."""
    began = time.monotonic()
    num_polls = 0
    while this.living() and num_polls * POLL_S < LATE_S:
        await asyncio.sleep(POLL_S)
        this.look()
        num_polls += 1
    return num_polls * POLL_S <= limit_s, time.monotonic() - began


async def loading(this: Round, random: Random) -> None:
    """Wait for a moment of the start: any one, or one at which the files are loaded."""
    if random.random() < 0.3:
        await asyncio.sleep(random.uniform(0.0, START_S))
        return
    while this.process.poll() is None and not descendants(this.process.pid):
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(random.uniform(0.0, LOADING_S))


async def serving(this: Round, random: Random) -> None:
    """Wait until the server is ready, and use it for a random time."""
    assert this.process.stdout is not None
    async with asyncio.timeout(READY_S):
        ready = await asyncio.to_thread(this.process.stdout.readline)
    if address := ready.partition("api http://")[2].partition("/")[0]:
        this.clients = [asyncio.create_task(use(address, random)) for _ in range(NUM_CLIENTS)]
        await asyncio.sleep(random.uniform(0.0, USE_S))
    else:
        await asyncio.to_thread(this.process.wait, READY_S)


async def one_round(number: int, case: int, weights: Path, seed: int, report: CampaignReport) -> float | None:
    """Run one server to its end. Return how long it took after SIGTERM; None if it had ended before."""
    random = Random(f"{seed} {number} moments")
    phase = "use" if number % 2 else "load"
    what = f"round {number}: case {case} ({kind_of(case)}), {phase}"
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as log:
        folder = Path(name)
        write_model(folder, weights, case, seed)
        this = Round(start(log, [str(folder)]), log, random)
        try:
            await (serving if phase == "use" else loading)(this, random)
            this.look()
            if (status := this.process.poll()) is not None:
                report.cases[f"{phase}: refused"] += 1
                if status != REFUSED:
                    report.breach(f"{what}: exit status {status}: {this.log()[-1000:]}")
                return None
            this.terminate()
            in_time, took_s = await wait(this, LIMIT_S + (DRAIN_S if phase == "use" else 0.0))
            if not in_time:
                await this.end_late(f"{what}: {took_s:.1f} s after SIGTERM", report)
            report.cases[f"{phase}: {'ended' if in_time else 'late'}"] += 1
            this.judge_exit(what, report, REFUSED)
            return took_s
        finally:
            for client in this.clients:
                client.cancel()
            this.close()


async def main(options: argparse.Namespace, report: CampaignReport) -> None:
    took: list[float] = []
    number = options.first
    usable = UsableCases(options.seed)
    with tempfile.TemporaryDirectory() as name:
        weights = Path(name)
        write_weights(weights)
        while len(took) < options.moments:
            case = await usable.take(number // 2) if number % 2 else number // 2
            took_s = await one_round(number, case, weights, options.seed, report)
            took += [] if took_s is None else [took_s]
            number += 1
            if number % 20 == 0:
                print_times(took, report)
    print_times(took, report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--moments", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    arguments = parser.parse_args()
    outcome = CampaignReport()
    uvloop.run(main(arguments, outcome))
    raise SystemExit(int(bool(outcome.breaches)))
