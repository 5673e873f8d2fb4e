"""The memory that serving an encoder takes in all processes, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...common.errors import ConfigError
from ...common.settings import Settings
from ...model import model_name, model_path
from ...model.encoder import EncoderSpec, read_encoder
from ...model.memory_plan import PROCESS_BYTES
from ...model.runner.capacity import EncoderCapacity, decide_encoder_capacity
from ...server import SERVER_PROCESS_BYTES, MemoryLimits
from .serving_plan import TOKENIZER_TOKEN_BYTES, PlanTarget, num_tokens


@dataclass(frozen=True, kw_only=True)
class EncoderPlan:
    """The memory that serving an encoder with `settings` takes."""

    settings: Settings
    spec: EncoderSpec
    capacity: EncoderCapacity
    tokens: int  # tokens of the tokenizer's vocabulary

    @cached_property
    def clients(self) -> MemoryLimits:
        return MemoryLimits(self.settings.server)

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part of the memory map."""
        memory = self.capacity.memory
        return {
            **{f"weights {dtype}": size for dtype, size in sorted(memory.weights.items())},
            "batch arena": memory.arena_bytes,
            "position tables": memory.position_bytes,
            "worker scratch": memory.scratch_bytes,
            "engine process": PROCESS_BYTES,
            "API server process": SERVER_PROCESS_BYTES,
            "tokenizer": self.tokens * TOKENIZER_TOKEN_BYTES,
            "clients, at most": self.clients.total_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """The bytes of an engine process and the API server process, including the limits of clients' data."""
        return sum(self.parts.values())

    @property
    def title(self) -> str:
        return (
            f"{model_name(model_path(self.settings.engine.model))}, weights {', '.join(self.capacity.memory.weights)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures: sizes in bytes."""
        return {
            "model": self.settings.engine.model,
            "family": self.spec.family,
            "dimensions": self.spec.dimensions,
            "labels": self.spec.num_labels,
            "weights": dict(sorted(self.capacity.memory.weights.items())),
            "max_model_len": self.capacity.max_model_len,
            "max_batch_tokens": self.capacity.max_rows,
            "max_batch_texts": self.capacity.max_texts,
            "parts": self.parts,
            "total_bytes": self.total_bytes,
            "threads": self.capacity.cpus.threads,
        }

    def text(self, arena: bool) -> str:
        """Return the memory map, with the map of the batch arena if `arena` is set."""
        body = self.spec.body
        capacity = self.capacity
        made = f"scores of {self.spec.num_labels}" if self.spec.num_labels else f"vectors of {self.spec.dimensions}"
        lines = [
            f"{body.family}: {body.num_layers} layers, hidden {body.hidden_size}, {body.num_heads} heads of "
            f"{body.head_dim}, vocabulary {body.vocab_size}",
            f"{made}; texts of up to {capacity.max_model_len:,} tokens, batches of up to {capacity.max_rows:,} tokens "
            f"of {capacity.max_texts} texts",
            "",
            *(f"{name:<20}{size:>18,} B" for name, size in self.parts.items()),
            f"{'total':<20}{self.total_bytes:>18,} B",
        ]
        if arena:
            lines += ["", "batch arena, by offset:", capacity.memory.program.describe()]
        return "\n".join(lines)


def plan_encoder(settings: Settings, target: PlanTarget) -> EncoderPlan:
    """Plan serving the encoder of `settings`. Raises ModelError or ConfigError."""
    for flag in ("memory", "profile", "shapes"):
        if getattr(target, flag) is not None:
            raise ConfigError(f"{flag} cannot be given with an encoder: it has no KV cache and does not decode")
    path = model_path(settings.engine.model)
    spec = read_encoder(path)
    return EncoderPlan(
        settings=settings,
        spec=spec,
        capacity=decide_encoder_capacity(settings.engine, spec),
        tokens=num_tokens(path, spec.body.vocab_size),
    )
