"""Compare Quire with OpenVINO GenAI's continuous batching, alternating in one run: tokens per second and ratios.

usage: beside_openvino.py --openvino-python PYTHON --openvino-model FOLDER --model FOLDER [--shapes 1x128,8x128] …

PYTHON belongs to an environment with openvino-genai, FOLDER to an export of the same shape, such as
    optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format int8 FOLDER
Each side is a process of its own, which has loaded its model and sleeps while the other one works. The definitions are
the same for both: random prompts, greedy decoding, EOS ignored.
    prefill       batch * prompt tokens / seconds for one new token each
    decode, diff  32 more tokens each / the difference of runs of 33 and of 1 new tokens. Too high for an engine that
                  prefills long prompts in chunks: early users decode during the prefill of later ones
    decode, all   the same over steps in which all users decode and none prefills
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any, Protocol

NEW_TOKENS = 32
SPARE_TOKENS = 40  # the first user still decodes when the last is prefilled; more are added for more chunks
CHUNK = 2048  # prompt tokens that OpenVINO computes in one step
CACHE_GB = 4
Times = dict[str, float]  # prefill, diff, all: seconds


def main() -> None:
    arguments = _parse_arguments()
    if arguments.side:
        _serve(OpenVino(arguments) if arguments.side == "openvino" else Quire(arguments))
        return
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    sides = {
        "OpenVINO": _start(arguments.openvino_python, "openvino"),
        "Quire": _start(sys.executable, "quire"),
    }
    print(f"medians of {arguments.repeats}; tokens per second of OpenVINO and Quire, and Quire / OpenVINO")
    print(f"{'':12}{'prefill':^26}{'decode, diff':^26}{'decode, all':^26}")
    for batch, prompt in shapes:
        runs: dict[str, list[Times]] = {name: [] for name in sides}
        for _ in range(arguments.repeats):
            for name, side in sides.items():
                runs[name].append(_ask(side, batch, prompt))
        print(_row(batch, prompt, runs), flush=True)
    for side in sides.values():
        side.communicate()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openvino-python", required=True)
    parser.add_argument("--openvino-model", required=True)
    parser.add_argument("--openvino-kv", default="u8")
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--shapes", default="1x128,8x128,32x128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=["openvino", "quire"], help=argparse.SUPPRESS)
    return parser.parse_args()


def _start(python: str, side: str) -> subprocess.Popen[str]:
    command = [python, __file__, *sys.argv[1:], "--side", side]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _answer(process)  # loaded
    return process


def _ask(side: subprocess.Popen[str], batch: int, prompt: int) -> Times:
    assert side.stdin is not None
    print(json.dumps([batch, prompt]), file=side.stdin, flush=True)
    return _answer(side)


def _answer(side: subprocess.Popen[str]) -> Times:
    assert side.stdout is not None
    for line in side.stdout:
        if line.startswith("{"):  # skip what libraries print
            return json.loads(line)
    raise SystemExit(f"{side.args} ended with status {side.wait()}")


def _row(batch: int, prompt: int, runs: dict[str, list[Times]]) -> str:
    columns = []
    for what, tokens in (("prefill", prompt), ("diff", NEW_TOKENS), ("all", NEW_TOKENS)):
        openvino, quire = (batch * tokens / statistics.median(run[what] for run in side) for side in runs.values())
        columns.append(f"{openvino:8.1f}{quire:9.1f}{quire / openvino:7.2f}x ")
    return f"{f'{batch}x{prompt}':<12}{' '.join(columns)}"


# One side, in a separate process.


class Engine(Protocol):
    def generate(self, batch: int, prompt: int, new: int) -> float:
        """Return the seconds to generate exactly `new` tokens for each of `batch` random prompts."""

    def decode(self, batch: int, prompt: int) -> float:
        """Return the seconds of NEW_TOKENS steps in which all of them decode."""


def _serve(engine: Engine) -> None:
    engine.generate(1, 16, 4)
    print("{}", flush=True)
    for line in sys.stdin:
        batch, prompt = json.loads(line)
        first = engine.generate(batch, prompt, 1)
        diff = engine.generate(batch, prompt, 1 + NEW_TOKENS) - first
        print(json.dumps({"prefill": first, "diff": diff, "all": engine.decode(batch, prompt)}), flush=True)


class OpenVino:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = CHUNK
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"KV_CACHE_PRECISION": arguments.openvino_kv}
        self._pipe = genai.ContinuousBatchingPipeline(arguments.openvino_model, scheduler, "CPU", properties)
        self._genai = genai
        self._random = random.Random(1)
        self._next_id = 0

    def generate(self, batch: int, prompt: int, new: int) -> float:
        prompts = [self._prompt(prompt) for _ in range(batch)]
        start = time.perf_counter()
        self._pipe.generate(prompts, [self._config(new)] * batch)
        return time.perf_counter() - start

    def decode(self, batch: int, prompt: int) -> float:
        config = self._config(NEW_TOKENS + SPARE_TOKENS + batch * prompt // (CHUNK - batch))
        handles = []
        for _ in range(batch):
            handles.append(self._pipe.add_request(self._next_id, self._prompt(prompt), config))
            self._next_id += 1
        while not all(handle.can_read() for handle in handles):  # a first token can be read of each
            self._pipe.step()
        start = time.perf_counter()
        for _ in range(NEW_TOKENS):
            self._pipe.step()
        seconds = time.perf_counter() - start
        if any(handle.get_status() != self._genai.GenerationStatus.RUNNING for handle in handles):
            raise SystemExit("a request ended while decode was timed; raise SPARE_TOKENS")
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        return seconds

    def _prompt(self, tokens: int) -> Any:
        import numpy as np
        import openvino

        return openvino.Tensor(np.array([[self._random.randrange(10, 8000) for _ in range(tokens)]], np.int64))

    def _config(self, new: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        config.eos_token_id = 0
        return config


class Quire:
    def __init__(self, arguments: argparse.Namespace) -> None:
        from quire import LLM

        self._llm = LLM(
            arguments.model,
            weights=arguments.weights,
            kv_cache_dtype=arguments.kv_cache_dtype,
            kv_cache_memory=CACHE_GB << 30,
            enable_prefix_caching=False,
        )
        self._random = random.Random(1)

    def generate(self, batch: int, prompt: int, new: int) -> float:
        from quire.runtime.tools.bench.speed import Shape, time_generation

        return time_generation(self._llm, self._random, Shape(batch, prompt), new)

    def decode(self, batch: int, prompt: int) -> float:
        from quire.runtime.tools.bench.speed import Shape, time_decode

        return time_decode(self._llm, self._random, Shape(batch, prompt), NEW_TOKENS).seconds


if __name__ == "__main__":
    main()
