"""Tokens per second of prefill and decode, separately, through the whole engine: queue, scheduler, kernels, sampling.

A shape is run twice, for 1 new token and for 1 + n: the first time is prefill, the difference is n decode steps.
Prompts are random ids and no token ends a request, so every peer does the same work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
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
    decode_s: float  # for new_tokens more each
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    op_seconds: dict[str, float]  # of the last decode run, by kind of op


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
    return msgspec.structs.replace(
        config,
        max_num_seqs=users,
        max_num_batched_tokens=max(config.max_num_batched_tokens, users),
        max_model_len=max(shape.prompt_tokens for shape in shapes) + new_tokens + 1,
        max_num_waiting=users,
        enable_prefix_caching=False,
    )


def measure_shapes(
    llm: LLM, shapes: list[Shape], new_tokens: int, repeats: int, report: Callable[[str], None]
) -> Iterator[ShapeResult]:
    """One result per shape, as it is ready. `report` is told what runs now."""
    generator = random.Random(SEED)
    _run(llm, generator, Shape(1, shapes[0].prompt_tokens), 1)
    for shape in shapes:
        first, rest = [], []
        for repeat in range(repeats):
            report(f"{shape}: run {repeat + 1} of {repeats}")
            prefill = _run(llm, generator, shape, 1)
            llm.engine.machine.op_seconds()
            rest.append(_run(llm, generator, shape, 1 + new_tokens) - prefill)
            first.append(prefill)
        prefill_s, decode_s = statistics.median(first), statistics.median(rest)
        yield ShapeResult(
            shape,
            new_tokens,
            prefill_s,
            decode_s,
            shape.batch * shape.prompt_tokens / prefill_s,
            shape.batch * new_tokens / decode_s,
            llm.engine.machine.op_seconds(),
        )


def _run(llm: LLM, generator: random.Random, shape: Shape, new_tokens: int) -> float:
    """Seconds to generate exactly `new_tokens` for each user."""
    vocab = llm.engine.machine.spec.vocab_size
    low, high = (10, min(8000, vocab)) if vocab > 20 else (0, vocab)
    prompts = [[generator.randrange(low, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)]
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start
