"""The memory that the API server process takes for its clients at most; `quire plan` and the log at start show it."""

from __future__ import annotations

from ..common.config import ServerConfig

CONNECTION_BYTES = 16 << 10  # measured: the objects of an idle connection
TLS_BYTES = 128 << 10  # of a connection with TLS, besides


class MemoryLimits:
    """Bytes by purpose, whatever clients do. The interpreter, the tokenizer and queued prompts come on top."""

    def __init__(self, config: ServerConfig) -> None:
        connection_bytes = CONNECTION_BYTES + (0 if config.tls_cert is None else TLS_BYTES)
        self.bytes_by_purpose = {
            "kept_output": config.max_kept_bytes,
            "unsent_output": config.max_unsent_bytes,
            "pending_input": config.max_pending_bytes,
            "connections": config.max_connections * connection_bytes,
        }
        self._notes = {
            "kept_output": "to resume requests and answer idempotency keys",
            "unsent_output": "frames, and tokens that wait for credit",
            "pending_input": "incomplete frames, and texts to tokenize",
            "connections": f"{config.max_connections:,} of {connection_bytes:,} B",
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_purpose.values())

    def describe(self) -> str:
        """Return the limits as text, one line per purpose."""
        lines = [(name.replace("_", " "), size, self._notes[name]) for name, size in self.bytes_by_purpose.items()]
        lines.append(("at most", self.total_bytes, ""))
        return "\n".join(f"{name:<18}{size:>18,} B  {note}".rstrip() for name, size, note in lines)
