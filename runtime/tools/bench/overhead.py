"""Measure the cost of a step besides its kernels: the Python between and around them, per running sequence.

The bundled model serves 32 users through the whole engine; their output is encoded as TOKENS frames and counted in the
metrics, as in the server. These costs do not depend on the model, so the measurement always uses the bundled one, which
has a tokenizer. Only steps in which all users decode are counted.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass

import msgspec
import uvloop

from ...common.config import EngineConfig
from ...common.types import SamplingParams
from ...engine import Engine, GenerateRequest, LocalEngine, StepStats
from ...protocol.codec import encode
from ...server.monitoring import PrometheusObserver
from ...server.msgpack.convert import tokens_frame

USERS = 32
NEW_TOKENS = 96
PROMPT = "This module provides"


@dataclass(frozen=True, slots=True)
class StepOverhead:
    """Microseconds per running sequence and step."""

    schedule: float
    commit: float
    publish: float  # detokenizing, metrics, handing chunks to streams
    frames: float  # building and encoding TOKENS frames
    arrays: float  # the executor: a plan to index arrays, sampled rows to tokens
    waiting: float  # the step for its thread: asyncio wakes every stream (frames included), then hands over

    @property
    def event_loop(self) -> float:
        """The work of Quire itself on the event loop: schedule, commit, publish and frames."""
        return self.schedule + self.commit + self.publish + self.frames

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "event_loop": self.event_loop}


def measure_overhead(config: EngineConfig) -> StepOverhead:
    """Measure for about a second, with the threads and ISA level of `config`. Raises ConfigError."""
    return uvloop.run(_measure(msgspec.structs.replace(EngineConfig(), threads=config.threads, isa=config.isa)))


async def _measure(config: EngineConfig) -> StepOverhead:
    config = msgspec.structs.replace(config, kv_cache_memory=64 << 20, max_num_seqs=USERS)
    engine = await Engine.start(config)
    try:
        await _serve_users(engine, _DecodeTimes(engine))  # warm up
        times = _DecodeTimes(engine)
        await _serve_users(engine, times)
    finally:
        await engine.close()
    return times.per_sequence()


async def _serve_users(engine: LocalEngine, times: _DecodeTimes) -> None:
    engine.set_observer(times)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    request = GenerateRequest(prompt=PROMPT, sampling_params=params)
    await asyncio.gather(*(_serve_user(engine, request, user, times) for user in range(USERS)))


async def _serve_user(engine: LocalEngine, request: GenerateRequest, user: int, times: _DecodeTimes) -> None:
    async for chunk in await engine.submit(request):
        start = time.perf_counter()
        frame = tokens_frame(user, chunk)
        if frame is not None:
            encode(frame)
        times.frames_s += time.perf_counter() - start


class _DecodeTimes(PrometheusObserver):
    """An observer that adds up the times of steps in which all users decode."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__()
        self._runner = engine.core.runner
        self.frames_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._steps: list[StepStats] = []
        self._start = self._end = time.perf_counter()
        self._kernels_s = 0.0
        self._frames_before_s = self._frames_after_s = self.frames_s

    def on_step(self, stats: StepStats) -> None:
        super().on_step(stats)
        kernels_s = sum(self._runner.op_seconds().values())
        if stats.prefill_tokens:
            self._begin()
        elif stats.decode_tokens == USERS:
            self._steps.append(stats)
            self._end = time.perf_counter()
            self._kernels_s += kernels_s
            self._frames_after_s = (
                self.frames_s
            )  # up to the previous step: the frames of a step are made during the next one

    def per_sequence(self) -> StepOverhead:
        steps = self._steps
        to_us = 1e6 / (USERS * len(self._steps))
        schedule_s = sum(step.schedule_s for step in steps)
        commit_s = sum(step.commit_s for step in steps)
        publish_s = sum(step.publish_s for step in steps)
        execute_s = sum(step.duration_s for step in steps)
        return StepOverhead(
            schedule=schedule_s * to_us,
            commit=commit_s * to_us,
            publish=publish_s * to_us,
            frames=(self._frames_after_s - self._frames_before_s) * to_us,
            arrays=(execute_s - self._kernels_s) * to_us,
            waiting=(self._end - self._start - schedule_s - commit_s - publish_s - execute_s) * to_us,
        )
