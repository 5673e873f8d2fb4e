"""A sweep over thread counts: the counts, the tables and the ratios, from given measurements."""

from __future__ import annotations

import re
from typing import Any

import pytest
from quire.kernels import supported_levels
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.bench.roofline import Roofline
from quire.runtime.tools.bench.speed import Phase, Shape, ShapeResult
from quire.runtime.tools.bench.thread_sweep import ThreadResult, ThreadSweep, least_op_seconds, parse_thread_counts
from quire.runtime.tools.bench.work import Work

ABOUT = {"model": "toy", "weights": "q8", "kv_cache_dtype": "int8", "isa": "avx2"}


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (96, [1, 2, 4, 8, 16, 32, 64, 96])],
)
def test_without_values_the_counts_double_up_to_the_cpus(cpus: int, counts: list[int]) -> None:
    assert parse_thread_counts((), cpus) == counts


def test_values_are_separated_by_commas_or_spaces_sorted_and_unique() -> None:
    assert parse_thread_counts(("4,1", "2", "4"), 2) == [1, 2, 4]


@pytest.mark.parametrize("value", ["0", "1,", "-2", "two", "1.5", "1025", "٣"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"threads_sweep: {value!r}")):
        parse_thread_counts((value,), 2)


def test_a_number_of_any_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"threads_sweep: '{'9' * 80}' is not allowed"):
        parse_thread_counts(("9" * 5000,), 2)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_least_op_takes_time_on_any_number_of_threads(threads: int) -> None:
    assert least_op_seconds(threads, supported_levels()[0]) > 0


def measured(threads: int, prefill_s: float, decode_s: float) -> ThreadResult:
    work = Work(3_000_000, 1_000_000, {"q8": 8_000_000})

    def phase(tokens: int, seconds: float) -> Phase:
        return Phase(tokens, seconds, 4, {"attention": seconds / 2}, work)

    roofline = Roofline(threads * 1e9, {"q8": threads * 4e9, "bf16": threads * 2e9, "f32": threads * 1e9})
    shapes = [
        ShapeResult(Shape(batch, 16), phase(16 * batch, prefill_s), phase(4 * batch, decode_s), roofline)
        for batch in (1, 8)
    ]
    return ThreadResult(threads, threads * 1e-7, shapes)


@pytest.fixture
def sweep() -> ThreadSweep:
    return ThreadSweep(ABOUT, [measured(1, 0.8, 0.4), measured(2, 0.4, 0.25), measured(128, 0.2, 0.4)])


def test_ratios_are_to_the_fewest_threads_and_shares_to_the_roofline_of_the_same_count(sweep: ThreadSweep) -> None:
    report: dict[str, Any] = sweep.as_dict()
    assert {name: report[name] for name in ABOUT} == ABOUT
    assert [row["threads"] for row in report["thread_counts"]] == [1, 2, 128]
    assert [row["least_op_s"] for row in report["thread_counts"]] == [1e-7, 2e-7, 128e-7]
    two = report["thread_counts"][1]["shapes"][1]
    assert (two["shape"], two["prefill"]["tokens_per_s"]) == ("8x16", 320)
    assert two["prefill"]["ratio_to_fewest_threads"] == pytest.approx(2.0)
    assert two["decode"]["ratio_to_fewest_threads"] == pytest.approx(1.6)
    assert two["prefill"]["share_of_peak"] == pytest.approx(8e6 / 8e9 / 0.4)
    assert two["decode"]["share_of_bandwidth"] == pytest.approx(4e6 / 2e9 / 0.25)


def test_the_tables_show_every_count_and_fit_100_columns(
    sweep: ThreadSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    for threads, least_op, ratio in (("1", "0.10", "1.00x"), ("2", "0.20", "2.00x"), ("128", "12.80", "4.00x")):
        assert any(line.split()[:1] == [threads] and least_op in line for line in lines)
        assert any(line.split()[:2] == [threads, "8x16"] and ratio in line for line in lines)
