"""Engine hosts as an API server sees them, without sockets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from quire.runtime.cluster.host_link import (
    FromHost,
    Heartbeat,
    HostLeaving,
    HostReady,
    HostRequestFailed,
    HostRestarting,
)
from quire.runtime.cluster.members import Member
from quire.runtime.cluster.remote import Credentials
from quire.runtime.common.errors import ProtocolError, QuireError
from quire.runtime.workers.engine_link import ToEngine

from tests.support.engine_processes import FakeProcess, core_info

DIGEST = "model"


class FakeConnection(FakeProcess):
    """A link to a host; it is closed by `exit`."""

    def __init__(self, receive: Callable[[FromHost], None], on_heartbeat: Callable[[bool], None]) -> None:
        self.num_heartbeats = 0  # received
        self.problem: ProtocolError | None = None  # error that ended the link
        super().__init__(0, None, receive, on_heartbeat)  # type: ignore[arg-type]  # a host is not started

    def send(self, message: ToEngine | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            self.num_heartbeats += 1
        else:
            super().send(message)

    def reply(self, message: FromHost) -> None:  # type: ignore[override]  # a host says more than a process
        try:
            super().reply(message)  # type: ignore[arg-type]
        except ProtocolError as error:
            self.problem = error
            self.exit(0)

    def leave(self) -> None:
        self.reply(HostLeaving())

    def restart(self, *request_ids: int) -> None:
        """Report that the host has no engine process, for which these wait."""
        self.reply(HostRestarting(request_ids))

    def fail(self, request_id: int, error: str) -> None:
        self.reply(HostRequestFailed(request_id, error, "why"))


class FakeHosts:
    """Takes the place of the class `HostConnection`."""

    def __init__(self) -> None:
        self.opened: dict[str, list[FakeConnection]] = defaultdict(list)  # address -> connections
        self.errors: dict[str, QuireError] = {}  # addresses that cannot be connected to
        self.infos: dict[str, dict[str, Any]] = {}  # changes of `core_info`
        self.digests: dict[str, str] = {}
        self.restarting: set[str] = set()  # addresses of hosts that have no engine process at connection
        self.max_num_waiting = 8
        self.secrets: dict[str, bytes] = {}  # secret of the member in the last attempt to connect

    async def open(
        self,
        member: Member,
        credentials: Credentials,
        receive: Callable[[FromHost], None],
        on_heartbeat: Callable[[bool], None],
    ) -> FakeConnection:
        address = str(member.address)
        self.secrets[address] = member.secret
        if address in self.errors:
            raise self.errors[address]
        connection = FakeConnection(receive, on_heartbeat)
        info = core_info(num_processes=1, **self.infos.get(address, {}))
        connection.ready.set_result(HostReady(info, 0, self.digests.get(address, DIGEST), self.max_num_waiting))
        self.opened[address].append(connection)
        if address in self.restarting:
            asyncio.get_running_loop().call_later(0.001, connection.restart)
        return connection

    def __getitem__(self, name: str) -> FakeConnection:
        """Return the latest connection to `name:1`."""
        return self.opened[f"{name}:1"][-1]
