"""Tokens per second of prefill and decode, separately, through the whole engine: queue, scheduler, kernels, sampling.

Prefill is the time until every user has its first token. Decode is timed in a second run, over n steps in which all
users decode and nobody prefills. Prompts are random ids and no token ends a request, so every peer does the same work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ..config import EngineConfig
from ..engine import StepStats
from ..engine.observer import SilentObserver
from ..errors import ConfigError
from ..execution import Machine
from ..generation import SamplingParams
from ..llm import LLM

SEED = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """`batch` users with prompts of `prompt_tokens` each."""

    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class ShapeResult:
    """Medians over the repeats. Rates in tokens per second over all users; times in seconds."""

    shape: Shape
    new_tokens: int
    prefill_s: float  # until every user has its first token
    decode_s: float  # for new_tokens more each, all users decoding
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    op_seconds: dict[str, float]  # of the last decode measurement, by kind of op


def parse_shapes(text: str) -> list[Shape]:
    """`1x128,8x2048`. Raises ConfigError."""
    return [_parse_shape(part.strip()) for part in text.split(",")]


def _parse_shape(text: str) -> Shape:
    batch, _, prompt = text.partition("x")
    if not (batch.isdecimal() and prompt.isdecimal() and int(batch) > 0 and int(prompt) > 0):
        raise ConfigError(f"--shapes: {text!r} is not a shape; write users x prompt tokens, such as 8x128")
    return Shape(int(batch), int(prompt))


def bench_config(config: EngineConfig, shapes: list[Shape], new_tokens: int) -> EngineConfig:
    """`config` with room for the widest shape; prefixes are not cached, or the second run would find the first."""
    users = max(shape.batch for shape in shapes)
    rows = max(config.max_num_batched_tokens, users)
    config = msgspec.structs.replace(config, max_num_seqs=users, max_num_batched_tokens=rows)
    return msgspec.structs.replace(
        config,
        max_model_len=max(shape.prompt_tokens + new_tokens + _prefill_steps(config, shape) for shape in shapes),
        max_num_waiting=users,
        enable_prefix_caching=False,
    )


def measure_shapes(
    llm: LLM, shapes: list[Shape], new_tokens: int, repeats: int, report: Callable[[str], None]
) -> Iterator[ShapeResult]:
    """One result per shape, as it is ready. `report` is told what runs now."""
    generator = random.Random(SEED)
    _generate(llm, generator, Shape(1, shapes[0].prompt_tokens), 1)
    for shape in shapes:
        prefills, clocks = [], []
        for repeat in range(repeats):
            report(f"{shape}: run {repeat + 1} of {repeats}")
            prefills.append(_generate(llm, generator, shape, 1))
            clocks.append(_time_decode(llm, generator, shape, new_tokens))
        prefill_s, decode_s = statistics.median(prefills), statistics.median(clock.seconds for clock in clocks)
        yield ShapeResult(
            shape,
            new_tokens,
            prefill_s,
            decode_s,
            shape.batch * shape.prompt_tokens / prefill_s,
            shape.batch * new_tokens / decode_s,
            clocks[-1].op_seconds,
        )


class StepClock(SilentObserver):
    """Times the first `num_steps` steps in which all users decode and nobody prefills any more."""

    def __init__(self, machine: Machine, users: int, num_steps: int) -> None:
        self._machine = machine
        self._users = users
        self._num_steps = num_steps
        self._ends: list[float] = []  # of the last step with prefill, then of each decode step
        self.op_seconds: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return self._ends[self._num_steps] - self._ends[0]

    def on_step(self, stats: StepStats) -> None:
        if stats.prefill_tokens:
            self._ends = [time.perf_counter()]
            self._machine.op_seconds()
        elif stats.decode_tokens == self._users and len(self._ends) <= self._num_steps:
            self._ends.append(time.perf_counter())
            if len(self._ends) > self._num_steps:
                self.op_seconds = self._machine.op_seconds()


def _time_decode(llm: LLM, generator: random.Random, shape: Shape, new_tokens: int) -> StepClock:
    """A run in which the first user still decodes for `new_tokens` steps when the last has been prefilled."""
    clock = StepClock(llm.engine.machine, shape.batch, new_tokens)
    llm.engine.set_observer(clock)
    _generate(llm, generator, shape, new_tokens + _prefill_steps(llm.engine.config, shape))
    llm.engine.set_observer(SilentObserver())
    return clock


def _prefill_steps(config: EngineConfig, shape: Shape) -> int:
    """At most so many steps until every user has its first token, even if they come one by one."""
    return -(-shape.batch * shape.prompt_tokens // (config.max_num_batched_tokens - shape.batch + 1)) + shape.batch


def _generate(llm: LLM, generator: random.Random, shape: Shape, new_tokens: int) -> float:
    """Seconds to generate exactly `new_tokens` for each user."""
    vocab = llm.engine.machine.spec.vocab_size
    low, high = (10, min(8000, vocab)) if vocab > 20 else (0, vocab)
    prompts = [[generator.randrange(low, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)]
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start
