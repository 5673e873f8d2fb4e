"""`quire loadtest`: put a server under load; print its clients' latencies, write vLLM's JSON and a report.

Every option is checked before the first request is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import Parameter

from ..common.errors import ConfigError, Unavailable
from ..tools.checks import parse_goodput
from ..tools.loadtest.console import lateness, print_result, print_sweep, shown_progress
from ..tools.loadtest.load import PreparedLoad, make_load
from ..tools.loadtest.options import (
    FIXED_OUTPUT,
    ClientBehavior,
    DatasetOptions,
    LoadOptions,
    Pacing,
    SamplingOptions,
    TargetOptions,
    check_load,
    check_target,
)
from ..tools.loadtest.report import check_report, write_report
from ..tools.loadtest.results import (
    GOODPUT_METRICS,
    METRICS,
    QUEUE_METRICS,
    LoadTestRun,
    RunOptions,
    summarize,
    without_details,
)
from ..tools.loadtest.sender import LoadProgress, SendResult, send_closed_loop, send_open_loop
from ..tools.loadtest.server_metrics import sample_metrics
from ..tools.loadtest.sweep import LoadPoint, SweepFolder, parse_sweep, run_sweep
from ..tools.loadtest.target import OpenTarget, given_address, open_target
from .local_server import local_server

GOODPUT_HELP = "Milliseconds within which a request counts as good, such as ttft:2000 tpot:200; of ttft, tpot and e2el."
METADATA_HELP = "KEY=VALUE pairs that are copied to the result."


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The report and its destination; each field is followed by its help text."""

    percentile_metrics: str = ",".join(METRICS)
    "Metrics to print: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue."
    metric_percentiles: str = "50,90,99"
    "Percentiles of those metrics."
    disable_tqdm: bool = False
    "Show no progress."
    label: str | None = None
    "Name of the result. Default: the backend."
    save_result: bool = False
    "Write a JSON file with the keys of `vllm bench serve`, and Quire's own under x_quire."
    save_detailed: bool = False
    "Include every request in that file."
    result_dir: Path | None = None
    "Folder of the result file. Default: the current one."
    result_filename: str | None = None
    "Name of that file. Default: made of label, rate, model and time."
    report: Path | None = None
    "Write a page of charts to this .html file."
    sweep: str | None = None
    "Several runs: request rates such as 1,2,4,inf, or concurrency:1,8,32."
    sweep_dir: Path | None = None
    "Keep each run in this folder, so that an interrupted sweep continues where it stopped."
    metrics_url: str | None = None
    "The server's /metrics, sampled during the run. Default: that of the server started here."


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """All options of one load test."""

    target: TargetOptions = field(default_factory=TargetOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    goodput: tuple[str, ...] = ()  # ttft:2000 tpot:200
    metadata: tuple[str, ...] = ()  # KEY=VALUE


def loadtest(
    *,
    target: Annotated[TargetOptions | None, Parameter(name="*", group="Server under load", negative="")] = None,
    dataset: Annotated[DatasetOptions | None, Parameter(name="*", group="Requests", negative="")] = None,
    pacing: Annotated[Pacing | None, Parameter(name="*", group="When they are sent")] = None,
    behavior: Annotated[ClientBehavior | None, Parameter(name="*", group="How clients behave")] = None,
    sampling: Annotated[SamplingOptions | None, Parameter(name="*", group="Sampling", negative="")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*", group="Results", negative="")] = None,
    goodput: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, negative="", group="Results", help=GOODPUT_HELP)
    ] = (),
    metadata: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, negative="", group="Results", help=METADATA_HELP)
    ] = (),
) -> None:
    """Run a load test. Raises ConfigError before anything is sent, and Unavailable if no request succeeded."""
    load = LoadOptions(
        dataset=dataset or DatasetOptions(), pacing=pacing or Pacing(), behavior=behavior or ClientBehavior()
    )
    test = LoadTest(
        target=target or TargetOptions(),
        sampling=sampling or SamplingOptions(),
        load=load,
        output=output or OutputOptions(),
        goodput=goodput,
        metadata=metadata,
    )
    parsed = _ParsedOptions.of(test)
    runs = uvloop.run(_loadtest(test, parsed))
    for run in runs if parsed.points else ():  # a single run prints the warning above its results
        if (warning := lateness(run.summary, parsed.percentiles)) is not None:
            sys.stdout.flush()
            print(f"quire: warning: at {run.label}, {warning}", file=sys.stderr)
    if test.output.report is not None:
        write_report(test.output.report, runs)
    if not any(run.summary["completed"] for run in runs):
        errors = [record.error for run in runs for record in run.records if record.error]
        raise Unavailable(f"no request succeeded; the first failed with: {errors[0]}" if errors else "nothing was sent")


@dataclass(frozen=True, slots=True)
class _ParsedOptions:
    """Options that flags give as text, parsed."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: dict[str, float]
    metadata: dict[str, str]
    points: tuple[LoadPoint, ...]

    @classmethod
    def of(cls, test: LoadTest) -> _ParsedOptions:
        check_target(test.target)
        check_load(test.load)
        if test.output.report is not None:
            check_report(test.output.report)
        if test.output.sweep is None and test.output.sweep_dir is not None:
            raise ConfigError("--sweep-dir is where a --sweep keeps its runs")
        return cls(
            _metrics(test.output.percentile_metrics),
            _percentiles(test.output.metric_percentiles),
            parse_goodput(test.goodput, GOODPUT_METRICS),
            _metadata(test.metadata),
            () if test.output.sweep is None else parse_sweep(test.output.sweep),
        )


async def _loadtest(test: LoadTest, parsed: _ParsedOptions) -> list[LoadTestRun]:
    async with _reachable(test) as (test, address):
        ignore_eos = test.load.dataset.dataset_name in FIXED_OUTPUT
        async with open_target(test.target, test.sampling, address, ignore_eos=ignore_eos) as target:
            if not parsed.points:
                return [await _run(test, parsed, target, test.output.label or test.target.backend)]

            async def run_point(point: LoadPoint) -> LoadTestRun:
                _say(test, f"sweep, {parsed.points.index(point) + 1} of {len(parsed.points)}: {point.label}")
                run = await _run(_at_load(test, point), parsed, target, point.label)
                figures = "{completed:,} ok, {failed:,} failed, {output_throughput:,.1f} tokens/s"
                _say(test, f"  {figures.format_map(run.summary)} in {run.summary['duration']:.1f} s")
                return run

            runs = await run_sweep(parsed.points, run_point, _folder(test))
            print_sweep(runs, parsed.metrics, parsed.percentiles)
            return runs


@contextlib.asynccontextmanager
async def _reachable(test: LoadTest) -> AsyncIterator[tuple[LoadTest, str]]:
    """Yield the test and the server's address; start a server if the test names none."""
    address = given_address(test.target)
    if address is not None:
        yield test, address
        return
    async with local_server() as server:
        output = replace(test.output, metrics_url=test.output.metrics_url or server.metrics_url)
        yield replace(test, output=output), server.address


def _at_load(test: LoadTest, point: LoadPoint) -> LoadTest:
    pacing = test.load.pacing
    if point.kind == "rate":
        pacing = replace(pacing, request_rate=point.load)
    else:
        pacing = replace(pacing, max_concurrency=int(point.load))
    output = test.output
    name = test.output.result_filename
    if name is not None:  # one file per run
        output = replace(output, result_filename=f"{Path(name).stem}-{point.file_name}")
    return replace(test, load=replace(test.load, pacing=pacing), output=output)


def _folder(test: LoadTest) -> SweepFolder | None:
    """Return the folder of the sweep, which identifies runs by all options except the output's and the token."""
    if test.output.sweep_dir is None:
        return None
    settings = {"load": asdict(test.load), "sampling": asdict(test.sampling), "target": asdict(test.target)}
    del settings["target"]["token"]
    return SweepFolder(test.output.sweep_dir, settings)


async def _run(test: LoadTest, parsed: _ParsedOptions, target: OpenTarget, label: str) -> LoadTestRun:
    """Run one load: warm up, send the requests, save the result, and print it unless it is part of a sweep."""
    load = await asyncio.to_thread(make_load, test.load, target.vocabulary)  # slow: it reads files
    await _warm_up(target, load)
    progress = LoadProgress()
    async with sample_metrics(test.output.metrics_url) as metrics:
        with shown_progress(progress, quiet=test.output.disable_tqdm):
            sent = await _send(test, target, load, progress)
    summary = summarize(sent.records, _run_options(test, parsed, target, sent, metrics.server))
    if not parsed.points:
        print_result(summary, parsed.metrics, parsed.percentiles)
    _save(test, summary)
    return LoadTestRun(label=label, started_s=sent.started_s, summary=summary, records=sent.records, metrics=metrics)


def _say(test: LoadTest, line: str) -> None:
    """Print a line of progress, even if the output is not a terminal."""
    if not test.output.disable_tqdm:
        print(line, file=sys.stderr, flush=True)


async def _warm_up(target: OpenTarget, load: PreparedLoad) -> None:
    if not load.warmups:
        return
    warmed = await send_closed_loop(target.backend, load.warmups, LoadProgress(), max_concurrency=1)
    for record in warmed.records:
        if record.error is not None:
            raise Unavailable(f"a warm-up request failed with {record.error_code}: {record.error}")


async def _send(test: LoadTest, target: OpenTarget, load: PreparedLoad, progress: LoadProgress) -> SendResult:
    pacing = test.load.pacing
    if load.times is not None:
        progress.total = len(load.times)
        requests = list(load.requests)
        return await send_open_loop(
            target.backend, requests, load.times, progress, max_concurrency=pacing.max_concurrency
        )
    assert pacing.max_concurrency is not None, "a closed loop has a concurrency"
    progress.total = test.load.dataset.num_prompts
    return await send_closed_loop(
        target.backend, load.requests, progress, max_concurrency=pacing.max_concurrency, duration_s=pacing.duration
    )


def _run_options(
    test: LoadTest, parsed: _ParsedOptions, target: OpenTarget, sent: SendResult, server: dict[str, str]
) -> RunOptions:
    tokenizer = test.target.tokenizer
    return RunOptions(
        backend=test.target.backend,
        duration_s=sent.duration_s,
        model_id=target.model_id,
        num_prompts=test.load.dataset.num_prompts or len(sent.records),
        label=test.output.label,
        tokenizer_id=None if tokenizer is None else str(tokenizer),
        pacing=test.load.pacing,
        percentile_metrics=parsed.metrics,
        metric_percentiles=parsed.percentiles,
        goodput=parsed.goodput,
        metadata=parsed.metadata,
        generator_delays_s=sent.generator_delays_s,
        extra={
            "dataset": test.load.dataset.dataset_name,
            "seed": test.load.dataset.seed,
            "server": server,
            "task": test.target.task,
        },
    )


def _save(test: LoadTest, summary: dict[str, Any]) -> None:
    """Write the result if an option asks for it. Raises ConfigError if it cannot be written."""
    if not test.output.save_result:
        return
    folder = test.output.result_dir or Path()
    path = folder / (test.output.result_filename or _file_name(test, summary))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary if test.output.save_detailed else without_details(summary)))
    except OSError as error:
        raise ConfigError(f"--save-result: {path} cannot be written: {error.strerror or error}") from error
    print(f"saved {path}")


def _file_name(test: LoadTest, summary: dict[str, Any]) -> str:
    """Return the name that vLLM gives to a result."""
    pacing = test.load.pacing
    rate = f"{pacing.request_rate}qps"
    if pacing.ramp_up_strategy is not None:
        rate = f"ramp-up-{pacing.ramp_up_strategy}-{pacing.ramp_up_start_rps}qps-{pacing.ramp_up_end_rps}qps"
    concurrency = "" if pacing.max_concurrency is None else f"-concurrency{pacing.max_concurrency}"
    model = str(summary["model_id"]).rsplit("/", 1)[-1]
    return f"{test.output.label or test.target.backend}-{rate}{concurrency}-{model}-{summary['date']}.json"


def _metrics(text: str) -> tuple[str, ...]:
    allowed = (*METRICS, *QUEUE_METRICS)
    metrics = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in metrics if name not in allowed]:
        raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is not allowed; allowed: {', '.join(allowed)}")
    return metrics


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        percentiles = tuple(float(each) for each in text.split(","))
    except ValueError:
        percentiles = (-1.0,)
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise ConfigError(
            f"--metric-percentiles: {text!r} is not allowed; write numbers from 0 to 100 as in 50,90,99.9"
        )
    return percentiles


def _metadata(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--metadata: {pair!r} is not allowed; write KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
