"""Measure the speed of prefill and of decode through the whole engine: queue, scheduler, kernels, sampling.

Prefill is the time until every user has its first token. Decode is timed in a second run, over steps in which all users
decode and none prefills. The difference of two runs would overstate decode: with chunked prefill, early users decode
during later prefills. Prompts are random ids and EOS is ignored, so every user does the same work. The machine's
roofline is measured before the shapes, and after each shape if the last measurement is older than a second.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ....kernels.ops import RECURRENT
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ...common.types import SamplingParams
from ...engine import StepStats
from ...engine.facade import SilentObserver
from ...llm import LLM
from ...model import model_path, read_spec
from ...model.runner import ModelRunner
from .roofline import Roofline, RooflineMeter, mean_roofline
from .work import Contexts, Work, decode_work, prefill_work

SEED = 1
ROOFLINE_LASTS_S = 1.0  # a measurement takes half a second, and a shared machine changes by the minute


@dataclass(frozen=True, slots=True)
class Shape:
    """`batch` users with prompts of `prompt_tokens` each."""

    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class Phase:
    """Prefill or decode of one shape: the median run. Tokens and work are of all users together."""

    tokens: int
    seconds: float
    steps: int
    op_seconds: dict[str, float]  # kind of op -> seconds
    work: Work

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def ops_per_s(self) -> float:
        return self.work.num_ops / self.seconds

    @property
    def kv_bytes_per_s(self) -> float:
        """Bytes of keys and values read per second of attention."""
        return self.work.kv_bytes / self.op_seconds["attention"]

    @property
    def state_bytes_per_s(self) -> float:
        """Bytes of states read and written per second of the ops with states; 0 without such ops."""
        seconds = sum(self.op_seconds.get(op.__name__.lower(), 0.0) for op in RECURRENT)
        return self.work.state_bytes / seconds if seconds else 0.0

    def share_of_peak(self, roofline: Roofline) -> float:
        return self.work.compute_seconds(roofline) / self.seconds

    def share_of_bandwidth(self, roofline: Roofline) -> float:
        return self.work.memory_seconds(roofline) / self.seconds


@dataclass(frozen=True, slots=True)
class ShapeResult:
    shape: Shape
    prefill: Phase  # phase until every user has its first token
    decode: Phase  # steps in which all users decode
    roofline: Roofline  # mean of the measurements before and after


def parse_shapes(text: str) -> list[Shape]:
    """Parse shapes such as `1x128,8x2048`. Raises ConfigError."""
    return [_parse_shape(part.strip()) for part in text.split(",")]


def _parse_shape(text: str) -> Shape:
    sizes = re.fullmatch(r"0*([1-9][0-9]{0,8})x0*([1-9][0-9]{0,8})", text)
    if sizes is None:
        raise ConfigError(f"shapes: {text[:80]!r} is not a shape; write users x prompt tokens, such as 8x128")
    return Shape(int(sizes[1]), int(sizes[2]))


def bench_config(config: EngineConfig, shapes: list[Shape], new_tokens: int) -> EngineConfig:
    """Return `config` with room for the largest shape and without prefix caching, so that runs do not reuse pages.

    Raises ModelError, or ConfigError if the model has too few positions.
    """
    users = max(shape.batch for shape in shapes)
    rows = max(config.max_num_batched_tokens, users)
    config = msgspec.structs.replace(config, max_num_seqs=users, max_num_batched_tokens=rows)
    longest = max(shape.prompt_tokens + new_tokens + _prefill_steps(config, shape) for shape in shapes)
    positions = read_spec(model_path(config.model)).max_position_embeddings
    if longest > positions:
        raise ConfigError(f"--shapes: the longest sequence takes {longest:,} of the model's {positions:,} positions")
    return msgspec.structs.replace(
        config,
        max_model_len=longest,
        max_num_waiting=users,
        enable_prefix_caching=False,
    )


def measure_shapes(
    llm: LLM, shapes: list[Shape], new_tokens: int, repeats: int, report: Callable[[str], None]
) -> Iterator[ShapeResult]:
    """Yield one result per shape. Calls `report` with the name of each run. Raises ConfigError."""
    capacity = llm.engine.core.runner.capacity
    meter = RooflineMeter(capacity.cpus.threads, capacity.isa)
    generator = random.Random(SEED)
    time_generation(llm, generator, Shape(1, shapes[0].prompt_tokens), 1)
    before = meter.measure()
    measured_at = time.perf_counter()
    for shape in shapes:
        prefills = []
        decodes = []
        for repeat in range(repeats):
            report(f"{shape}: run {repeat + 1} of {repeats}")
            prefills.append(time_prefill(llm, generator, shape))
            decodes.append(time_decode(llm, generator, shape, new_tokens))
        after = before
        if time.perf_counter() - measured_at > ROOFLINE_LASTS_S:
            after = meter.measure()
            measured_at = time.perf_counter()
        yield ShapeResult(shape, _median(prefills), _median(decodes), mean_roofline([before, after]))
        before = after


def _median(runs: list[Phase]) -> Phase:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


class StepClock(SilentObserver):
    """An observer that times the first `num_steps` steps in which all users decode and none prefills."""

    def __init__(self, runner: ModelRunner, users: int, num_steps: int) -> None:
        self._runner = runner
        self._users = users
        self._num_steps = num_steps
        self._ends: list[float] = []  # end of the last step with prefill, then of each decode step
        self.contexts: list[Contexts] = []  # [decode steps]
        self.op_seconds: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return self._ends[self._num_steps] - self._ends[0]

    def on_step(self, stats: StepStats) -> None:
        if stats.prefill_tokens:
            self._ends = [time.perf_counter()]
            self.contexts = []
            self._runner.op_seconds()
        elif stats.decode_tokens == self._users and len(self.contexts) < self._num_steps:
            self._ends.append(time.perf_counter())
            self.contexts.append(stats.context_tokens)
            if len(self.contexts) == self._num_steps:
                self.op_seconds = self._runner.op_seconds()


class _ContextCollector(SilentObserver):
    """An observer that collects the contexts of every step."""

    def __init__(self) -> None:
        self.contexts: list[Contexts] = []

    def on_step(self, stats: StepStats) -> None:
        self.contexts.append(stats.context_tokens)


def time_prefill(llm: LLM, generator: random.Random, shape: Shape) -> Phase:
    """Time a run of one new token for each user."""
    runner = llm.engine.core.runner
    steps = _ContextCollector()
    runner.op_seconds()
    llm.engine.set_observer(steps)
    seconds = time_generation(llm, generator, shape, 1)
    llm.engine.set_observer(SilentObserver())
    work = prefill_work(runner, shape.batch, shape.prompt_tokens, steps.contexts)
    return Phase(shape.batch * shape.prompt_tokens, seconds, len(steps.contexts), runner.op_seconds(), work)


def time_decode(llm: LLM, generator: random.Random, shape: Shape, new_tokens: int) -> Phase:
    """Time decode in a run in which the first user still decodes `new_tokens` steps after the last prefill."""
    runner = llm.engine.core.runner
    clock = StepClock(runner, shape.batch, new_tokens)
    llm.engine.set_observer(clock)
    time_generation(llm, generator, shape, new_tokens + _prefill_steps(llm.engine.core.config, shape))
    llm.engine.set_observer(SilentObserver())
    work = decode_work(runner, clock.contexts)
    return Phase(shape.batch * new_tokens, clock.seconds, new_tokens, clock.op_seconds, work)


def _prefill_steps(config: EngineConfig, shape: Shape) -> int:
    """Return the most steps until every user has its first token, even if the users are prefilled one by one."""
    return -(-shape.batch * shape.prompt_tokens // (config.max_num_batched_tokens - shape.batch + 1)) + shape.batch


def time_generation(llm: LLM, generator: random.Random, shape: Shape, new_tokens: int) -> float:
    """Generate exactly `new_tokens` for each user and return the duration in seconds."""
    vocab = llm.engine.core.runner.spec.vocab_size
    low, high = (10, min(8000, vocab)) if vocab > 20 else (0, vocab)
    prompts = [[generator.randrange(low, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)]
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start
