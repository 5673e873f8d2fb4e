"""The output of `quire bench`: tables that fit 100 columns, or one dict with the same figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...model.runner import describe_choices
from .overhead import USERS, StepOverhead
from .roofline import DTYPES, PEAK_NAMES, Roofline
from .speed import Phase, ShapeResult


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The results of all shapes."""

    about: dict[str, Any]  # model, weights, kv_cache_dtype, isa, threads, tuned
    results: list[ShapeResult]
    overhead: StepOverhead

    def as_dict(self) -> dict[str, Any]:
        """Return the figures: rates per second, times in seconds, shares from 0 to 1, the overhead in microseconds."""
        return {
            **self.about,
            "shapes": [shape_as_dict(result) for result in self.results],
            "step_overhead_us_per_sequence": self.overhead.as_dict(),
        }

    @property
    def title(self) -> str:
        about = self.about
        dtypes = f"weights {about['weights']}, KV {about['kv_cache_dtype']}"
        return f"{about['model']}: {dtypes}, {about['isa']}, {about['threads']} threads"

    def print(self) -> None:
        console = Console(width=100, highlight=False)
        console.print(self.title)
        console.print(describe_choices(self.about["tuned"]))
        console.print(self._roofline_text())
        console.print(self._speed_table())
        console.print(self._split_table())
        console.print(self._overhead_text())

    def _roofline_text(self) -> str:
        rooflines = [result.roofline for result in self.results]
        reads = range_text([each.read_bytes_per_s / 1e9 for each in rooflines], ".1f")
        peaks = ", ".join(
            f"{PEAK_NAMES[dtype]} {range_text([each.peak_ops_per_s[dtype] / 1e9 for each in rooflines], '.0f')}"
            for dtype in DTYPES
        )
        return f"this machine during the run: {reads} GB/s read; GOP/s {peaks}\n"

    def _speed_table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title="speed", title_justify="left", title_style="bold")
        for column in (
            "users x prompt",
            "prefill\ntok/s",
            "share of\npeak",
            "decode\ntok/s",
            "step\nms",
            "share of read\nbandwidth",
            "attention reads\nKV, GB/s",
        ):
            table.add_column(column, justify="right")
        has_states = any(result.decode.work.state_bytes for result in self.results)
        if has_states:
            table.add_column("recurrence\nstates, GB/s", justify="right")
        for result in self.results:
            prefill = result.prefill
            decode = result.decode
            table.add_row(
                str(result.shape),
                f"{prefill.tokens_per_s:,.1f}",
                f"{prefill.share_of_peak(result.roofline):.0%}",
                f"{decode.tokens_per_s:,.1f}",
                f"{decode.step_s * 1000:.2f}",
                f"{decode.share_of_bandwidth(result.roofline):.0%}",
                f"{decode.kv_bytes_per_s / 1e9:.1f}",
                *([f"{decode.state_bytes_per_s / 1e9:.1f}"] if has_states else []),
            )
        return table

    def _split_table(self) -> Table:
        """Return the table of seconds by kind of op (rows) and shape (columns)."""
        table = Table(
            box=box.SIMPLE_HEAD, title="time by op, % of prefill | decode", title_justify="left", title_style="bold"
        )
        table.add_column("")
        for result in self.results:
            table.add_column(str(result.shape), justify="right")
        names = {
            name: None for result in self.results for name in (*result.prefill.op_seconds, *result.decode.op_seconds)
        }
        for name in names:
            table.add_row(name, *(_pair(result, name) for result in self.results))
        table.add_row("between ops and steps", *(_pair(result, None) for result in self.results))
        return table

    def _overhead_text(self) -> str:
        overhead = self.overhead
        return (
            f"step overhead, {USERS} users of the bundled model: {overhead.event_loop:.1f} µs per running sequence\n"
            f"(schedule {overhead.schedule:.1f}, commit {overhead.commit:.1f}, publish {overhead.publish:.1f}, "
            f"frames {overhead.frames:.1f});\n"
            f"besides, the executor's arrays {overhead.arrays:.1f} and waiting for its thread {overhead.waiting:.1f}"
        )


def range_text(values: list[float], digits: str) -> str:
    """Return the lowest and the highest value, or one number if both look the same."""
    low, high = format(min(values), digits), format(max(values), digits)
    return low if low == high else f"{low}–{high}"


def _pair(result: ShapeResult, name: str | None) -> str:
    return " | ".join(f"{_share(phase, name):4.1f}" for phase in (result.prefill, result.decode))


def _share(phase: Phase, name: str | None) -> float:
    """Return the percentage of a phase spent in ops of that name; without a name, outside all ops."""
    in_ops = sum(phase.op_seconds.values())
    seconds = phase.seconds - in_ops if name is None else phase.op_seconds.get(name, 0.0)
    return 100 * seconds / phase.seconds


def shape_as_dict(result: ShapeResult) -> dict[str, Any]:
    """Return the figures of one shape, with the units of `SpeedReport.as_dict`."""
    return {
        "shape": str(result.shape),
        "batch": result.shape.batch,
        "prompt_tokens": result.shape.prompt_tokens,
        "roofline": _roofline_as_dict(result.roofline),
        "prefill": _phase_as_dict(result.prefill, result.roofline),
        "decode": _phase_as_dict(result.decode, result.roofline),
    }


def _roofline_as_dict(roofline: Roofline) -> dict[str, Any]:
    return {"read_bytes_per_s": roofline.read_bytes_per_s, "peak_ops_per_s": dict(roofline.peak_ops_per_s)}


def _phase_as_dict(phase: Phase, roofline: Roofline) -> dict[str, Any]:
    return {
        "tokens": phase.tokens,
        "seconds": phase.seconds,
        "steps": phase.steps,
        "tokens_per_s": phase.tokens_per_s,
        "weight_bytes": phase.work.weight_bytes,
        "kv_bytes": phase.work.kv_bytes,
        "state_bytes": phase.work.state_bytes,
        "kv_bytes_per_s_of_attention": phase.kv_bytes_per_s,
        "state_bytes_per_s_of_recurrence": phase.state_bytes_per_s,
        "ops": phase.work.ops,
        "share_of_peak": phase.share_of_peak(roofline),
        "share_of_bandwidth": phase.share_of_bandwidth(roofline),
        "op_seconds": phase.op_seconds,
    }
