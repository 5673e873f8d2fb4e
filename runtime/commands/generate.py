"""`quire generate`: one prompt through an engine in this process, the text printed as it comes."""

from __future__ import annotations

import asyncio
import sys

from ..config import EngineConfig
from ..engine import Engine, GenerateRequest
from ..generation import SamplingParams, Usage


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
        stream = await engine.submit(GenerateRequest(prompt=prompt, params=params))
        usage = None
        async for chunk in stream:
            print(chunk.text, end="", flush=True)
            usage = chunk.usage
        assert usage is not None, "a stream's last chunk has its usage"
        return usage
    finally:
        await engine.close()
