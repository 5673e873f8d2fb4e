"""The application and the router as Serve uses them, on stand-ins for Ray's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from quire.runtime.ray import members
from quire.runtime.ray.app import app
from quire.runtime.ray.host_replica import HostReplica
from quire.runtime.ray.server_replica import ServerReplica


class FakeRequestRouter:
    """Serve's base class of routers."""

    def __init__(self) -> None:
        self.curr_replicas: dict[str, Any] = {}  # replica id -> replica

    def update_replicas(self, replicas: list[Any]) -> None:
        self.curr_replicas = {replica.replica_id: replica for replica in replicas}


class Deployed:
    """A class with the options of its deployment, and the arguments that it was bound to."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self.arguments: tuple[Any, ...] = ()

    def bind(self, *arguments: Any) -> Deployed:
        self.arguments = arguments
        return self


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put stand-ins in the place of Ray's modules."""
    contents: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.serve": {"deployment": lambda **options: lambda kind: Deployed(kind, options)},
        "ray.serve.config": {"RequestRouterConfig": SimpleNamespace},
        "ray.serve.request_router": {"RequestRouter": FakeRequestRouter},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    monkeypatch.delitem(sys.modules, "quire.runtime.ray.router", raising=False)
    yield
    sys.modules.pop("quire.runtime.ray.router", None)


@pytest.fixture
def router(ray: None) -> Any:
    return importlib.import_module("quire.runtime.ray.router").HostRouter()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list of the addresses in each report; there are links to the hosts a and b."""
    reports: list[list[str]] = []
    listening = SimpleNamespace(
        report=lambda metadata: reports.append([each["address"] for each in metadata]),
        links=SimpleNamespace(addresses=frozenset({"a", "b"})),
    )
    monkeypatch.setattr(members, "_listening", listening)
    return reports


def replicas(addresses: str) -> list[Any]:
    return [SimpleNamespace(replica_id=f"id-{each}", replica_metadata={"address": each}) for each in addresses]


def test_calls_reach_a_replica_that_leaves_while_it_has_a_link(router: Any, reported: list[list[str]]) -> None:
    router.update_replicas(replicas("abc"))
    router.update_replicas(replicas("d"))
    assert set(router.curr_replicas) == {"id-a", "id-b", "id-d"}, "there is no link to c"
    router.update_replicas(replicas("ad"))
    assert list(router.curr_replicas) == ["id-a", "id-d", "id-b"], "each of them once"
    assert reported == [["a", "b", "c"], ["d"], ["a", "d"]], "a replica that leaves is no member"


async def test_a_call_reaches_the_replica_that_its_first_argument_names(router: Any) -> None:
    candidates = replicas("abc")
    for arguments, chosen in ((["b", "link"], candidates[1:2]), (["gone"], candidates), ([], candidates)):
        assert await router.choose_replicas(candidates, SimpleNamespace(args=arguments)) == [chosen]
    assert await router.choose_replicas(candidates) == [candidates]


def test_serve_waits_for_requests_longer_than_quire_does(ray: None) -> None:
    args = {"shutdown_timeout": 60, "threads": 1}
    servers = app(args)
    assert (servers.kind, servers.options["name"]) == (ServerReplica, "ApiServer")
    assert servers.arguments[0] is args
    hosts = servers.arguments[1]
    assert (hosts.kind, hosts.options["name"], hosts.arguments) == (HostReplica, "EngineHost", (args,))
    assert hosts.options["request_router_config"].request_router_class == "quire.runtime.ray.router:HostRouter"
    for deployed in (hosts, servers):
        assert deployed.options["graceful_shutdown_timeout_s"] == 75.0
        assert deployed.options["max_replicas_per_node"] == 1
