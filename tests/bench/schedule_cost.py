"""Measure what scheduling costs: microseconds per running sequence and step, of `schedule` and of `commit`.

    python tests/bench/schedule_cost.py [--sequences 32,256] [--steps 300]

Runs the real scheduler and pager without kernels: every sequence decodes one token in every step. Full pages, their
publication and the training of the cost model are included in the means. There are seven tenants.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from quire.pager import Pager
from quire.scheduler import (
    CostModel,
    Fair,
    FirstComeFirstServed,
    LatencyBudget,
    Policy,
    Request,
    RequestSpec,
    SampledToken,
    Scheduler,
    SchedulerConfig,
    StepResult,
)

PAGE_SIZE = 32
PROMPT_TOKENS = 100
STEP_S = 0.05


def measure(count: int, steps: int, policy: Policy, windows: Sequence[int]) -> str:
    pager = Pager(PAGE_SIZE, len(windows) * count * ((PROMPT_TOKENS + steps) // PAGE_SIZE + 2), windows=windows)
    cost = CostModel()
    scheduler = Scheduler(
        pager,
        LatencyBudget(cost, 10.0, PROMPT_TOKENS * count),
        SchedulerConfig(max_num_seqs=count, max_num_waiting=count),
        cost=cost,
        policy=policy,
    )
    for number in range(count):
        prompt = [(number * 7 + place) % 1000 for place in range(PROMPT_TOKENS)]
        scheduler.add(Request(RequestSpec(number, prompt, max_tokens=steps, tenant=str(number % 7))))
    schedule_s = []
    commit_s = []
    while (started := time.perf_counter()) and (plan := scheduler.schedule()) is not None:
        planned = time.perf_counter()
        sampled = tuple(SampledToken(row.request_id, 5) for row in plan.sequences if row.num_samples)
        result = StepResult(plan.step_id, sampled, STEP_S)
        computed = time.perf_counter()
        scheduler.commit(result)
        if plan.num_decode_rows == count:
            schedule_s.append(planned - started)
            commit_s.append(time.perf_counter() - computed)
    both = [a + b for a, b in zip(schedule_s, commit_s, strict=True)]
    to_us = 1e6 / count
    return (
        f"{count:4d} sequences, {type(policy).__name__:<20} windows {tuple(windows)!s:<14}"
        f"schedule {statistics.median(schedule_s) * to_us:5.2f}  commit {statistics.median(commit_s) * to_us:5.2f}  "
        f"both, mean {statistics.mean(both) * to_us:5.2f}  worst step {max(both) * to_us:6.2f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="32,256")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    for count in map(int, arguments.sequences.split(",")):
        for policy in (FirstComeFirstServed(), Fair()):
            print(measure(count, arguments.steps, policy, (0,)), flush=True)
        print(measure(count, arguments.steps, FirstComeFirstServed(), (0, 64, 64)), flush=True)


if __name__ == "__main__":
    main()
