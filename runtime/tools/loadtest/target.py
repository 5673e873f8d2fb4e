"""Connect to the server under load, and find its vocabulary and its tokenizer for prompts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ...common.types import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from .load import PromptVocabulary
from .openai_backend import OpenAIBackend, OpenAITarget
from .options import SamplingOptions, TargetOptions
from .quire_backend import QuireBackend, QuireTarget
from .records import Backend

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORTS = {"quire": 7070, "openai": 8000}
TOKEN_VARIABLES = {"quire": "QUIRE_TOKEN", "openai": "OPENAI_API_KEY"}
DEFAULT_NAME = "quire"  # name for a model without a name at its server
DEFAULT_VOCAB_SIZE = 1000  # below the size of every model's vocabulary


@dataclass(frozen=True, slots=True)
class OpenTarget:
    backend: Backend
    model_id: str
    vocabulary: PromptVocabulary


def given_address(options: TargetOptions) -> str | None:
    """Return the address of the server. None: no server was given, start one."""
    if options.base_url is not None:
        # The endpoint begins with /v1; the base URL of OpenAI's clients ends with it.
        return options.base_url.rstrip("/").removesuffix("/v1") if options.backend == "openai" else options.base_url
    if options.backend == "quire" and options.host is None and options.port is None:
        return None
    host = options.host or DEFAULT_HOST
    address = f"{f'[{host}]' if ':' in host else host}:{options.port or DEFAULT_PORTS[options.backend]}"
    return address if options.backend == "quire" else f"http://{address}"


@asynccontextmanager
async def open_target(
    options: TargetOptions, sampling: SamplingOptions, address: str, *, ignore_eos: bool
) -> AsyncIterator[OpenTarget]:
    """Connect to `address`. `ignore_eos`: the dataset prescribes the length of answers.

    Raises the errors of opening a backend.
    """
    tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    token = options.token or os.environ.get(TOKEN_VARIABLES[options.backend]) or None
    params = sampling.given() | ({"ignore_eos": True} if ignore_eos else {})
    if options.backend == "quire":
        target = QuireTarget(
            address,
            token,
            options.tls_ca or options.tls,
            options.num_connections,
            SamplingParams(**params),
            options.deadline_ms,
            options.texts_per_request if options.task == "embed" else None,
        )
        quire = await QuireBackend.open(target)
        opened = OpenTarget(
            quire, options.model or quire.model.name or DEFAULT_NAME, _quire_vocabulary(options, tokenizer, quire)
        )
    else:
        api = OpenAITarget(
            address, options.endpoint, options.model, token, body=params, num_connections=options.num_connections
        )
        openai = await OpenAIBackend.open(api)
        opened = OpenTarget(openai, openai.model, _vocabulary(options, tokenizer, only_text=api.is_chat))
    try:
        yield opened
    finally:
        await opened.backend.close()


def _vocabulary(options: TargetOptions, tokenizer: Tokenizer | None, *, only_text: bool) -> PromptVocabulary:
    if tokenizer is None:
        return PromptVocabulary(options.vocab_size or DEFAULT_VOCAB_SIZE, only_text=only_text)
    return PromptVocabulary(
        options.vocab_size or tokenizer.vocab_size,
        lambda text: len(tokenizer.encode(text)),
        tokenizer.decode,
        only_text,
    )


def _quire_vocabulary(options: TargetOptions, tokenizer: Tokenizer | None, backend: QuireBackend) -> PromptVocabulary:
    """Count tokens at the server unless a tokenizer is given. Loads are made in a thread, so counting may block."""
    model = backend.model
    loop = asyncio.get_running_loop()

    def count_at_server(text: str) -> int:
        return asyncio.run_coroutine_threadsafe(backend.count_tokens(text), loop).result()

    local = _vocabulary(options, tokenizer, only_text=False)
    counter = local.count_tokens or (count_at_server if model.has_tokenizer else None)
    return replace(local, size=options.vocab_size or model.vocab_size, count_tokens=counter)
