"""The server of a chat: the running one that serves the model, or one of its own for the duration of the chat."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..common.config import EngineConfig
from ..common.errors import InvalidRequest, ModelNotFound, QuireError
from ..common.options import flag_name
from ..common.settings import Settings
from ..model import model_name, model_path
from ..net.listening_user import listening_user
from .chat_api import ChatAPI
from .flags import read_settings
from .local_server import local_server
from .model_files import with_model_files

PROBE_TIMEOUT_S = 1
LOAD_TIMEOUT_S = 3600  # a large model on a slow disk
SEQUENCES = 2  # sequences of the own server, which has one user


@contextmanager
def chat_server(url: str | None, model: str | None, memory: Any) -> Iterator[tuple[ChatAPI, str]]:
    """Yield a server and the name of a model that chats.

    With a URL, it is the server there. Else it is the server on this machine, if that serves the model, or any model if
    none is named; else one of its own, with the flags in `memory`. The first adapter among them answers. Raises
    QuireError.
    """
    settings = read_settings(model, memory)
    key = settings.server.token
    if url is not None:
        api = ChatAPI(url, key)
        yield api, _pick(api.models(), model, url)
        return
    if model is None or not settings.engine.lora:
        port = settings.server.openai_port
        # The key is for a server of this user or of the system, not for any program that has the port.
        is_trusted = key is None or listening_user(port) in (os.getuid(), 0)
        api = ChatAPI(f"http://127.0.0.1:{port}/v1", key if is_trusted else None)
        if (name := _running(api, model)) is not None:
            yield api, name
            return
    with _own_server(with_model_files(settings)) as found:
        yield found


def _running(api: ChatAPI, model: str | None) -> str | None:
    """Return the name of the model at the server on this machine, None if there is none or another one."""
    try:
        cards = api.models(PROBE_TIMEOUT_S)
    except QuireError:
        return None
    ours = [card for card in cards if card.get("owned_by") == "quire"]  # the port may belong to another program
    try:
        return _pick(ours, model, api.url)
    except QuireError:
        return None


def _pick(cards: list[Any], model: str | None, url: str) -> str:
    """Return the name of the model to chat with. Raises ModelNotFound, or InvalidRequest if the model does not chat."""
    names = [card["id"] for card in cards if "chat" in card.get("capabilities", ("chat",))]
    if not names:
        raise InvalidRequest(f"{url} serves no model that chats")
    if model is None:
        return str(names[0])
    wanted = {model, model.rstrip("/").rpartition("/")[2]}
    found = [name for name in names if name in wanted]
    if not found:
        raise ModelNotFound(f"{url} does not serve {model}; it serves {', '.join(map(str, names))}")
    return str(found[0])


@contextmanager
def _own_server(settings: Settings) -> Iterator[tuple[ChatAPI, str]]:
    """Start a server process for one user and end it afterwards, also after SIGTERM or a closed terminal."""
    name = settings.server.served_model_name or model_name(model_path(settings.engine.model))
    print(f"quire: loading {name}", file=sys.stderr, flush=True)
    with asyncio.Runner() as runner:
        server = local_server(*flags_of(settings, name), start_timeout_s=LOAD_TIMEOUT_S, own_group=True)
        started = runner.run(server.__aenter__())
        handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            api = ChatAPI(started.api_url)
            yield api, _pick(api.models(), next(iter(settings.engine.lora), name), api.url)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            runner.run(server.__aexit__(None, None, None))


def flags_of(settings: Settings, name: str) -> list[str]:
    """Return the command line of `quire serve` with the engine options that are not defaults."""
    engine = settings.engine
    default = EngineConfig()
    flags = [] if engine.model is None else [engine.model]
    for option in EngineConfig.__struct_fields__:
        value = getattr(engine, option)
        if option in ("model", "max_num_seqs") or value == getattr(default, option):
            continue
        flag = flag_name(option)
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        text = ",".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else value
        flags.append(f"{flag}={text}")
    return [*flags, f"--max-num-seqs={SEQUENCES}", f"--served-model-name={name}"]


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
