"""`quire generate`: continue one prompt with an engine in this process and print the text as it is generated.

Several outputs are printed one after another, each under its number, once all have ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from cyclopts import Parameter

from ..common.config import EngineConfig
from ..common.errors import ConfigError, ModelNotFound
from ..common.types import SAMPLING_OPTIONS, CompletionOutput, SamplingParams, Usage, join_chunks
from ..engine import Engine, GenerateRequest, has_tokenizer
from ..hub import parse_reference
from ..model import model_path
from ..model.config_json import CONFIG_FILE
from .flags import MemoryFlags, ModelFolder, SchedulingFlags, settings_from, typed_flags
from .interrupts import leaving_at_once

NOT_FLAGS = ("logit_bias", "logprobs", "structured_outputs")  # maps, and values that the command does not print

if TYPE_CHECKING:
    SamplingFlags: TypeAlias = Any
else:
    SamplingFlags = typed_flags(SamplingParams, SAMPLING_OPTIONS, without=NOT_FLAGS)


def generate(
    model: ModelFolder = None,
    prompt: Annotated[
        str | None,
        Parameter(help="The text to continue; - reads standard input. One argument alone is the prompt."),
    ] = None,
    /,
    *,
    sampling: SamplingFlags | None = None,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
) -> None:
    """Print the continuation of `prompt`, and its usage on standard error. Raises ModelError, ConfigError or others.

    The KV cache takes memory as the prompt's sequences use it, unless its size is given.
    """
    if prompt is None:
        model, prompt = None, _only_argument(model)
    params = SamplingParams(**asdict(sampling)) if sampling is not None else SamplingParams()
    config = _for_one_prompt(settings_from(model, memory, scheduling).engine, params)
    path = model_path(config.model)
    if not has_tokenizer(path):  # checked before the model is loaded
        raise ModelNotFound(f"{path} has no tokenizer.json, which a prompt of text needs; copy the model's file there")
    usage = asyncio.run(_generate(config, standard_input() if prompt == "-" else prompt, params))
    seconds = (usage.prefill_ms + usage.decode_ms) / 1000
    print(
        f"\n\n[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated in {seconds:.2f} s, "
        f"seed {usage.seed}]",
        file=sys.stderr,
    )


def _only_argument(text: str | None) -> str:
    """Return the only argument, which is the prompt. Raises ConfigError if there is none, or if it is a model."""
    if (
        text is None
        or text.endswith(".gguf")
        or parse_reference(text)
        or os.path.isfile(os.path.join(text, CONFIG_FILE))
    ):
        raise ConfigError(
            "PROMPT is missing; write `quire generate MODEL PROMPT`, or PROMPT alone for the bundled model"
        )
    return text


def standard_input() -> str:
    """Return the text on standard input without the newline that ends it. Raises ConfigError."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input is no UTF-8 text: {error.reason}") from error


def _for_one_prompt(config: EngineConfig, params: SamplingParams) -> EngineConfig:
    """Return a configuration whose buffers and default KV cache are for the sequences of one prompt."""
    sequences = max(1, params.n, params.best_of or 0, params.beam_width)
    return msgspec.structs.replace(config, max_num_seqs=min(config.max_num_seqs, sequences))


async def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> Usage:
    with leaving_at_once():
        engine = await Engine.start(config, populate=config.kv_cache_memory is not None)
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
