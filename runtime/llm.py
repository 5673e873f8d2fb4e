"""`LLM`: a model in this process, without a server. It runs the same engine on an event loop in another thread.

`generate` returns one finished output per prompt, in order, or raises and leaves no request running.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Never, Self, Unpack

import numpy as np
import numpy.typing as npt

from .common.config import EngineConfig, EngineOptions
from .common.errors import InvalidRequest, ModelNotFound, NotOpen
from .common.images import extract_images
from .common.loop_thread import LoopThread
from .common.options import suggestion
from .common.prompts import PromptImage, as_documents, as_prompts, as_token_ids, chat_messages, chat_tools
from .common.settings import resolve_settings
from .common.types import RequestOutput, SamplingParams, ToolChoice, check_arguments, join_chunks
from .engine import EmbedRequest, Engine, GenerateRequest, LocalEngine
from .engine.stream import Stream
from .hub import cached, parse_reference

Prompt = str | Sequence[int]
OFFLINE_QUEUE = 1 << 20  # requests; a caller of `generate` waits for all of its prompts anyway


class LLM:
    """A model that generates text in this process. Use it as a context manager, or call `close`.

    `model` is a folder in Hugging Face's format, a GGUF file, or the name of a model that `quire pull` has downloaded;
    None is the bundled model. `options` are those of
    `EngineConfig`, such as weights="q8" or kv_cache_memory="4GiB"; docs/reference/options.md lists them. Among the
    QUIRE_* variables, only QUIRE_ISA, QUIRE_TUNE and QUIRE_DEBUG have an effect. With `kv_cache_memory`, the KV cache
    takes its memory at once; the default size is only a limit, up to which the cache takes memory as requests use it.
    Raises ModelError or ConfigError.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]) -> None:
        names = EngineOptions.__annotations__
        if unknown := options.keys() - names.keys():
            name = min(unknown)
            raise TypeError(f"LLM has no option {name!r}{suggestion(name, names)}; the options are {', '.join(names)}")
        models: dict[str, Any] = {"model": None if model is None else os.fspath(model)}
        models |= {name: options[name] for name in ("embedding_model", "draft_model") if name in options}
        given = {
            "max_num_waiting": OFFLINE_QUEUE,
            **options,
            **{name: _local(value) if isinstance(value, str) else value for name, value in models.items()},
        }
        config = resolve_settings(given, environ={}).engine
        self._start(config, populate=config.kv_cache_memory is not None)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Load the model that a resolved configuration describes, and take the memory of the KV cache at once."""
        llm = cls.__new__(cls)
        llm._start(config, populate=True)
        return llm

    def _start(self, config: EngineConfig, *, populate: bool) -> None:
        self._thread = LoopThread("this LLM", uses_thread_pools=True)
        try:
            engine = self._thread.run(Engine.start(config, populate=populate))
        except BaseException:
            self._thread.close()
            raise
        self._engine: LocalEngine | None = engine
        self._thread.on_close = engine.close
        weakref.finalize(self, self._thread.begin_close).atexit = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        images: Sequence[Sequence[PromptImage]] | None = None,
        lora: str | Sequence[str] = "",
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order. A prompt is text or token ids.

        `sampling_params` is one value for all prompts or one for each. `images` has a list of images for each prompt of
        token ids. `lora` is the name of an adapter for all prompts, or one for each; an empty name is none.

        Raises InvalidRequest, ContextLengthExceeded or GenerationFailed if any prompt is refused or fails; the others
        are then cancelled. Raises TypeError for an unknown argument.
        """
        check_arguments(unknown, ("prompts", "sampling_params", "images", "lora"))
        each = as_prompts(prompts)
        params = _params_list(sampling_params, len(each))
        images = [()] * len(each) if images is None else images
        if len(images) != len(each):
            raise InvalidRequest(f"{len(images)} lists of images for {len(each)} prompts; give one for each prompt")
        adapters = [lora] * len(each) if isinstance(lora, str) else list(lora)
        if len(adapters) != len(each):
            raise InvalidRequest(f"{len(adapters)} names of lora for {len(each)} prompts; give one, or one each")
        requests = [
            GenerateRequest(prompt=prompt, sampling_params=own, images=tuple(of_prompt), lora=adapter)
            for prompt, own, of_prompt, adapter in zip(each, params, images, adapters, strict=True)
        ]
        return self._thread.run(_generate(self._open_engine(), requests))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str = "",
    ) -> RequestOutput:
        """Return the answer to a chat, `[{"role": "user", "content": …}, …]`, with the model's own chat template.

        The content of a message may be a list of parts, which may include images if the model has a vision tower:
        `{"type": "image", "image": the bytes of a file}`, or OpenAI's `image_url` with a data URL.

        The template gets `tools` in OpenAI's form and the variables in `chat_template_kwargs`. With a `tool_choice`, an
        output's `reasoning` and `tool_calls` are separate from its text, and calls are valid. Without one, the text
        includes the model's markup of reasoning and tool calls, except special tokens.

        `lora` is the name of an adapter. Raises InvalidRequest if the model has no template or the template refuses the
        messages, and as `generate`.
        """
        engine = self._open_engine()
        bare, images = extract_images(messages)
        request = GenerateRequest(
            prompt=None,
            messages=chat_messages(bare),
            image_files=images,
            tools=chat_tools(tools),
            tool_choice=tool_choice,
            reads_output=tool_choice is not None,
            template_variables=dict(chat_template_kwargs or {}),
            sampling_params=sampling_params or SamplingParams(),
            lora=lora,
        )
        return self._thread.run(_generate(engine, [request]))[0]

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return one vector per input, f32 [inputs, dimensions]. An input is text or token ids.

        `prompt_name` is one of the model's prompts, such as "query", which goes before each text. A text that is too
        long is refused, unless `truncate_prompt_tokens` says how many tokens to keep (-1: as many as the model takes).
        Raises InvalidRequest, ContextLengthExceeded or GenerationFailed if any input fails.
        """
        request = EmbedRequest(
            inputs=tuple(as_prompts(inputs)),
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return self._thread.run(_embed(self._open_engine(), request))

    def score(
        self, query: str, documents: Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Return a score of each document as an answer to the query, f32 [documents]; higher is better.

        A reranker scores each pair of texts; a model with vectors gives the cosine of the two vectors. Raises as
        `embed`.
        """
        texts = as_documents(query, documents)
        request = EmbedRequest(
            inputs=texts, query=query, truncate_prompt_tokens=truncate_prompt_tokens, input_name="documents[{}]"
        )
        return self._thread.run(_embed(self._open_engine(), request))[:, 0]

    def classify(
        self, inputs: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the probability of each of a classifier's labels, f32 [inputs, labels]. Raises as `embed`."""
        texts = tuple(as_prompts(inputs))
        request = EmbedRequest(inputs=texts, classify=True, truncate_prompt_tokens=truncate_prompt_tokens)
        return self._thread.run(_embed(self._open_engine(), request))

    def logits(
        self, token_ids: Sequence[int], images: Sequence[PromptImage] = (), *, lora: str = ""
    ) -> npt.NDArray[np.float32]:
        """Return the raw logits [len(token_ids), vocab] after each token, for evaluation, without the prefix cache."""
        return self._thread.run(self._open_engine().logits(as_token_ids(token_ids), images, lora))

    @property
    def engine(self) -> LocalEngine:
        """The engine, for tools and tests. It runs on another thread."""
        return self._open_engine()

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        self._engine = None
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_engine(self) -> LocalEngine:
        if self._engine is None:
            raise NotOpen("this LLM was closed")
        return self._engine


def _local(model: str) -> str:
    """Return the path of a model; a name on a hub stands for the model that was downloaded. Raises ModelNotFound."""
    reference = parse_reference(model)
    if reference is None:
        return model
    path = cached(reference)
    if path is None:
        raise ModelNotFound(f"{model} is neither a folder nor in the cache; download it with `quire pull {model}`")
    return str(path)


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidRequest("sampling_params must be one SamplingParams or a sequence of them")
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts; give one, or one each")
    return list(params)


async def _generate(engine: LocalEngine, requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
    streams: list[Stream] = []
    outputs: list[asyncio.Task[RequestOutput]] = []
    try:
        for request in requests:
            streams.append(await engine.submit(request))
            outputs.append(asyncio.create_task(_collect(streams[-1])))
        if outputs:
            await asyncio.wait(outputs, return_when=asyncio.FIRST_EXCEPTION)
    finally:  # the other requests end first, even after a failure or a cancellation
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*outputs, return_exceptions=True)
    return [output.result() for output in outputs]


async def _embed(engine: LocalEngine, request: EmbedRequest) -> npt.NDArray[np.float32]:
    return np.concatenate([chunk.values async for chunk in await engine.embed(request)])


async def _collect(stream: Stream) -> RequestOutput:
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None, "a stream's last chunk has its usage"
    return RequestOutput(prompt_token_ids=stream.prompt_token_ids, outputs=join_chunks(chunks), usage=usage)
