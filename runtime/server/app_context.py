"""What all connections of one server share. Made once by `Server.start`; it has no behaviour of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..common.config import ServerConfig
from ..engine.facade import EngineFacade
from .auth import Keyring
from .live import LiveRequests
from .monitoring import PrometheusObserver
from .resume import ResumeIndex


@dataclass(slots=True)
class AppContext:
    engine: EngineFacade
    config: ServerConfig
    observer: PrometheusObserver
    keyring: Keyring
    requests: LiveRequests
    kept: ResumeIndex
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))  # of the threads for prompts
    leaves_at: float | None = None  # the loop's time at which what has not ended will be; None: it stays
