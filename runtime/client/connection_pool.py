"""The links of one client: one for new requests, and older ones whose requests have not ended.

It must not know requests. One invariant: at most one link is being opened at a time, and whoever needs one meanwhile
waits for that one.
"""

from __future__ import annotations

import asyncio
import copy
import ssl

from ..common.errors import Unauthenticated, Unavailable
from ..protocol.address import Address
from .link import Link


class Links:
    def __init__(self, address: Address, token: str | None, tls: ssl.SSLContext | None) -> None:
        self.is_closed = False
        self._address = address
        self._token = token
        self._tls = tls
        self._links: list[Link] = []  # latest last; those that are lost are removed when another is opened
        self._sessions: dict[str, Link] = {}  # by which link a session goes on
        self._opening: asyncio.Task[Link] | None = None

    async def for_new_requests(self) -> Link:
        """The latest, or another one if that is lost or its server leaves. Raises as `Link.open`, and Unauthenticated
        again if that ended the latest."""
        latest = self._links[-1] if self._links else None
        if latest is not None and isinstance(latest.lost, Unauthenticated):
            raise copy.copy(latest.lost)
        if latest is not None and latest.lost is None and not latest.is_leaving:
            return latest
        return await self._open(latest.session if latest is not None and latest.lost is not None else None)

    async def for_session(self, session: str) -> Link:
        """One whose requests are those of `session`, if its server still knows it. Raises as `Link.open`."""
        if self._opening is not None:
            await self._open(session)  # perhaps for this very session
        link = self._sessions.get(session)
        return link if link is not None and link.lost is None else await self._open(session)

    async def close(self) -> None:
        self.is_closed = True
        try:
            if self._opening is not None:
                self._opening.cancel()
                await asyncio.wait([self._opening])
        finally:
            await asyncio.gather(*(link.close() for link in self._links))

    async def _open(self, session: str | None) -> Link:
        if self.is_closed:
            raise Unavailable("this client is closed")
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_one(session))
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():  # by `close`, not whoever waits here
                raise Unavailable("this client is closed") from None
            raise

    async def _open_one(self, session: str | None) -> Link:
        link = await Link.open(self._address, self._token, self._tls, session)
        for earlier in self._links:
            earlier.close_when_idle()
        self._links = [earlier for earlier in self._links if earlier.lost is None] + [link]
        self._sessions = {name: kept for name, kept in self._sessions.items() if kept.lost is None}
        self._sessions[link.session] = link
        if session is not None:
            self._sessions[session] = link
        return link

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieved: whoever waited may be gone
