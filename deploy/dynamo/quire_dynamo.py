"""A Dynamo worker: token ids in, token ids out, computed by Quire's engine processes on this machine.

usage: python quire_dynamo.py [MODEL] [--config FILE] [--namespace dynamo] [--component quire] [--endpoint generate]
                              [--served-model-name NAME] [--discovery-backend etcd] [--request-plane tcp]

Quire's options come from `--config` and from QUIRE_* variables, as for `quire serve`. With `kv_events` (and the extra
`quire[events]`), Dynamo's router receives the pages of the prefix cache. One worker has one engine process: start one
per NUMA node. Needs `ai-dynamo`, whose frontend tokenizes, applies the chat template and detokenizes.

An engine process that crashes is replaced, and its requests continue there: Dynamo sees a pause. When Dynamo continues
a request of a lost worker here, the prompt includes the tokens so far.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from dynamo.common.backend import EngineConfig, GenerateChunk, GenerateRequest, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import DynamoException, EngineShutdown, InvalidArgument, Unknown
from quire import InvalidRequest, OutputChunk, QuireError, SamplingParams, Unavailable
from quire.runtime import engine as quire
from quire.runtime.common.settings import Settings, resolve_settings
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.model import model_name, model_path
from quire.runtime.workers import EnginePool

# Sampling options that have the same name at both ends.
SAMPLING = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "length_penalty",
)  # fmt: skip
STOPPING = ("max_tokens", "min_tokens", "stop", "ignore_eos")
GRAMMARS = ("json", "regex", "choice")  # names of guided_decoding's grammars
ASKS_NOTHING = (None, False, [], {}, "")


class QuireEngine(LLMEngine):
    """Quire's engine behind Dynamo's interface."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._engine: quire.Engine[EnginePool] | None = None
        self._streams: dict[str, quire.Generation] = {}  # Dynamo's id of the request -> stream

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[QuireEngine, WorkerConfig]:
        """Return the engine, not yet started, and its address for Dynamo. Raises ConfigError or ModelError."""
        parser = argparse.ArgumentParser(description="A Dynamo worker with Quire's engine")
        parser.add_argument("model", nargs="?", help="folder or GGUF file; default: the bundled model")
        parser.add_argument("--config", type=Path, help="TOML file of Quire's options")
        parser.add_argument("--served-model-name", help="default: the name of the model's folder")
        for flag, default in (
            ("namespace", "dynamo"),
            ("component", "quire"),
            ("endpoint", "generate"),
            ("endpoint-types", "chat,completions"),
            ("discovery-backend", "etcd"),
            ("request-plane", "tcp"),
            ("event-plane", "zmq"),
        ):
            parser.add_argument(f"--{flag}", default=default, help=f"default: {default}")
        options = parser.parse_args(argv)
        settings = resolve_settings({"model": options.model}, os.environ, options.config)
        path = model_path(settings.engine.model)
        name = options.served_model_name or settings.server.served_model_name or model_name(path)
        where = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=str(path),
            served_model_name=name,
            endpoint_types=options.endpoint_types,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
        )
        return cls(settings, name), where

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. Raises EngineShutdown with the reason why it cannot be served."""
        config = self._settings.engine
        try:
            texts, encoder_texts = quire.load_texts(config)
            self._engine = quire.Engine(await EnginePool.launch(config, num_processes=1), texts, encoder_texts)
        except QuireError as error:
            raise EngineShutdown(str(error)) from error
        info = self._engine.info
        return EngineConfig(
            model=str(model_path(config.model)),
            served_model_name=self._name,
            runtime_data={"bits": info.fingerprint},
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.page_size,
                total_kv_blocks=info.num_pages,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks of all choices. Raises InvalidArgument for a refused request, EngineShutdown, Unknown."""
        if self._engine is None:
            raise EngineShutdown("the engine is not started")
        request_id = context.id()
        try:
            prompt = tuple(request["token_ids"])
            longest = self._engine.info.max_model_len
            params = sampling_params(request, longest)
            asked = quire.GenerateRequest(
                prompt=prompt, sampling_params=params, fit_max_tokens=params.max_tokens == longest
            )
            stream = await self._engine.submit(asked)
            self._streams[request_id] = stream
            async for chunk in stream:
                yield dynamo_chunk(chunk)
        except QuireError as error:
            raise _dynamo_error(error) from error
        finally:
            if (live := self._streams.pop(request_id, None)) is not None:
                live.cancel()

    async def abort(self, context: Any) -> None:
        """Cancel a request, whose pages are free before the next step."""
        if (stream := self._streams.get(context.id())) is not None:
            stream.cancel()

    async def cleanup(self) -> None:
        """End all requests and the engine process. Idempotent."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            await engine.close()

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return the endpoint at which the engine process publishes the pages of its prefix cache."""
        config = self._settings.engine
        if config.kv_events is None:
            return []
        endpoint = config.kv_events.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:")
        return [ZmqSource(endpoint=endpoint, topic=config.kv_events_topic)]


def sampling_params(request: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Return Quire's parameters of a request, with at most `max_tokens` tokens. Raises InvalidRequest."""
    sampling = request.get("sampling_options") or {}
    stopping = request.get("stop_conditions") or {}
    given = {name: sampling.get(name) for name in SAMPLING} | {name: stopping.get(name) for name in STOPPING}
    given["logprobs"] = (request.get("output_options") or {}).get("logprobs")
    given["stop_token_ids"] = [*(stopping.get("stop_token_ids") or ()), *(stopping.get("stop_token_ids_hidden") or ())]
    if given["top_k"] == -1:  # all tokens
        given["top_k"] = 0
    given["structured_outputs"] = _structured_outputs(sampling.get("guided_decoding") or {})
    if sampling.get("use_beam_search"):
        raise InvalidRequest("use_beam_search is not supported through Dynamo; use Quire's own server")
    defaults = {"temperature": 1.0, "max_tokens": max_tokens}  # defaults of OpenAI's API
    return SamplingParams(**defaults | {name: value for name, value in given.items() if value is not None})


def _structured_outputs(guided: Mapping[str, Any]) -> StructuredOutputs | None:
    asked = {name: value for name, value in guided.items() if value not in ASKS_NOTHING}
    asked.pop("backend", None)
    if unknown := asked.keys() - set(GRAMMARS):
        raise InvalidRequest(f"guided_decoding: {min(unknown)} is not supported; use {', '.join(GRAMMARS)}")
    return msgspec.convert(asked, StructuredOutputs) if asked else None


def dynamo_chunk(chunk: OutputChunk) -> GenerateChunk:
    """Return a chunk in Dynamo's form; the last one of a request has the usage."""
    converted: GenerateChunk = {"token_ids": list(chunk.token_ids), "index": chunk.choice}
    if chunk.logprobs is not None:
        converted["log_probs"] = [entry.logprob for entry in chunk.logprobs]
        converted["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
                for rank, (token_id, logprob) in enumerate(entry.top, 1)
            ]
            for entry in chunk.logprobs
        ]
    if chunk.finish_reason is not None:
        converted["finish_reason"] = chunk.finish_reason
    if chunk.usage is not None:
        prompt = chunk.usage.prompt_tokens
        completion = chunk.usage.completion_tokens
        converted["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": chunk.usage.cached_tokens},
        }
    return converted


def _dynamo_error(error: QuireError) -> DynamoException:
    match error:
        case InvalidRequest():
            return InvalidArgument(str(error))
        case Unavailable():
            return EngineShutdown(str(error))
    return Unknown(str(error))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run(QuireEngine)
