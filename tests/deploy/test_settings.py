"""Flags and settings in deploy/ exist, and every process manager waits for the drain before it kills the server."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cyclopts import CycloptsError
from quire.runtime.cli.app import app
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings, resolve_settings
from quire.runtime.model import model_path, read_spec
from quire.runtime.model.runner.capacity import decide_capacity
from quire.runtime.ray.app import HOSTS, SERVERS
from quire.runtime.ray.settings import settings_of
from quire.runtime.server.server import CLOSE_TIMEOUT_S
from quire.runtime.server.tenancy.auth import Keyring
from quire.runtime.workers.engine_process import SAVE_TIMEOUT_S

from tests.deploy.queries import DEPLOY, ROOT
from tests.test_docs import QWEN3_06B

MARGIN_S = CLOSE_TIMEOUT_S + SAVE_TIMEOUT_S  # added to --shutdown-timeout: time to close connections, then engines
PYTHON_BYTES = 1 << 30  # added to the sum that `quire plan` prints
KUBERNETES = DEPLOY / "kubernetes"
UNIT = (DEPLOY / "quire.service").read_text("utf-8")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8")
BYTES = {"Mi": 1 << 20, "Gi": 1 << 30}
Tool = Callable[..., str]


def load(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text("utf-8"))


def seconds(text: str) -> float:
    """Parse `45s`, `45` or `1min`."""
    found = re.fullmatch(r"(\d+)(s|min)?", text)
    assert found, text
    return int(found[1]) * (60 if found[2] == "min" else 1)


def settings_in(folder: str) -> Settings:
    return resolve_settings({}, {}, KUBERNETES / folder / "quire.toml")


def pod() -> Any:
    return load("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]


# Flags and settings


def commands() -> Iterator[list[str]]:
    """Yield the arguments of every `quire` command in deploy/, without `"$@"`."""
    yield shlex.split(re.findall(r"^ExecStart=/opt/quire/bin/quire (.*)$", UNIT, re.MULTILINE)[0])
    yield json.loads(re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)[0])
    yield pod()["containers"][0]["args"]
    yield load("kubernetes/fleet/engine-hosts.yaml")["spec"]["template"]["spec"]["containers"][0]["args"]
    yield load("compose.demo.yaml")["services"]["loadtest"]["command"]
    script = (DEPLOY / "local.sh").read_text("utf-8").replace("\\\n", " ")
    for command in re.findall(r"^ *(?:start )?quire (.*?)(?: >.*)?$", script, re.MULTILINE):
        yield shlex.split(command.replace('"$@"', ""))


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_every_command_line_parses(arguments: list[str]) -> None:
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        pytest.fail(str(error), pytrace=False)


def test_every_environment_variable_is_a_setting() -> None:
    environment = dict(re.findall(r"^Environment=(QUIRE_\w+)=(.*)$", UNIT, re.MULTILINE))
    environment |= dict(re.findall(r"\b(QUIRE_(?:HOST|OPERATOR_HOST|OPENAI_HOST|LOG_FORMAT))=(\S+)", CONTAINERFILE))
    environment |= load("compose.yaml")["services"]["quire"]["environment"]
    assert len(environment) >= 6
    known = {"QUIRE_" + name.upper() for part in ("engine", "server") for name in fields_of(part)}
    assert set(environment) <= known
    resolve_settings({}, environment)


def test_the_application_for_ray_has_known_options_deployments_and_functions() -> None:
    (application,) = load("ray/quire.yaml")["applications"]
    settings = settings_of(application["args"])
    assert settings.server.has_keys
    deployments = {each["name"]: each for each in application["deployments"]}
    assert set(deployments) == {HOSTS, SERVERS}
    policy = deployments[HOSTS]["autoscaling_config"]["policy"]["policy_function"]
    for path in (application["import_path"], policy):
        module, _, name = path.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_kuberay_runs_the_application_for_ray_on_pods_that_have_room_for_it() -> None:
    spec = load("kubernetes/ray/ray-service.yaml")["spec"]
    application = load("ray/quire.yaml")
    assert yaml.safe_load(spec["serveConfigV2"]) == application
    deployments = {each["name"]: each for each in application["applications"][0]["deployments"]}
    cluster = spec["rayClusterConfig"]
    with (ROOT / "pyproject.toml").open("rb") as file:
        (ray,) = tomllib.load(file)["project"]["optional-dependencies"]["ray"]
    (least,) = re.findall(r">=([\d.]+)", ray)
    assert cluster["rayVersion"].startswith(f"{least}.")
    (workers,) = cluster["workerGroupSpecs"]
    scaling = deployments[HOSTS]["autoscaling_config"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    (container,) = pods[1]["containers"]
    num_cpus = sum(each["ray_actor_options"]["num_cpus"] for each in deployments.values())
    assert int(container["resources"]["requests"]["cpu"]) > num_cpus
    arguments = application["applications"][0]["args"]
    for each in pods:
        mounts = {mount["name"]: mount["mountPath"] for mount in each["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in each["volumes"]}
        assert arguments["model"].startswith(mounts["models"])
        assert arguments["auth_tokens"].startswith(mounts["tokens"])
    service = load("kubernetes/ray/service.yaml")
    assert service["spec"]["selector"] == workers["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert container["readinessProbe"]["httpGet"]["port"] in ports


def test_the_demo_server_accepts_the_key_of_the_demo_load_generator() -> None:
    key = load("compose.demo.yaml")["services"]["loadtest"]["environment"]["QUIRE_TOKEN"]
    assert Keyring.load(DEPLOY / load("compose.demo.yaml")["secrets"]["tokens.toml"]["file"]).authenticate(key).name


def fields_of(part: str) -> tuple[str, ...]:
    fields: tuple[str, ...] = getattr(resolve_settings({}, {}), part).__struct_fields__
    return fields


# Shutdown times, probes and memory


def test_systemd_waits_for_the_drain_and_signals_only_the_api_server() -> None:
    settings = dict(re.findall(r"^(\w+)=(\S+)$", UNIT, re.MULTILINE))
    timeout = float(re.findall(r"QUIRE_SHUTDOWN_TIMEOUT=(\d+)", UNIT)[0])
    assert seconds(settings["TimeoutStopSec"]) >= timeout + MARGIN_S
    assert settings["KillMode"] == "mixed"
    assert settings["OOMPolicy"] == "continue"


def test_compose_waits_for_the_drain() -> None:
    service = load("compose.yaml")["services"]["quire"]
    assert seconds(service["stop_grace_period"]) >= float(service["environment"]["QUIRE_SHUTDOWN_TIMEOUT"]) + MARGIN_S


def test_a_container_stops_by_sigterm_and_the_advised_time_covers_the_drain() -> None:
    assert "STOPSIGNAL SIGTERM" in CONTAINERFILE
    advised = float(re.findall(r"docker stop --time (\d+)", CONTAINERFILE)[0])
    assert advised >= ServerConfig().shutdown_timeout + MARGIN_S


@pytest.mark.parametrize("folder", ["base", "model"])
def test_kubernetes_waits_for_endpoints_and_the_drain(folder: str) -> None:
    command, sleep_s = pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = seconds(sleep_s) + settings_in(folder).server.shutdown_timeout + MARGIN_S
    assert pod()["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize("document", ["deploy/README.md", "docs/operations.md"])
def test_the_documents_show_the_same_times(document: str) -> None:
    shown = dict(re.findall(r"`(\w+)` \| (\d+) s \|$", (ROOT / document).read_text("utf-8"), re.MULTILINE))
    assert shown == {
        "TimeoutStopSec": re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0],
        "stop_grace_period": load("compose.yaml")["services"]["quire"]["stop_grace_period"].removesuffix("s"),
        "terminationGracePeriodSeconds": str(pod()["terminationGracePeriodSeconds"]),
    }


def test_no_probe_kills_a_server_whose_supervisor_restarts_engines() -> None:
    container = pod()["containers"][0]
    liveness = container["livenessProbe"]
    assert liveness["httpGet"]["path"] == "/healthz"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= ServerConfig().stall_timeout_ms / 1000
    assert container["readinessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert pod()["enableServiceLinks"] is False  # a Service named quire sets QUIRE_PORT=tcp://…, which is not a port


@pytest.mark.parametrize(
    ("folder", "resources"),
    [
        ("base", pod()["containers"][0]["resources"]),
        (
            "model",
            load("kubernetes/model/deployment-patch.yaml")["spec"]["template"]["spec"]["containers"][0]["resources"],
        ),
    ],
)
def test_pods_request_whole_cpus_and_the_planned_memory(folder: str, resources: Any, tmp_path: Path) -> None:
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit()
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", resources["limits"]["memory"]).groups()  # type: ignore[union-attr]
    config = settings_in(folder).engine
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    if config.model is not None:
        config = msgspec.structs.replace(config, model=str(tmp_path))
    spec = read_spec(model_path(config.model))
    assert int(number) * BYTES[unit] >= decide_capacity(config, spec).memory.total_bytes + PYTHON_BYTES


# Checks by external tools


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_file_is_yaml(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text("utf-8")))


def test_systemd_accepts_the_unit(tool: Tool, tmp_path: Path) -> None:
    """Replace the command by an existing one, because `verify` looks for it."""
    unit = tmp_path / "quire.service"
    unit.write_text(UNIT.replace("/opt/quire/bin/quire", "/bin/true"))
    tool("systemd-analyze", "verify", unit)
    tool("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)
