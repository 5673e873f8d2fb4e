"""The application that Serve runs: two deployments, `EngineHost` and `ApiServer`.

Ray pickles a deployment class by name, so it must not be decorated where it is defined.
"""

from __future__ import annotations

from typing import Any

from .handle_links import MAX_LINKS
from .host_replica import HostReplica
from .server_replica import ServerReplica
from .settings import settings_of

HOSTS, SERVERS = "EngineHost", "ApiServer"  # the deployments
CLOSE_MARGIN_S = 15.0  # time to notice the shutdown and to close, after shutdown_timeout; then Serve kills a replica
LEAVE_AFTER_S = 0.1  # Serve's wait for the requests of its handles, by default 2 s; clients use none
MAX_CALLS = 3 * MAX_LINKS  # calls of a host at a time: links over handles need two each


def app(args: dict[str, Any]) -> Any:
    """Return the application for Quire's options, by name. Raises ConfigError.

    The number of replicas and their machines are options of Serve: see deploy/ray.
    """
    from ray import serve  # imported here, because the rest of this package needs no Ray
    from ray.serve.config import RequestRouterConfig

    graceful_s = settings_of(args).server.shutdown_timeout + CLOSE_MARGIN_S
    common = {
        "max_replicas_per_node": 1,
        "graceful_shutdown_timeout_s": graceful_s,
        "graceful_shutdown_wait_loop_s": LEAVE_AFTER_S,
    }
    router = RequestRouterConfig(request_router_class="quire.runtime.ray.router:HostRouter")
    hosts = serve.deployment(name=HOSTS, request_router_config=router, max_ongoing_requests=MAX_CALLS, **common)(
        HostReplica
    )
    servers = serve.deployment(name=SERVERS, **common)(ServerReplica)
    return servers.bind(args, hosts.bind(args))
