"""/metrics: vLLM's names under `quire_`, with the numbers that the engine reports."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from quire.runtime.common.errors import GenerationFailed, Overloaded, QuireError, Unavailable
from quire.runtime.common.types import Usage
from quire.runtime.engine.facade import EmbedStats, EngineStats, RequestStats, StepStats
from quire.runtime.engine.stats import counters_of
from quire.runtime.server.monitoring.collector import ClientLoad
from quire.runtime.server.monitoring.instruments import MAX_TENANTS
from quire.runtime.server.monitoring.metrics import PrometheusObserver, error_codes

from tests.support import samples

STATS = msgspec.structs.replace(
    samples.STATS,
    waiting_by_reason={"pages": 1},
    pages_reserved=3,
    pages_pinned=1,
    pages_spilled=8,
    preemptions_spilled=1,
    recomputed_tokens=50,
    draft_tokens=40,
    accepted_draft_tokens=30,
    drafted_by_source={"head": 25, "forced": 15},
    accepted_by_source={"head": 20, "forced": 10},
    accepted_by_position={"0": 15, "1": 5},
    restarts=3,
    replayed_requests=5,
    quarantined_requests=1,
    steps_over_itl_target=9,
    encoder_running=2,
    encoder_waiting=6,
    encoded_texts=800,
    encoded_tokens=9000,
    encoded_images=70,
    image_cache_hits=7,
    states_total=9,
    states_cached=4,
    states_free=3,
    states_kept=21,
    state_hits=11,
    state_copies=17,
    states_spilled=3,
    states_cached_bytes=5000,
    stateless_tokens=77,
)
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, queue_ms=20, prefill_ms=30, decode_ms=400)


@pytest.fixture
def observer() -> PrometheusObserver:
    observer = PrometheusObserver(version="0.1.0", isa="avx2", threads=2, threads_reason="--threads")
    observer.watch(lambda: STATS, lambda: ClientLoad(6, {"kept_output": 700, "unsent_output": 80}))
    return observer


def exposed(observer: PrometheusObserver) -> dict[str, float]:
    """Return sample line -> value."""
    lines = generate_latest(observer.registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def families(observer: PrometheusObserver) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", generate_latest(observer.registry).decode(), re.MULTILINE))


def test_the_names_are_pinned(observer: PrometheusObserver) -> None:
    assert families(observer) == {
        "quire_build_info": "gauge",
        "quire_cpu_info": "gauge",
        "quire_num_requests_running": "gauge",
        "quire_num_requests_waiting": "gauge",
        "quire_kv_cache_usage_perc": "gauge",
        "quire_requests_waiting_by_reason": "gauge",
        "quire_kv_pages": "gauge",
        "quire_kv_pages_reserved": "gauge",
        "quire_kv_pages_pinned": "gauge",
        "quire_kv_pages_spilled": "gauge",
        "quire_states": "gauge",
        "quire_prefix_cache_queries_total": "counter",
        "quire_prefix_cache_hits_total": "counter",
        "quire_states_spilled": "gauge",
        "quire_states_cached_bytes": "gauge",
        "quire_stateless_tokens_total": "counter",
        "quire_request_prompt_tokens_cached": "histogram",
        "quire_states_kept_total": "counter",
        "quire_state_hits_total": "counter",
        "quire_state_copies_total": "counter",
        "quire_num_preemptions_total": "counter",
        "quire_preemptions_by_kind_total": "counter",
        "quire_recomputed_tokens_total": "counter",
        "quire_spec_decode_num_draft_tokens_total": "counter",
        "quire_spec_decode_num_accepted_tokens_total": "counter",
        "quire_spec_decode_draft_tokens_by_source_total": "counter",
        "quire_spec_decode_accepted_tokens_by_source_total": "counter",
        "quire_spec_decode_num_accepted_tokens_per_pos_total": "counter",
        "quire_steps_total": "counter",
        "quire_steps_over_itl_target_total": "counter",
        "quire_num_encodings_running": "gauge",
        "quire_num_encodings_waiting": "gauge",
        "quire_encoded_texts_total": "counter",
        "quire_encoded_tokens_total": "counter",
        "quire_encoded_images_total": "counter",
        "quire_image_cache_hits_total": "counter",
        "quire_engine_restarts_total": "counter",
        "quire_replayed_requests_total": "counter",
        "quire_quarantined_requests_total": "counter",
        "quire_connections": "gauge",
        "quire_client_memory_bytes": "gauge",
        "quire_prompt_tokens_total": "counter",
        "quire_prompt_tokens_cached_total": "counter",
        "quire_generation_tokens_total": "counter",
        "quire_prefill_tokens_total": "counter",
        "quire_request_success_total": "counter",
        "quire_request_failures_total": "counter",
        "quire_admission_rejections_total": "counter",
        "quire_embed_requests_total": "counter",
        "quire_cancelled_total": "counter",
        "quire_refused_requests_total": "counter",
        "quire_resumed_streams_total": "counter",
        "quire_idempotent_replays_total": "counter",
        "quire_connections_refused_total": "counter",
        "quire_http_unknown_fields_total": "counter",
        "quire_time_to_first_token_seconds": "histogram",
        "quire_inter_token_latency_seconds": "histogram",
        "quire_request_time_per_output_token_seconds": "histogram",
        "quire_e2e_request_latency_seconds": "histogram",
        "quire_request_queue_time_seconds": "histogram",
        "quire_request_prefill_time_seconds": "histogram",
        "quire_request_decode_time_seconds": "histogram",
        "quire_request_prompt_tokens": "histogram",
        "quire_request_generation_tokens": "histogram",
        "quire_embed_latency_seconds": "histogram",
        "quire_embed_request_texts": "histogram",
        "quire_step_duration_seconds": "histogram",
        "quire_batch_size": "histogram",
    }


def test_every_help_text_is_a_phrase_that_stands_alone() -> None:
    observer = PrometheusObserver()
    observer.watch(lambda: STATS, lambda: ClientLoad(1, {"texts": 1}), hosts=lambda: samples.HOSTS)
    texts = {family.name: family.documentation for family in observer.registry.collect()}
    assert len(texts) > 60
    for name, text in texts.items():
        assert re.fullmatch(r"(?!(In|From|Between|By|Of|Per|Whether|Not) )[A-Z1]\S*( \S+){3,}\.", text), (name, text)


def test_the_engine_is_read_when_scraped(observer: PrometheusObserver) -> None:
    samples = exposed(observer)
    assert samples['quire_build_info{version="0.1.0"}'] == 1
    assert samples['quire_cpu_info{isa="avx2",threads="2",threads_reason="--threads"}'] == 1
    assert samples["quire_num_requests_running"] == 2
    assert samples["quire_num_requests_waiting"] == 1
    assert samples["quire_kv_cache_usage_perc"] == 0.4
    assert [samples[f'quire_kv_pages{{state="{state}"}}'] for state in ("owned", "cached", "free")] == [4, 1, 5]
    assert samples["quire_prefix_cache_queries_total"] == 100
    assert samples["quire_prefix_cache_hits_total"] == 30
    assert [samples[f'quire_states{{use="{use}"}}'] for use in ("running", "cached", "free")] == [2, 4, 3]
    assert [samples[f"quire_{what}_total"] for what in ("states_kept", "state_hits", "state_copies")] == [21, 11, 17]
    assert (samples["quire_states_spilled"], samples["quire_states_cached_bytes"]) == (3, 5000)
    assert samples["quire_stateless_tokens_total"] == 77
    assert samples["quire_num_preemptions_total"] == 2
    assert [samples[f'quire_preemptions_by_kind_total{{kind="{kind}"}}'] for kind in ("recompute", "spill")] == [1, 1]
    assert samples["quire_recomputed_tokens_total"] == 50
    assert samples["quire_spec_decode_num_draft_tokens_total"] == 40
    assert samples["quire_spec_decode_num_accepted_tokens_total"] == 30
    assert samples['quire_spec_decode_draft_tokens_by_source_total{source="head"}'] == 25
    assert samples['quire_spec_decode_accepted_tokens_by_source_total{source="forced"}'] == 10
    assert samples['quire_spec_decode_num_accepted_tokens_per_pos_total{position="1"}'] == 5
    assert samples["quire_engine_restarts_total"] == 3
    assert samples["quire_replayed_requests_total"] == 5
    assert samples["quire_quarantined_requests_total"] == 1
    assert samples["quire_steps_over_itl_target_total"] == 9
    assert [samples[f"quire_num_encodings_{state}"] for state in ("running", "waiting")] == [2, 6]
    assert [samples[f"quire_encoded_{what}_total"] for what in ("texts", "tokens", "images")] == [800, 9000, 70]
    assert samples["quire_image_cache_hits_total"] == 7
    assert samples["quire_connections"] == 6
    assert samples['quire_client_memory_bytes{purpose="kept_output"}'] == 700
    assert samples['quire_client_memory_bytes{purpose="unsent_output"}'] == 80


def test_no_counter_falls_when_the_engine_that_counted_is_unloaded(observer: PrometheusObserver) -> None:
    def counters() -> dict[str, float]:
        return {name: value for name, value in exposed(observer).items() if name.partition("{")[0].endswith("_total")}

    before = counters()
    observer.watch(lambda: counters_of(STATS))
    assert counters() == before


def test_hosts_have_series_of_their_own_and_one_that_is_down_those_of_this_server() -> None:
    observer = PrometheusObserver()
    observer.watch(lambda: STATS, hosts=lambda: samples.HOSTS)
    of_hosts = {name: value for name, value in exposed(observer).items() if name.startswith("quire_host_")}
    assert of_hosts == {
        'quire_host_info{bits="f00d",host="a:7072",isa="avx2"}': 1,
        'quire_host_info{bits="",host="b:7072",isa=""}': 1,
        'quire_host_up{host="a:7072"}': 1,
        'quire_host_up{host="b:7072"}': 0,
        'quire_host_requests{host="a:7072"}': 3,
        'quire_host_requests{host="b:7072"}': 1,
        'quire_host_moved_requests_total{host="a:7072"}': 2,
        'quire_host_moved_requests_total{host="b:7072"}': 4,
        'quire_host_predicted_wait_seconds{host="a:7072"}': 0.5,
        'quire_host_running{host="a:7072"}': 2,
        'quire_host_waiting{host="a:7072"}': 1,
        'quire_host_kv_pages{host="a:7072",state="owned"}': 4,
        'quire_host_kv_pages{host="a:7072",state="cached"}': 1,
        'quire_host_kv_pages{host="a:7072",state="free"}': 5,
        'quire_host_prefix_cache_queries_total{host="a:7072"}': 100,
        'quire_host_prefix_cache_hits_total{host="a:7072"}': 30,
        'quire_host_replayed_requests_total{host="a:7072"}': 0,
        'quire_host_engine_restarts_total{host="a:7072"}': 0,
    }


def test_texts_count_for_their_host_and_a_host_that_leaves_is_not_up() -> None:
    stats = msgspec.structs.replace(samples.STATS, encoder_running=3, encoder_waiting=6)
    host = msgspec.structs.replace(samples.HOSTS[0], state="leaving", engine=stats)
    observer = PrometheusObserver()
    observer.watch(lambda: STATS, hosts=lambda: [host])
    shown = exposed(observer)
    assert [shown[f'quire_host_{what}{{host="a:7072"}}'] for what in ("running", "waiting", "up")] == [5, 7, 0]


def test_a_server_without_hosts_has_no_series_of_them(observer: PrometheusObserver) -> None:
    observer.watch(lambda: STATS, hosts=lambda: None)
    assert not any(name.startswith("quire_host_") for name in families(observer))


def test_pages_by_state_add_up_to_all_pages(observer: PrometheusObserver) -> None:
    samples = exposed(observer)
    assert sum(value for name, value in samples.items() if name.startswith("quire_kv_pages{")) == STATS.pages_total
    assert [samples[f"quire_kv_pages_{name}"] for name in ("reserved", "pinned", "spilled")] == [3, 1, 8]


def test_every_waiting_reason_has_a_series(observer: PrometheusObserver) -> None:
    samples = exposed(observer)
    assert {
        reason: samples[f'quire_requests_waiting_by_reason{{reason="{reason}"}}']
        for reason in ("sequences", "pages", "latency", "tokens", "quota", "fork")
    } == {"sequences": 0, "pages": 1, "latency": 0, "tokens": 0, "quota": 0, "fork": 0}


class Hostile(QuireError):
    """An error whose code is unique."""

    def __init__(self, code: str) -> None:
        super().__init__("x" * 1000)
        self.code = code  # type: ignore[misc]


def test_unknown_values_add_no_series(observer: PrometheusObserver) -> None:
    before = set(exposed(observer))
    for i in range(100):
        name: Any = f'"}}\n# {i} <script>\u202e'
        error = Hostile(name)
        ended = RequestStats(
            tenant=name,
            finish_reason=None if i % 2 else name,
            error=error if i % 2 else None,
            prompt_tokens=10**i,
            usage=USAGE,
            e2e_s=10.0**i,
            time_to_first_token_s=10.0**-i,
        )
        observer.on_rejected(error)
        observer.on_cancelled(name)
        observer.on_finished(ended)
    observer.watch(
        lambda: msgspec.structs.replace(
            STATS,
            waiting_by_reason=dict.fromkeys("abc", 1),
            drafted_by_source=dict.fromkeys("abc", 1),
            accepted_by_source=dict.fromkeys("abc", 1),
            accepted_by_position={"15": 1, "16": 1, "a": 1},
        ),
        lambda: ClientLoad(6, {"kept_output": 700, "unsent_output": 80}),
    )
    samples = exposed(observer)
    assert set(samples) == before
    assert samples['quire_admission_rejections_total{reason="other"}'] == 100
    assert samples['quire_request_failures_total{code="other"}'] == 50
    assert samples['quire_request_success_total{finished_reason="other"}'] == 50
    assert samples['quire_cancelled_total{cause="other"}'] == 100
    assert samples['quire_requests_waiting_by_reason{reason="other"}'] == 3
    assert samples['quire_spec_decode_draft_tokens_by_source_total{source="other"}'] == 3
    assert samples['quire_spec_decode_accepted_tokens_by_source_total{source="other"}'] == 3
    assert samples['quire_spec_decode_num_accepted_tokens_per_pos_total{position="other"}'] == 2


def test_every_code_of_the_error_tree_is_a_label() -> None:
    assert {"resource_exhausted", "aborted", "not_found", "internal", "unimplemented"} <= error_codes()


def test_steps_and_tokens(observer: PrometheusObserver) -> None:
    observer.on_step(
        StepStats(
            duration_s=0.02,
            prefill_tokens=6,
            decode_tokens=2,
            context_tokens=(40, 8, 6),
            schedule_s=1e-4,
            commit_s=1e-4,
            publish_s=1e-4,
        )
    )
    observer.on_tokens(1, None)
    observer.on_tokens(2, 0.03)
    samples = exposed(observer)
    assert samples['quire_step_duration_seconds_bucket{le="0.01"}'] == 0
    assert samples['quire_step_duration_seconds_bucket{le="0.025"}'] == 1
    assert samples["quire_batch_size_sum"] == 3
    assert samples["quire_prefill_tokens_total"] == 6
    assert samples["quire_generation_tokens_total"] == 3
    assert samples["quire_inter_token_latency_seconds_count"] == 1
    assert samples['quire_inter_token_latency_seconds_bucket{le="0.05"}'] == 1


def test_a_finished_request(observer: PrometheusObserver) -> None:
    observer.on_finished(
        RequestStats(
            tenant="acme",
            finish_reason="stop",
            error=None,
            prompt_tokens=10,
            usage=USAGE,
            e2e_s=0.45,
            time_to_first_token_s=0.05,
            time_per_output_token_s=0.1,
        )
    )
    samples = exposed(observer)
    assert samples['quire_request_success_total{finished_reason="stop"}'] == 1
    assert samples["quire_prompt_tokens_total"] == 10
    assert samples["quire_prompt_tokens_cached_total"] == 4
    depths = [samples[f'quire_request_prompt_tokens_cached_bucket{{le="{bound}"}}'] for bound in ("2.0", "5.0")]
    assert depths == [0, 1]
    assert samples["quire_time_to_first_token_seconds_sum"] == 0.05
    assert samples["quire_e2e_request_latency_seconds_sum"] == 0.45
    assert samples["quire_request_queue_time_seconds_sum"] == 0.02
    assert samples["quire_request_prefill_time_seconds_sum"] == 0.03
    assert samples["quire_request_decode_time_seconds_sum"] == 0.4
    assert samples["quire_request_time_per_output_token_seconds_sum"] == 0.1
    assert samples["quire_request_prompt_tokens_sum"] == 10
    assert samples["quire_request_generation_tokens_sum"] == 5


def test_a_failed_request_does_not_count_as_a_success(observer: PrometheusObserver) -> None:
    observer.on_finished(
        RequestStats(
            tenant="acme",
            finish_reason=None,
            error=Unavailable("closed"),
            prompt_tokens=10,
            usage=None,
            e2e_s=0.1,
            time_to_first_token_s=None,
        )
    )
    samples = exposed(observer)
    assert not [name for name in samples if name.startswith("quire_request_success") and samples[name]]
    assert samples['quire_request_failures_total{code="unavailable"}'] == 1
    assert samples["quire_time_to_first_token_seconds_count"] == 0
    assert samples["quire_e2e_request_latency_seconds_count"] == 1


def test_rejections_and_cancels_have_a_small_set_of_labels(observer: PrometheusObserver) -> None:
    observer.on_rejected(Overloaded("the queue is full: 17 of 17"))
    observer.on_cancelled("slow_reader")
    samples = exposed(observer)
    assert samples['quire_admission_rejections_total{reason="resource_exhausted"}'] == 1
    assert samples['quire_cancelled_total{cause="slow_reader"}'] == 1


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (
            "time_to_first_token_seconds",
            "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 "
            "2560.0 +Inf",
        ),
        (
            "inter_token_latency_seconds",
            "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf",
        ),
    ],
)
def test_buckets_are_those_of_vllm(observer: PrometheusObserver, name: str, bounds: str) -> None:
    found = [re.search(r'le="(.+)"', sample) for sample in exposed(observer) if f"quire_{name}_bucket" in sample]
    assert " ".join(match[1] for match in found if match) == bounds


def test_no_created_series(observer: PrometheusObserver) -> None:
    observer.on_tokens(1, 0.1)
    assert "_created" not in generate_latest(observer.registry).decode()


def test_other_metrics_are_exposed_while_the_engine_does_not_answer() -> None:
    def gone() -> EngineStats:
        raise Unavailable("gone")

    observer = PrometheusObserver()
    observer.watch(gone)
    assert "quire_generation_tokens_total" in exposed(observer)
    assert "quire_num_requests_running" not in exposed(observer)


def test_two_observers_share_nothing() -> None:
    first = PrometheusObserver()
    second = PrometheusObserver()
    first.on_tokens(5, None)
    assert exposed(second)["quire_generation_tokens_total"] == 0


def test_refusals_by_tenant_have_a_bounded_number_of_series(observer: PrometheusObserver) -> None:
    for number in range(MAX_TENANTS + 50):
        observer.on_refused(f"tenant{number}", "RESOURCE_EXHAUSTED")
        observer.on_refused("tenant0", "MADE_UP")
    counts = observer.refused_requests.counts
    assert len(counts) == MAX_TENANTS + 2
    assert counts["other", "resource_exhausted"] == 50
    assert counts["tenant0", "other"] == MAX_TENANTS + 50
    text = generate_latest(observer.registry).decode()
    assert 'quire_refused_requests_total{reason="resource_exhausted",tenant="tenant1"} 1.0' in text


def test_requests_to_embed_are_counted_by_kind_and_timed(observer: PrometheusObserver) -> None:
    for kind, error in (("embed", None), ("score", GenerationFailed("no"))):
        observer.on_embedded(
            EmbedStats(tenant="t", kind=kind, error=error, num_texts=30, prompt_tokens=90, e2e_s=0.2)  # type: ignore[arg-type]
        )
    samples = exposed(observer)
    assert [samples[f'quire_embed_requests_total{{kind="{kind}"}}'] for kind in ("embed", "score")] == [1, 1]
    assert samples['quire_request_failures_total{code="internal"}'] == 1
    assert samples["quire_embed_latency_seconds_count"] == 2
    assert samples["quire_embed_request_texts_sum"] == 60
