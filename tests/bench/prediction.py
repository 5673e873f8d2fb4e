"""Compare the speed that `quire plan --profile` predicts with the speed that `quire bench` measures.

usage: prediction.py [--weights auto] [--kv-cache-dtype int8] [--shapes 1x128,8x128,32x128] [--repeats 3] [MODEL ...]

Each prediction uses the roofline that was measured immediately before and after the shape, so that a machine that is
shared, and changes by the minute, changes both. Without MODEL, the bundled model. A ratio is measured / predicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quire import LLM
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import weights_text
from quire.runtime.tools.bench import measure_shapes, parse_shapes
from quire.runtime.tools.bench.speed import bench_config
from quire.runtime.tools.simulation import predict_speed, roofline_cost

NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--shapes", default="1x128,8x128,32x128")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[None])
    options = parser.parse_args()
    phases = "".join(f"{f'{phase} tok/s':>16}{'predicted':>11}{'ratio':>7}" for phase in ("prefill", "decode"))
    print(f"{'model':<16}{'weights':<12}{'KV':<6}{'shape':>8}{'GB/s':>7}{phases}")
    for model in options.models:
        compare(model, options)


def compare(model: str | None, options: argparse.Namespace) -> None:
    shapes = parse_shapes(options.shapes)
    config = EngineConfig(model=model, weights=options.weights, kv_cache_dtype=options.kv_cache_dtype)
    with LLM.from_config(bench_config(config, shapes, NEW_TOKENS)) as llm:
        runner = llm.engine.core.runner
        names = f"{Path(model or 'bundled').name:<16}{weights_text(runner.spec, config.weights):<12}"
        for result in measure_shapes(llm, shapes, NEW_TOKENS, options.repeats, lambda run: None):
            cost = roofline_cost(runner.spec, runner.capacity, result.roofline)
            speed = predict_speed(cost, result.shape, config.max_num_batched_tokens)
            tokens = result.shape.batch * result.shape.prompt_tokens
            pairs = (
                (result.prefill.tokens_per_s, tokens / speed.first_token_s),
                (result.decode.tokens_per_s, speed.tokens_per_s),
            )
            figures = "".join(f"{found:>16,.1f}{said:>11,.1f}{found / said:>7.2f}" for found, said in pairs)
            read = f"{result.roofline.read_bytes_per_s / 1e9:>7.1f}"
            print(f"{names}{config.kv_cache_dtype:<6}{result.shape!s:>8}{read}{figures}", flush=True)


if __name__ == "__main__":
    main()
