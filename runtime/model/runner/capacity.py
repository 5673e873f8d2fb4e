"""The capacity of an engine: fixed numbers from the configuration, the model's shape and this machine.

Nothing is loaded or allocated. `quire plan` prints these numbers, and `load_model` allocates by them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec

from ....kernels import CpuBudget, available_cpus, pick_level
from ....pager import PAGE_SIZES, STATE_INTERVAL, KVLayout, StatePool
from ...common.config import MTP, EngineConfig, TuneMode
from ...common.errors import ConfigError
from ...common.memory import free_memory_bytes
from .. import DecoderSpec, MemoryPlan, kv_layout, plan_memory, read_head, read_spec
from ..encoder import EncoderMemoryPlan, EncoderSpec, plan_encoder_memory, read_encoder
from ..files import model_path
from ..lora import LoraLayout, plan_lora
from ..states import StateLayout, lay_out_states
from ..vision import VisionMemoryPlan, plan_tower_memory, read_vision

MAX_BATCH_TEXTS = 256  # texts of a batch: each takes at least a page of keys and values
CACHED_STATES = 4  # states that the prefix cache keeps by default for each sequence that runs, where memory allows
CACHED_STATES_SHARE = 0.25  # largest share of the KV cache without the states of running sequences that they take
LONGEST_BY_DEFAULT = 8192  # tokens; the memory of a batch grows with the longest text


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that a model runner is built with."""

    layout: KVLayout
    num_pages: int
    state_layout: StateLayout
    num_states: int  # slots for states: one for each sequence that runs, and those of the prefix cache
    num_cached_states: int  # slots for states that the prefix cache keeps
    state_interval: int  # tokens of a prompt between two of them
    max_model_len: int  # tokens
    max_num_samples: int  # rows of a step that sample
    cpus: CpuBudget
    isa: str
    tune: TuneMode
    memory: MemoryPlan
    lora: LoraLayout | None = None  # layers that adapters may change
    draft: Capacity | None = None  # capacity of the draft model, or of the model's own head
    shows_hidden: bool = False  # whether steps have the normed rows that a head reads as a result

    def open_states(self, copy: Callable[[int, int], None] | None = None) -> StatePool | None:
        """Return a pool of the slots for states, which `copy` copies; None for a model without states."""
        states = self.state_layout
        return StatePool(self.num_states, states.rollback, copy, states.nbytes) if states.nbytes else None

    def prefix_cache_problem(self, config: EngineConfig) -> str | None:
        """Return why there is no prefix cache if `config` has not switched it off; None if there is one."""
        wanted = config.enable_prefix_caching and config.state_cache_memory != 0
        if not wanted or not self.state_layout.nbytes or self.num_cached_states:
            return None
        return "no state fits; raise kv_cache_memory or state_cache_memory, or lower max_num_seqs"


def decide_capacity(config: EngineConfig, spec: DecoderSpec) -> Capacity:
    """Decide all sizes. Raises ConfigError if the model or this machine cannot do what the configuration asks for."""
    layout = _layout(config, spec)
    cpus = pick_cpus(config)
    max_model_len = _wanted_model_len(config, spec)
    encoder = _encoder_beside(config)
    images = None if spec.head_of is not None else _tower_memory(config, cpus.threads)
    other_bytes = 0 if encoder is None else encoder.memory.total_bytes
    other_bytes += 0 if images is None else images.total_bytes
    slots = _num_adapters(config)
    lora = plan_lora(spec, config.weights, config.max_lora_rank, slots) if slots else None
    lora_bytes = 0 if lora is None else config.lora_memory or lora.slots * lora.adapter_nbytes()
    other_bytes += lora_bytes
    states = lay_out_states(spec, config.num_speculative_tokens, config.state_dtype)
    draft = None if config.draft_model is None else DraftShare.of(config, spec, layout, max_model_len)
    draft_bytes = 0
    if draft is not None:
        other_bytes += draft.other_bytes
    kv_bytes = _kv_bytes(config, other_bytes)
    if draft is not None:
        num_states = config.max_num_seqs + _num_cached_states(config, states, 0)
        draft_bytes = draft.of_bytes(kv_bytes - num_states * states.nbytes)
        kv_bytes -= draft_bytes
    num_cached_states = _num_cached_states(config, states, kv_bytes - config.max_num_seqs * states.nbytes)
    num_states = config.max_num_seqs + num_cached_states
    others = OthersInCache(num_states * states.nbytes, draft_bytes)
    num_pages = _num_pages(config, layout, max_model_len, kv_bytes - others.state_bytes, others)
    max_model_len = _fitting_model_len(config, layout, num_pages, max_model_len)
    max_num_samples = _max_num_samples(config)
    draft_capacity = None if draft is None else draft.capacity(min(draft_bytes, draft.beside(num_pages, layout)))
    shows_hidden = spec.head_of is not None or config.draft_model == MTP
    memory = plan_memory(
        spec,
        weights=config.weights,
        kv_dtype=config.kv_cache_dtype,
        page_size=layout.page_size,
        num_pages=num_pages,
        max_positions=max_model_len,
        max_tokens=config.max_num_batched_tokens,
        max_samples=max_num_samples,
        workers=cpus.threads,
        states=states,
        num_states=num_states,
        encoder=None if encoder is None else encoder.memory,
        images=images,
        lora=lora,
        lora_bytes=lora_bytes,
        draft=None if draft_capacity is None else draft_capacity.memory,
        shows_hidden=shows_hidden,
    )
    isa = pick_isa(config)
    tune = pick_tune_mode(config)
    return Capacity(
        layout,
        num_pages,
        states,
        num_states,
        num_cached_states,
        _state_interval(config, layout, num_pages, num_cached_states),
        max_model_len,
        max_num_samples,
        cpus,
        isa,
        tune,
        memory,
        lora,
        draft_capacity,
        shows_hidden,
    )


def least_kv_bytes(config: EngineConfig, capacity: Capacity) -> int:
    """Return the bytes of pages and states that one sequence needs, and max_num_seqs sequences a state each.

    `capacity` is that of `config` with any size of the KV cache. By default, the prefix cache keeps few states then.
    """
    layout = capacity.layout
    page_bytes = layout.pages_for(config.max_model_len or 1) * layout.page_bytes
    state_bytes, num_cached = capacity.state_layout.nbytes, capacity.num_cached_states
    if state_bytes and config.state_cache_memory is None:
        most_bytes = int(page_bytes * CACHED_STATES_SHARE / (1 - CACHED_STATES_SHARE))
        num_cached = min(num_cached, most_bytes // state_bytes)
    return page_bytes + (config.max_num_seqs + num_cached) * state_bytes


@dataclass(frozen=True, slots=True)
class DraftShare:
    """The draft model's share of the KV cache: as many tokens as the model's own."""

    config: EngineConfig
    spec: DecoderSpec
    ratio: float  # bytes of a sequence in the draft model's pages over those in the model's
    other_bytes: int  # weights and work memory

    @classmethod
    def of(cls, config: EngineConfig, spec: DecoderSpec, layout: KVLayout, max_model_len: int) -> DraftShare:
        """Return the share that `config` implies. Raises ModelError or ConfigError for a model that cannot draft."""
        if not config.num_speculative_tokens:
            raise ConfigError("draft_model needs num_speculative_tokens, which is 0; 4 is a good start")
        draft = draft_config(config)
        path = model_path(draft.model)
        draft_spec = read_head(path) if config.draft_model == MTP else read_spec(path)
        if lay_out_states(draft_spec).nbytes:
            raise ConfigError(
                f"draft_model {config.draft_model} has layers with states; a draft model needs attention in all layers"
            )
        draft_layout = _layout(draft, draft_spec)
        length = min(max_model_len, draft_spec.max_position_embeddings)
        ratio = _sequence_bytes(draft_layout, length) / max(1, _sequence_bytes(layout, max_model_len))
        smallest = msgspec.structs.replace(draft, kv_cache_memory=_sequence_bytes(draft_layout, 1))
        memory = decide_capacity(smallest, draft_spec).memory
        return cls(draft, draft_spec, ratio, memory.total_bytes - memory.kv_bytes - memory.process_bytes)

    def of_bytes(self, kv_bytes: int) -> int:
        """Return the draft model's part of a KV cache of this size."""
        return max(int(kv_bytes * self.ratio / (1 + self.ratio)), self._least_bytes)

    def beside(self, num_pages: int, layout: KVLayout) -> int:
        """Return the bytes of the draft model's pages beside `num_pages` pages of the model."""
        return max(int(num_pages * layout.page_bytes * self.ratio), self._least_bytes)

    @property
    def _least_bytes(self) -> int:
        """Bytes of the pages that one sequence needs at least."""
        return _sequence_bytes(_layout(self.config, self.spec), 1)

    def capacity(self, kv_bytes: int) -> Capacity:
        """Return the capacity of the draft model with pages of `kv_bytes` bytes."""
        return decide_capacity(msgspec.structs.replace(self.config, kv_cache_memory=kv_bytes), self.spec)


def _sequence_bytes(layout: KVLayout, num_tokens: int) -> int:
    return layout.pages_for(num_tokens) * layout.page_bytes


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the draft model, as if it were served alone."""
    alone = {"embedding_model": None, "draft_model": None, "max_model_len": None, "state_cache_memory": None}
    without_adapters: dict[str, Any] = {"lora": {}, "max_loras": None, "lora_memory": None}
    model = config.model if config.draft_model == MTP else config.draft_model
    return msgspec.structs.replace(config, model=model, **without_adapters, **alone)


def _num_adapters(config: EngineConfig) -> int:
    """Return the adapters that are in memory at the same time. Raises ConfigError."""
    slots = len(config.lora) if config.max_loras is None else config.max_loras
    if slots < len(config.lora):
        raise ConfigError(
            f"max_loras is {slots}, and lora names {len(config.lora)} adapters; raise max_loras, or load the others "
            "while the server runs"
        )
    return slots


def _encoder_beside(config: EngineConfig) -> EncoderCapacity | None:
    """Return the capacity of the encoder that is served next to the decoder, if there is one."""
    if config.embedding_model is None:
        return None
    return decide_encoder_capacity(encoder_config(config), read_encoder(model_path(config.embedding_model)))


def _tower_memory(config: EngineConfig, workers: int) -> VisionMemoryPlan | None:
    """Return the memory of the model's vision tower, if it has one. Raises ConfigError if no step can hold an image."""
    spec = read_vision(model_path(config.model), config.max_image_tokens)
    if spec is not None and spec.whole_images:
        least = spec.num_tokens + config.max_num_seqs
        if config.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens {config.max_num_batched_tokens} must be at least {least}: a step computes the "
                f"{spec.num_tokens} tokens of an image, beside max_num_seqs {config.max_num_seqs} sequences that decode"
            )
    return None if spec is None else plan_tower_memory(spec, config.weights, config.image_cache_memory, workers)


def encoder_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the encoder next to a decoder, as if the encoder were served alone."""
    decoders = {"max_model_len": None, "kv_cache_memory": None}
    return msgspec.structs.replace(config, model=config.embedding_model, embedding_model=None, **decoders)


@dataclass(frozen=True, slots=True)
class EncoderCapacity:
    """The sizes that an encoder runner is built with."""

    max_model_len: int  # tokens of the longest text
    max_rows: int  # tokens of a batch
    max_texts: int  # most texts in a batch
    cpus: CpuBudget
    isa: str
    tune: TuneMode
    memory: EncoderMemoryPlan


def decide_encoder_capacity(config: EngineConfig, spec: EncoderSpec) -> EncoderCapacity:
    """Decide all sizes. Raises ConfigError if the model or this machine cannot do what the configuration asks for.

    `max_model_len` limits the texts of an encoder only if it is served alone; otherwise it belongs to the decoder.
    """
    if config.kv_cache_memory is not None:
        raise ConfigError("kv_cache_memory cannot be given with an encoder: it has no KV cache")
    wanted = config.max_model_len
    if wanted is not None and wanted > spec.max_model_len:
        raise ConfigError(f"max_model_len {wanted} is more than the {spec.max_model_len} tokens this model takes")
    longest = wanted or min(spec.max_model_len, LONGEST_BY_DEFAULT)
    max_rows = max(longest, config.max_num_batched_tokens)
    max_texts = min(MAX_BATCH_TEXTS, max_rows)
    cpus = pick_cpus(config)
    memory = plan_encoder_memory(
        replace(spec, max_model_len=longest),
        weights=config.weights,
        max_rows=max_rows,
        max_texts=max_texts,
        workers=cpus.threads,
    )
    return EncoderCapacity(longest, max_rows, max_texts, cpus, pick_isa(config), pick_tune_mode(config), memory)


def _layout(config: EngineConfig, spec: DecoderSpec) -> KVLayout:
    if config.page_size not in PAGE_SIZES:
        raise ConfigError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, not {config.page_size}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} must be at least max_num_seqs "
            f"{config.max_num_seqs}: every running sequence may decode a token in one step"
        )
    return kv_layout(spec, config.kv_cache_dtype, config.page_size)


def pick_cpus(config: EngineConfig) -> CpuBudget:
    """Return the number of threads and the reason for it. Raises ConfigError."""
    available = available_cpus()
    if config.threads is None:
        return available
    if config.threads > 1024:
        raise ConfigError(f"threads must be between 1 and 1024, not {config.threads}")
    if config.threads > available.threads:
        return CpuBudget(config.threads, f"--threads, more than the {available.threads} CPUs: {available.reason}")
    return CpuBudget(config.threads, "--threads")


def pick_isa(config: EngineConfig) -> str:
    """Return the ISA level. Raises ConfigError for a level that this build or machine does not have."""
    try:
        return pick_level(config.isa)
    except ValueError as error:
        raise ConfigError(f"`isa` or QUIRE_ISA: {error}") from error


def pick_tune_mode(config: EngineConfig) -> TuneMode:
    """Return how functions are chosen: by the option, else QUIRE_TUNE, else automatically. Raises ConfigError."""
    mode = config.tune or os.environ.get("QUIRE_TUNE") or "auto"
    modes: tuple[TuneMode, ...] = get_args(TuneMode)
    if mode not in modes:
        raise ConfigError(f"`tune` or QUIRE_TUNE must be one of {', '.join(modes)}, not {mode[:80]!r}")
    return modes[modes.index(mode)]


def _wanted_model_len(config: EngineConfig, spec: DecoderSpec) -> int:
    if config.max_model_len is not None and config.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {spec.max_position_embeddings} positions this "
            "model has"
        )
    return config.max_model_len or spec.max_position_embeddings


def _max_num_samples(config: EngineConfig) -> int:
    """Return one row per running sequence, but at least all draft tokens of one sequence and the row after them."""
    return min(config.max_num_batched_tokens, max(config.max_num_seqs, 1 + config.num_speculative_tokens))


def _kv_bytes(config: EngineConfig, other_bytes: int) -> int:
    """Return the most bytes of the KV cache: as configured, or a share of the memory that is free.

    `other_bytes` are needed by an encoder and a vision tower.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    return int(max(0, free_memory_bytes() - other_bytes) * config.kv_cache_share)


def _num_cached_states(config: EngineConfig, states: StateLayout, bytes_left: int) -> int:
    """Return how many states the prefix cache keeps; the states of running sequences leave it `bytes_left`."""
    if not states.nbytes or not config.enable_prefix_caching:
        return 0
    if config.state_cache_memory is not None:
        return config.state_cache_memory // states.nbytes
    fits = int(max(0, bytes_left) * CACHED_STATES_SHARE) // states.nbytes
    return min(CACHED_STATES * config.max_num_seqs, fits)


def _state_interval(config: EngineConfig, layout: KVLayout, num_pages: int, num_cached_states: int) -> int:
    """Return the tokens between two states of a prompt: a prompt takes no larger share of them than of the pages."""
    tokens = num_pages * layout.page_size // len(layout.group_windows)
    return config.state_interval or max(STATE_INTERVAL, tokens // max(1, num_cached_states))


@dataclass(frozen=True, slots=True)
class OthersInCache:
    """The bytes of the KV cache beside the model's pages: states, and the pages of a draft model."""

    state_bytes: int
    draft_bytes: int

    def describe(self, config: EngineConfig) -> str:
        """Return the parts with their sizes, as text of an error; empty if there are none."""
        states = f"the states of max_num_seqs {config.max_num_seqs} sequences and of state_cache_memory"
        parts = ((self.state_bytes, states), (self.draft_bytes, "a page of draft_model"))
        return " and ".join(f"the {size} bytes of {what}" for size, what in parts if size)


def _num_pages(
    config: EngineConfig, layout: KVLayout, max_model_len: int, page_bytes: int, others: OthersInCache
) -> int:
    """Return the pages of the configured size, or enough for all sequences at full length within `page_bytes`.

    A chunk of prefill needs all its pages before a sliding layer group releases any, so one step's pages are added.
    """
    least = layout.pages_for(1)
    besides = others.describe(config)
    if config.kv_cache_memory is not None:
        if besides and page_bytes <= 0:
            raise ConfigError(f"kv_cache_memory {config.kv_cache_memory} must be more than {besides}")
        pages = layout.pages_in(page_bytes)
        if pages < least:
            holds = f"{pages} of the {least} pages that a sequence needs at least" if pages else "no page"
            less = f", less {besides}," if besides else ""
            raise ConfigError(
                f"kv_cache_memory {config.kv_cache_memory}{less} holds {holds}; a page of {layout.page_size} tokens "
                f"takes {layout.page_bytes} bytes"
            )
        return pages
    if others.state_bytes and page_bytes < least * layout.page_bytes:
        kv_bytes = page_bytes + others.state_bytes + others.draft_bytes
        raise ConfigError(
            f"the KV cache has {kv_bytes} bytes by kv_cache_share {config.kv_cache_share}, which must be at least "
            f"{least * layout.page_bytes} more than {besides}; lower max_num_seqs, or set kv_cache_memory"
        )
    chunk = -(-config.max_num_batched_tokens // layout.page_size) * sum(map(bool, layout.group_windows))
    wanted = config.max_num_seqs * layout.pages_for(max_model_len) + chunk
    return max(least, min(wanted, layout.pages_in(max(0, page_bytes))))


def _fitting_model_len(config: EngineConfig, layout: KVLayout, num_pages: int, max_model_len: int) -> int:
    """Return the longest request whose pages fit the pool. Raises ConfigError if the configured length does not fit."""
    fits = bisect_right(range(max_model_len + 1), num_pages, key=layout.pages_for) - 1
    if config.max_model_len is not None and fits < max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} needs {layout.pages_for(max_model_len) * layout.page_bytes} bytes of KV "
            f"cache, there are {num_pages * layout.page_bytes}; raise kv_cache_memory or lower max_model_len"
        )
    return fits
