"""The application that Serve runs: two deployments, `EngineHost` and `ApiServer`."""

from __future__ import annotations

from typing import Any

from .host_replica import HostReplica
from .server_replica import ServerReplica
from .settings import settings_of

HOSTS, SERVERS = "EngineHost", "ApiServer"  # the deployments
CLOSE_MARGIN_S = 15.0  # beyond shutdown_timeout, before Serve kills a replica: to notice that it leaves, and to close


def app(args: dict[str, Any]) -> Any:
    """Return the application for Quire's options, by name. Raises ConfigError.

    How many replicas there are, and on which machines, are options of Serve: see deploy/ray.
    """
    from ray import serve  # here: what this package has besides needs no Ray
    from ray.serve.config import RequestRouterConfig

    graceful_s = settings_of(args).server.shutdown_timeout + CLOSE_MARGIN_S
    common = {"max_replicas_per_node": 1, "graceful_shutdown_timeout_s": graceful_s}
    router = RequestRouterConfig(request_router_class="quire.runtime.ray.router:HostRouter")
    hosts = serve.deployment(name=HOSTS, request_router_config=router, **common)(HostReplica)
    servers = serve.deployment(name=SERVERS, **common)(ServerReplica)
    return servers.bind(args, hosts.bind(args))
