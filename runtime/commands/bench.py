"""`quire bench`: speed by shape as a table or JSON, and the KV cache's own story."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench import CacheStory, ShapeResult, measure_shapes, parse_shapes, tell_cache_story
from ..bench.plot import plot_cache_story
from ..bench.speed import Shape, bench_config
from ..config import EngineConfig
from ..errors import ConfigError
from ..execution import Machine
from ..llm import LLM


def bench_speed(config: EngineConfig, shapes_text: str, new_tokens: int, repeats: int, as_json: bool) -> None:
    """Print tokens per second of every shape. Raises ConfigError or ModelError."""
    if new_tokens < 1 or repeats < 1:
        raise ConfigError("--new-tokens and --repeats must be at least 1")
    shapes = parse_shapes(shapes_text)
    with LLM.from_config(bench_config(config, shapes, new_tokens)) as llm:
        machine = llm.engine.machine
        results = measure_shapes(llm, shapes, new_tokens, repeats, _progress)
        if as_json:
            print(json.dumps({**_circumstances(config, machine), "shapes": [_as_dict(r) for r in results]}, indent=1))
        else:
            _print_table(config, machine, list(results))


def bench_cache(config: EngineConfig, shapes_text: str, new_tokens: int, as_json: bool, plot: Path | None) -> None:
    """Tell the cache's story for the first shape's prompt. Raises ConfigError, ModelError or MissingDependency."""
    shape = parse_shapes(shapes_text)[0]
    if new_tokens < 2:
        raise ConfigError("--new-tokens must be at least 2 to show what the cache is worth")
    with LLM.from_config(bench_config(config, [Shape(1, shape.prompt_tokens)], new_tokens)) as llm:
        story = tell_cache_story(llm.engine.machine, shape.prompt_tokens, new_tokens)
        if plot is not None:
            plot_cache_story(story, plot)
        if as_json:
            print(json.dumps({**_circumstances(config, llm.engine.machine), **_story_as_dict(story)}, indent=1))
        else:
            _print_story(story, new_tokens)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<40}", end="", file=sys.stderr, flush=True)


def _circumstances(config: EngineConfig, machine: Machine) -> dict[str, Any]:
    return {
        "model": config.model or "bundled demo",
        "weights": config.weights,
        "kv_cache_dtype": config.kv_cache_dtype,
        "isa": machine.capacity.isa,
        "threads": machine.capacity.cpus.threads,
    }


def _as_dict(result: ShapeResult) -> dict[str, Any]:
    return {
        "shape": str(result.shape),
        "batch": result.shape.batch,
        "prompt_tokens": result.shape.prompt_tokens,
        "new_tokens": result.new_tokens,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "prefill_tokens_per_s": result.prefill_tokens_per_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        "op_seconds": result.op_seconds,
    }


def _print_table(config: EngineConfig, machine: Machine, results: list[ShapeResult]) -> None:
    about = _circumstances(config, machine)
    table = Table(title="  ".join(str(value) for value in about.values()) + " threads")
    for column in ("users x prompt", "prefill tok/s", "decode tok/s", "step ms"):
        table.add_column(column, justify="right")
    for result in results:
        step_ms = result.decode_s / result.new_tokens * 1000
        table.add_row(
            str(result.shape),
            f"{result.prefill_tokens_per_s:.1f}",
            f"{result.decode_tokens_per_s:.1f}",
            f"{step_ms:.2f}",
        )
    if sys.stderr.isatty():
        print(f"\r{'':<40}\r", end="", file=sys.stderr)
    Console().print(table)


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
