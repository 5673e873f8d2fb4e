"""`Watchdog`: ends a connection that is idle, silent in spite of its heartbeat, or too slow with a frame.

It has two timers per connection, regardless of the number of reads. Must not import requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...common.errors import ProtocolError, QuireError, Unavailable
from ...common.server_config import ServerConfig
from ...protocol.frames import HEARTBEATS_MISSED


class Watchdog:
    """Watches one welcomed connection until `stop`. A connection is silent while nothing is received.

    `idle_since` returns the time at which the last live request ended, None while there are live requests. `ping` is
    called after each `heartbeat_ms` of silence if the client negotiated it; `on_timeout` is called once, with the
    reason.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        heartbeat: bool,
        idle_since: Callable[[], float | None],
        ping: Callable[[], None],
        on_timeout: Callable[[QuireError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._frame_timeout_ms = config.frame_timeout_ms
        self._idle_timeout_ms = config.idle_timeout_ms
        self._heartbeat_ms = config.heartbeat_ms if heartbeat else None
        self._idle_since = idle_since
        self._ping = ping
        self._on_timeout = on_timeout
        self._received_at = self._pinged_at = self._loop.time()
        self._silent_intervals = 0  # intervals of heartbeat_ms since something was received
        self._frame_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._check_silence()

    def received(self, num_frames: int, inside_frame: bool) -> None:
        """Record bytes that completed `num_frames` frames; `inside_frame`: another one has begun."""
        self._received_at = self._loop.time()
        self._silent_intervals = 0
        if self._frame_timer is not None and (num_frames or not inside_frame):
            self._frame_timer.cancel()
            self._frame_timer = None
        if inside_frame and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._frame_timeout_ms / 1000, self._end_slow_frame)

    def stop(self) -> None:
        for timer in (self._frame_timer, self._silence_timer):
            if timer is not None:
                timer.cancel()

    def _end_slow_frame(self) -> None:
        self._end(ProtocolError(f"a frame must be complete within {self._frame_timeout_ms} ms of its first byte"))

    def _check_silence(self) -> None:
        """End the connection or ping if that is due, and schedule the next check."""
        now = self._loop.time()
        idle_since = self._idle_since()
        idle_at = max(self._received_at, now if idle_since is None else idle_since) + self._idle_timeout_ms / 1000
        if now >= idle_at:
            self._end(Unavailable(f"this connection was idle for {self._idle_timeout_ms} ms; open another one"))
            return
        next_check_at = idle_at
        if self._heartbeat_ms is not None:
            heartbeat_s = self._heartbeat_ms / 1000
            if now >= max(self._received_at, self._pinged_at) + heartbeat_s:
                # Intervals are counted instead of seconds: this process itself may have been suspended.
                self._silent_intervals += 1
                if self._silent_intervals == HEARTBEATS_MISSED:
                    silent_ms = HEARTBEATS_MISSED * self._heartbeat_ms
                    self._end(Unavailable(f"the client sent nothing for {silent_ms} ms, not even PONG"))
                    return
                self._pinged_at = now
                self._ping()
            next_check_at = min(next_check_at, max(self._received_at, self._pinged_at) + heartbeat_s)
        self._silence_timer = self._loop.call_at(next_check_at, self._check_silence)

    def _end(self, reason: QuireError) -> None:
        self.stop()
        self._on_timeout(reason)
