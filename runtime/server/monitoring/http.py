"""The operator's HTTP port: `/metrics`, `/healthz`, `/readyz` and a status page at `/`, in the server's own event loop.

No answer changes what is served. A browser loads only the page's own script and style sheet. Must not import the
protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from .readiness import Readiness
from .status import Status

MAX_CONNECTIONS = 64
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
PAGE = {  # path -> file in this folder, media type
    "/": ("status.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
}


def operator_app(registry: CollectorRegistry, readiness: Readiness, status: Callable[[], Status]) -> Starlette:
    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(request: Request) -> Response:
        """Answer while the event loop runs."""
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        problem = readiness.problem()
        return PlainTextResponse(f"{problem or 'ready'}\n", status_code=503 if problem else 200)

    async def status_json(request: Request) -> Response:
        return Response(msgspec.json.encode(status()), media_type="application/json", headers=PAGE_HEADERS)

    answers = {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz, "/status.json": status_json}
    return Starlette(routes=[*(Route(path, answer) for path, answer in answers.items()), *_page_routes()])


def _page_routes() -> Iterator[Route]:
    for path, (name, media_type) in PAGE.items():
        content = (files(__package__) / name).read_bytes()
        yield Route(path, _file(content, media_type))


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return answer


class OperatorServer:
    """uvicorn on a socket that listens already."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_Protocol,
            ws="none",
            date_header=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        self._server.leave.set()
        await self._task


class _Protocol(H11Protocol):
    """HTTP/1.1 with few connections and a timeout for the first request.

    File descriptors are shared with the protocol port.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which are the command's, and without its 10 Hz polling loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
