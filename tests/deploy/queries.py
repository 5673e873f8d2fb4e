"""Read the queries of the dashboards and the rules from the files in deploy/, and the metrics that they name.

Must not import quire: the queries come from the files that operators use, the exported metrics from a running server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULE_FILES = (DEPLOY / "prometheus" / "records.yml", DEPLOY / "prometheus" / "alerts.yml")

_METRIC = re.compile(r"(?<![\w:])(?:instance:)?quire_\w+(?::\w+)?")
_QUOTED = re.compile(r'"[^"]*"')


class Query(NamedTuple):
    where: str  # panel or rule, for messages
    promql: str


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """Return the panels in order, without rows."""
    return [panel for panel in json.loads(dashboard.read_text("utf-8"))["panels"] if panel["type"] != "row"]


def dashboard_queries() -> Iterator[Query]:
    """Yield the queries of all panels as written, with Grafana's variables."""
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield Query(f"{dashboard.stem}: {panel['title']} {target['refId']}", target["expr"])


def rules() -> Iterator[dict[str, Any]]:
    """Yield all recording rules and alerts in order."""
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> set[str]:
    """Return the names of the metrics that recording rules create."""
    return {rule["record"] for rule in rules() if "record" in rule}


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def metrics_in(promql: str) -> set[str]:
    """Return the names of all Quire metrics in the query, including recorded ones."""
    return set(_METRIC.findall(_QUOTED.sub('""', promql)))


def with_variables(promql: str, interval: str) -> str:
    """Return the query as Grafana sends it when every server is selected."""
    return promql.replace("$__rate_interval", interval).replace("$job", ".*").replace("$instance", ".*")
