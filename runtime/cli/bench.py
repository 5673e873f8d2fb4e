"""`quire bench`: measure speed by shape and its share of the roofline, or the gain of the KV cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from ...kernels import available_cpus
from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..llm import LLM
from ..model import model_path, read_spec, weights_text
from ..model.encoder import is_encoder
from ..model.runner import pick_cpus, pick_isa
from ..tools.bench import (
    CacheComparison,
    compare_cache,
    measure_embedding,
    measure_overhead,
    measure_shapes,
    parse_shapes,
)
from ..tools.bench.console import SpeedReport
from ..tools.bench.machine import measure_machine
from ..tools.bench.plot import plot_cache_comparison, plot_roofline
from ..tools.bench.speed import Shape, bench_config
from ..tools.bench.thread_sweep import ThreadResult, ThreadSweep, least_op_seconds, parse_thread_counts
from ..tools.plotting import check_plot
from .flags import (
    Json,
    MemoryFlags,
    ModelFolder,
    SchedulingFlags,
    refuse_flags,
    settings_from,
    warn_of_ignored,
)
from .interrupts import leaving_at_once

SET_BY_SHAPES = ("max_model_len", "max_num_seqs", "enable_prefix_caching", "max_num_waiting")  # see `bench_config`
DEFAULT_SHAPES = "1x128,8x128,32x128"
DEFAULT_NEW_TOKENS = 32
DEFAULT_REPEATS = 3
THREADS_SWEEP = Parameter(
    consume_multiple=True,
    negative="",
    help="Measure on each of these thread counts, such as 1,2,4. Without values: 1, 2, 4 and so on up to the CPUs.",
)


def bench(
    model: ModelFolder = None,
    /,
    *,
    task: Annotated[
        Literal["generate", "embed"], Parameter(help="What is measured: generated text, or vectors of texts.")
    ] = "generate",
    shapes: Annotated[
        str,
        Parameter(help="Users x prompt tokens of each measurement; for embed, texts x tokens."),
    ] = DEFAULT_SHAPES,
    new_tokens: Annotated[
        int | None, Parameter(help=f"Tokens to generate per user. Default: {DEFAULT_NEW_TOKENS}.")
    ] = None,
    repeats: Annotated[int | None, Parameter(help=f"Runs of each measurement. Default: {DEFAULT_REPEATS}.")] = None,
    threads_sweep: Annotated[tuple[str, ...] | None, THREADS_SWEEP] = None,
    json: Json = False,
    kv_cache: Annotated[
        bool,
        Parameter(negative="--no-kv-cache", help="Off: compare with a run that recomputes everything for each token."),
    ] = True,
    machine: Annotated[
        bool,
        Parameter(
            negative="",
            help="Measure this machine in some minutes: peaks, bandwidth, functions by level, and models with random "
            "weights. Takes json, threads, isa and tune.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, Parameter(help="Draw the results in this file: a roofline, or the runs of --no-kv-cache.")
    ] = None,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Measure and print. Raises ConfigError, ModelError or MissingDependency."""
    refuse_flags("bench", SET_BY_SHAPES, "shapes", memory, scheduling)
    if threads_sweep is not None:
        _check_sweep(kv_cache, plot, memory)
    if not kv_cache and (repeats is not None or not (shapes == DEFAULT_SHAPES or _is_one_prompt(shapes))):
        raise ConfigError("--no-kv-cache compares one run of one prompt: give --shapes 1xTOKENS and no --repeats")
    config = settings_from(model, memory, scheduling).engine
    if machine:
        if not (model is None and shapes == DEFAULT_SHAPES and task == "generate" and kv_cache) or any(
            given is not None for given in (new_tokens, repeats, threads_sweep, plot)
        ):
            raise ConfigError("--machine takes --json, --threads, --isa and --tune; leave out the other flags of bench")
        _bench_machine(config, json)
        return
    warn_of_ignored("bench", config, (*SET_BY_SHAPES, *(("threads",) if threads_sweep is not None else ())))
    if task == "embed" and not (threads_sweep is None and plot is None and kv_cache and new_tokens is None):
        raise ConfigError("task embed takes shapes, repeats and json; leave out the other flags of bench")
    new_tokens = DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens
    repeats = DEFAULT_REPEATS if repeats is None else repeats
    if task == "embed":
        _bench_embedding(config, _checked_shapes(shapes, new_tokens, repeats), repeats, json)
        return
    if is_encoder(model_path(config.model)):
        raise ConfigError("this model is an encoder, which generates no text; measure it with --task embed")
    if threads_sweep is not None:
        counts = parse_thread_counts(threads_sweep, available_cpus().threads)
        _bench_threads(config, counts, shapes, new_tokens, repeats, json)
    elif kv_cache:
        _bench_speed(config, shapes, new_tokens, repeats, json, plot)
    else:
        _bench_cache(config, shapes, new_tokens, json, plot)


def _bench_machine(config: EngineConfig, as_json: bool) -> None:
    engine = EngineConfig(threads=config.threads, isa=config.isa, tune=config.tune)
    with leaving_at_once():
        report = measure_machine(engine, show_progress)
    show_progress("")
    if as_json:
        print(dumps(report.as_dict(), indent=1))
    else:
        report.print()


def _check_sweep(kv_cache: bool, plot: Path | None, memory: Any) -> None:
    """Raise ConfigError for flags that a sweep over thread counts does not take."""
    if memory is not None and memory.threads is not None:
        raise ConfigError("threads cannot be given with --threads-sweep, which sets it")
    if not kv_cache:
        raise ConfigError("threads_sweep cannot be given with --no-kv-cache")
    if plot is not None:
        raise ConfigError("plot cannot be given with --threads-sweep")


def _is_one_prompt(shapes: str) -> bool:
    parsed = parse_shapes(shapes)
    return len(parsed) == 1 and parsed[0].batch == 1


def _checked_shapes(shapes: str, new_tokens: int, repeats: int) -> list[Shape]:
    if new_tokens < 1 or repeats < 1:
        raise ConfigError("--new-tokens and --repeats must be at least 1")
    return parse_shapes(shapes)


def _bench_threads(
    config: EngineConfig, counts: Sequence[int], shapes_text: str, new_tokens: int, repeats: int, as_json: bool
) -> None:
    """Measure every shape on each number of threads, with a separate engine."""
    shapes = _checked_shapes(shapes_text, new_tokens, repeats)
    results: list[ThreadResult] = []
    for threads in counts:
        with leaving_at_once():
            one = msgspec.structs.replace(config, threads=threads)
            loaded = LLM.from_config(bench_config(one, shapes, new_tokens))
        with loaded as llm:
            report = partial(_report_run, threads)
            measured = list(measure_shapes(llm, shapes, new_tokens, repeats, report))
        results.append(ThreadResult(threads, least_op_seconds(threads, pick_isa(config)), measured))
    show_progress("")
    sweep = ThreadSweep(_configuration(config), results)
    if as_json:
        print(dumps(sweep.as_dict(), indent=1))
    else:
        sweep.print()


def _report_run(threads: int, run: str) -> None:
    show_progress(f"{threads} threads, {run}")


def _bench_speed(
    config: EngineConfig, shapes_text: str, new_tokens: int, repeats: int, as_json: bool, plot: Path | None
) -> None:
    """Measure every shape, then the overhead of a step."""
    shapes = _checked_shapes(shapes_text, new_tokens, repeats)
    if plot is not None:
        check_plot(plot)
    with leaving_at_once():
        loaded = LLM.from_config(bench_config(config, shapes, new_tokens))
    with loaded as llm:
        results = list(measure_shapes(llm, shapes, new_tokens, repeats, show_progress))
        tuned = dict(llm.engine.core.runner.tuned)
    about = {**_configuration(config), "threads": pick_cpus(config).threads, "tuned": tuned}
    report = SpeedReport(about, results, measure_overhead(config))
    show_progress("")
    if plot is not None:
        plot_roofline(results, report.title, plot)
    if as_json:
        print(dumps(report.as_dict(), indent=1))
    else:
        report.print()


def _bench_embedding(config: EngineConfig, shapes: Sequence[Shape], repeats: int, as_json: bool) -> None:
    with leaving_at_once():
        loaded = LLM.from_config(config)
    with loaded as llm:
        results = list(measure_embedding(llm, shapes, repeats, show_progress))
    show_progress("")
    if as_json:
        about = {"model": config.embedding_model or config.model, "weights": config.weights, "isa": pick_isa(config)}
        shown = [result.as_dict() for result in results]
        print(dumps({**about, "threads": pick_cpus(config).threads, "results": shown}, indent=1))
        return
    print(f"{'texts':>6} {'tokens':>7} {'texts/s':>12} {'tokens/s':>12} {'ms/request':>12}")
    for each in results:
        print(
            f"{each.num_texts:>6} {each.text_tokens:>7} {each.texts_per_s:>12,.1f} {each.tokens_per_s:>12,.0f} "
            f"{each.request_ms:>12,.2f}"
        )


def _bench_cache(config: EngineConfig, shapes_text: str, new_tokens: int, as_json: bool, plot: Path | None) -> None:
    """Measure the prompt of the first shape with and without the KV cache."""
    shape = parse_shapes(shapes_text)[0]
    if new_tokens < 2:
        raise ConfigError(f"--new-tokens must be at least 2 without the KV cache, not {new_tokens}")
    if plot is not None:
        check_plot(plot)
    with leaving_at_once():
        loaded = LLM.from_config(bench_config(config, [Shape(1, shape.prompt_tokens)], new_tokens))
    with loaded as llm:
        comparison = compare_cache(llm.engine.core.runner, shape.prompt_tokens, new_tokens)
        if plot is not None:
            plot_cache_comparison(comparison, plot)
        if as_json:
            about = {**_configuration(config), "threads": pick_cpus(config).threads}
            print(dumps({**about, **_comparison_as_dict(comparison)}, indent=1))
        else:
            _print_comparison(comparison, new_tokens)


def show_progress(text: str) -> None:
    """Show a line on standard error in place of the last one, if that is a terminal; remove it if `text` is empty."""
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)


def _configuration(config: EngineConfig) -> dict[str, Any]:
    return {
        "model": config.model or "bundled demo",
        "weights": weights_text(read_spec(model_path(config.model)), config.weights),
        "kv_cache_dtype": config.kv_cache_dtype,
        "isa": pick_isa(config),
    }


def _print_comparison(comparison: CacheComparison, new_tokens: int) -> None:
    print(f"{comparison.prompt_tokens} prompt tokens, {new_tokens} generated")
    print(f"KV cache               {comparison.cached.describe()}")
    print(f"everything recomputed  {comparison.uncached.describe()}")
    print(f"same tokens: {'yes' if comparison.same_tokens else 'NO'}")


def _comparison_as_dict(comparison: CacheComparison) -> dict[str, Any]:
    return {
        name: {
            "ttft_s": run.time_to_first_token_s,
            "decode_tokens_per_s": run.decode_tokens_per_s,
            "forward_s": list(run.forward_s),
            "token_ids": list(run.token_ids),
        }
        for name, run in (("cached", comparison.cached), ("uncached", comparison.uncached))
    } | {
        "prompt_tokens": comparison.prompt_tokens,
        "same_tokens": comparison.cached.token_ids == comparison.uncached.token_ids,
    }
