"""The objects that kustomize builds from deploy/kubernetes: their references resolve, and their numbers fit each other.

Schemas are not checked: that needs a cluster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from quire.runtime.cluster import Members
from quire.runtime.cluster.greeting import GREETING_MAGIC, HELLO_BYTES
from quire.runtime.common.settings import Settings, resolve_settings
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.runner.capacity import decide_capacity

from tests.deploy.queries import DEPLOY
from tests.deploy.test_settings import BYTES, MARGIN_S, PYTHON_BYTES

KUBERNETES = DEPLOY / "kubernetes"
NAME = "app.kubernetes.io/name"
SECRETS = {"quire-tokens", "quire-link"}  # secrets that the operator makes
Tool = Callable[..., str]
Objects = dict[tuple[str, str], Any]  # (kind, name) -> object
Build = Callable[[str], Objects]
_BUILT: dict[str, Objects] = {}  # arguments of a build -> objects


@pytest.fixture(params=["base", "production", "fleet", "base+inference-pool", "fleet+inference-pool"])
def objects(request: pytest.FixtureRequest, build: Build) -> Objects:
    return build(request.param)


@pytest.fixture
def build(tool: Tool, tmp_path: Path) -> Build:
    """Return a function that builds a folder, or an overlay of it with a component; each is built once."""

    def run(what: str) -> Objects:
        if what not in _BUILT:
            base, _, component = what.partition("+")
            overlay = {"namespace": "quire", "resources": [os.path.relpath(KUBERNETES / base, tmp_path)]}
            if component:
                overlay["components"] = [os.path.relpath(KUBERNETES / component, tmp_path)]
            (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
            documents = list(yaml.safe_load_all(tool("kubectl", "kustomize", tmp_path)))
            _BUILT[what] = {(each["kind"], each["metadata"]["name"]): each for each in documents}
        return _BUILT[what]

    return run


def workloads(objects: Objects) -> Iterator[Any]:
    for (kind, _), each in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            yield each


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def pod_labels(objects: Objects) -> list[dict[str, str]]:
    return [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(objects)]


def container_ports(workload: Any) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for each in pod(workload)["containers"] for port in each["ports"]}


def selected(objects: Objects, labels: dict[str, str]) -> Any:
    """Return the one workload whose pods have `labels`."""
    (found,) = [
        workload
        for workload in workloads(objects)
        if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]
    return found


def test_everything_is_in_one_namespace_and_selects_its_own_pods(objects: Objects) -> None:
    assert {each["metadata"]["namespace"] for each in objects.values()} == {"quire"}
    names = [labels[NAME] for labels in pod_labels(objects)]
    assert len(set(names)) == len(names)
    for workload in workloads(objects):
        assert selected(objects, workload["spec"]["selector"]["matchLabels"]) is workload
    for (kind, _), each in objects.items():
        if kind in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            selected(objects, selector["matchLabels"])


def test_volumes_and_accounts_exist(objects: Objects) -> None:
    for workload in workloads(objects):
        spec = pod(workload)
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in objects
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        if "serviceAccountName" in spec:
            assert ("ServiceAccount", spec["serviceAccountName"]) in objects
    deployment = objects["Deployment", "quire"]
    assert ("replicas" in deployment["spec"]) == (("ScaledObject", "quire") not in objects)


def test_services_and_probes_name_ports_of_their_pods(objects: Objects) -> None:
    for (kind, _), each in objects.items():
        if kind == "Service":
            ports = container_ports(selected(objects, each["spec"]["selector"]))
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= set(ports)
    for workload in workloads(objects):
        ports = container_ports(workload)
        for container in pod(workload)["containers"]:
            for name, probe in container.items():
                if name.endswith("Probe") and "exec" not in probe:
                    (action,) = [probe[kind] for kind in ("httpGet", "grpc") if kind in probe]
                    assert action["port"] in {*ports, *ports.values()}


def test_pods_are_confined(objects: Objects) -> None:
    for workload in workloads(objects):
        for container in pod(workload)["containers"]:
            context = pod(workload).get("securityContext", {}) | container["securityContext"]
            assert context["runAsNonRoot"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def settings_of(objects: Objects, workload: Any, folder: Path) -> Settings:
    """Return the settings in the workload's quire.toml."""
    (name,) = [volume["configMap"]["name"] for volume in pod(workload)["volumes"] if "configMap" in volume]
    path = folder / f"{name}.toml"
    path.write_text(objects["ConfigMap", name]["data"]["quire.toml"])
    return resolve_settings({}, {}, path)


@pytest.fixture
def fleet(build: Build) -> Objects:
    return build("fleet")


def test_api_servers_of_a_fleet_find_and_may_reach_every_engine_host(fleet: Objects, tmp_path: Path) -> None:
    hosts = fleet["StatefulSet", "quire-engines"]
    servers = fleet["Deployment", "quire"]
    service = fleet["Service", hosts["spec"]["serviceName"]]
    settings = settings_of(fleet, servers, tmp_path).server
    assert settings.engine_hosts is not None
    (name,) = Members(settings.engine_hosts)._names
    assert (name.host, name.port) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert service["spec"]["clusterIP"] == "None"
    assert container_ports(hosts) == {"link": name.port}
    (ingress,) = fleet["NetworkPolicy", "quire-engines"]["spec"]["ingress"]
    (source,) = ingress["from"]
    assert selected(fleet, source["podSelector"]["matchLabels"]) is servers
    to_hosts, to_names = fleet["NetworkPolicy", "quire"]["spec"]["egress"]
    assert selected(fleet, to_hosts["to"][0]["podSelector"]["matchLabels"]) is hosts
    assert to_hosts["ports"] == [{"port": name.port}]
    assert {port["port"] for port in to_names["ports"]} == {53}


def test_both_ends_of_a_fleet_have_the_same_secret(fleet: Objects, tmp_path: Path) -> None:
    files = set()
    for workload in (fleet["StatefulSet", "quire-engines"], fleet["Deployment", "quire"]):
        path = Path(str(settings_of(fleet, workload, tmp_path).server.secret_file))
        mounts = {mount["mountPath"]: mount["name"] for mount in pod(workload)["containers"][0]["volumeMounts"]}
        (secret,) = [each["secret"] for each in pod(workload)["volumes"] if each["name"] == mounts[str(path.parent)]]
        files.add((secret["secretName"], path.name))
    assert files == {("quire-link", "secret")}


def test_kubernetes_waits_until_an_engine_host_has_left(fleet: Objects, tmp_path: Path) -> None:
    hosts = fleet["StatefulSet", "quire-engines"]
    timeout_s = settings_of(fleet, hosts, tmp_path).server.shutdown_timeout
    assert pod(hosts)["terminationGracePeriodSeconds"] >= timeout_s + MARGIN_S


def test_engine_hosts_have_the_planned_memory_and_whole_cpus(fleet: Objects, tmp_path: Path) -> None:
    hosts = fleet["StatefulSet", "quire-engines"]
    resources = pod(hosts)["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit()
    config = settings_of(fleet, hosts, tmp_path).engine
    needed = decide_capacity(config, read_spec(BUNDLED_MODEL)).memory.total_bytes + PYTHON_BYTES
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", resources["limits"]["memory"]).groups()  # type: ignore[union-attr]
    assert int(number) * BYTES[unit] >= needed


def test_an_engine_host_is_ready_once_it_greets(fleet: Objects) -> None:
    container = pod(fleet["StatefulSet", "quire-engines"])["containers"][0]
    probe = container["readinessProbe"]["exec"]["command"][-1]
    compile(probe, "probe", "exec")
    assert f"recv({HELLO_BYTES}).startswith({GREETING_MAGIC!r})".replace("'", '"') in probe
    assert container["startupProbe"]["exec"] == container["readinessProbe"]["exec"]


@pytest.fixture
def pool(build: Build) -> Objects:
    return build("base+inference-pool")


def test_the_inference_pool_has_the_http_api_of_the_servers_and_its_picker(pool: Objects) -> None:
    spec = pool["InferencePool", "quire"]["spec"]
    servers = selected(pool, spec["selector"]["matchLabels"])
    assert servers["metadata"]["name"] == "quire"
    assert spec["targetPorts"] == [{"number": container_ports(servers)["api"]}]
    reference = spec["endpointPickerRef"]
    (port,) = pool["Service", reference["name"]]["spec"]["ports"]
    assert port["port"] == reference["port"]["number"]
    assert port["appProtocol"] == "http2"
    (rule,) = pool["HTTPRoute", "quire"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "quire"}]


def test_the_picker_reads_its_pool_its_plugins_and_the_servers_metrics(pool: Objects) -> None:
    picker = pool["Deployment", "quire-epp"]
    options = dict(each.removeprefix("--").split("=") for each in pod(picker)["containers"][0]["args"])
    assert (options["pool-name"], options["pool-namespace"]) == ("quire", "quire")
    assert {int(options["grpc-port"]), int(options["grpc-health-port"])} == set(container_ports(picker).values())
    (name,) = [volume["configMap"]["name"] for volume in pod(picker)["volumes"]]
    config = yaml.safe_load(pool["ConfigMap", name]["data"][Path(options["config-file"]).name])
    plugins = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    assert {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]} <= plugins
    binding = pool["RoleBinding", "quire-epp"]
    assert binding["roleRef"]["name"] == pool["Role", "quire-epp"]["metadata"]["name"]
    assert binding["subjects"][0]["name"] == pod(picker)["serviceAccountName"]
    args = pool["Deployment", "quire"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--openai-metrics", "--metrics-compat=vllm"} <= set(args)
