"""`AppContext`: the objects that connections of both protocols share. Must not import frames or sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from ..common.logs import BoundedLog
from ..common.server_config import ServerConfig
from .models.catalog import ModelCatalog
from .monitoring import PrometheusObserver
from .requests.live_requests import LiveRequests
from .requests.resume import ReplayStore
from .tenancy.auth import Keyring
from .tenancy.tenant_bytes import EqualShares

_log = structlog.get_logger("quire.server")


@dataclass(slots=True)
class AppContext:
    """The objects that all connections of one server share. Made once by `Server.start`."""

    models: ModelCatalog
    config: ServerConfig
    observer: PrometheusObserver
    keyring: Keyring
    requests: LiveRequests
    replays: ReplayStore
    operator_address: str  # address of the operator port
    openai_address: str  # address of OpenAI's HTTP API; empty without one
    unsent: EqualShares = field(init=False)
    pending: EqualShares = field(init=False)
    connection_log: BoundedLog = field(default_factory=lambda: BoundedLog(_log))
    leaves_at: float | None = None  # the loop's time at which live requests end; None: the server is not draining

    def __post_init__(self) -> None:
        config = self.config
        keyring = self.keyring
        self.unsent = EqualShares("output", "max_unsent_bytes", lambda: config.max_unsent_bytes // keyring.num_tenants)
        self.pending = EqualShares(
            "pending input", "max_pending_bytes", lambda: config.max_pending_bytes // (keyring.num_tenants + 1)
        )

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes held for clients now, by purpose."""
        return {
            "kept_output": self.replays.num_bytes,
            "unsent_output": self.unsent.num_bytes,
            "pending_input": self.pending.num_bytes,
            "texts": self.requests.texts.num_bytes,
        }
