"""The choice of functions by measurement: the level whose code runs an op, by kind, dtype and class of row counts.

All levels compute the same bits outside of bf16, so one program may mix them, and speed alone decides. The ops of a
loaded program are timed with its weights and workers. A lower level replaces the program's own if it wins by a margin.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....kernels import Program, supported_levels
from ....kernels.isa import EQUAL_FUNCTIONS, NAMES, row_class
from ....kernels.ops import (
    Attention,
    EphemeralAttention,
    ExpertLinear,
    Gather,
    HeadLinear,
    LatentAttention,
    Linear,
    Op,
    PoolRows,
    head_groups,
)

Choices = Mapping[str, str]  # name of a function -> level
Times = dict[str, list[float]]  # level -> seconds of each round

NEVER_CHOSEN = ("scalar", "amx-twin")  # levels for tests, or for machines that have no other
WINNING_SHARE = 0.95  # most of the own level's time that a level may take to replace the own level
SLOW = 1.5  # multiple of the own level's time; a level that takes more is not measured again, nor with more rows
LEAST_ROUNDS = 3  # rounds that a decision needs
ATTENTION_ROWS = 64  # most rows of a call of attention


@dataclass(frozen=True, slots=True)
class Trial:
    """A step whose ops are timed."""

    rows: int  # rows of its linear layers
    queries: int  # rows of each sequence
    run: Callable[[int, int], None]  # runs the ops [first, end) of the step


@dataclass(frozen=True, slots=True)
class Effort:
    """The time that tuning may take."""

    rounds: int  # rounds of each trial
    seconds: float  # seconds of all trials
    slow: float = SLOW


def rivals_of(isa: str) -> tuple[str, ...]:
    """Return the levels below a level whose functions its programs may run, the highest first."""
    if isa in NEVER_CHOSEN:
        return ()
    below = NAMES[: NAMES.index(isa)]
    return tuple(level for level in reversed(supported_levels()) if level in below and level not in NEVER_CHOSEN)


def fastest_functions(
    program: Program, ops: Sequence[Op], kv_dtype: str, trials: Sequence[Trial], isa: str, effort: Effort
) -> dict[str, str]:
    """Return the functions that are faster at a level below `isa`, with that level.

    A function without enough rounds when the time is over stays with its level.
    """
    measured = time_functions(program, ops, kv_dtype, trials, [isa, *rivals_of(isa)], effort)
    decisions = {name: _fastest_level(trials_of, isa) for name, trials_of in measured.items()}
    return {name: level for name, level in decisions.items() if level != isa}


def time_functions(
    program: Program, ops: Sequence[Op], kv_dtype: str, trials: Sequence[Trial], levels: list[str], effort: Effort
) -> dict[str, list[Times]]:
    """Return the seconds of each function in one layer at each level, by trial. The first level is the program's own.

    The program then has no choices and no times of ops.
    """
    layers = layers_of(ops)
    deadline = time.perf_counter() + effort.seconds
    measured: dict[str, list[Times]] = defaultdict(list)
    for trial in trials:
        names = function_names(ops, kv_dtype, trial)
        if names:
            for name, times in _time_trial(program, trial, layers, names, levels, effort, deadline).items():
                measured[name].append(times)
    program.choose({})
    program.op_seconds()  # resets the times for later readers
    return measured


def layers_of(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """Return the ranges of ops from one attention to the next, of the layers that have the most frequent shape."""
    attention = Attention, LatentAttention, EphemeralAttention
    starts = [index for index, op in enumerate(ops) if isinstance(op, attention)]
    if len(starts) == 1:
        last = next((i for i, op in enumerate(ops) if isinstance(op, (Gather, PoolRows))), len(ops))
        starts.append(max(last, starts[0] + 1))
    ranges = list(itertools.pairwise(starts))
    shapes = [tuple(map(describe_op, ops[first:end])) for first, end in ranges]
    usual = max(Counter(shapes).items(), key=lambda item: item[1], default=(None, 0))[0]
    return [place for place, shape in zip(ranges, shapes, strict=True) if shape == usual]


def describe_op(op: Op) -> str:
    """Return the kind of an op, and for linear layers and attention the sizes and dtypes that decide their speed."""
    kind = type(op).__name__.lower()
    if isinstance(op, (Attention, EphemeralAttention)):
        return f"{kind} {op.num_heads}/{op.num_kv_heads}x{op.head_dim}"
    if isinstance(op, LatentAttention):
        return f"{kind} {op.num_heads}x{op.rank}+{op.rotary_dim}"
    if isinstance(op, (Linear, ExpertLinear, HeadLinear)):
        weight = op.weight if isinstance(op, Linear) else op.weights[0]
        dtypes = "+".join(dict.fromkeys(dtype for _, dtype in weight.ranges))
        return f"{kind} {weight.out_features}x{weight.in_features} {dtypes}"
    return kind


def function_names(ops: Sequence[Op], kv_dtype: str, trial: Trial) -> dict[int, str]:
    """Return the functions of other levels that may compute ops of layers in a trial: index of the op -> name."""
    indices = [index for layer in layers_of(ops) for index in range(*layer)]
    names = {index: _name_of(ops[index], kv_dtype, trial) for index in indices}
    return {index: name for index, name in names.items() if name in EQUAL_FUNCTIONS}


def _name_of(op: Op, kv_dtype: str, trial: Trial) -> str:
    if isinstance(op, (Attention, LatentAttention, EphemeralAttention)):
        group = op.num_heads // (head_groups(op.num_heads) if isinstance(op, LatentAttention) else op.num_kv_heads)
        rows = min(trial.queries, max(1, ATTENTION_ROWS // group)) * group
        return f"attention {kv_dtype} {row_class(rows)}"
    if isinstance(op, (Linear, ExpertLinear, HeadLinear)):
        ranges = (op.weight if isinstance(op, Linear) else op.weights[0]).ranges
        dtypes = {dtype for _, dtype in ranges}
        return f"linear {dtypes.pop()} {row_class(trial.rows)}" if len(dtypes) == 1 else ""
    return ""


def _time_trial(
    program: Program,
    trial: Trial,
    layers: Sequence[tuple[int, int]],
    names: Mapping[int, str],
    levels: list[str],
    effort: Effort,
    deadline: float,
) -> dict[str, Times]:
    """Time the functions of a step at each level; each run takes the next layer, whose weights are in no cache.

    Removes slow levels from `levels`, whose first one is the program's own.
    """
    runs = 0
    least: dict[str, float] = {}
    times: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    trial.run(*layers[-1])
    for number in range(effort.rounds):
        for turn in range(len(levels)):
            if time.perf_counter() > deadline:
                return times
            level = levels[(number + turn) % len(levels)]
            program.choose(dict.fromkeys(names.values(), level))
            program.op_seconds()
            first, end = layers[runs % len(layers)]
            trial.run(first, end)
            runs += 1
            by_name = _by_name(program.op_seconds(), names, first, end)
            for name, seconds in by_name.items():
                times[name][level].append(seconds)
            least[level] = min(least.get(level, math.inf), sum(by_name.values()))
        if number > 0:
            levels[:] = [level for level in levels if least[level] <= effort.slow * least[levels[0]]]
    return times


def _by_name(op_seconds: Sequence[float], names: Mapping[int, str], first: int, end: int) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for index in range(first, end):
        if index in names:
            spent[names[index]] += op_seconds[index]
    return spent


def _fastest_level(trials: Sequence[Times], isa: str) -> str:
    """Return the level that is fastest over all trials of a function, in its medians and in its fastest rounds."""
    finished = [times for times in trials if len(times[isa]) >= LEAST_ROUNDS]  # The time was over in other trials.
    winners = [level for level in sorted(set().union(*finished)) if _wins(finished, level, isa)]
    return min(winners, key=lambda level: _sum(finished, level, statistics.median), default=isa)


def _wins(trials: Sequence[Times], level: str, isa: str) -> bool:
    """Return whether a level was measured in all trials and is faster than the own level by the margin."""
    if level == isa or any(len(times.get(level, ())) < LEAST_ROUNDS for times in trials):
        return False
    return all(_sum(trials, level, of) <= WINNING_SHARE * _sum(trials, isa, of) for of in (statistics.median, min))


def _sum(trials: Sequence[Times], level: str, of: Callable[[Sequence[float]], float]) -> float:
    return sum(of(times[level]) for times in trials)
