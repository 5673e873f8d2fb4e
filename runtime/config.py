"""Configuration as frozen structs, one per part, and nothing that reads or writes it elsewhere.

Flags carry vLLM's names where one exists, llama.cpp's for CPU matters. Precedence: flag > QUIRE_* > TOML file > default.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WeightDtype = Literal["bf16", "q8", "f32"]
KVCacheDtype = Literal["bf16", "f32"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine needs to start. Sizes in bytes or tokens; None means: chosen at start and printed."""

    model: str | None = None  # Hugging Face folder; None: the bundled model
    weights: WeightDtype = "bf16"
    kv_cache_dtype: KVCacheDtype = "bf16"
    block_size: int = 32  # tokens per page
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory: int | None = None  # bytes
    threads: int | None = None
    enable_prefix_caching: bool = True
    max_num_waiting: int = 1024  # queue limit
    isa: str | None = None  # None: QUIRE_ISA or the best this machine has


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets of `quire serve`. Port 0 asks the system for a free one."""

    host: str = "127.0.0.1"
    port: int = 7070
    uds: str | None = None  # unix socket path; instead of TCP
    http_host: str = "127.0.0.1"
    http_port: int = 7071
    token: str | None = None  # required of clients when set; must be set off loopback
    served_model_name: str | None = None
    max_frame_bytes: int = 4 << 20
    max_connections: int = 4096
