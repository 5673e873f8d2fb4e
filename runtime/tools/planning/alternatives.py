"""The effect of other data types of weights and KV cache on the number of sequences and their speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...common.config import EngineConfig, KVCacheDtype, WeightDtype
from ...common.errors import ConfigError
from ...model import DecoderSpec, weights_text
from ...model.runner import Capacity, decide_capacity, least_kv_bytes
from ..bench import Roofline, Shape
from ..simulation import Speed, predict_speed, roofline_cost

WEIGHTS: tuple[WeightDtype, ...] = ("q8", "q4")
KV_DTYPE: KVCacheDtype = "int8"
UNBOUNDED = 1 << 60  # bytes of KV cache: more than any sequence needs
SHORTEST_CONTEXT = 256
MAX_LENGTHS = 5


@dataclass(frozen=True, slots=True)
class Alternative:
    """Data types of weights and KV cache, and a pool that takes the rest of a given memory."""

    config: EngineConfig
    weights: str  # weights in messages: "q8", or for a mixture "q4_k, q6_k"
    capacity: Capacity  # capacity of a pool of any size
    num_pages: int
    state_bytes: int  # states of sequences and of the prefix cache, as planned

    @property
    def weights_bytes(self) -> int:
        return self.capacity.memory.weights_bytes

    @property
    def kv_bytes(self) -> int:
        """The bytes of the pool's pages."""
        return self.num_pages * self.capacity.layout.page_bytes

    def sequences(self, length: int) -> int:
        """Return the number of sequences of `length` tokens that the memory of pages and states holds at once."""
        layout = self.capacity.layout
        sequence_bytes = layout.pages_for(length) * layout.page_bytes + self.capacity.state_layout.nbytes
        return (self.kv_bytes + self.state_bytes) // sequence_bytes

    def predict(self, spec: DecoderSpec, roofline: Roofline, shapes: Sequence[Shape]) -> list[Speed | None]:
        """Return the speed of each shape; None if its users do not all run at once."""
        cost = roofline_cost(spec, self.capacity, roofline)
        rows = self.config.max_num_batched_tokens
        return [predict_speed(cost, shape, rows) if self._runs(shape) else None for shape in shapes]

    def _runs(self, shape: Shape) -> bool:
        length = shape.prompt_tokens + 1
        fits = self.sequences(length) if length <= self.capacity.max_model_len else 0
        return shape.batch <= min(fits, self.config.max_num_seqs)


def alternatives(config: EngineConfig, spec: DecoderSpec, capacity: Capacity) -> list[Alternative]:
    """Return the alternative of `config`, then q8 and q4 weights and an int8 KV cache, all in the same memory."""
    found = [_alternative(config, spec, capacity, capacity)]
    for weights in (config.weights, *WEIGHTS):
        for kv_dtype in dict.fromkeys((config.kv_cache_dtype, KV_DTYPE)):
            if (weights, kv_dtype) != (config.weights, config.kv_cache_dtype):
                other = msgspec.structs.replace(
                    config,
                    weights=weights,
                    kv_cache_dtype=kv_dtype,
                    kv_cache_memory=UNBOUNDED,
                    max_model_len=capacity.max_model_len,
                )
                found.append(_alternative(other, spec, decide_capacity(other, spec), capacity))
    return list(_distinct(found))


def _alternative(config: EngineConfig, spec: DecoderSpec, capacity: Capacity, planned: Capacity) -> Alternative:
    memory = capacity.memory
    kv_bytes = memory.kv_bytes + memory.draft_kv_bytes
    own_share = memory.kv_bytes / kv_bytes if memory.draft else 1
    others = memory.total_bytes - kv_bytes - memory.state_bytes + planned.memory.state_bytes
    return Alternative(
        config=config,
        weights=weights_text(spec, config.weights),
        capacity=capacity,
        num_pages=max(0, capacity.layout.pages_in(int((planned.memory.total_bytes - others) * own_share))),
        state_bytes=planned.memory.state_bytes,
    )


def _distinct(found: Sequence[Alternative]) -> Iterator[Alternative]:
    seen: set[tuple[Any, ...]] = set()
    for each in found:
        key = each.weights, each.weights_bytes, each.capacity.layout.dtype
        if key not in seen:
            yield each
        seen.add(key)


def sequence_lengths(longest: int) -> list[int]:
    """Return lengths that grow by factors of 4 up to `longest`, which is the last; at most five."""
    powers = [SHORTEST_CONTEXT << 2 * step for step in range(16)]
    return [*[length for length in powers if length < longest][1 - MAX_LENGTHS :], longest]


def fit_capacity(config: EngineConfig, spec: DecoderSpec, memory_bytes: int, other_bytes: int) -> Capacity:
    """Return the capacity with a pool that takes the rest of `memory_bytes`.

    Other processes take `other_bytes`. Raises ConfigError if the rest is too small for `max_model_len`.
    """
    largest = decide_capacity(msgspec.structs.replace(config, kv_cache_memory=UNBOUNDED), spec)
    memory = largest.memory
    others = memory.total_bytes - memory.kv_bytes - memory.draft_kv_bytes - memory.state_bytes + other_bytes
    least = least_kv_bytes(config, largest)
    if memory_bytes < others + least:
        raise ConfigError(f"memory must be at least {others + least:,} bytes with these options, not {memory_bytes:,}")
    return decide_capacity(msgspec.structs.replace(config, kv_cache_memory=memory_bytes - others), spec)
