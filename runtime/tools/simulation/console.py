"""The output of `quire simulate`: tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..percentiles import LatencySummary
from .report import FleetFigures, SimulationReport


def print_report(about: Mapping[str, Any], report: SimulationReport) -> None:
    """Print the figures of a simulation. `about`: model, weights, kv_cache_dtype, pool, limits and roofline."""
    console = Console(width=100, highlight=False)
    console.print(_about_text(about))
    console.print(_latency_table(report))
    if len(report.tenants) > 1:
        console.print(_tenant_table(report))
    console.print("\n".join(_figures(report)))


def _about_text(about: Mapping[str, Any]) -> str:
    return (
        f"{about['model']}: weights {about['weights']}, KV {about['kv_cache_dtype']}, "
        f"{about['pages']:,} pages of {about['page_size']} tokens, {about['memory_bytes']:,} bytes in total\n"
        f"on a machine that reads {about['read_bytes_per_s'] / 1e9:.1f} GB/s and computes "
        f"{about['peak_ops_per_s']['q8'] / 1e9:.0f} int8 GOP/s with {about['threads']} threads\n"
    )


def _latency_table(report: SimulationReport) -> Table:
    table = _table("milliseconds", ("", "mean", "p50", "p90", "p95", "p99", "max"))
    for name, values in (
        ("queue", report.queue_ms),
        ("time to first token", report.ttft_ms),
        ("inter-token latency", report.itl_ms),
        ("time per output token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    ):
        table.add_row(name, *_cells(values))
    return table


def _tenant_table(report: SimulationReport) -> Table:
    columns = ("tenant", "offered", "finished", "tokens served", "TTFT p50", "TTFT p99")
    table = _table("tenants", columns)
    for name, tenant in report.tenants.items():
        ttft = tenant.ttft_ms
        table.add_row(
            name,
            f"{tenant.offered:,}",
            f"{tenant.finished:,}",
            f"{tenant.served_tokens:,}",
            "–" if ttft is None else f"{ttft.p50:,.0f}",
            "–" if ttft is None else f"{ttft.p99:,.0f}",
        )
    return table


def _figures(report: SimulationReport) -> list[str]:
    refused = ", ".join(f"{count:,} {reason}" for reason, count in report.refused.items()) or "none"
    lines = [
        f"requests    {report.offered:,} in {report.duration_s:,.1f} s, {report.finished:,} finished; "
        f"refused: {refused}",
        f"throughput  {report.request_throughput:.2f} requests/s, {report.output_throughput:,.1f} output tokens/s, "
        f"{report.total_throughput:,.1f} tokens/s with prompts",
        f"KV pool     mean {report.pool_mean:.0%}, max {report.pool_max:.0%} in use; "
        f"{report.cached_share:.1%} of prompt tokens cached; at most {report.most_waiting:,} waiting",
        f"preemption  {report.preemptions:,} times, {report.spilled:,} of them spilled; "
        f"{report.wasted_share:.1%} of the tokens recomputed",
    ]
    if report.objectives:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in report.objectives.items())
        lines.insert(2, f"goodput     {report.goodput:.2f} requests/s, {report.goodput_share:.1%} within {limits}")
    if report.fleet is not None:
        lines += _fleet_lines(report.fleet)
    if len(report.tenants) > 1:
        lines.append(f"fairness    {report.fairness:.3f} (Jain's index of service relative to fair shares)")
    return lines


def _fleet_lines(fleet: FleetFigures) -> list[str]:
    lines = [
        f"hosts       {fleet.hosts:,} behind {fleet.api_servers:,} API servers, routing {fleet.routing}: "
        f"{fleet.fewest_requests:,} to {fleet.most_requests:,} requests each, mean {fleet.mean_requests:,.1f}",
        f"            one cache for all of them would have {fleet.ideal_cached_share:.1%} of prompt tokens",
    ]
    if fleet.lost_hosts:
        lines.append(
            f"losses      {fleet.lost_hosts:,} hosts lost, {fleet.moved_requests:,} requests continued on others"
        )
    return lines


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _cells(values: LatencySummary | None) -> list[str]:
    if values is None:
        return ["–"] * 6
    return [f"{value:,.1f}" for value in (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)]
