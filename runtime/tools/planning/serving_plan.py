"""The memory that serving a model takes in all processes, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ....pager import KVLayout
from ....pager.layout import TILE, KVHeads
from ...common.config import EngineConfig
from ...common.errors import ConfigError, ModelError
from ...common.options import parse_size
from ...common.settings import Settings
from ...engine import has_tokenizer
from ...engine.structured.compiled_grammars import MAX_LIVE
from ...engine.structured.trials import MAX_BYTES, MAX_PROCESSES, TRIAL_PROCESS_BYTES
from ...engine.text import Tokenizer
from ...model import DecoderSpec, model_name, model_path, read_spec, weights_text
from ...model.rope import short_context, uses_long_factors
from ...model.runner import Capacity, decide_capacity
from ...server import SERVER_PROCESS_BYTES, MemoryLimits
from ..bench import Roofline, Shape, parse_shapes, read_profile
from ..simulation import Speed
from .alternatives import Alternative, alternatives, fit_capacity, sequence_lengths

GRAMMAR_TOKEN_BYTES = 550  # measured: bytes per token of the tables for structured output
TOKENIZER_TOKEN_BYTES = 350  # measured: bytes per token of a tokenizer; 264 to 397 with 49,152 to 262,144 tokens
SHAPES = "1x128,8x128,32x128"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """The machine to plan for, as flags of `quire plan`; each field is followed by its help text."""

    memory: str | None = None
    "Memory of all processes, such as 16GiB; the KV cache takes what the rest leaves. Default: as serving decides."
    profile: Path | None = None
    "Machine profile from `quire info --measure`: predict the speed there, with its number of threads."
    shapes: str | None = None
    "Users x prompt tokens of each prediction. Default: 1x128,8x128,32x128."


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers with the same attention window."""

    window: int  # tokens; 0: full attention
    num_layers: int
    token_bytes: int  # keys and values of one token, without padding

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a sequence that the cache holds; None: all."""
        return self.window + TILE - 1 if self.window else None


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The memory that serving with `settings` takes, and the effect of other data types."""

    settings: Settings
    spec: DecoderSpec
    capacity: Capacity
    server_bytes: dict[str, int]  # purpose -> bytes of the API server process at start
    structured_bytes: dict[str, int]  # purpose -> bytes for structured output in an engine process
    alternatives: list[Alternative]  # the first one has the data types of `settings`
    shapes: list[Shape]  # shapes whose speed is predicted
    roofline: Roofline | None  # roofline of the machine profile, if there is one

    @cached_property
    def clients(self) -> MemoryLimits:
        return MemoryLimits(self.settings.server)

    @property
    def total_bytes(self) -> int:
        """The bytes of an engine process and the API server process, including the limits of clients' data."""
        others = sum(self.server_bytes.values()) + self.clients.total_bytes + sum(self.structured_bytes.values())
        return self.capacity.memory.total_bytes + others

    @property
    def rope_factors(self) -> Literal["short", "long"] | None:
        """The factors of LongRoPE for all requests; None for a model without LongRoPE."""
        if short_context(self.spec.ropes) is None:
            return None
        return "long" if uses_long_factors(self.spec.ropes, self.capacity.max_model_len) else "short"

    @property
    def lengths(self) -> list[int]:
        """The lengths of sequences, in tokens, for which the plan counts sequences."""
        return sequence_lengths(self.settings.engine.max_model_len or self.spec.max_position_embeddings)

    @property
    def kv_layers(self) -> list[WindowLayers]:
        return _layers_by_window(self.capacity.layout)

    @cached_property
    def speeds(self) -> list[list[Speed | None]]:
        """The speed of each alternative and shape; empty without a profile."""
        if self.roofline is None:
            return []
        return [each.predict(self.spec, self.roofline, self.shapes) for each in self.alternatives]

    @property
    def title(self) -> str:
        config = self.settings.engine
        name = "the bundled model" if config.model is None else model_name(model_path(config.model))
        return f"{name}, weights {weights_text(self.spec, config.weights)}, KV {self.capacity.layout.dtype}"

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each part of the memory map."""
        memory = self.capacity.memory
        return {
            **{f"weights {dtype}": size for dtype, size in sorted(memory.weights.items())},
            "KV pages": memory.kv_bytes,
            "states": memory.state_bytes,
            "step arena": memory.arena_bytes,
            "rotary table": memory.rotary_bytes,
            "scratch": memory.scratch_bytes + memory.sampling_bytes,
            "embedding model": memory.encoder_bytes,
            "vision tower": memory.images_bytes,
            "draft model": memory.draft_bytes,
            "engine process": memory.process_bytes,
            "API server process": sum(self.server_bytes.values()),
            "clients, at most": self.clients.total_bytes,
            "structured output, at most": sum(self.structured_bytes.values()),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the figures: sizes in bytes, times in seconds."""
        layout = self.capacity.layout
        memory = self.capacity.memory
        roofline = self.roofline
        return {
            "model": self.settings.engine.model or "bundled demo",
            "family": self.spec.family,
            "weights": dict(sorted(memory.weights.items())),
            "kv_cache_dtype": layout.dtype,
            "kv_layers": [
                {"window": each.window, "layers": each.num_layers, "token_bytes": each.token_bytes}
                for each in self.kv_layers
            ],
            "page_size": layout.page_size,
            "page_bytes": layout.page_bytes,
            "pages": memory.kv_pages,
            "state_bytes": self.capacity.state_layout.nbytes,
            "states_kept": self.capacity.num_cached_states,
            "max_model_len": self.capacity.max_model_len,
            "rope_factors": self.rope_factors,
            "engine_process": {
                "weights": memory.weights_bytes,
                "kv_pages": memory.kv_bytes,
                "states": memory.state_bytes,
                "step_arena": memory.arena_bytes,
                "rotary_table": memory.rotary_bytes,
                "worker_scratch": memory.scratch_bytes,
                "sampling_scratch": memory.sampling_bytes,
                "embedding_model": memory.encoder_bytes,
                "vision_tower": memory.images_bytes,
                "draft_model": memory.draft_bytes,
                "python_libraries": memory.process_bytes,
            },
            "api_server_process": _as_keys(self.server_bytes),
            "clients": self.clients.bytes_by_purpose,
            "structured_output": _as_keys(self.structured_bytes),
            "total_bytes": self.total_bytes,
            "threads": self.capacity.cpus.threads,
            "read_bytes_per_s": roofline and roofline.read_bytes_per_s,
            "peak_ops_per_s": roofline and dict(roofline.peak_ops_per_s),
            "alternatives": [self._alternative_as_dict(index) for index in range(len(self.alternatives))],
        }

    def _alternative_as_dict(self, index: int) -> dict[str, Any]:
        each = self.alternatives[index]
        speeds = self.speeds[index] if self.speeds else []
        return {
            "weights": each.weights,
            "kv_cache_dtype": each.capacity.layout.dtype,
            "weights_bytes": each.weights_bytes,
            "token_bytes": each.capacity.layout.token_bytes,
            "kv_bytes": each.kv_bytes,
            "sequences": {str(length): each.sequences(length) for length in self.lengths},
            "predicted": {
                str(shape): speed and {"first_token_s": speed.first_token_s, "tokens_per_s": speed.tokens_per_s}
                for shape, speed in zip(self.shapes, speeds, strict=False)
            },
        }


def plan_serving(settings: Settings, target: PlanTarget) -> ServingPlan:
    """Plan serving with `settings` on a machine. Raises ModelError or ConfigError."""
    roofline = None
    if target.shapes is not None and target.profile is None:
        raise ConfigError("shapes needs --profile")
    shapes = parse_shapes(target.shapes or SHAPES)
    if target.profile is not None:
        config, roofline = read_profile(target.profile).configure(settings.engine)
        settings = Settings(engine=config, server=settings.server)
    spec = read_spec(model_path(settings.engine.model))
    tokens = num_tokens(model_path(settings.engine.model), spec.vocab_size)
    server_bytes = _server_start_bytes(tokens)
    structured_bytes = _structured_output_bytes(tokens)
    others = sum(server_bytes.values()) + sum(structured_bytes.values()) + MemoryLimits(settings.server).total_bytes
    capacity = _capacity(settings, spec, target.memory, others)
    return ServingPlan(
        settings=settings,
        spec=spec,
        capacity=capacity,
        server_bytes=server_bytes,
        structured_bytes=structured_bytes,
        alternatives=alternatives(settings.engine, spec, capacity),
        shapes=shapes,
        roofline=roofline,
    )


def _capacity(settings: Settings, spec: DecoderSpec, memory: str | None, other_bytes: int) -> Capacity:
    """Return the capacity; `memory` must also hold `other_bytes` besides the engine process at start."""
    if memory is None:
        return decide_capacity(settings.engine, spec)
    if settings.engine.kv_cache_memory is not None:
        raise ConfigError("memory cannot be given with --kv-cache-memory")
    if settings.engine.kv_cache_share != EngineConfig().kv_cache_share:
        raise ConfigError("memory cannot be given with --kv-cache-share: the KV cache takes what the rest leaves")
    size = parse_size(memory)
    if size is None:
        raise ConfigError(f"memory must be a size in bytes, such as 17179869184 or 16GiB, not {memory!r}")
    return fit_capacity(settings.engine, spec, size, other_bytes)


def _server_start_bytes(tokens: int) -> dict[str, int]:
    """Return estimates for the API server process at start, without memory shared with engine processes.

    `tokens` is the size of the tokenizer's vocabulary, 0 without a tokenizer.
    """
    return {"Python libraries": SERVER_PROCESS_BYTES, "tokenizer": tokens * TOKENIZER_TOKEN_BYTES}


def _structured_output_bytes(tokens: int) -> dict[str, int]:
    """Return the memory of structured output; empty without a tokenizer.

    The first figure is an estimate of a tokenizer and the tables of its vocabulary, which an engine process has from
    the first grammar on. The other figures are limits for grammars in that process and for the API server's trial
    processes.
    """
    return {
        "vocabulary": tokens * (TOKENIZER_TOKEN_BYTES + GRAMMAR_TOKEN_BYTES),
        "compiled grammars": MAX_LIVE if tokens else 0,
        "trials of grammars": MAX_PROCESSES * (TRIAL_PROCESS_BYTES + MAX_BYTES) if tokens else 0,
    }


def _as_keys(sizes: dict[str, int]) -> dict[str, int]:
    """Return sizes by purpose with keys for JSON."""
    return {name.lower().replace(" ", "_"): size for name, size in sizes.items()}


def num_tokens(path: Path, vocab_size: int) -> int:
    """Return the number of tokens of the model's tokenizer, which may be lower than the rows of the embedding."""
    try:
        return Tokenizer(path).vocab_size if has_tokenizer(path) else 0
    except ModelError:  # serving refuses the tokenizer, and its size is unknown
        return vocab_size


def _layers_by_window(layout: KVLayout) -> list[WindowLayers]:
    kinds: dict[int, list[KVHeads]] = {}
    for group in layout.groups:
        kinds.setdefault(group.window, []).extend([group.heads] * len(group.layers))
    return [WindowLayers(window, len(each), sum(map(layout.layer_token_bytes, each))) for window, each in kinds.items()]
