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
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Processes = Annotated[int, msgspec.Meta(ge=0, le=64)]
FrameBytes = Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30, description="bytes")]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine needs to start. Sizes in bytes or tokens; None means: chosen at start and printed."""

    model: str | None = None  # Hugging Face folder; None: the bundled model
    weights: WeightDtype = "bf16"
    kv_cache_dtype: KVCacheDtype = "bf16"
    page_size: Count = 32  # tokens per page
    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 512
    kv_cache_memory: Bytes | None = None
    kv_cache_share: Share = 0.4  # of the memory that is free at start: the most for the pool if its size is not given
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
    """All of `quire serve` but its engine: sockets, who may connect, limits, processes, logs. Port 0: a free one."""

    host: str = "127.0.0.1"
    port: Port = 7070
    uds: str | None = None  # unix socket path; instead of TCP
    http_host: str = "127.0.0.1"
    http_port: Port = 7071
    token: Secret | None = None  # required of clients when set; must be set off loopback
    auth_tokens: str | None = None  # TOML file of tenants, the hashes of their keys and their limits
    tls_cert: str | None = None  # PEM files; clients then speak TLS
    tls_key: str | None = None
    served_model_name: str | None = None
    prefix_snapshot: str | None = None  # file that keeps the prefix cache from one run to the next
    max_frame_bytes: FrameBytes = 4 << 20
    max_connections: Count = 4096
    max_requests_per_connection: Count = 1024
    max_outgoing_bytes: Bytes = 8 << 20  # unsent per connection before its reader counts as stuck
    write_timeout_ms: Count = 30_000  # without progress before its reader counts as stuck
    handshake_timeout_ms: Count = 10_000
    frame_timeout_ms: Count = 30_000  # from a frame's first byte to its last
    idle_timeout_ms: Count = 600_000  # of a connection without live requests
    heartbeat_ms: Count = 15_000  # for clients that want it
    credit_timeout_ms: Count = 30_000  # with tokens to send and no credit, before a request's reader counts as stuck
    resume_timeout_ms: Count = 60_000  # how long a resumable request waits for its client
    idempotency_window_ms: Count = 600_000  # how long the outcome of a request with an idempotency key is kept
    max_kept_bytes: Bytes = 64 << 20  # of kept outcomes; the oldest that nobody needs go first
    stall_timeout_ms: Count = 30_000  # work without a finished step before /readyz says no and the engine is restarted
    shutdown_timeout: Seconds = 30.0  # that accepted requests have to end after SIGTERM
    in_process: bool = False  # the engine in the server's own process: nothing survives its crash
    engine_processes: Processes = 0  # 0: one per NUMA node
    engine_pulse_timeout_ms: Count = 1_000  # without a pulse before an engine process is replaced
    metrics_compat: Literal["vllm"] | None = None  # mirror the names that routers and dashboards hard-code
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
