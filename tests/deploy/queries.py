"""What deploy/ asks of Prometheus: the dashboard's queries and the rules', and the metrics they name.

It must not know how anything is served. One invariant: it reads the very files that operators use.
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
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "quire.json"
RULE_FILES = (DEPLOY / "prometheus" / "records.yml", DEPLOY / "prometheus" / "alerts.yml")

_METRIC = re.compile(r"(?<![\w:])(?:instance:)?quire_\w+(?::\w+)?")
_QUOTED = re.compile(r'"[^"]*"')


class Query(NamedTuple):
    where: str  # for people
    promql: str


def panels() -> list[dict[str, Any]]:
    """Those that show something, in order; rows are left out."""
    return [panel for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"] if panel["type"] != "row"]


def dashboard_queries() -> Iterator[Query]:
    """As written, with Grafana's variables."""
    for panel in panels():
        for target in panel["targets"]:
            yield Query(f"{panel['title']} {target['refId']}", target["expr"])


def rules() -> Iterator[dict[str, Any]]:
    """Recording rules and alerts, in order."""
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> set[str]:
    """Names of the metrics that recording rules make."""
    return {rule["record"] for rule in rules() if "record" in rule}


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


def metrics_in(promql: str) -> set[str]:
    """Names of our metrics, recorded ones among them."""
    return set(_METRIC.findall(_QUOTED.sub('""', promql)))


def filled_in(promql: str, interval: str) -> str:
    """With every server selected, as Grafana would send it."""
    return promql.replace("$__rate_interval", interval).replace("$job", ".*").replace("$instance", ".*")
