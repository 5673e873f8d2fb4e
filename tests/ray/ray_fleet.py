"""A Ray cluster of four nodes in processes, with engine hosts and an API server of the bundled model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from quire.runtime.ray.app import HOSTS, SERVERS
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

CONFIG = Path(__file__).parents[2] / "deploy" / "ray" / "quire.yaml"
ENGINE = {
    "weights": "q8",
    "kv_cache_dtype": "int8",
    "kv_cache_memory": "8M",
    "threads": 1,
    "num_speculative_tokens": 3,
}
SERVER = {"shutdown_timeout": 0, "port": 0, "operator_port": 0, "openai_port": 0}
UNUSED = {"include_log_monitor": False, "no_monitor": True}  # processes of 45 MiB: tests read logs and add nodes
MOVED = "requests moved"  # text in the log of an API server
START_TIMEOUT_S = 240.0  # start time on a busy machine
HOST_REQUESTS = re.compile(r'^quire_host_requests\{host="([^"]*)"\} (\S+)$', re.MULTILINE)
HOST_UP = re.compile(r'^quire_host_up\{host="([^"]*)"\} (\S+)$', re.MULTILINE)
HOST_PROCESS = re.compile(r"/(\d+)-")  # part of the name of a host whose links are over handles
LISTENING = "0A"  # state in /proc/net/tcp
HOST_REPLICA = f"ray::ServeReplica:quire:{HOSTS}"
SERVER_REPLICA = f"ray::ServeReplica:quire:{SERVERS}"


class RayFleet:
    """One head node with the API server, and nodes that run an engine host each."""

    def __init__(self, num_nodes: int) -> None:
        os.environ.update(RAY_worker_niceness="0")  # Ray's 15 makes replicas wait for all other processes
        head = {"num_cpus": 1, "resources": {"server": 2}, "include_dashboard": False, **UNUSED}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.cluster.head_node.kill_dashboard()  # the dashboard's 75 MiB only report usage to Ray's makers
        self.nodes: list[Any] = []
        for _ in range(num_nodes):
            self.add_node()
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        self._deployed: tuple[int, dict[str, Any]] | None = None

    def add_node(self) -> None:
        """Add a node that has room for one engine host."""
        self.nodes.append(self.cluster.add_node(wait=False, num_cpus=1, resources={"host": 1}))

    def deploy(self, num_hosts: int, **args: Any) -> None:
        """Deploy the example of deploy/, with small replicas, and wait until Serve has the requested number."""
        if self._deployed == (deployed := (num_hosts, args)):
            return
        self._deployed = deployed
        config = yaml.safe_load(CONFIG.read_text("utf-8"))
        (application,) = config["applications"]
        application["args"] = {**ENGINE, **SERVER, **args}
        application["deployments"] = [deployment(HOSTS, num_hosts, "host"), deployment(SERVERS, 1, "server")]
        _get_global_client().deploy_apps(ServeDeploySchema(**config))
        self.until(lambda: self.status == "RUNNING")

    @property
    def status(self) -> str:
        return serve.status().applications["quire"].status.name

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, at most START_TIMEOUT_S."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert time.monotonic() < give_up_at, serve.status()
            time.sleep(0.05)

    async def address(self) -> str:
        """Return where clients connect."""
        return (await serve.get_app_handle("quire").remote())["clients"]

    def num_moves(self) -> int:
        """Return the number of moves of requests from lost hosts."""
        logs = Path(self.cluster.head_node.get_logs_dir_path()).glob("worker-*.err")
        return sum(log.read_text("utf-8", "replace").count(MOVED) for log in logs)

    def hosts_at(self, node: Any) -> list[int]:
        """Return the ids of the processes on a node that are replicas with an engine host."""
        return [pid for pid in descendants(raylet_of(node)) if command_of(pid).startswith(HOST_REPLICA)]

    def busiest_host(self) -> int:
        """Return the process id of the replica with the engine host that has the most requests; wait for one."""
        while (host := self.busiest_host_now()) is None:
            time.sleep(0.01)
        return host

    def busiest_host_now(self) -> int | None:
        """Return the process id of the replica with the engine host that has the most requests; None if none has."""
        num_requests, name = max((count, name) for name, count in self._of_hosts(HOST_REQUESTS).items())
        if not num_requests:
            return None
        if found := HOST_PROCESS.search(name):
            return int(found[1])
        port = int(name.rpartition(":")[2])
        return next(pid for pid in self.hosts() if port in listening_ports(pid))

    def num_hosts_up(self) -> int:
        """Return the number of hosts that accept requests of the API server."""
        return int(sum(self._of_hosts(HOST_UP).values()))

    def _of_hosts(self, metric: re.Pattern[str]) -> dict[str, float]:
        """Return a metric of the API server by the name of the host."""
        address = serve.get_app_handle("quire").remote().result()["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=START_TIMEOUT_S) as answer:
            return {name: float(value) for name, value in metric.findall(answer.read().decode())}

    def hosts(self) -> list[int]:
        """Return the ids of the processes that are replicas with an engine host."""
        return [pid for node in self.nodes for pid in self.hosts_at(node)]

    def servers(self) -> list[int]:
        """Return the ids of the processes that are replicas with an API server."""
        pids = descendants(raylet_of(self.cluster.head_node))
        return [pid for pid in pids if command_of(pid).startswith(SERVER_REPLICA)]

    def kill_node_of(self, host: int) -> None:
        """Kill every process of the node of an engine host, as the loss of its machine does."""
        node = self.node_of(host)
        self.nodes.remove(node)
        for pid in self.processes_of(node):
            os.kill(pid, signal.SIGKILL)

    def node_of(self, host: int) -> Any:
        """Return the node of an engine host."""
        return next(node for node in self.nodes if host in self.hosts_at(node))

    def processes_of(self, node: Any) -> list[int]:
        """Return the ids of all processes of a node."""
        return [raylet_of(node), *descendants(raylet_of(node))]

    def close(self) -> None:
        """End all processes, and check that none of them is left."""
        pids = [pid for node in [self.cluster.head_node, *self.nodes] for pid in descendants(raylet_of(node))]
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while left := [command_of(pid) for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < give_up_at, left
            time.sleep(0.05)


def deployment(name: str, num_replicas: int, resource: str) -> dict[str, Any]:
    """Return the configuration of a deployment whose replicas take a resource of their node."""
    return {
        "name": name,
        "num_replicas": num_replicas,
        "ray_actor_options": {"num_cpus": 0, "resources": {resource: 1}},
    }


@contextmanager
def ray_fleet(num_nodes: int) -> Iterator[RayFleet]:
    """Run a cluster; all of its processes are gone at the end."""
    fleet = RayFleet(num_nodes)
    try:
        yield fleet
    finally:
        fleet.close()


def raylet_of(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split() for line in lines if line.split()[3] == LISTENING]
    open_files = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            open_files.add(os.readlink(each))
    return {int(each[1].partition(":")[2], 16) for each in sockets if f"socket:[{each[9]}]" in open_files}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # ended meanwhile
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found
