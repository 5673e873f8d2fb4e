"""The options of a server besides its engine's, as a frozen struct like the one in `config.py`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec

from .options import Count, option

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Processes = Annotated[int, msgspec.Meta(ge=0, le=64)]
FrameBytes = Annotated[int, msgspec.Meta(ge=64 << 10, le=1 << 30)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**6)]

SERVER = "Server"
LIMITS = "Timeouts and limits"
MACHINES = "Many machines"
HOST = "Engine host"
_server = partial(option, SERVER)
_limit = partial(option, LIMITS)
_machines = partial(option, MACHINES)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `quire serve` besides its engine's."""

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
            alias="api_host",
        ),
    ] = "127.0.0.1"
    openai_port: Annotated[Port, _server("Port of OpenAI's HTTP API; 0 takes a free one.", alias="api_port")] = 8000
    ollama_port: Annotated[
        Port | None,
        _server(
            "Port for Ollama's clients, at `openai_host`; 0 takes a free one. The flag without a number takes 11434.",
            default="off",
        ),
    ] = None
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
    tls_cert: Annotated[
        str | None,
        _server("Certificate chain in PEM; with it, clients use TLS. At an engine host: API servers.", unit="file"),
    ] = None
    tls_key: Annotated[str | None, _server("Private key of the certificate, in PEM.", unit="file")] = None
    allowed_image_hosts: Annotated[
        str | None,
        _server(
            "Hosts from which images of the HTTP API are fetched over https, separated by commas: a name, a name with "
            "a port (`name:port`) or an address; addresses that are not public must be in the list themselves.",
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
    batch_folder: Annotated[
        str | None,
        _server("Folder that keeps the files and batches of the HTTP API.", unit="folder", default="no batches"),
    ] = None
    models_memory: Annotated[
        Count | None,
        _server(
            "Memory of the engine processes of all models in tables of the options file. Models that do not fit are "
            "loaded when a request needs them, and the one that was used longest ago is unloaded.",
            unit="bytes",
            default="what all models take; all are loaded at start",
        ),
    ] = None
    model_wait_ms: Annotated[
        Count,
        _server(
            "Time that a request waits for a model to be loaded; one that would wait longer is refused.", unit="ms"
        ),
    ] = 60_000
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
    otlp_traces_endpoint: Annotated[
        str | None,
        _server(
            "Collector that receives a trace of each request over OTLP (http/protobuf), such as "
            "http://127.0.0.1:4318/v1/traces; `pip install 'quire[traces]'`.",
            unit="address",
            default="no traces",
        ),
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
            "Unsent output of one connection, waiting for credit included; beyond it, its largest stream ends, or the "
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
    max_batch_bytes: Annotated[Count, _limit("Files of batches that each tenant may keep, on disk.", unit="bytes")] = (
        1 << 30
    )
    batch_window_ms: Annotated[Count, _limit("Time that files of batches, and ended batches, are kept.", unit="ms")] = (
        30 * 24 * 3_600_000
    )
    stall_timeout_ms: Annotated[
        Count,
        _limit("Time without a finished step after which /readyz fails and the engine is restarted.", unit="ms"),
    ] = 30_000
    engine_heartbeat_timeout_ms: Annotated[
        Count,
        _limit(
            "Time without a heartbeat after which an engine process is replaced, or an engine host counts as lost.",
            unit="ms",
        ),
    ] = 1_000
    engine_restart_timeout_ms: Annotated[
        Count,
        _limit(
            "Time that requests wait for the next engine process while its start fails, or for an engine host; then "
            "they end.",
            unit="ms",
        ),
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
        _machines("Certificate in PEM that signs the engine hosts' certificates; with it, links use TLS.", unit="file"),
    ] = None
    listen: Annotated[
        str, option(HOST, "Address and port for API servers; port 0 takes a free one.", unit="address")
    ] = "0.0.0.0:7072"

    @property
    def has_keys(self) -> bool:
        return self.token is not None or self.auth_tokens is not None

    @property
    def http_ports(self) -> dict[str, int]:
        """The ports of the HTTP APIs by their options; none without such an API."""
        ports = {"openai_port": self.openai_port, "ollama_port": self.ollama_port}
        return {name: port for name, port in ports.items() if port is not None} if self.serves_api else {}

    @property
    def serves_api(self) -> bool:
        """Whether there is an HTTP API. Every user of the machine can reach its port, a unix socket only its owner."""
        return self.uds is None or self.has_keys
