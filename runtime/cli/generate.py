"""`quire generate`: one prompt through an engine in this process, the text printed as it comes.

Several choices would come mixed: they are printed one after another, each under its number, once all have ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from ..common.config import EngineConfig
from ..common.types import CompletionOutput, SamplingParams, Usage, join_chunks
from ..engine import Engine, GenerateRequest


def generate(config: EngineConfig, prompt: str, params: SamplingParams) -> None:
    usage = asyncio.run(_generate(config, prompt, params))
    seconds = (usage.prefill_ms + usage.decode_ms) / 1000
    print(
        f"\n\n[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated in {seconds:.2f} s, "
        f"seed {usage.seed}]",
        file=sys.stderr,
    )


async def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> Usage:
    engine = await Engine.start(config)
    try:
        stream = await engine.submit(GenerateRequest(prompt=prompt, sampling_params=params))
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if params.n == 1:
                print(chunk.text, end="", flush=True)
        if params.n > 1:
            _print_choices(join_chunks(chunks))
        usage = chunks[-1].usage
        assert usage is not None, "a stream's last chunk has its usage"
        return usage
    finally:
        await engine.close()


def _print_choices(choices: Sequence[CompletionOutput]) -> None:
    for number, choice in enumerate(choices, 1):
        score = "" if choice.cumulative_logprob is None else f", logprob {choice.cumulative_logprob:.3f}"
        print(f"[choice {number}: {choice.finish_reason}{score}]\n{choice.text}\n")
