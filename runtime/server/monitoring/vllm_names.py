"""`metrics_compat = "vllm"`: the metrics once more, under the names that routers and dashboards hard-code.

A mirrored sample has the value of Quire's sample. The name and one finish reason differ, and two labels are added:
`model_name` and `engine`, which vLLM puts on every series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from ...common.errors import QuireError
from ...engine.facade import EngineInfo

# Quire's name without `quire_` -> vLLM's names without `vllm:`. A second name is an older spelling that is still used:
# gpu_* in vLLM's production stack and early Gateway API endpoint pickers, time_per_output_token in dashboards that are
# older than the name inter-token latency.
VLLM_NAMES = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "num_preemptions": ("num_preemptions",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "spec_decode_num_accepted_tokens_per_pos": ("spec_decode_num_accepted_tokens_per_pos",),
    "prompt_tokens": ("prompt_tokens",),
    "prompt_tokens_cached": ("prompt_tokens_cached",),
    "generation_tokens": ("generation_tokens",),
    "request_success": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "request_decode_time_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
}
FINISHED_REASONS = {"cancelled": "abort"}
ENGINE = "0"  # all engine processes together


class VllmNames:
    """Yields the mirror of the given families, and vLLM's description of the cache."""

    def __init__(self, model_name: str, info: Callable[[], EngineInfo]) -> None:
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._info = info

    def __call__(self, families: Iterable[Metric]) -> Iterator[Metric]:
        for family in families:
            for name in VLLM_NAMES.get(family.name.removeprefix("quire_"), ()):
                yield self._renamed(family, f"vllm:{name}")
        yield from self._cache_config()

    def _renamed(self, family: Metric, name: str) -> Metric:
        mirrored = Metric(name, family.documentation, family.type)
        mirrored.samples = [
            sample._replace(name=name + sample.name.removeprefix(family.name), labels=self._relabeled(sample))
            for sample in family.samples
        ]
        return mirrored

    def _relabeled(self, sample: Sample) -> dict[str, str]:
        labels = {**self._labels, **sample.labels}
        if "finished_reason" in labels:
            labels["finished_reason"] = FINISHED_REASONS.get(labels["finished_reason"], labels["finished_reason"])
        return labels

    def _cache_config(self) -> Iterator[Metric]:
        try:
            info = self._info()
        except QuireError:
            return
        labels = {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages), "engine": ENGINE}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Number of pages, and tokens per page.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        yield family
