"""Write the rules of deploy/prometheus as a PrometheusRule for the Prometheus operator; run it after changing them.

The text of the groups is copied unchanged, so a cluster gets exactly the rules that promtool has checked.
"""

from __future__ import annotations

import re
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULE_FILES = ("records.yml", "alerts.yml")
TARGET = DEPLOY / "kubernetes" / "monitoring" / "prometheus-rule.yaml"
HEAD = """\
# Generated from deploy/prometheus/{records,alerts}.yml by tests/deploy/make_prometheus_rule.py: edit those files.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: quire
spec:
  groups:
"""


def prometheus_rule() -> str:
    return HEAD + "".join(_groups(DEPLOY / "prometheus" / name) for name in RULE_FILES)


def _groups(path: Path) -> str:
    """Return the list below `groups:`, indented for `spec`."""
    _, _, groups = path.read_text("utf-8").partition("groups:\n")
    return re.sub(r"^(?=.)", "  ", groups, flags=re.MULTILINE)


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule(), "utf-8")
