"""Rules and dashboard ask for what exists, and every alert is tested; promtool has the last word where it is there."""

from __future__ import annotations

from collections.abc import Callable

import yaml

from tests.deploy.make_prometheus_rule import TARGET, prometheus_rule
from tests.deploy.queries import (
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
    """Query -> metrics it names that nobody exports."""
    return {query.where: missing for query in queries if (missing := metrics_in(query.promql) - known)}


def test_metrics_are_found_in_queries() -> None:
    promql = 'sum by (le) (rate(quire_a_bucket{x="quire_no"}[5m])) > 2 * instance:quire_b:p99_5m and up{job="quire"}'
    assert metrics_in(promql) == {"quire_a_bucket", "instance:quire_b:p99_5m"}


def test_the_dashboard_asks_for_what_is_exported_or_recorded(exported: set[str]) -> None:
    assert unknown(list(dashboard_queries()), exported | recorded()) == {}


def test_the_rules_ask_for_what_is_exported_or_recorded(exported: set[str]) -> None:
    assert unknown(list(rule_queries()), exported | recorded()) == {}


def test_autoscaling_asks_for_what_is_exported(exported: set[str]) -> None:
    triggers = yaml.safe_load(SCALED_OBJECT.read_text("utf-8"))["spec"]["triggers"]
    queries = [Query("autoscaling", trigger["metadata"]["query"]) for trigger in triggers]
    assert unknown(queries, exported) == {}


def test_every_alert_is_tested_to_speak_and_says_what_to_do() -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text("utf-8"))["tests"]
    spoken = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert spoken == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert set(alert["annotations"]) == {"summary", "description"}


def test_promtool_likes_configuration_and_rules(tool: Tool) -> None:
    tool("promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    tool("promtool", "check", "rules", "--lint=all", "--lint-fatal", *RULE_FILES)


def test_alerts_speak_and_keep_silent(tool: Tool) -> None:
    tool("promtool", "test", "rules", ALERT_TESTS)


def test_a_cluster_gets_the_same_rules() -> None:
    assert TARGET.read_text("utf-8") == prometheus_rule(), "run tests/deploy/make_prometheus_rule.py"
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    assert yaml.safe_load(prometheus_rule())["spec"]["groups"] == groups


def test_panels_explain_themselves_and_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
        assert place["x"] + place["w"] <= 24


def test_panels_have_units_and_ids_of_their_own() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    for panel in panels():
        unit = panel["fieldConfig"]["defaults"].get("unit") or panel["options"].get("yAxis", {}).get("unit")
        assert unit or panel["type"] == "table", panel["title"]
