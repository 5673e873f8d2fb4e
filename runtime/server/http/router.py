"""`HTTPRouter`: the paths of the APIs at one port, and the conditions of each request. Must not import handlers."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from structlog.contextvars import bound_contextvars

from ..app_context import AppContext
from ..monitoring import TRACEPARENT, TRACESTATE, note_caller
from ..requests.request_log import quire_error
from ..tenancy.tenants import Turns
from .errors import BadRequest, DoorForm
from .request_cycle import RequestCycle

BEARER = b"bearer "
API_KEY_HEADER = "x-api-key"  # header with a key in Anthropic's API
OPTIONAL_PATHS = {  # the beginning of paths that a port may lack -> the option that they need
    "/api/": "a port for Ollama's clients (--ollama-port)",
    "/metrics": "--openai-metrics",
    "/v1/batches": "--batch-folder",
    "/v1/files": "--batch-folder",
}


class Route(NamedTuple):
    """The handler of one method of a path, and the conditions of the request."""

    answer: Callable[[RequestCycle], Awaitable[None]]
    takes_body: bool = False
    needs_key: bool = True


Routes = Mapping[str, Route]  # routes of a path by method


class Door(Protocol):
    """One API: its paths and its form."""

    form: DoorForm
    paths: dict[str, dict[str, Route]]  # paths to name in errors
    takes_any_type: bool  # bodies may have any content type, unless a browser sends them

    def claims(self, path: str, headers: Mapping[str, bytes]) -> bool:
        """Return whether the API answers a request whose path several APIs may have."""

    def routes(self, path: str) -> Routes | None:
        """Return the routes of a path, None for an unknown one."""


class HTTPRouter:
    """The requests of every HTTP connection to one port."""

    def __init__(self, context: AppContext, doors: Sequence[Door]) -> None:
        """Route to the first door that claims a request, else to the first one that has its path."""
        self._context = context
        self._doors = doors
        self.form = doors[0].form  # form of errors before a request is routed
        self.turns = Turns()  # turns in which connections begin requests

    def route(self, cycle: RequestCycle) -> Route:
        """Return the route of the request; set its form, and its tenant if the route needs a key.

        Raises BadRequest or Unauthenticated.
        """
        path = cycle.target.partition("?")[0]
        claiming = [door for door in self._doors if door.claims(path, cycle.headers)]
        first = next(iter(claiming), self._doors[0])
        found = ((door, routes) for door in (first, *self._doors) if (routes := door.routes(path)) is not None)
        door, methods = next(found, (first, None))
        cycle.form = door.form
        self._check_host(cycle.headers)
        if methods is None:
            raise self._not_found(path, first)
        route = methods.get("GET" if cycle.method == "HEAD" else cycle.method)
        if route is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise BadRequest(f"{path} allows {allowed}", status=405, headers={"allow": allowed})
        if route.needs_key:
            cycle.tenant = self._context.keyring.authenticate(_key(cycle.headers))
        if route.takes_body:
            _check_body_headers(cycle.headers, takes_any_type=door.takes_any_type)
        return route

    async def answer(self, cycle: RequestCycle, route: Route) -> None:
        """Answer the request, in a task of its own. Never raises."""
        note_caller(*(cycle.headers.get(name, b"").decode("ascii", "replace") for name in (TRACEPARENT, TRACESTATE)))
        with bound_contextvars(request=cycle.log_id):
            try:
                if cycle.tenant is not None:
                    await cycle.tenant.frame_turns.wait()
                await route.answer(cycle)
            except Exception as error:
                cycle.refuse(quire_error(error, client_id=cycle.number), cycle.form.known)

    # Refusals by path and headers

    def _not_found(self, path: str, door: Door) -> BadRequest:
        paths = door.paths
        advice = f"the paths are {', '.join(paths)}"
        without_v1 = path.removeprefix("/v1")
        if f"/v1{path}" in paths or (without_v1.startswith("/v1/") and without_v1 in paths):
            advice = "the base URL of this server ends with /v1, once"
        elif without_v1 in paths:
            advice = f"the path is {without_v1}, without /v1"
        elif path.rstrip("/") in paths:
            advice = "this path has no slash at its end"
        served = [known for each in self._doors for known in each.paths]
        for start, option in OPTIONAL_PATHS.items():
            if path.startswith(start) and not any(known.startswith(start) for known in served):
                advice = f"this path needs {option}"
        return BadRequest(f"there is no {path[:200]!r} here; {advice}", error_code="not_found", status=404)

    def _check_host(self, headers: Mapping[str, bytes]) -> None:
        """Raise BadRequest for the name of another site, unless keys are required.

        Without keys a web page could point its own name at this address, and a browser would let it read the answers.
        """
        if self._context.config.has_keys:
            return
        host = headers.get("host", b"").decode("ascii", "replace")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() in ("", "localhost", self._context.config.openai_host):
            return
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            raise BadRequest(
                f"the host {host[:200]!r} is not this machine's address; use its address, or set up keys (--token or "
                "--auth-tokens)",
                status=403,
            ) from None


def _key(headers: Mapping[str, bytes]) -> str | None:
    """Return the client's key."""
    value = headers.get("authorization", b"")
    if value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip().decode(errors="replace")
    given = headers.get(API_KEY_HEADER)
    return None if given is None else given.strip().decode(errors="replace")


def _check_body_headers(headers: Mapping[str, bytes], *, takes_any_type: bool) -> None:
    """Raise BadRequest for a body that is not plain JSON: browsers send no JSON to another site without its consent."""
    if headers.get("content-length", b"0") == b"0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not (takes_any_type and "origin" not in headers):
        raise BadRequest(
            f"content-type must be application/json, not {kind.decode(errors='replace')[:80]!r}", status=415
        )
    if headers.get("content-encoding", b"identity").lower() != b"identity":
        raise BadRequest("a compressed body is not supported; leave out content-encoding", status=415)
