"""`LLM`: a model in this process, without a server. The engine is the same one, behind a synchronous face.

It must not know kernels, pages or sockets. One invariant: `generate` returns one finished output per prompt, in order,
or raises and leaves nothing running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from .config import EngineConfig, KVCacheDtype, WeightDtype
from .engine import Engine, GenerateRequest
from .engine.stream import Stream
from .errors import InvalidRequest, Unavailable
from .generation import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, Usage
from .loop_thread import LoopThread

Prompt = str | Sequence[int]
OFFLINE_QUEUE = 1 << 20  # requests; whoever calls `generate` waits for all of them anyway


class LLM:
    """Load a model and generate. Use as a context manager, or `close` it.

    model: Hugging Face folder; None: the bundled model. weights: "bf16", "q8" (quantised at load) or "f32".
    kv_cache_dtype: "bf16" or "f32". kv_cache_memory: bytes. threads: None means all this process may use.
    Raises ModelError or ConfigError.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        weights: WeightDtype = "bf16",
        kv_cache_dtype: KVCacheDtype = "bf16",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | None = None,
        threads: int | None = None,
        enable_prefix_caching: bool = True,
        block_size: int = 32,
        isa: str | None = None,
    ) -> None:
        config = EngineConfig(
            model=model,
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            threads=threads,
            enable_prefix_caching=enable_prefix_caching,
            max_num_waiting=OFFLINE_QUEUE,
            isa=isa,
        )
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """As the constructor, for callers that have resolved flags, environment and file into a config."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self._thread = LoopThread("quire-llm")
        try:
            self._engine: Engine | None = self._thread.run(Engine.start(config))
        except BaseException:
            self._thread.close()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """One output per prompt (text or token ids), in order. `params`: one for all, or one each.

        Raises InvalidRequest or ContextLengthExceeded before anything runs, GenerationFailed if a request fails.
        """
        each = _prompt_list(prompts)
        settings = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(each):
            raise InvalidRequest(f"{len(settings)} sampling params for {len(each)} prompts; give one, or one each")
        return self._thread.run(_generate(self._open_engine(), each, settings))

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits [len(token_ids), vocab] after each token, for evaluation. Bypasses the prefix cache."""
        return self._thread.run(self._open_engine().logits(tuple(token_ids)))

    @property
    def engine(self) -> Engine:
        """The engine itself, for tools and tests; it lives on another thread."""
        return self._open_engine()

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        if self._engine is not None:
            self._thread.run(self._engine.close())
            self._thread.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise Unavailable("this LLM was closed")
        return self._engine


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text or a single list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # what isinstance has just shown
    return list(prompts)  # type: ignore[arg-type]


async def _generate(engine: Engine, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    streams: list[Stream] = []
    try:
        for prompt, settings in zip(prompts, params, strict=True):
            streams.append(await engine.submit(GenerateRequest(prompt=_frozen(prompt), params=settings)))
        return list(await asyncio.gather(*(_collect(stream) for stream in streams)))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise


def _frozen(prompt: Prompt) -> str | tuple[int, ...]:
    return prompt if isinstance(prompt, str) else tuple(int(token) for token in prompt)


async def _collect(stream: Stream) -> RequestOutput:
    token_ids: list[int] = []
    text: list[str] = []
    logprobs: list[TokenLogprobs] = []
    has_logprobs = False
    reason: FinishReason = "cancelled"
    usage: Usage | None = None
    async for chunk in stream:
        token_ids += chunk.token_ids
        text.append(chunk.text)
        if chunk.logprobs is not None:
            has_logprobs = True
            logprobs += chunk.logprobs
        reason, usage = chunk.finish_reason or reason, chunk.usage
    assert usage is not None, "a stream's last chunk has its usage"
    return RequestOutput(
        prompt_token_ids=stream.prompt_token_ids,
        token_ids=tuple(token_ids),
        text="".join(text),
        logprobs=tuple(logprobs) if has_logprobs else None,
        finish_reason=reason,
        usage=usage,
    )
