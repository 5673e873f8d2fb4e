"""The number of hosts that the policy returns for reports of hosts. Without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.ray.scaling import HostScaling


def wanted(num_hosts: int, wait_s: float, kv_share: float, num_running: int | None = None, **targets: float) -> int:
    """Return the number of hosts that is wanted where all running ones report the same."""
    running = [f"replica {index}" for index in range(num_hosts if num_running is None else num_running)]
    metrics: Any = {"predicted_wait_s": dict.fromkeys(running, wait_s), "kv_share": dict.fromkeys(running, kv_share)}
    context = SimpleNamespace(target_num_replicas=num_hosts, running_replicas=running, aggregated_metrics=metrics)
    number, state = HostScaling(**targets)(context)
    assert state == {}
    return number


@pytest.mark.parametrize(
    ("num_hosts", "wait_s", "kv_share", "number"),
    [
        (2, 1.0, 0.1, 2),
        (2, 1.4, 0.1, 3),
        (2, 0.0, 0.98, 3),
        (10, 0.0, 0.72, 11),
        (2, 60.0, 0.9, 4),
        (2, 0.9, 0.6, 2),
        (4, 0.0, 0.3, 3),
        (3, 0.0, 0.4, 3),
        (2, 0.0, 0.0, 1),
        (1, 0.0, 0.0, 1),
        (1, 9.0, 1.0, 2),
    ],
)
def test_load_adds_hosts_up_to_twice_as_many_and_lack_of_it_takes_one_away(
    num_hosts: int, wait_s: float, kv_share: float, number: int
) -> None:
    assert wanted(num_hosts, wait_s, kv_share) == number


def test_the_mean_over_hosts_counts() -> None:
    metrics = {"predicted_wait_s": {"a": 0.0, "b": 3.0}, "kv_share": {"a": 0.1, "b": 0.2}}
    context = SimpleNamespace(target_num_replicas=2, running_replicas=["a", "b"], aggregated_metrics=metrics)
    assert HostScaling()(context) == (3, {})


def test_nothing_is_decided_while_hosts_start_or_leave() -> None:
    assert wanted(3, 9.0, 1.0, num_running=2) == 3
    assert wanted(2, 0.0, 0.0, num_running=3) == 2


@pytest.mark.parametrize(
    "metrics", [None, {}, {"predicted_wait_s": {"a": 9.0}}, {"predicted_wait_s": {}, "kv_share": {}}]
)
def test_nothing_is_decided_without_reports(metrics: Any) -> None:
    context = SimpleNamespace(target_num_replicas=1, running_replicas=["a"], aggregated_metrics=metrics)
    assert HostScaling()(context) == (1, {})


def test_targets_may_be_chosen() -> None:
    assert wanted(2, 3.0, 0.1, target_wait_s=4.0) == 2
    assert wanted(2, 0.0, 0.6, target_kv_share=0.5) == 3


@pytest.mark.parametrize("targets", [{"target_wait_s": 0.0}, {"target_kv_share": 1.5}, {"target_kv_share": -1.0}])
def test_impossible_targets_are_refused(targets: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        HostScaling(**targets)
