"""The options of an engine and of a server, as frozen structs with one field per option.

A field is the only definition of its option: its name, type, range, unit and help text make the command line flag, the
QUIRE_* variable, the key of a TOML file, the keyword argument of `LLM` and the row in docs/reference/options.md. Names
are vLLM's where vLLM has the option, llama.cpp's for CPU matters. `settings.py` reads the values.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypedDict

import msgspec

from .images import MAX_IMAGES
from .options import option

WeightDtype = Literal["auto", "bf16", "q8", "q4", "f32"]
KVCacheDtype = Literal["bf16", "f32", "int8"]
PageSize = Literal[16, 32, 64]
ToolCallParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "mistral_list", "phi4_mini_json", "deepseek_v3",
    "deepseek_v31", "openai",
]  # fmt: skip
SchedulingPolicy = Literal["fcfs", "priority", "fair"]

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
DraftTokens = Annotated[int, msgspec.Meta(ge=0, le=16)]
Processes = Annotated[int, msgspec.Meta(ge=0, le=64)]
FrameBytes = Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30)]
Images = Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGES)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**6)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

MEMORY, SCHEDULING, SERVER, LIMITS = "Model and memory", "Scheduling", "Server", "Timeouts and limits"
MACHINES, HOST = "Many machines", "Engine host"
_memory = partial(option, MEMORY)
_scheduling = partial(option, SCHEDULING)
_server = partial(option, SERVER)
_limit = partial(option, LIMITS)
_machines = partial(option, MACHINES)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine. None means that the engine chooses the value at start and prints it."""

    model: Annotated[
        str | None,
        _memory(
            "The model: a folder in Hugging Face's format, or a GGUF file.", unit="path", default="the bundled model"
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        _memory(
            "A second model, which embeds or scores texts beside the model that generates: a folder, or "
            "`demo_embedding`, the bundled embedding model.",
            unit="path",
            default="none; a model that is an encoder itself is served alone",
        ),
    ] = None
    weights: Annotated[
        WeightDtype,
        _memory(
            "Data type of the weights. auto: that of the file if it is quantised, else bf16. q8 and q4 quantise while "
            "loading."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[KVCacheDtype, _memory("Data type of the KV cache.")] = "bf16"
    page_size: Annotated[PageSize, _memory("Tokens per page of the KV cache.", unit="tokens", alias="block_size")] = 32
    max_model_len: Annotated[
        Count | None,
        _memory("Longest prompt and output together.", unit="tokens", default="what the model and the KV cache allow"),
    ] = None
    max_num_seqs: Annotated[Count, _memory("Sequences that run at the same time.", unit="sequences")] = 64
    max_num_batched_tokens: Annotated[Count, _memory("Tokens computed in one step.", unit="tokens")] = 512
    kv_cache_memory: Annotated[
        Count | None,
        _memory(
            "Size of the KV cache.",
            unit="bytes",
            default="what max_num_seqs sequences need, at most kv_cache_share of the free memory",
        ),
    ] = None
    kv_cache_share: Annotated[
        Share, _memory("Maximum share of the memory free at start for the KV cache if its size is not set.")
    ] = 0.4
    image_cache_memory: Annotated[
        CountOrZero,
        _memory(
            "What models that take images have computed of images that were used last. At least one.", unit="bytes"
        ),
    ] = 256 << 20
    max_image_tokens: Annotated[
        Count,
        _memory(
            "Tokens of an image, for models that take images of any size; larger images are made smaller. The vision "
            "tower's buffers are for such an image.",
            unit="tokens",
        ),
    ] = 4096
    threads: Annotated[
        Count | None,
        _memory("Threads that compute.", unit="threads", default="what CPU affinity and cgroup quota allow"),
    ] = None
    enable_prefix_caching: Annotated[
        bool, _memory("Reuse the KV cache of prompts that begin with the same tokens.")
    ] = True
    isa: Annotated[
        str | None,
        _memory(
            "Instruction set level; `quire info` lists those of this machine.", unit="level", default="the best one"
        ),
    ] = None

    kv_events: Annotated[
        str | None,
        _memory(
            "ZeroMQ endpoint that publishes which pages the prefix cache has, such as tcp://*:5557. Each further "
            "engine process takes the next port.",
            unit="endpoint",
            default="not published",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        _memory(
            "ZeroMQ endpoint that sends earlier events again, such as tcp://*:5657.",
            unit="endpoint",
            default="not sent again",
        ),
    ] = None
    kv_events_topic: Annotated[str, _memory("Topic of the events of kv_events.", unit="text")] = ""

    tool_call_parser: Annotated[
        ToolCallParser,
        _memory(
            "How the model writes tool calls: the name of a family. auto: as its chat template says; none: it writes "
            "none."
        ),
    ] = "auto"
    max_images_per_request: Annotated[Images, _memory("Images of one request.", unit="images")] = 16
    max_image_pixels: Annotated[
        Count,
        _memory(
            "Pixels of an image before it is resized. One image at a time is decoded, which takes about 16 bytes per "
            "pixel.",
            unit="pixels",
        ),
    ] = 1 << 25
    max_image_memory: Annotated[
        Count,
        _memory("Resized images of queued and running requests together; further ones are refused.", unit="bytes"),
    ] = 1 << 30

    max_num_waiting: Annotated[Count, _scheduling("Maximum number of requests in the queue.", unit="requests")] = 1024
    max_num_waiting_per_tenant: Annotated[
        Count | None,
        _scheduling("Maximum number of requests of one tenant in the queue.", unit="requests", default="no limit"),
    ] = None
    scheduling_policy: Annotated[
        SchedulingPolicy,
        _scheduling(
            "Which request is admitted next: fcfs by arrival, priority by priority and waiting time, fair from the "
            "tenant that was served least."
        ),
    ] = "fcfs"
    tenant_weights: Annotated[
        dict[str, Positive],
        _scheduling("Shares of tenants under the fair policy, such as a=2,b=0.5.", default="1 for every tenant"),
    ] = {}
    max_kv_share_per_tenant: Annotated[
        Share | None,
        _scheduling(
            "Maximum share of the KV pages that one tenant's requests, and its pins, hold.", default="no limit"
        ),
    ] = None
    itl_target_ms: Annotated[
        Positive | None,
        _scheduling(
            "Target for the time between two tokens of a stream. Steps take less prefill, and only as many sequences "
            "run as can decode in that time.",
            unit="ms",
            default="no target, the highest throughput",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        DraftTokens,
        _scheduling(
            "Maximum number of draft tokens per sequence and step, found in earlier text; the output stays the same. "
            "0: none.",
            unit="tokens",
        ),
    ] = 0
    kv_spill_size: Annotated[
        CountOrZero,
        _scheduling("Disk space for the KV pages of preempted requests. 0: their pages are recomputed.", unit="bytes"),
    ] = 0
    kv_spill_dir: Annotated[
        str | None,
        _scheduling("Folder of the spill file.", unit="folder", default="the system's folder for temporary files"),
    ] = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `quire serve` besides those of its engine."""

    host: Annotated[
        str,
        _server("Address for clients; one that other machines reach needs `token` or `auth_tokens`.", unit="address"),
    ] = "127.0.0.1"
    port: Annotated[Port, _server("Port for clients; 0 takes a free one.")] = 7070
    uds: Annotated[str | None, _server("Unix socket for clients, instead of `host` and `port`.", unit="file")] = None
    operator_host: Annotated[
        str, _server("Address for operators: metrics, probes and the status page.", unit="address")
    ] = "127.0.0.1"
    operator_port: Annotated[Port, _server("Port for operators; 0 takes a free one.")] = 7071
    openai_host: Annotated[
        str,
        _server(
            "Address of OpenAI's HTTP API; one that other machines reach needs `token` or `auth_tokens`.",
            unit="address",
        ),
    ] = "127.0.0.1"
    openai_port: Annotated[Port, _server("Port of OpenAI's HTTP API; 0 takes a free one.")] = 8000
    token: Annotated[
        str | None,
        _server(
            "Token that clients must present. Set QUIRE_TOKEN instead of the flag: process lists show flags.",
            unit="text",
            is_secret=True,
        ),
    ] = None
    auth_tokens: Annotated[
        str | None,
        _server(
            "TOML file of tenants, the hashes of their keys and their limits; `quire token` makes keys.",
            unit="file",
        ),
    ] = None
    tls_cert: Annotated[str | None, _server("Certificate chain in PEM; with it, clients use TLS.", unit="file")] = None
    tls_key: Annotated[str | None, _server("Private key of the certificate, in PEM.", unit="file")] = None
    allowed_image_hosts: Annotated[
        str | None,
        _server(
            "Hosts from which images of the HTTP API are fetched over https, separated by commas: `host`, `host:port` "
            "or an address; addresses that are not public must be in the list themselves.",
            unit="hosts",
            default="images are not fetched",
        ),
    ] = None
    served_model_name: Annotated[
        str | None, _server("Name of the model for clients.", unit="text", default="the name of the model's folder")
    ] = None
    prefix_snapshot: Annotated[
        str | None,
        _server("File that keeps the prefix cache across restarts.", unit="file", default="the cache is not kept"),
    ] = None
    shutdown_timeout: Annotated[
        Seconds, _server("Time that running requests have to finish after SIGTERM.", unit="seconds")
    ] = 30.0
    in_process: Annotated[
        bool, _server("Run the engine in the server's process; a crash of the engine then ends the server.")
    ] = False
    engine_processes: Annotated[
        Processes,
        _server("Engine processes, each with its own copy of the model. 0: one per NUMA node.", unit="processes"),
    ] = 0
    openai_metrics: Annotated[
        bool, _server("Serve /metrics at the port of the HTTP API, too, as vLLM does; it needs no key.")
    ] = False
    metrics_compat: Annotated[
        Literal["vllm"] | None, _server("Export the metrics under vLLM's names, too.", default="off")
    ] = None
    log_format: Annotated[Literal["console", "json"], _server("Form of log lines.")] = "console"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _server("Least severe level that is logged.")
    ] = "info"

    max_frame_bytes: Annotated[
        FrameBytes, _limit("Longest payload of a frame, and longest body of an HTTP request.", unit="bytes")
    ] = 4 << 20
    max_connections: Annotated[
        Count,
        _limit(
            "Connections to each port at the same time, at most what the limit of open files allows.",
            unit="connections",
        ),
    ] = 4096
    max_pending_connections: Annotated[
        Count,
        _limit(
            "Connections before HELLO, TLS handshakes included, at most half of max_connections; beyond it, the one "
            "that is pending longest is closed.",
            unit="connections",
        ),
    ] = 512
    max_pending_connections_per_address: Annotated[
        Count, _limit("Connections before HELLO from one address; an IPv6 /64 is one.", unit="connections")
    ] = 256
    max_requests_per_connection: Annotated[Count, _limit("Live requests of one connection.", unit="requests")] = 1024
    max_outgoing_bytes: Annotated[
        Count,
        _limit(
            "Unsent output of one connection, with what waits for credit; beyond it, its largest stream ends, or the "
            "connection.",
            unit="bytes",
        ),
    ] = 8 << 20
    max_unsent_bytes: Annotated[
        Count,
        _limit(
            "Unsent output of all connections. Each tenant has an equal share; beyond it, its largest stream or "
            "connection ends.",
            unit="bytes",
        ),
    ] = 128 << 20
    max_pending_bytes: Annotated[
        Count,
        _limit(
            "Incomplete frames of all connections. Each tenant has an equal share; beyond it, its largest connection "
            "is closed.",
            unit="bytes",
        ),
    ] = 64 << 20
    max_text_bytes: Annotated[
        Count,
        _limit(
            "Prompts and texts that are being tokenized, or wait for it. Each tenant has an equal share; further ones "
            "are refused.",
            unit="bytes",
        ),
    ] = 64 << 20
    write_timeout_ms: Annotated[
        Count, _limit("Time without progress in sending after which a connection is closed as too slow.", unit="ms")
    ] = 30_000
    handshake_timeout_ms: Annotated[Count, _limit("Time from connecting to HELLO.", unit="ms")] = 10_000
    frame_timeout_ms: Annotated[Count, _limit("Time from the first to the last byte of a frame.", unit="ms")] = 30_000
    idle_timeout_ms: Annotated[
        Count, _limit("Silence after which a connection without live requests is closed.", unit="ms")
    ] = 600_000
    heartbeat_ms: Annotated[
        Count, _limit("Silence after which a client that negotiated heartbeats is sent PING.", unit="ms")
    ] = 15_000
    credit_timeout_ms: Annotated[
        Count,
        _limit(
            "Time in which a client must take one in 32 of the tokens that wait for credit before the request ends.",
            unit="ms",
        ),
    ] = 30_000
    resume_timeout_ms: Annotated[
        Count, _limit("Time that a resumable request is kept after its connection was lost.", unit="ms")
    ] = 60_000
    idempotency_window_ms: Annotated[
        Count, _limit("Time that the output of a request with an idempotency key is kept.", unit="ms")
    ] = 600_000
    store_window_ms: Annotated[
        Count, _limit("Time that a stored response or chat is kept after its end.", unit="ms")
    ] = 3_600_000
    max_kept_bytes: Annotated[
        Count,
        _limit(
            "Output kept for resumable and stored requests and idempotency keys. Each tenant has an equal share, in "
            "which a running request reserves what it may generate; one without room is refused.",
            unit="bytes",
        ),
    ] = 128 << 20
    stall_timeout_ms: Annotated[
        Count,
        _limit("Time without a finished step after which /readyz fails and the engine is restarted.", unit="ms"),
    ] = 30_000
    engine_heartbeat_timeout_ms: Annotated[
        Count, _limit("Time without a heartbeat after which an engine process is replaced.", unit="ms")
    ] = 1_000
    engine_restart_timeout_ms: Annotated[
        Count,
        _limit("Time that requests wait for the next engine process while its start fails; then they end.", unit="ms"),
    ] = 30_000

    engine_hosts: Annotated[
        str | None,
        _machines(
            "Engine hosts to use instead of engine processes of this machine, separated by commas: `host:port`, or "
            "`dns:name:port` for every address of a name.",
            unit="addresses",
        ),
    ] = None
    secret_file: Annotated[
        str | None,
        _machines("File with the secret that API servers and engine hosts share, at least 16 bytes.", unit="file"),
    ] = None
    engine_hosts_ca: Annotated[
        str | None,
        _machines("Certificate in PEM that signs those of the engine hosts; with it, links use TLS.", unit="file"),
    ] = None
    listen: Annotated[
        str, option(HOST, "Address and port for API servers; port 0 takes a free one.", unit="address")
    ] = "0.0.0.0:7072"

    @property
    def has_keys(self) -> bool:
        return self.token is not None or self.auth_tokens is not None

    @property
    def serves_api(self) -> bool:
        """Whether there is an HTTP API. Every user of the machine can reach its port, a unix socket only its owner."""
        return self.uds is None or self.has_keys


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `LLM`: the fields of EngineConfig besides `model`, with sizes also as text.

    A test keeps both lists equal.
    """

    weights: WeightDtype | Literal["bfloat16", "float32"]
    kv_cache_dtype: KVCacheDtype | Literal["bfloat16", "float32"]
    page_size: PageSize
    block_size: PageSize
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: int | str | None
    kv_cache_share: float
    image_cache_memory: int | str
    max_image_tokens: int
    threads: int | None
    enable_prefix_caching: bool
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str
    tool_call_parser: ToolCallParser
    max_images_per_request: int
    max_image_pixels: int
    max_image_memory: int | str
    isa: str | None
    embedding_model: str | None
    max_num_waiting: int
    max_num_waiting_per_tenant: int | None
    scheduling_policy: SchedulingPolicy
    tenant_weights: dict[str, float]
    max_kv_share_per_tenant: float | None
    itl_target_ms: float | None
    num_speculative_tokens: int
    kv_spill_size: int | str
    kv_spill_dir: str | None
