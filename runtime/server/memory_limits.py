"""The most memory that the API server process takes for its clients; `quire plan` and the log at start show it.

Limits that are too low to work, or above this machine's memory, are refused at the start.
"""

from __future__ import annotations

from ..common.errors import ConfigError
from ..common.server_config import ServerConfig
from ..common.types import SamplingParams
from ..protocol.frames import MIN_FRAME_BYTES
from ..protocol.framing import PREFIX_BYTES
from .requests.output_log import ENTRY_BYTES, bytes_to_reserve

SERVER_PROCESS_BYTES = 46 << 20  # measured: Python and its libraries, without the files that engine processes share
CONNECTION_BYTES = 16 << 10  # measured: the objects of an idle connection
TLS_BYTES = 128 << 10  # additional bytes of a connection with TLS


class MemoryLimits:
    """Upper bounds in bytes by purpose. The interpreter, the tokenizer and queued prompts are additional."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        num_connections = (1 + len(config.http_ports)) * config.max_connections
        connection_bytes = CONNECTION_BYTES + (0 if config.tls_cert is None else TLS_BYTES)
        self.bytes_by_purpose = {
            "kept_output": config.max_kept_bytes,
            "unsent_output": config.max_unsent_bytes,
            "pending_input": config.max_pending_bytes,
            "texts": config.max_text_bytes,
            "connections": num_connections * connection_bytes,
        }
        self._notes = {
            "kept_output": "to resume requests and answer idempotency keys",
            "unsent_output": "frames, events, tokens that wait for credit, and incomplete answers",
            "pending_input": "incomplete frames and bodies",
            "texts": "prompts and texts to tokenize",
            "connections": f"{num_connections:,} of {connection_bytes:,} B",
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_purpose.values())

    def check(self, num_tenants: int, machine_bytes: int) -> None:
        """Raise ConfigError for a limit that is too low to work, or above the machine's memory."""
        config = self._config
        kept = bytes_to_reserve(SamplingParams(), 1) + ENTRY_BYTES
        tenants = f" of each of {num_tenants} tenants" if num_tenants > 1 else ""
        for name, least, what in (
            ("max_outgoing_bytes", config.max_frame_bytes + PREFIX_BYTES, "one frame of `max_frame_bytes`"),
            ("max_unsent_bytes", num_tenants * MIN_FRAME_BYTES, f"one frame{tenants}"),
            ("max_pending_bytes", (num_tenants + 1) * MIN_FRAME_BYTES, f"one frame{tenants} and one before HELLO"),
            ("max_text_bytes", num_tenants * MIN_FRAME_BYTES, f"one frame{tenants}"),
            ("max_kept_bytes", num_tenants * kept, f"one request{tenants}"),
        ):
            value = getattr(config, name)
            if value < least:
                raise ConfigError(f"{name} is {value} bytes; allowed: at least {least}, to hold {what}")
            if value > machine_bytes:
                raise ConfigError(f"{name} is {value} bytes; allowed: at most {machine_bytes}, this machine's memory")

    def describe(self) -> str:
        """Return the limits as text, one line per purpose."""
        lines = [(name.replace("_", " "), size, self._notes[name]) for name, size in self.bytes_by_purpose.items()]
        lines.append(("at most", self.total_bytes, ""))
        return "\n".join(f"{name:<18}{size:>18,} B  {note}".rstrip() for name, size, note in lines)
