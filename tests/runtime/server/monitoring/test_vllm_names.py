"""`metrics_compat = "vllm"`: the same numbers under the names that routers and dashboards hard-code."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.types import Usage
from quire.runtime.engine.facade import EngineInfo, RequestStats
from quire.runtime.server.monitoring.metrics import PrometheusObserver
from quire.runtime.server.monitoring.vllm_names import VLLM_NAMES, VllmNames

from tests.support.samples import INFO, STATS

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]  # name -> labels -> value


@pytest.fixture
def observer() -> PrometheusObserver:
    observer = PrometheusObserver()
    observer.watch(lambda: STATS, mirror=VllmNames('meta/"llama"', lambda: INFO))
    observer.on_tokens(1, None)
    observer.on_tokens(1, 0.03)
    observer.on_finished(
        RequestStats(
            tenant="acme",
            finish_reason="cancelled",
            error=None,
            prompt_tokens=10,
            usage=Usage(prompt_tokens=10, completion_tokens=2, queue_ms=20, prefill_ms=30, decode_ms=400),
            e2e_s=0.45,
            time_to_first_token_s=0.05,
            time_per_output_token_s=0.1,
        )
    )
    return observer


def scrape(observer: PrometheusObserver) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(observer.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


# Names in use: by the endpoint picker of the Gateway API inference extension, the router of vLLM's production stack,
# vLLM's own Grafana dashboard.
NAMES_IN_USE = (
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
)


@pytest.mark.parametrize("name", NAMES_IN_USE)
def test_every_name_in_use_is_exposed(observer: PrometheusObserver, name: str) -> None:
    assert name in scrape(observer)


def test_values_are_those_of_quire_with_labels_of_vllm(observer: PrometheusObserver) -> None:
    samples = scrape(observer)
    labels = {"model_name": 'meta/"llama"', "engine": "0"}
    mirrored = {name.removeprefix("vllm:"): series for name, series in samples.items() if name.startswith("vllm:")}
    del mirrored["cache_config_info"]
    for name, series in mirrored.items():
        assert all(labels.items() <= dict(each).items() for each in series), name
    for ours, theirs in VLLM_NAMES.items():
        for name in theirs:
            for suffix in ("", "_total", "_bucket", "_sum", "_count"):
                expected = samples.get(f"quire_{ours}{suffix}", {})
                assert list(mirrored.get(name + suffix, {}).values()) == list(expected.values()), name + suffix


def test_cancelled_requests_are_called_aborted(observer: PrometheusObserver) -> None:
    by_reason = {dict(each)["finished_reason"]: n for each, n in scrape(observer)["vllm:request_success_total"].items()}
    assert by_reason == {"stop": 0, "length": 0, "abort": 1, "other": 0}


def test_the_cache_is_described_by_labels(observer: PrometheusObserver) -> None:
    assert scrape(observer)["vllm:cache_config_info"] == {
        (("block_size", "32"), ("engine", "0"), ("num_gpu_blocks", "10")): 1
    }


def test_other_metrics_are_mirrored_while_the_engine_does_not_answer() -> None:
    def gone() -> EngineInfo:
        raise Unavailable("gone")

    observer = PrometheusObserver()
    observer.watch(lambda: STATS, mirror=VllmNames("m", gone))
    samples = scrape(observer)
    assert "vllm:num_requests_running" in samples
    assert "vllm:cache_config_info" not in samples


def test_nothing_is_mirrored_by_default() -> None:
    observer = PrometheusObserver()
    observer.watch(lambda: STATS)
    assert not [name for name in scrape(observer) if name.startswith("vllm:")]
