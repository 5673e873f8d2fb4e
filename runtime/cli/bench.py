"""`quire bench`: speed by shape beside the machine's roofs, or the KV cache's story; as tables, JSON and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..llm import LLM
from ..model.runner import ModelRunner
from ..tools.bench import CacheStory, measure_overhead, measure_shapes, parse_shapes, tell_cache_story
from ..tools.bench.console import SpeedReport
from ..tools.bench.plot import check_plot, plot_cache_story, plot_roofline
from ..tools.bench.speed import Shape, bench_config


def bench_speed(
    config: EngineConfig, shapes_text: str, new_tokens: int, repeats: int, as_json: bool, plot: Path | None
) -> None:
    """Measure every shape, then the step's overhead. Raises ConfigError, ModelError or MissingDependency."""
    if new_tokens < 1 or repeats < 1:
        raise ConfigError("--new-tokens and --repeats must be at least 1")
    shapes = parse_shapes(shapes_text)
    if plot is not None:
        check_plot(plot)
    with LLM.from_config(bench_config(config, shapes, new_tokens)) as llm:
        about = _circumstances(config, llm.engine.core.runner)
        results = list(measure_shapes(llm, shapes, new_tokens, repeats, _progress))
    report = SpeedReport(about, results, measure_overhead(config))
    _progress("")
    if plot is not None:
        plot_roofline(results, report.title, plot)
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        report.print()


def bench_cache(config: EngineConfig, shapes_text: str, new_tokens: int, as_json: bool, plot: Path | None) -> None:
    """Tell the cache's story for the first shape's prompt. Raises ConfigError, ModelError or MissingDependency."""
    shape = parse_shapes(shapes_text)[0]
    if new_tokens < 2:
        raise ConfigError("--new-tokens must be at least 2 to show what the cache is worth")
    if plot is not None:
        check_plot(plot)
    with LLM.from_config(bench_config(config, [Shape(1, shape.prompt_tokens)], new_tokens)) as llm:
        story = tell_cache_story(llm.engine.core.runner, shape.prompt_tokens, new_tokens)
        if plot is not None:
            plot_cache_story(story, plot)
        if as_json:
            print(json.dumps({**_circumstances(config, llm.engine.core.runner), **_story_as_dict(story)}, indent=1))
        else:
            _print_story(story, new_tokens)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="" if text else "\r", file=sys.stderr, flush=True)


def _circumstances(config: EngineConfig, runner: ModelRunner) -> dict[str, Any]:
    return {
        "model": config.model or "bundled demo",
        "weights": config.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
        "isa": runner.capacity.isa,
        "threads": runner.capacity.cpus.threads,
    }


def _print_story(story: CacheStory, new_tokens: int) -> None:
    print(f"{story.prompt_tokens} prompt tokens, {new_tokens} generated")
    print(f"KV cache               {story.cached.describe()}")
    print(f"everything recomputed  {story.uncached.describe()}")
    print(f"same tokens: {'yes' if story.cached.token_ids == story.uncached.token_ids else 'NO'}")


def _story_as_dict(story: CacheStory) -> dict[str, Any]:
    return {
        name: {
            "ttft_s": run.time_to_first_token_s,
            "decode_tokens_per_s": run.decode_tokens_per_s,
            "forward_s": list(run.forward_s),
            "token_ids": list(run.token_ids),
        }
        for name, run in (("cached", story.cached), ("uncached", story.uncached))
    } | {"prompt_tokens": story.prompt_tokens, "same_tokens": story.cached.token_ids == story.uncached.token_ids}
