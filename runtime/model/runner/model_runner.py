"""A loaded model bound to memory and threads, ready to execute steps: what an engine drives.

It must not know requests. One invariant: all memory that serving takes is taken in `assemble`, in the amounts that
`Capacity` planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....kernels import Pool, Program, Sampler
from ....kernels.ops import Linear, Op, padded
from ....pager import KVArena, KVLayout, OutOfMemory
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from .. import DecoderSpec, load_model, model_folder, read_spec
from ..program import ProgramPlan
from .capacity import Capacity, decide_capacity
from .executor import Executor


@dataclass(slots=True)
class Machine:
    spec: DecoderSpec
    capacity: Capacity
    executor: Executor
    arena: KVArena
    ops: list[Op]
    folder: Path

    @property
    def layout(self) -> KVLayout:
        return self.capacity.layout

    @property
    def num_pages(self) -> int:
        return self.capacity.num_pages

    @property
    def max_model_len(self) -> int:
        return self.capacity.max_model_len

    def op_seconds(self) -> dict[str, float]:
        """Seconds of steps by kind of op since this was last asked, linear layers apart by their purpose."""
        spent: dict[str, float] = {}
        in_ops, sampling_s = self.executor.op_seconds()
        for op, seconds in zip(self.ops, in_ops, strict=True):
            name = self._op_name(op)
            spent[name] = spent.get(name, 0.0) + seconds
        return {**spent, "sampling": sampling_s}

    def is_lm_head(self, op: Linear) -> bool:
        """Whether a linear layer runs over the rows that sample only."""
        return op.maxima is not None

    def _op_name(self, op: Op) -> str:
        if isinstance(op, Linear):
            return "lm_head" if self.is_lm_head(op) else "linear"
        return type(op).__name__.lower()

    def close(self) -> None:
        """Let go of weights, KV memory and threads now, not when a garbage collector finds them. Idempotent."""
        self.arena.close()
        self.ops.clear()
        if hasattr(self, "executor"):
            del self.executor


def assemble(config: EngineConfig) -> Machine:
    """Load, pack and bind. Raises ModelError or ConfigError, before any large allocation where that can be known."""
    folder = model_folder(config.model)
    spec = read_spec(folder)
    capacity = decide_capacity(config, spec)
    model = load_model(folder, config.weights)
    arena = _arena(capacity)
    plan = model.compile(
        max_positions=capacity.max_model_len,
        max_tokens=config.max_num_batched_tokens,
        max_samples=capacity.max_num_samples,
    )
    executor = _executor(config, spec, capacity, arena, plan)
    return Machine(spec, capacity, executor, arena, plan.ops, folder)


def _executor(
    config: EngineConfig, spec: DecoderSpec, capacity: Capacity, arena: KVArena, plan: ProgramPlan
) -> Executor:
    pool = Pool(capacity.cpus.threads)
    try:
        program = Program(
            plan.ops,
            plan.arena_bytes,
            arena.memory,
            capacity.layout,
            capacity.num_pages,
            pool,
            max_rows=config.max_num_batched_tokens,
            max_samples=capacity.max_num_samples,
            max_sequences=config.max_num_seqs,
            vocab_size=spec.vocab_size,
            isa=capacity.isa,
        )
        sampler = Sampler(spec.vocab_size, padded(spec.vocab_size), capacity.max_num_samples, pool, capacity.isa)
    except MemoryError as error:
        raise ConfigError(
            f"steps of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} sequences need "
            f"{plan.arena_bytes:,} bytes, which the system does not give; lower --max-num-batched-tokens and "
            "--max-num-seqs"
        ) from error
    return Executor(program, plan.logits, plan.maxima, spec.vocab_size, sampler, config.max_num_batched_tokens)


def _arena(capacity: Capacity) -> KVArena:
    try:
        return KVArena(capacity.layout, capacity.num_pages)
    except OutOfMemory as error:
        raise ConfigError(f"--kv-cache-memory: {error}") from error
