"""The number of engine hosts that Serve should run: an autoscaling policy for the deployment `EngineHost`.

Serve calls it every 0.1 s, and applies `upscale_delay_s`, `downscale_delay_s` and the bounds to the returned number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..common.errors import ConfigError

MAX_SCALE_UP = 2.0  # largest factor of the number of hosts in one decision
SPARE_LOAD = 0.7  # highest load with one host fewer: between it and 1.0 the number stays


class HostScaling:
    """Follows the larger of two loads of the hosts, each 1.0 at its target.

    They are the predicted wait of a new request, and the share of the KV cache that running requests have, as
    `HostReplica.record_autoscaling_stats` reports them. A load above 1.0 adds the necessary number of hosts. A low load
    removes one host, whose requests and cache move.
    """

    def __init__(self, target_wait_s: float = 1.0, target_kv_share: float = 0.7) -> None:
        """Raise ConfigError for targets that are not above 0, and for a share above 1."""
        if not (0 < target_wait_s < math.inf and 0 < target_kv_share <= 1):
            raise ConfigError("target_wait_s must be above 0, and target_kv_share above 0 and at most 1")
        self._target_wait_s = target_wait_s
        self._target_kv_share = target_kv_share

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of hosts, and no state. `context` is Serve's AutoscalingContext."""
        num_hosts = int(context.target_num_replicas)
        load = self._mean_load(context.aggregated_metrics or {})
        if load is None or len(context.running_replicas) != num_hosts:  # hosts are starting or leaving
            return num_hosts, {}
        if load > 1.0:
            return math.ceil(num_hosts * min(load, MAX_SCALE_UP)), {}
        if num_hosts > 1 and load * num_hosts / (num_hosts - 1) < SPARE_LOAD:
            return num_hosts - 1, {}
        return num_hosts, {}

    def _mean_load(self, metrics: Mapping[str, Mapping[Any, float]]) -> float | None:
        """Return the mean load of the hosts that report; None if none does."""
        waits, shares = (metrics.get(name) or {} for name in ("predicted_wait_s", "kv_share"))
        if not waits or not shares:
            return None
        wait_s = sum(waits.values()) / len(waits)
        kv_share = sum(shares.values()) / len(shares)
        return max(wait_s / self._target_wait_s, kv_share / self._target_kv_share)
