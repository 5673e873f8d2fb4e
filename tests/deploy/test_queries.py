"""Rules, dashboard and autoscaling query only exported metrics, and every alert is tested, with promtool if present."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.make_prometheus_rule import TARGET, prometheus_rule
from tests.deploy.queries import (
    DASHBOARDS,
    DEPLOY,
    ROOT,
    RULE_FILES,
    Query,
    alerts,
    dashboard_queries,
    metrics_in,
    panels,
    recorded,
    rule_queries,
)

SCALED_OBJECT = DEPLOY / "kubernetes" / "autoscaling" / "scaled-object.yaml"
ALERT_TESTS = ROOT / "tests" / "deploy" / "alerts_test.yml"
Tool = Callable[..., str]


def unknown(queries: list[Query], known: set[str]) -> dict[str, set[str]]:
    """Return for each query the metrics that it names and that are not in `known`."""
    return {query.where: missing for query in queries if (missing := metrics_in(query.promql) - known)}


def test_metrics_in_finds_metric_names_outside_quotes() -> None:
    promql = 'sum by (le) (rate(quire_a_bucket{x="quire_no"}[5m])) > 2 * instance:quire_b:p99_5m and up{job="quire"}'
    assert metrics_in(promql) == {"quire_a_bucket", "instance:quire_b:p99_5m"}


def test_the_dashboard_queries_only_exported_or_recorded_metrics(exported: set[str]) -> None:
    assert unknown(list(dashboard_queries()), exported | recorded()) == {}


def test_the_rules_query_only_exported_or_recorded_metrics(exported: set[str]) -> None:
    assert unknown(list(rule_queries()), exported | recorded()) == {}


def test_autoscaling_queries_only_exported_metrics(exported: set[str]) -> None:
    triggers = yaml.safe_load(SCALED_OBJECT.read_text("utf-8"))["spec"]["triggers"]
    queries = [Query("autoscaling", trigger["metadata"]["query"]) for trigger in triggers]
    assert unknown(queries, exported) == {}


def test_every_alert_has_a_test_in_which_it_fires_and_has_a_description() -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text("utf-8"))["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert set(alert["annotations"]) == {"summary", "description"}


def test_promtool_accepts_the_configuration_and_the_rules(tool: Tool) -> None:
    tool("promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    tool("promtool", "check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)


def test_alerts_fire_and_stay_silent_as_expected(tool: Tool) -> None:
    tool("promtool", "test", "rules", ALERT_TESTS)


def test_the_prometheus_rule_for_kubernetes_has_the_same_rules() -> None:
    assert TARGET.read_text("utf-8") == prometheus_rule(), "run tests/deploy/make_prometheus_rule.py"
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    assert yaml.safe_load(prometheus_rule())["spec"]["groups"] == groups


def test_every_dashboard_is_in_the_config_map_of_kubernetes() -> None:
    (generator,) = yaml.safe_load((DEPLOY / "grafana" / "kustomization.yaml").read_text("utf-8"))["configMapGenerator"]
    assert sorted(generator["files"]) == [f"dashboards/{path.name}" for path in DASHBOARDS]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_descriptions_and_do_not_overlap(dashboard: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
        assert place["x"] + place["w"] <= 24


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_units_and_unique_ids(dashboard: Path) -> None:
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))
    for panel in panels(dashboard):
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"].get("yAxis", {}).get("unit")
        assert unit or panel["type"] == "table", panel["title"]
