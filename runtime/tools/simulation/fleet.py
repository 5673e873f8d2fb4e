"""Many hosts behind API servers in one virtual time: real routing, schedulers and pagers.

Each turn of a conversation arrives at any of the API servers. A server knows the loads of hosts at the last report, and
the requests that it has sent since. Hosts can be lost: their requests continue on other hosts, and an empty host
replaces the lost one later. Every request ends once.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

from ...common.errors import ConfigError
from ...engine import GenerateRequest
from ...engine.input import PreparedInput, conversation_of
from ...workers.engine_link import STATS_INTERVAL_S
from ...workers.router import MemberLoad, Router
from ..checks import check_number
from ..traffic import Arrival
from .simulator import RequestOutcome, SimulationStalled, Simulator, prompt_tokens

Routing = Literal["home", "round-robin", "least-loaded"]

MAX_HOSTS = 10_000
LOSS_NOTICED_S = 1.0  # time until API servers notice that a host is lost
HOST_START_S = 60.0  # time until another host replaces it


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet; each field is followed by its help text."""

    hosts: int = 1
    "Number of hosts; the machine and the memory are those of each."
    routing: Routing = "home"
    "How API servers choose a host: home of the conversation, round-robin, or least-loaded."
    api_servers: int = 1
    "Number of API servers."
    host_losses: float = 0.0
    "Share of the hosts that is lost per minute. Requests continue on other hosts; after 60 s a host is replaced."

    def check(self) -> None:
        """Raise ConfigError for numbers outside of their ranges."""
        check_number("hosts", self.hosts, 1, MAX_HOSTS)
        check_number("api_servers", self.api_servers, 1, MAX_HOSTS)
        check_number("host_losses", self.host_losses, 0, 1)
        if self.host_losses and self.hosts < 2:
            raise ConfigError("host_losses needs at least 2 `hosts`, for requests to continue on")


class Fleet:
    """A simulation of several hosts. `build_host` makes each from the shared outcomes and its number."""

    def __init__(
        self,
        build_host: Callable[[list[RequestOutcome], int], Simulator],
        arrivals: Iterable[Arrival],
        options: FleetOptions,
        seed: int = 1,
    ) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.hosts: list[Simulator] = []  # including lost hosts
        self.num_lost = 0
        self.requests_of = Counter({f"host-{index}": 0 for index in range(options.hosts)})  # sent to each, by name
        self.options = options
        self._build_host = build_host
        self._random = Random(seed)
        self._now = 0.0
        self._order = itertools.count()  # order of events at the same time
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []  # a heap
        self._members: dict[str, Simulator] = {}  # members from the API servers' point of view
        self._lost: set[int] = set()  # ids of simulators
        self._servers = [_ApiServer(options.routing, index) for index in range(options.api_servers)]
        self._reported_at = -STATS_INTERVAL_S
        for name in self.requests_of:
            self._members[name] = self._new_host()
        self._note_members()
        last_s = 0.0
        for arrival in arrivals:
            self._at(arrival.time_s, self._arrive, arrival)
            last_s = arrival.time_s
        for time_s in self._loss_times(options.hosts * options.host_losses / 60, last_s):
            self._at(time_s, self._lose)

    def run(self) -> None:
        """Simulate until all requests have ended. Raises SimulationStalled."""
        while self._events:
            self._now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        if unfinished := sum(len(host.requests) for host in self._members.values()):
            raise SimulationStalled(f"{unfinished} requests are unfinished at {self._now:.3f} s and none can run")

    def _at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action, arguments))

    def _loss_times(self, rate: float, last_s: float) -> list[float]:
        times = itertools.accumulate(self._random.expovariate(rate) for _ in itertools.count()) if rate else ()
        return list(itertools.takewhile(lambda time_s: time_s < last_s, times))

    # Requests

    def _arrive(self, arrival: Arrival) -> None:
        self._report_loads()
        self._send(_key(arrival), partial(Simulator.add, arrival=arrival))

    def _send(self, key: bytes, add: Callable[[Simulator], object]) -> None:
        """Add a request to the host that one of the API servers chooses."""
        server = self._random.choice(self._servers)
        name = server.choose(key)
        self.requests_of[name] += 1
        host = self._members[name]
        host.clock.now = self._now
        add(host)
        server.note_wait(name, host.scheduler.predicted_wait_s or 0.0)
        self._begin_step(host)

    def _begin_step(self, host: Simulator) -> None:
        if host.is_stepping or id(host) in self._lost:
            return
        end = host.begin_step()
        if end is not None:
            self._at(end, self._end_step, host)

    def _end_step(self, host: Simulator) -> None:
        if id(host) in self._lost:
            return
        host.clock.now = self._now
        for outcome in host.end_step():
            following = outcome.arrival.next_turn(self._now) if outcome.finished else None
            if following is not None:
                self._at(following.time_s, self._arrive, following)
        self._begin_step(host)

    # Hosts

    def _new_host(self) -> Simulator:
        host = self._build_host(self.outcomes, len(self.hosts))
        host.clock.now = host.started_s = self._now
        self.hosts.append(host)
        return host

    def _lose(self) -> None:
        """Stop a host, before any API server notices, unless it is the last one."""
        running = [name for name, host in self._members.items() if id(host) not in self._lost]
        if len(running) > 1:
            name = self._random.choice(running)
            self._lost.add(id(self._members[name]))
            self.num_lost += 1
            self._at(self._now + LOSS_NOTICED_S, self._move_requests, name)

    def _move_requests(self, name: str) -> None:
        """Continue the requests of a lost host at their next homes."""
        lost = self._members.pop(name)
        self._note_members()
        for request in lost.requests.values():
            key = _key(self.outcomes[request.request_id].arrival)
            self._send(key, partial(Simulator.readmit, request=request))
        self._at(self._now + HOST_START_S, self._replace, name)

    def _replace(self, name: str) -> None:
        self._members[name] = self._new_host()
        self._note_members()

    def _note_members(self) -> None:
        router = Router(self._members)
        self._reported_at = -STATS_INTERVAL_S
        for server in self._servers:
            server.router = router
        self._report_loads()

    def _report_loads(self) -> None:
        """Let all hosts report to all API servers, if it is time."""
        if self._now >= self._reported_at + STATS_INTERVAL_S:
            self._reported_at = self._now
            loads = {name: _load(host) for name, host in self._members.items()}
            for server in self._servers:
                server.loads = dict(loads)


class _ApiServer:
    """The state of one API server, and its choice of a host."""

    router: Router
    loads: dict[str, MemberLoad]  # loads of the last report, plus requests that this server has sent since

    def __init__(self, routing: Routing, index: int) -> None:
        self._routing = routing
        self._num_chosen = index  # a start of its own, so that servers do not begin with the same host

    def choose(self, key: bytes) -> str:
        self._num_chosen += 1
        match self._routing:
            case "home":
                name = self.router.choose(key, self.loads)
            case "round-robin":
                name = self.router.members[self._num_chosen % len(self.router.members)]
            case "least-loaded":
                name = min(self.loads, key=self.loads.__getitem__)
        num_requests, wait_s = self.loads[name]
        self.loads[name] = MemberLoad(num_requests + 1, wait_s)
        return name

    def note_wait(self, name: str, wait_s: float) -> None:
        """Record the wait in a host's answer to a new request."""
        self.loads[name] = MemberLoad(self.loads[name].num_requests, wait_s)


def _load(host: Simulator) -> MemberLoad:
    return MemberLoad(len(host.requests), host.scheduler.predicted_wait_s or 0.0)


def _key(arrival: Arrival) -> bytes:
    """Return the key of the request's conversation; for a trace, which has none, of the beginning of its prompt."""
    if arrival.conversation is not None:
        return b"%d" % arrival.conversation
    request = GenerateRequest(prompt=None, tenant=arrival.tenant)
    return conversation_of(request, PreparedInput(tuple(prompt_tokens(arrival, 0)), request.sampling_params))
