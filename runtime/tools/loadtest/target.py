"""Which server is put under load, and what has to be known of it before prompts can be made.

It must not know a load. One invariant: what is opened is closed again, however opening ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ...common.errors import ConfigError
from ...common.types import SamplingParams
from ...engine.text.tokenizer import Tokenizer
from ..traffic import check_number
from .load import Vocabulary
from .openai_backend import COMPLETIONS, OpenAIBackend, OpenAITarget
from .quire_backend import QuireBackend, QuireTarget
from .request import Backend

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORTS = {"quire": 7070, "openai": 8000}
TOKEN_VARIABLES = {"quire": "QUIRE_TOKEN", "openai": "OPENAI_API_KEY"}
DEFAULT_NAME = "quire"  # of a model that its server has no name for
DEFAULT_VOCAB_SIZE = 1000  # every model's vocabulary is larger, and drawn ids must lie within it
MAX_VOCAB_SIZE = 10_000_000


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    backend: Literal["quire", "openai"] = "quire"
    "How the server is spoken to: Quire's protocol, or OpenAI's over HTTP."
    base_url: str | None = None
    """Its address: host:port, [v6]:port or unix:/path for quire, http://HOST:PORT for openai. Default: a server on the
    bundled model is started for the duration; for openai http://127.0.0.1:8000."""
    host: str | None = None
    "Instead of --base-url. Default 127.0.0.1."
    port: int | None = None
    "Instead of --base-url. Default 7070, for openai 8000."
    endpoint: str = COMPLETIONS
    "For openai: /v1/completions or /v1/chat/completions."
    model: str | None = None
    "Name of the model. Default: the first that the server names."
    token: str | None = None
    "Default: QUIRE_TOKEN, for openai OPENAI_API_KEY, which do not show in process lists."
    tls: bool = False
    "For quire: speak TLS."
    tokenizer: Path | None = None
    """Folder with the model's tokenizer.json, to count the tokens of text and to make text of drawn tokens. A Quire
    server is asked instead."""
    vocab_size: int | None = None
    "Drawn token ids lie below it. Default: what server or tokenizer say, or 1000."
    num_connections: int = 1
    "For quire: on which requests take turns. For openai: opened beforehand, one a request under way is best."
    deadline_ms: int | None = None
    "For quire: of every request, from its arrival at the server."


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Named as in both APIs. None: the server's default."""

    ignore_eos: bool = False
    "Generate to the full length. Always on for random and for recorded traces."
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}


@dataclass(frozen=True, slots=True)
class OpenTarget:
    backend: Backend
    model_id: str
    vocabulary: Vocabulary


def check_target(options: TargetOptions) -> None:
    """Raises ConfigError."""
    if options.base_url is not None and (options.host is not None or options.port is not None):
        raise ConfigError("--base-url names the whole address: leave out --host and --port")
    if options.backend != "quire" and options.deadline_ms is not None:
        raise ConfigError("--deadline-ms is for --backend quire: OpenAI's API has no deadlines")
    if options.backend != "quire" and options.tls:
        raise ConfigError("--tls is for --backend quire: write https:// before the address of another")
    check_number("--port", options.port, 1, 65535)
    check_number("--deadline-ms", options.deadline_ms, 1, 1e9)
    check_number("--num-connections", options.num_connections, 1, 4096)
    check_number("--vocab-size", options.vocab_size, 1, MAX_VOCAB_SIZE)


def given_address(options: TargetOptions) -> str | None:
    """Of a server that runs already; None: start one."""
    if options.base_url is not None:
        return options.base_url
    if options.backend == "quire" and options.host is None and options.port is None:
        return None
    host = options.host or DEFAULT_HOST
    place = f"{f'[{host}]' if ':' in host else host}:{options.port or DEFAULT_PORTS[options.backend]}"
    return place if options.backend == "quire" else f"http://{place}"


@asynccontextmanager
async def open_target(
    options: TargetOptions, sampling: SamplingOptions, address: str, *, ignore_eos: bool
) -> AsyncIterator[OpenTarget]:
    """`ignore_eos`: the dataset says how long answers are. Raises what opening a backend raises."""
    tokenizer = None if options.tokenizer is None else Tokenizer(options.tokenizer)
    token = options.token or os.environ.get(TOKEN_VARIABLES[options.backend]) or None
    params = sampling.given() | ({"ignore_eos": True} if ignore_eos else {})
    if options.backend == "quire":
        target = QuireTarget(
            address, token, options.tls, options.num_connections, SamplingParams(**params), options.deadline_ms
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


def _vocabulary(options: TargetOptions, tokenizer: Tokenizer | None, *, only_text: bool) -> Vocabulary:
    if tokenizer is None:
        return Vocabulary(options.vocab_size or DEFAULT_VOCAB_SIZE, only_text=only_text)
    return Vocabulary(
        options.vocab_size or tokenizer.vocab_size,
        lambda text: len(tokenizer.encode(text)),
        tokenizer.decode,
        only_text,
    )


def _quire_vocabulary(options: TargetOptions, tokenizer: Tokenizer | None, backend: QuireBackend) -> Vocabulary:
    """Loads are made in a thread, which may ask the server and wait."""
    model, loop = backend.model, asyncio.get_running_loop()

    def ask_server(text: str) -> int:
        return asyncio.run_coroutine_threadsafe(backend.count_tokens(text), loop).result()

    local = _vocabulary(options, tokenizer, only_text=False)
    counter = local.count_tokens or (ask_server if model.has_tokenizer else None)
    return replace(local, size=options.vocab_size or model.vocab_size, count_tokens=counter)
