"""Compare the figures of a load test with the known delays of a scripted server.

usage: harness_truth.py [--requests 300] [--rate 30] [--concurrency 16] [--seed 0]

The server (tests/runtime/tools/loadtest/fake_server.py) runs in a process of its own and records when every token
really left, so the differences are errors of the load test: socket, client, event loop, arithmetic. Prints them for
mean, p50, p90 and p99 of TTFT, TPOT, ITL and E2EL, for both backends, in an open and a closed loop, with the worst
error of a single request. Exit status 1 if a figure is wrong by more than 2 ms. On a busy machine run it at real-time
priority: `chrt --rr 10 python …`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import uvloop
from quire.runtime.tools.loadtest.latency import e2el_s, itls_s, tpot_s, ttft_s
from quire.runtime.tools.loadtest.openai_backend import OpenAIBackend, OpenAITarget
from quire.runtime.tools.loadtest.quire_backend import QuireBackend, QuireTarget
from quire.runtime.tools.loadtest.records import Backend, LoadRequest, RequestRecord
from quire.runtime.tools.loadtest.results import RunOptions, summarize
from quire.runtime.tools.loadtest.sender import LoadProgress, send_closed_loop, send_open_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "tools" / "loadtest"))
from fake_server import PROMPT_TOKENS, FakeServer, Script, fake_server, known_ms

LIMIT_MS = 2.0
PERCENTILES = (50, 90, 99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=30, help="requests per second, open loop")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time, closed loop")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    worst = 0.0
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "worst one")
    print(f"{'ms: reported - true':24}" + "".join(f"{name:>12}" for name in columns))
    for protocol in ("quire", "openai"):
        for loop in ("open", "closed"):
            with fake_server(protocol, options.requests, options.seed) as server:
                records, result = uvloop.run(
                    measure(protocol, server, options.rate, options.concurrency, loop == "open")
                )
            late = server.lateness_ms
            print(
                f"{protocol}, {loop} loop; the server was late by {np.median(late):.3f} (median), {max(late):.3f} (max)"
            )
            worst = max(worst, compare(records, result, server.actual))
    print(f"largest error: {worst:.3f} ms; allowed: {LIMIT_MS:g} ms")
    sys.exit(worst > LIMIT_MS)


async def measure(
    protocol: str, server: FakeServer, rate: float, concurrency: int, is_open: bool
) -> tuple[list[RequestRecord], dict[str, float]]:
    backend: Backend
    if protocol == "quire":
        backend = await QuireBackend.open(QuireTarget(server.address))
    else:
        backend = await OpenAIBackend.open(OpenAITarget(f"http://{server.address}", num_connections=concurrency))
    requests = [
        LoadRequest(f"{index}", PROMPT_TOKENS, answer.num_tokens) for index, answer in enumerate(server.expected)
    ]
    try:
        if is_open:
            times = np.cumsum(np.random.default_rng(0).exponential(1 / rate, len(requests)))
            sent = await send_open_loop(backend, requests, list(times), LoadProgress())
        else:
            sent = await send_closed_loop(backend, requests, LoadProgress(), max_concurrency=concurrency)
    finally:
        await backend.close()
    options = RunOptions(backend=protocol, duration_s=sent.duration_s, metric_percentiles=PERCENTILES)
    result = summarize(sent.records, options)
    if result["completed"] != len(requests):
        raise SystemExit(f"only {result['completed']} of {len(requests)} requests were completed")
    return sent.records, result


def compare(records: list[RequestRecord], result: dict[str, float], answers: list[Script]) -> float:
    """Print the errors of all figures and return the largest one, in milliseconds."""
    worst = 0.0
    for metric, values in known_ms(answers).items():
        known = {"mean": float(np.mean(values))}
        known |= {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}
        errors = [result[f"{name}_{metric}_ms"] - value for name, value in known.items()]
        single = single_errors_ms(metric, records, answers)
        print(f"  {metric:22}" + "".join(f"{error:12.3f}" for error in (*errors, max(single, key=abs))))
        worst = max(worst, *map(abs, errors))
    return worst


def single_errors_ms(metric: str, records: list[RequestRecord], answers: list[Script]) -> list[float]:
    """Return the error of each request, or of each gap between tokens."""
    measure = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s, "itl": itls_s}[metric]
    found = np.hstack([measure(record) for record in records])
    return list(1000 * found - known_ms(answers)[metric])


if __name__ == "__main__":
    main()
