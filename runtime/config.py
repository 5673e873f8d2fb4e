"""Configuration as frozen structs, one per part, and nothing that reads or writes it elsewhere.

Flags carry vLLM's names where one exists, llama.cpp's for CPU matters. Precedence, applied by `settings.py` together
with the ranges declared here: flag > QUIRE_* > TOML file > default.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

WeightDtype = Literal["bf16", "q8", "f32"]
KVCacheDtype = Literal["bf16", "f32", "int8"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]

Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Guesses = Annotated[int, msgspec.Meta(ge=0, le=16)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Weight = Annotated[float, msgspec.Meta(gt=0)]
SpillBytes = Annotated[int, msgspec.Meta(ge=0, description="bytes")]
Bytes = Annotated[int, msgspec.Meta(ge=1, description="bytes")]  # written 4294967296 or 4GiB
Secret = Annotated[str, msgspec.Meta(description="secret")]  # never quoted in a message
FrameBytes = Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30, description="bytes")]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine needs to start. Sizes in bytes or tokens; None means: chosen at start and printed."""

    model: str | None = None  # Hugging Face folder; None: the bundled model
    weights: WeightDtype = "bf16"
    kv_cache_dtype: KVCacheDtype = "bf16"
    block_size: Count = 32  # tokens per page
    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 512
    kv_cache_memory: Bytes | None = None
    threads: Count | None = None
    enable_prefix_caching: bool = True
    max_num_waiting: Count = 1024  # queue limit
    max_num_waiting_per_tenant: Count | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    tenant_weights: dict[str, Weight] = {}  # of the fair policy; 1 for tenants not named. Written a=2,b=0.5
    max_kv_share_per_tenant: Share | None = None  # of all pages
    itl_target_ms: Milliseconds | None = None  # None: as much prefill per step as max_num_batched_tokens allows
    num_speculative_tokens: Guesses = 0  # guessed per sequence and step, 0: none
    kv_spill_size: SpillBytes = 0  # file for the pages of preempted sequences; 0: they are recomputed
    kv_spill_dir: str | None = None  # None: the system's folder for temporary files
    isa: str | None = None  # None: QUIRE_ISA or the best this machine has


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sockets of `quire serve`. Port 0 asks the system for a free one."""

    host: str = "127.0.0.1"
    port: Port = 7070
    uds: str | None = None  # unix socket path; instead of TCP
    http_host: str = "127.0.0.1"
    http_port: Port = 7071
    token: Secret | None = None  # required of clients when set; must be set off loopback
    served_model_name: str | None = None
    prefix_snapshot: str | None = None  # file that keeps the prefix cache from one run to the next
    max_frame_bytes: FrameBytes = 4 << 20
    max_connections: Count = 4096
    max_requests_per_connection: Count = 1024
    max_outgoing_bytes: Bytes = 8 << 20  # unsent per connection before its reader counts as stuck
    write_timeout_ms: Count = 30_000  # without progress before its reader counts as stuck
    handshake_timeout_ms: Count = 10_000
    stall_timeout_ms: Count = 30_000  # work without a finished step before /readyz says no
