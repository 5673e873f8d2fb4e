"""When a connection's silence, or its slowness, ends it: idle, dead behind a heartbeat, or never done with a frame.

It must not know frames or requests. One invariant: its timers are as many as connections, never as reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..common.config import ServerConfig
from ..common.errors import ProtocolError, QuireError, Unavailable
from ..protocol.frames import HEARTBEATS_MISSED


class Watchdog:
    """Of one welcomed connection, until `stop`. Silence is that nothing was received.

    `idle_since`: when the last live request ended, None while some take their time. `ping` is called
    after every `heartbeat_ms` of silence if the peer wants it; `bite` once, with the reason.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        heartbeat: bool,
        idle_since: Callable[[], float | None],
        ping: Callable[[], None],
        bite: Callable[[QuireError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._frame_timeout_ms = config.frame_timeout_ms
        self._idle_timeout_ms = config.idle_timeout_ms
        self._heartbeat_ms = config.heartbeat_ms if heartbeat else None
        self._idle_since = idle_since
        self._ping = ping
        self._bite = bite
        self._received_at = self._pinged_at = self._next_check_at = self._loop.time()
        self._silent_intervals = 0  # of heartbeat_ms, since something came
        self._frame_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._check_silence()

    def received(self, num_frames: int, inside_frame: bool) -> None:
        """Bytes came that completed so many frames; `inside_frame`: another one has begun."""
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
        """End the connection, or ping, or neither, and come back when the next of these may be due."""
        now = self._loop.time()
        idle_since = self._idle_since()
        idle_at = max(self._received_at, now if idle_since is None else idle_since) + self._idle_timeout_ms / 1000
        if now >= idle_at:
            self._end(Unavailable(f"this connection was idle for {self._idle_timeout_ms} ms; open another one"))
            return
        self._next_check_at = idle_at
        if self._heartbeat_ms is not None and not self._hears_a_heart(now, self._heartbeat_ms / 1000):
            self._end(Unavailable(f"nothing came for {HEARTBEATS_MISSED * self._heartbeat_ms} ms, not even PONG"))
            return
        self._silence_timer = self._loop.call_at(self._next_check_at, self._check_silence)

    def _hears_a_heart(self, now: float, heartbeat_s: float) -> bool:
        """Ping when it is time. Intervals are counted, not seconds: this process may have been the one that slept."""
        if now >= max(self._received_at, self._pinged_at) + heartbeat_s:
            self._silent_intervals += 1
            if self._silent_intervals == HEARTBEATS_MISSED:
                return False
            self._pinged_at = now
            self._ping()
        self._next_check_at = min(self._next_check_at, max(self._received_at, self._pinged_at) + heartbeat_s)
        return True

    def _end(self, reason: QuireError) -> None:
        self.stop()
        self._bite(reason)
