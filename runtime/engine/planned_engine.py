"""The description and the memory of an engine before it is loaded, from the headers of its model's files."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..model import model_path, read_spec
from ..model.encoder import is_encoder, read_encoder
from ..model.memory_plan import PROCESS_BYTES
from ..model.runner import Capacity, decide_capacity
from ..model.runner.capacity import decide_encoder_capacity, encoder_config
from .embedding.encoder import encoder_info
from .facade import CoreInfo, EncoderInfo, EngineInfo
from .text import has_tokenizer
from .text_processor import load_template


class PlannedEngine(NamedTuple):
    """An engine that can be loaded within a known size."""

    config: EngineConfig  # options, completed by the size of the KV cache
    info: EngineInfo  # description, except for parts that only loading decides
    total_bytes: int  # memory of an engine process
    kv_bytes: int  # part of `total_bytes` that several processes share


def plan_engine(config: EngineConfig, memory_bytes: int) -> PlannedEngine:
    """Plan an engine within `memory_bytes`. A KV cache without a size takes at most its share of the rest.

    Raises ModelError, or ConfigError for an engine that does not fit.
    """
    path = model_path(config.model)
    if is_encoder(path):
        planned = _plan_encoder(config)
    else:
        capacity = decide_capacity(config, read_spec(path))
        if config.kv_cache_memory is None:
            model_bytes = capacity.memory.total_bytes - _kv_bytes(capacity)
            kv_bytes = min(_kv_bytes(capacity), int(max(0, memory_bytes - model_bytes) * config.kv_cache_share))
            config = msgspec.structs.replace(config, kv_cache_memory=max(1, kv_bytes))
            try:
                capacity = decide_capacity(config, read_spec(path))
            except ConfigError:
                raise ConfigError(
                    f"the model takes {model_bytes:,} bytes and leaves no page of a KV cache; models_memory is "
                    f"{memory_bytes}"
                ) from None
        template, problem = load_template(path, config.chat_template)
        info = _describe(config, capacity, has_template=template is not None, chat_problem=problem)
        planned = PlannedEngine(config, info, capacity.memory.total_bytes, _kv_bytes(capacity))
    if planned.total_bytes > memory_bytes:
        raise ConfigError(f"the model takes {planned.total_bytes:,} bytes; models_memory is {memory_bytes}")
    return planned


def _kv_bytes(capacity: Capacity) -> int:
    memory = capacity.memory
    return memory.kv_bytes + memory.state_bytes + memory.draft_kv_bytes


def _plan_encoder(config: EngineConfig) -> PlannedEngine:
    path = model_path(config.model)
    capacity = decide_encoder_capacity(config, read_encoder(path))
    encoder = encoder_info(read_encoder(path), capacity.max_model_len, path)
    core = CoreInfo(
        vocab_size=encoder.vocab_size,
        max_model_len=encoder.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_pages=0,
        page_size=config.page_size,
        isa=capacity.isa,
        threads=capacity.cpus.threads,
        threads_reason=capacity.cpus.reason,
        encoder=encoder,
        generates=False,
    )
    info = EngineInfo(**msgspec.structs.asdict(core), has_tokenizer=True, has_chat_template=False)
    return PlannedEngine(config, info, capacity.memory.total_bytes + PROCESS_BYTES, 0)


def _describe(config: EngineConfig, capacity: Capacity, *, has_template: bool, chat_problem: str) -> EngineInfo:
    path = model_path(config.model)
    spec = read_spec(path)
    core = CoreInfo(
        vocab_size=spec.vocab_size,
        max_model_len=capacity.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_pages=capacity.num_pages,
        page_size=capacity.layout.page_size,
        isa=capacity.isa,
        threads=capacity.cpus.threads,
        threads_reason=capacity.cpus.reason,
        encoder=_encoder_beside(config),
        adapters=dict.fromkeys(config.lora, ""),
    )
    return EngineInfo(
        **msgspec.structs.asdict(core),
        has_tokenizer=has_tokenizer(path),
        has_chat_template=has_template,
        chat_problem=chat_problem,
        default_sampling=dict(config.default_sampling),
    )


def _encoder_beside(config: EngineConfig) -> EncoderInfo | None:
    if config.embedding_model is None:
        return None
    path = model_path(config.embedding_model)
    spec = read_encoder(path)
    return encoder_info(spec, decide_encoder_capacity(encoder_config(config), spec).max_model_len, path)
