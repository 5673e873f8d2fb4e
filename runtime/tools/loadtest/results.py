"""The result of a run: figures under exactly the keys of `vllm bench serve`, and Quire's own under `x_quire`.

Totals, means and percentiles cover requests that finished. A request that was cancelled on purpose counts neither as
completed nor as failed. A request that was read slowly on purpose counts as completed, but not in the latencies.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...common.errors import ConfigError
from ..percentiles import percentiles
from .latency import e2el_s, is_measured, itls_s, schedule_delay_s, tpot_s, ttft_s
from .load import ramp_rate
from .options import Pacing
from .records import RequestRecord
from .server_metrics import ServerMetrics

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")  # metrics for runs with max_concurrency
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
REQUEST_DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
SERVER_TIMES = ("queue", "prefill", "decode", "stall")  # the server's own figures, summed over requests


class LoadTestRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its result, its records and its server's metrics. Saved by sweeps, shown by reports."""

    label: str  # label in the report's legend
    started_s: float  # second 0 of the charts, as time.perf_counter
    summary: dict[str, Any]  # see `summarize`
    records: list[RequestRecord]
    metrics: ServerMetrics | None = msgspec.field(default=None, name="timeline")

    def save(self, path: Path) -> None:
        """Write this run as JSON, atomically. Raises ConfigError where `path` cannot be written."""
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(msgspec.json.encode(self))
            partial.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> LoadTestRun:
        """Read a run that `save` wrote. Raises ConfigError for any other file."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not a saved run: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The settings of a run, for the result, and the figures that the result contains."""

    backend: str
    duration_s: float
    model_id: str = ""
    num_prompts: int = 0
    label: str | None = None
    tokenizer_id: str | None = None
    pacing: Pacing = field(default_factory=Pacing)
    percentile_metrics: Sequence[str] = METRICS
    metric_percentiles: Sequence[float] = (50, 90, 99)
    goodput: Mapping[str, float] = field(default_factory=dict)  # metric -> milliseconds
    metadata: Mapping[str, str] = field(default_factory=dict)
    generator_delays_s: Sequence[float] = ()  # open loop: delay of the generator, per request
    extra: Mapping[str, Any] = field(default_factory=dict)  # further entries of `x_quire`


def summarize(records: Sequence[RequestRecord], options: RunOptions) -> dict[str, Any]:
    """Return the result with all details. Times are seconds, or milliseconds where a key says so."""
    completed = [record for record in records if record.finish_reason is not None]
    measured = [record for record in completed if is_measured(record)]
    failed = sum(record.error is not None for record in records)
    input_tokens = sum(record.prompt_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)
    result = _setup(options)
    result |= {
        "duration": options.duration_s,
        "completed": len(completed),
        "failed": failed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(completed) / options.duration_s,
        "request_goodput": _num_good(measured, options.goodput) / options.duration_s if options.goodput else None,
        "output_throughput": output_tokens / options.duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / options.duration_s,
    }
    result |= _details(records)
    result |= {
        "max_output_tokens_per_s": _max_tokens_per_s(completed),
        "max_concurrent_requests": _max_concurrent(completed),
        "rtfx": 0.0,  # a key of vLLM, for speech recognition
    }
    if options.pacing.ramp_up_strategy is not None:
        result["rps_change_events"] = _rate_changes(records, options.pacing)
    result |= _latencies(measured, options)
    result["x_quire"] = _x_quire(records, completed, measured, options)
    return result


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that vLLM saves without `save_detailed`."""
    return {key: value for key, value in result.items() if key not in REQUEST_DETAILS}


def _setup(options: RunOptions) -> dict[str, Any]:
    pacing = options.pacing
    setup: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": options.model_id,
        "tokenizer_id": options.tokenizer_id,
        "num_prompts": options.num_prompts,
        **options.metadata,
        "request_rate": _finite(pacing.request_rate),
        "burstiness": _finite(pacing.burstiness),
        "max_concurrency": pacing.max_concurrency,
    }
    if pacing.ramp_up_strategy is not None:
        setup["ramp_up_strategy"] = pacing.ramp_up_strategy
        setup["ramp_up_start_rps"] = pacing.ramp_up_start_rps
        setup["ramp_up_end_rps"] = pacing.ramp_up_end_rps
    return setup


def _finite(value: float) -> float | str:
    """Return infinity as a text, like vLLM, since JSON has none."""
    return "inf" if math.isinf(value) else value


def _details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return lists with one entry per request, failed ones included."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record.finish_reason is None else record.output_tokens for record in records],
        "ttfts": [ttft_s(record) or 0.0 for record in records],
        "itls": [itls_s(record) for record in records],
        "latencies": [e2el_s(record) or 0.0 for record in records],
        "start_times": [record.sent_s for record in records],
        "queue_times": [schedule_delay_s(record) for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error or "" for record in records],
    }


def _rate_changes(records: Sequence[RequestRecord], pacing: Pacing) -> list[dict[str, Any]]:
    """Return the times at which a ramp first reached each whole rate."""
    epoch = datetime.now() - timedelta(seconds=time.perf_counter())
    changes: list[dict[str, Any]] = []
    reached = int(pacing.ramp_up_start_rps or 0) - 1
    for record in records:
        for rate in range(reached + 1, int(ramp_rate(pacing, record.index, len(records))) + 1):
            changes.append({"rps": rate, "timestamp": (epoch + timedelta(seconds=record.sent_s)).isoformat()})
            reached = rate
    return changes


def _latencies(records: Sequence[RequestRecord], options: RunOptions) -> dict[str, float]:
    """Return mean, median, std and percentiles of each wanted metric, 0 where nothing was measured."""
    values: dict[str, Iterable[float | None]] = {
        "ttft": map(ttft_s, records),
        "tpot": map(tpot_s, records),
        "itl": chain.from_iterable(map(itls_s, records)),
        "e2el": map(e2el_s, records),
    }
    if options.pacing.max_concurrency is not None:
        values["client_queue_time"] = map(schedule_delay_s, records)
        if not math.isinf(options.pacing.request_rate):
            values["e2el_including_client_queue"] = map(_since_scheduled, map(e2el_s, records), records)
    found: dict[str, float] = {}
    for metric in (name for name in values if name in options.percentile_metrics):
        for name, value in _distribution(values[metric], options.metric_percentiles).items():
            found[f"{name}_{metric}_ms"] = value
    return found


def _since_scheduled(seconds: float | None, record: RequestRecord) -> float | None:
    return None if seconds is None else seconds + schedule_delay_s(record)


def _distribution(seconds: Iterable[float | None], percents: Sequence[float]) -> dict[str, float]:
    """Return mean, median, std and percentiles in milliseconds, without requests that have no value."""
    values = np.fromiter((each for each in seconds if each is not None), np.float64) * 1000
    if not values.size:
        values = np.zeros(1)
    found = {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())}
    for percent, value in zip(percents, percentiles(values, percents), strict=True):
        found[percentile_key(percent)] = value
    return found


def percentile_key(percent: float) -> str:
    """Return a percentile's name as vLLM writes it: p99, p99.9."""
    return f"p{int(percent) if percent == int(percent) else percent}"


def _num_good(records: Sequence[RequestRecord], limits_ms: Mapping[str, float]) -> int:
    """Count the requests within every limit. As in vLLM, an answer of a single token meets any limit of TPOT."""
    measures = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
    return sum(
        all((measures[metric](record) or 0.0) * 1000 <= limit_ms for metric, limit_ms in limits_ms.items())
        for record in records
    )


def _max_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Return the most tokens that arrived in one second, of the whole seconds since the first request was sent."""
    if not records:
        return 0.0
    start = min(record.sent_s for record in records)
    seconds: Counter[int] = Counter()
    for record in records:
        for time_s, count in zip(record.token_times, record.token_counts, strict=True):
            seconds[int(time_s - start)] += count
    return float(max(seconds.values(), default=0))


def _max_concurrent(records: Sequence[RequestRecord]) -> int:
    """Return the most requests in flight at once. Requests do not overlap if one ends when the other starts."""
    events = sorted([(record.sent_s, 1) for record in records] + [(record.token_times[-1], -1) for record in records])
    running = highest = 0
    for _, change in events:
        running += change
        highest = max(highest, running)
    return highest


def _x_quire(
    records: Sequence[RequestRecord],
    completed: Sequence[RequestRecord],
    measured: Sequence[RequestRecord],
    options: RunOptions,
) -> dict[str, Any]:
    """Return Quire's own figures.

    `…_from_schedule_ms` count from the scheduled time of a request, so that a late generator or a concurrency limit
    cannot hide the wait (coordinated omission).
    """

    def distribution(seconds: Iterable[float | None]) -> dict[str, float]:
        return _distribution(seconds, options.metric_percentiles)

    generator = {"generator_delay_ms": distribution(options.generator_delays_s)} if options.generator_delays_s else {}
    reported = [record for record in completed if record.queue_ms is not None]
    return {
        "schedule_delay_ms": distribution(map(schedule_delay_s, records)),
        **generator,
        "ttft_from_schedule_ms": distribution(map(_since_scheduled, map(ttft_s, measured), measured)),
        "e2el_from_schedule_ms": distribution(map(_since_scheduled, map(e2el_s, measured), measured)),
        "cancelled": sum(record.cancelled for record in records),
        "cancelled_output_tokens": sum(record.output_tokens for record in records if record.cancelled),
        "slow_readers": sum(record.slow_reader for record in records),
        "errors": dict(Counter(record.error_code for record in records if record.error_code).most_common()),
        "cached_tokens": sum(record.cached_tokens or 0 for record in completed),
        "server_ms": {name: sum(getattr(record, f"{name}_ms") for record in reported) for name in SERVER_TIMES},
        **options.extra,
    }
