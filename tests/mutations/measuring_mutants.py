"""Bugs in what measures and plans: `runtime/tools/` and `runtime/server/monitoring/`."""

from mutant import Mutant

TESTS = "tests/runtime/tools/loadtest"
MONITORING_TESTS = "tests/runtime/server/monitoring"
LATENCY, SENDER, LOAD, RESULTS, SWEEP, SERVER_METRICS = (
    f"runtime/tools/loadtest/{name}.py" for name in ("latency", "sender", "load", "results", "sweep", "server_metrics")
)
OPENAI, TIMELINE = "runtime/tools/loadtest/openai_backend.py", "runtime/tools/loadtest/timeline.py"
COLLECTOR, METRICS, HISTORY, READINESS, INSTRUMENTS = (
    f"runtime/server/monitoring/{name}.py" for name in ("collector", "metrics", "history", "readiness", "instruments")
)
ALTERNATIVES, SERVING_PLAN = (f"runtime/tools/planning/{name}.py" for name in ("alternatives", "serving_plan"))
PROFILE, PREDICTION = "runtime/tools/bench/profile.py", "runtime/tools/simulation/prediction.py"
PLANNING_TESTS = "tests/runtime/tools/planning tests/runtime/tools/simulation/test_prediction.py tests/runtime/tools/bench/test_profile.py"

SIMULATOR = "runtime/tools/simulation/simulator.py"
RESULT_TESTS = "tests/runtime/tools/loadtest/test_results.py"
SIMULATOR_TESTS = "tests/runtime/tools/simulation/test_simulator.py"

MUTANTS = [
    Mutant(
        LATENCY,
        "(record.output_tokens - 1)\n",
        "record.output_tokens\n",
        "time per output token is too small",
    ),
    Mutant(
        LATENCY,
        "    return record.token_times[0] - record.sent_s if",
        "    return record.token_times[0] - record.scheduled_s if",
        "time to first token includes the delay of the load generator",
    ),
    Mutant(
        LATENCY,
        "return record.finish_reason is not None and not record.slow_reader",
        "return record.finish_reason is not None",
        "readers that are slow on purpose spoil the latencies",
    ),
    Mutant(
        LATENCY,
        "    return record.token_times[-1] - record.sent_s if",
        "    return record.ended_s - record.sent_s if",
        "the end-to-end latency includes what follows the last token",
    ),
    Mutant(
        LATENCY,
        "elsewhere = np.array([1000 * (e2el_s(record) or 0.0) for record in reported]) - at_server",
        "elsewhere = np.array([(e2el_s(record) or 0.0) for record in reported]) - at_server",
        "the time outside of the server is always 0",
    ),
    Mutant(
        SENDER,
        "                left -= chunk.num_tokens\n                if left <= 0:",
        "                left -= 1\n                if left <= 0:",
        "cancelling counts chunks instead of tokens",
    ),
    Mutant(
        SENDER,
        "        progress.failed += record.error is not None\n",
        "",
        "the progress line shows no failures",
    ),
    Mutant(
        SENDER,
        "        async with slots:\n            await _send(backend, request, record, progress)",
        "        await _send(backend, request, record, progress)",
        "max_concurrency has no effect in an open loop",
    ),
    Mutant(
        SENDER,
        "    record.decode_ms, record.stall_ms = end.decode_ms, end.stall_ms",
        "    record.decode_ms, record.stall_ms = end.stall_ms, end.decode_ms",
        "stalls are shown as decoding",
    ),
    Mutant(
        SENDER,
        'raise RequestFailed("NO_TOKENS", "the stream ended without a token")',
        "pass",
        "an answer without a token counts as a success",
    ),
    Mutant(
        RESULTS,
        '"total_token_throughput": (input_tokens + output_tokens) / options.duration_s,',
        '"total_token_throughput": output_tokens / options.duration_s,',
        "the total throughput leaves out prompts",
    ),
    Mutant(
        RESULTS,
        "completed = [record for record in records if record.finish_reason is not None]",
        "completed = [record for record in records if record.error is None]",
        "cancelled requests count as completed",
    ),
    Mutant(
        LOAD,
        "    stretch = count / pacing.request_rate / times[-1]\n",
        "    stretch = 1.0\n",
        "the real request rate differs from the one asked for",
    ),
    Mutant(
        LOAD,
        "    return float(start * (end / start) ** progress)",
        "    return float(start * (end - start) ** progress)",
        "an exponential ramp ends at the wrong rate",
    ),
    Mutant(
        SWEEP,
        "    return after / before - 1 < SATURATED_SHARE * load_growth",
        "    return after / before - 1 < SATURATED_SHARE",
        "a sweep in small steps stops early",
    ),
    Mutant(
        SERVER_METRICS,
        "            kv_usage=_mean(own[KV_USAGE[0]] or own[KV_USAGE[1]]),",
        "            kv_usage=_sum(own[KV_USAGE[0]] or own[KV_USAGE[1]]),",
        "two engines that are half full show as full",
    ),
    Mutant(
        OPENAI,
        "    return delta is None or delta.role is None or bool(delta.content or delta.reasoning_content)",
        "    return True",
        "the role event of a chat counts as the first token",
    ),
    Mutant(
        TIMELINE,
        'begun = np.searchsorted(np.sort(begins), times, side="right")',
        'begun = np.searchsorted(np.sort(begins), times, side="left")',
        "the chart of requests in flight lacks those that begin at its points",
    ),
    Mutant(
        COLLECTOR,
        '"recompute": stats.preemptions - stats.preemptions_spilled,',
        '"recompute": stats.preemptions,',
        "spilled preemptions are counted twice",
        MONITORING_TESTS,
    ),
    Mutant(
        COLLECTOR,
        "        except QuireError:\n            return ()",
        "        except QuireError:\n            raise",
        "while the engine restarts /metrics fails",
        MONITORING_TESTS,
    ),
    Mutant(
        COLLECTOR,
        "counts[reason if reason in counts else OTHER] += count",
        "counts[reason] = count",
        "an unknown reason makes a new series",
        MONITORING_TESTS,
    ),
    Mutant(
        METRICS,
        "self.queue_time.observe(usage.queue_ms / 1000)",
        "self.queue_time.observe(usage.queue_ms)",
        "the queue time is in milliseconds under a name in seconds",
        MONITORING_TESTS,
    ),
    Mutant(
        METRICS,
        "            self.success.add(stats.finish_reason)\n        if stats.error is not None:\n"
        "            self.failures.add(stats.error.code.lower())\n",
        "            self.success.add(stats.finish_reason)\n",
        "failed requests are not counted",
        MONITORING_TESTS,
    ),
    Mutant(
        HISTORY,
        "        self._counted = generated, prefilled\n",
        "",
        "rates on the status page only grow",
        MONITORING_TESTS,
    ),
    Mutant(
        HISTORY,
        "            for window in self._windows:\n                window.turn()\n",
        "            pass\n",
        "latencies on the status page are those since the start",
        MONITORING_TESTS,
    ),
    Mutant(
        HISTORY,
        "return below + (bounds[bucket] - below) * (1 - (up_to[bucket] - rank) / counts[bucket])",
        "return below",
        "quantiles are too small by a bucket",
        MONITORING_TESTS,
    ),
    Mutant(
        READINESS,
        "        if stalled_s < self._stall_timeout_s:\n            return None\n",
        "        return None\n",
        "a stalled engine is ready",
        MONITORING_TESTS,
    ),
    Mutant(
        READINESS,
        "        self._detector.note(stats.step, num_requests > 0, now)",
        "        self._detector.note(stats.step, True, now)",
        "an idle engine is not ready",
        MONITORING_TESTS,
    ),
    Mutant(
        INSTRUMENTS,
        "        self.counts[value if value in self.counts else OTHER] += 1",
        "        self.counts[value] = self.counts.get(value, 0) + 1",
        "a label takes any value: series grow without limit",
        MONITORING_TESTS,
    ),
    Mutant(
        INSTRUMENTS,
        "self.counts[bisect_left(self.bounds, value)] += 1",
        "self.counts[min(bisect_left(self.bounds, value) + 1, len(self.bounds))] += 1",
        "values count in the bucket above",
        MONITORING_TESTS,
    ),
    Mutant(
        ALTERNATIVES,
        "others = capacity.memory.total_bytes - capacity.memory.kv_bytes\n",
        "others = planned.memory.total_bytes - planned.memory.kv_bytes\n",
        "smaller weights leave no more memory for the KV cache",
        PLANNING_TESTS,
    ),
    Mutant(
        ALTERNATIVES,
        "return shape.batch <= min(fits, self.config.max_num_seqs)",
        "return shape.batch <= fits",
        "a speed is predicted for more users than run at once",
        PLANNING_TESTS,
    ),
    Mutant(
        ALTERNATIVES,
        "largest.memory.kv_bytes + other_bytes",
        "largest.memory.kv_bytes",
        "`quire plan --memory` forgets the API server process and its clients",
        PLANNING_TESTS,
    ),
    Mutant(
        SERVING_PLAN,
        "count * layer_bytes) for",
        "layer_bytes) for",
        "the KV bytes of a layer group are those of one layer",
        f"{PLANNING_TESTS} tests/runtime/cli/test_plan.py",
    ),
    Mutant(
        PROFILE,
        "config.isa or self.isa, config.threads or self.threads",
        "self.isa, self.threads",
        "`quire plan --profile` ignores --isa and --threads",
        PLANNING_TESTS,
    ),
    Mutant(
        PROFILE,
        "if (profile.format, profile.version) != (FORMAT, VERSION):",
        "if profile.format != FORMAT:",
        "a machine profile of another version is read as if it were of this one",
        PLANNING_TESTS,
    ),
    Mutant(
        PREDICTION,
        "return Speed(prefill_s, shape.batch / decode_s)",
        "return Speed(prefill_s / shape.batch, shape.batch / decode_s)",
        "the predicted time to the first token is that of one of the users",
        PLANNING_TESTS,
    ),
    Mutant(
        PREDICTION,
        "            if not free:\n",
        "            if free < max_rows:\n",
        "prompts that share a step are predicted one per step",
        PLANNING_TESTS,
    ),
    Mutant(
        ALTERNATIVES,
        "if length < longest]",
        "if length <= longest]",
        "the longest length of the plan is listed twice",
        PLANNING_TESTS,
    ),
    Mutant(
        "runtime/tools/simulation/cost.py",
        "rows * self.top_k * self.row_s / busy_share",
        "rows * self.row_s / busy_share",
        "each row is predicted to pass one expert only",
        "tests/runtime/tools/simulation/test_cost.py",
    ),
    Mutant(
        PROFILE,
        "sorted((each for each in self.rooflines if each.isa == isa), key=lambda each: each.threads)",
        "[each for each in self.rooflines if each.isa == isa]",
        "a machine profile whose thread counts are not in order is refused or interpolated wrongly",
        PLANNING_TESTS,
    ),
    Mutant(
        SERVING_PLAN,
        " + sum(structured_bytes.values()) + MemoryLimits",
        " + MemoryLimits",
        "`quire plan --memory` forgets structured output",
        PLANNING_TESTS,
    ),
    Mutant(
        "runtime/tools/perplexity.py",
        "float(np.exp(log_p) @ (log_p - (logits.astype(np.float64) - normaliser)))",
        "float(np.exp(logits - normaliser) @ ((logits.astype(np.float64) - normaliser) - log_p))",
        "the KL divergence is that of the base from the model",
        "tests/runtime/tools/test_perplexity.py",
    ),
    Mutant(
        "runtime/server/monitoring/collector.py",
        "stats.waiting + stats.encoder_waiting for name",
        "stats.waiting for name",
        "texts that wait at a host are not in its metrics",
        "tests/runtime/server/monitoring/test_metrics.py",
    ),
    Mutant(
        "runtime/server/monitoring/collector.py",
        'host.state == "up" for',
        'host.state != "down" for',
        "a leaving host counts as up",
        "tests/runtime/server/monitoring/test_metrics.py",
    ),
    Mutant(
        "runtime/tools/simulation/fleet.py",
        "server.loads = dict(loads)",
        "server.loads = loads",
        "simulated API servers see at once what others send",
        "tests/runtime/tools/simulation/test_fleet.py",
    ),
    Mutant(
        "runtime/tools/simulation/fleet.py",
        "self._num_chosen = index  #",
        "self._num_chosen = 0  #",
        "simulated servers that take turns all begin with the same host",
        "tests/runtime/tools/simulation/test_fleet.py",
    ),
    Mutant(
        RESULTS,
        "if not math.isinf(options.pacing.request_rate):\n            values",
        "if True:\n            values",
        "a latency with the client's queue is reported where all requests are due at once",
        RESULT_TESTS,
    ),
    Mutant(
        RESULTS,
        "int(time_s - start)] += count",
        "int(time_s - start)] += 1",
        "the busiest second counts chunks instead of tokens",
        RESULT_TESTS,
    ),
    Mutant(
        RESULTS,
        "(measures[metric](record) or 0.0) * 1000 <= limit_ms",
        "(measures[metric](record) or 0.0) * 1000 < limit_ms",
        "a request that takes exactly as long as its objective is not good",
        RESULT_TESTS,
    ),
    Mutant(
        RESULTS,
        "partial.write_bytes(msgspec.json.encode(self))",
        "path.write_bytes(msgspec.json.encode(self))",
        "a run that cannot be saved destroys the earlier one",
        RESULT_TESTS,
    ),
    Mutant(
        SIMULATOR,
        "            end += self._spill.take_spent_s()\n",
        "            self._spill.take_spent_s()\n",
        "a simulated disk takes no time",
        SIMULATOR_TESTS,
    ),
    Mutant(
        SIMULATOR,
        "len(plan.sequences) * self._sequence_s",
        "self._sequence_s",
        "the simulated time between steps does not grow with the sequences",
        SIMULATOR_TESTS,
    ),
    Mutant(
        SIMULATOR,
        "if arrival.prompt_tokens + arrival.output_tokens > self._max_model_len",
        "if arrival.prompt_tokens > self._max_model_len",
        "requests whose output exceeds the context are served in the simulation",
        SIMULATOR_TESTS,
    ),
]
