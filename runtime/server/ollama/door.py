"""Ollama's API: its paths, and their handlers. The server has its models from the start, and changes none."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec

from ...common.errors import QuireError
from ...engine.facade import EngineInfo
from ..app_context import AppContext
from ..http.calls import Call, for_model
from ..http.embedding import answer_embedding
from ..http.errors import BadRequest, DoorForm, HTTPAnswer
from ..http.fields import Fields
from ..http.json_body import BodyReader
from ..http.playback import answer_call
from ..http.request_cycle import RequestCycle
from ..http.request_reader import RequestReader
from ..http.router import Route, Routes
from ..http.served_models import check_model, vocabularies
from ..models.catalog import ModelName, Task
from .calls import (
    ALL_FIELDS,
    CHAT_FIELDS,
    EMBED_FIELDS,
    GENERATE_FIELDS,
    OPTION_NAMES,
    chat_call,
    check_options,
    embed_request,
    generate_call,
)
from .errors import error_answer, error_line
from .formats import LineFormat, VectorsForm, time_text

API_VERSION = "0.12.6"  # version of Ollama whose API this is; clients compare it
KEEP_NOT_ALIVE = (0, "0")  # values of keep_alive by which clients unload a model; only operators do
LATEST = ":latest"  # tag of a model's name, which clients may add
NEVER = "9999-12-31T23:59:59Z"  # time at which a served model is unloaded
LINE_HEADERS = (("content-type", "application/x-ndjson"), ("x-accel-buffering", "no"))
OLLAMA_FORM = DoorForm(error_answer, error_line, ALL_FIELDS, LINE_HEADERS, b"")
CHANGES = ("/api/create", "/api/copy", "/api/push", "/api/delete")  # paths that change models


class OllamaDoor:
    """Ollama's API. Implements `Door`."""

    form = OLLAMA_FORM
    takes_any_type = True

    def __init__(self, context: AppContext, bodies: BodyReader) -> None:
        self._context = context
        self._started = time.time()
        self._models = context.models
        self._reader = RequestReader(context, self._check_model, bodies)
        self._vocabularies = vocabularies(context.models)
        self.paths: dict[str, dict[str, Route]] = {
            "/": {"GET": Route(_greet, needs_key=False)},
            "/api/version": {"GET": Route(_version, needs_key=False)},
            "/api/tags": {"GET": Route(partial(self._list, is_running=False))},
            "/api/ps": {"GET": Route(partial(self._list, is_running=True))},
            "/api/show": {"POST": Route(self._show, takes_body=True)},
            "/api/pull": {"POST": Route(self._pull, takes_body=True)},
            "/api/chat": {"POST": Route(partial(self._generate, chat_call, CHAT_FIELDS), takes_body=True)},
            "/api/generate": {"POST": Route(partial(self._generate, generate_call, GENERATE_FIELDS), takes_body=True)},
            "/api/embed": {"POST": Route(partial(self._embed, is_one=False), takes_body=True)},
            "/api/embeddings": {"POST": Route(partial(self._embed, is_one=True), takes_body=True)},
        }
        refuse = Route(_refuse_change, takes_body=True)
        self.paths |= {path: {"DELETE" if path.endswith("delete") else "POST": refuse} for path in CHANGES}

    def claims(self, path: str, headers: Mapping[str, bytes]) -> bool:
        """See `Door.claims`."""
        return False

    def routes(self, path: str) -> Routes | None:
        """See `Door.routes`."""
        return self.paths.get(path)

    def _check_model(self, fields: Fields, task: Task) -> ModelName:
        """Return the model of a body that names it with or without its tag. Raises BadRequest."""
        given = fields.get("model", str, "") or fields.get("name", str, "")
        if not given:
            raise BadRequest("model is required", "model")
        name = self._served_name(given)
        if name not in self._models.names:
            served = " and ".join(map(repr, self._models.names))
            raise BadRequest(f"model {given[:80]!r} not found; this server has {served}", "model", status=404)
        fields.values["model"] = given
        return check_model(self._models, Fields({"model": name}), task)

    def _served_name(self, given: str) -> str:
        """Return the name of a model without the tag that a client added."""
        return given if given in self._models.names else given.removesuffix(LATEST)

    # Requests to the engine

    async def _generate(
        self, read_call: Callable[[Fields, EngineInfo, str], Call], known: Set[str], cycle: RequestCycle
    ) -> None:
        tenant = cycle.authenticated.name
        is_chat = known is CHAT_FIELDS
        prompt = "messages" if is_chat else "prompt"
        cycle.field_names = {**OPTION_NAMES, "prompt": prompt}
        with self._reader.reporting(cycle):
            self._reader.check_accepting()
            num_bytes = len(cycle.body)
            fields, model = await self._reader.fields(cycle, known, loads=False)
            given = fields.values["model"]
            is_empty = not fields.values.get(prompt) and not fields.values.get("images")
            if not is_empty or fields.values.get("keep_alive") not in KEEP_NOT_ALIVE:
                await self._reader.load(model, tenant, num_bytes)
            if is_empty:
                cycle.respond(self._loaded(given, fields, is_chat=is_chat))
                return
            read = partial(read_call, fields, model.info, tenant)
            call = for_model(await self._reader.bodies.read(tenant, num_bytes, read), model)
        form = LineFormat(call, given, self._vocabularies[model.model.key], is_chat=is_chat)
        answering = answer_call(cycle, call, form, self._context)
        del call, fields, read  # the objects hold the prompt
        await answering

    def _loaded(self, model: str, fields: Fields, *, is_chat: bool) -> HTTPAnswer:
        """Return the answer to a request without a prompt, by which clients load and unload a model."""
        check_options(fields)
        reason = "unload" if fields.values.get("keep_alive") in KEEP_NOT_ALIVE else "load"
        body: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        return _json(
            {"model": model, "created_at": time_text(time.time()), **body, "done": True, "done_reason": reason}
        )

    async def _embed(self, cycle: RequestCycle, *, is_one: bool) -> None:
        context = self._context
        with self._reader.reporting(cycle):
            self._reader.check_accepting()
            fields, model = await self._reader.fields(cycle, EMBED_FIELDS, "vectors")
            given = fields.values["model"]
            if is_one:
                fields.values["input"] = fields.get("prompt", str, "")
            request = embed_request(fields, cycle.authenticated.name, model.model.key)
        form = VectorsForm(given, is_one=is_one)
        if not request.inputs:
            cycle.respond(HTTPAnswer(200, form.whole(0)))
            return
        try:
            live = context.requests.embed(cycle.authenticated, cycle.number, request)
        except QuireError as error:
            context.requests.log.refused(cycle.authenticated.name, cycle.number, error.code, error.retry_after_ms)
            raise
        answering = answer_embedding(cycle, live, form)
        del request, fields  # the objects hold the texts
        if (failure := await answering) is not None:
            cycle.refuse(failure, EMBED_FIELDS)

    # Models

    async def _list(self, cycle: RequestCycle, *, is_running: bool) -> None:
        models = []
        for name in self._models.names:
            found = self._models.find(name)
            assert found is not None, "a name of this server"
            if is_running and self._models.state(found.model) not in ("ready", "draining"):
                continue
            tagged = _tagged(name)
            digest = _digest(found.target, found.info)
            card = {"name": tagged, "model": tagged, "size": 0, "digest": digest, "details": _details()}
            if is_running:
                length = _context_length(not found.is_encoder, found.info)
                card |= {"expires_at": NEVER, "size_vram": 0, "context_length": length}
            else:
                card["modified_at"] = time_text(self._started)
            models.append(card)
        cycle.respond(_json({"models": models}))

    async def _show(self, cycle: RequestCycle) -> None:
        with self._reader.reporting(cycle):
            _, model = await self._reader.fields(cycle, ALL_FIELDS, "any", loads=False)
        info = model.info
        is_main = not model.is_encoder
        parameters = "\n".join(f"{name} {value:g}" for name, value in info.default_sampling.items())
        cycle.respond(
            _json(
                {
                    "modelfile": "",
                    "parameters": parameters,
                    "template": "",
                    "details": _details(),
                    "model_info": {
                        "general.architecture": "quire",
                        "quire.context_length": _context_length(is_main, info),
                        "quire.vocab_size": info.vocab_size,
                    },
                    "capabilities": _capabilities(info, is_main=is_main),
                    "modified_at": time_text(self._started),
                }
            )
        )

    async def _pull(self, cycle: RequestCycle) -> None:
        """Answer that a served model is there. Other models are not found: this server downloads none."""
        with self._reader.reporting(cycle):
            fields, _ = await self._reader.fields(cycle, ALL_FIELDS, "any", loads=False)
            is_stream = fields.get("stream", bool, True)
        content = msgspec.json.encode({"status": "success"})
        media_type = LINE_HEADERS[0][1] if is_stream else "application/json"
        cycle.respond(HTTPAnswer(200, content + b"\n" * is_stream, media_type))


def _capabilities(info: EngineInfo, *, is_main: bool) -> list[str]:
    found = []
    if is_main and info.generates:
        found.append("completion")
        found += ["tools"] if info.has_tool_calls else []
        found += ["thinking"] if info.has_reasoning else []
        found += ["vision"] if info.max_images else []
    if info.encoder is not None and not info.encoder.num_labels and not (is_main and info.generates):
        found.append("embedding")
    return found


def _context_length(is_main: bool, info: EngineInfo) -> int:
    return info.max_model_len if is_main or info.encoder is None else info.encoder.max_model_len


def _details() -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(("parent_model", "format", "parameter_size", "quantization_level"), "")
    return {**empty, "family": "quire", "families": ["quire"]}


def _digest(name: str, info: EngineInfo) -> str:
    return hashlib.sha256(f"{name}/{info.fingerprint}".encode()).hexdigest()


def _tagged(name: str) -> str:
    return name if ":" in name else name + LATEST


async def _greet(cycle: RequestCycle) -> None:
    """Answer the probe of clients."""
    cycle.respond(HTTPAnswer(200, b"Ollama is running", "text/plain; charset=utf-8"))


async def _version(cycle: RequestCycle) -> None:
    cycle.respond(_json({"version": f"{API_VERSION}+quire.{version('quire')}"}))


async def _refuse_change(cycle: RequestCycle) -> None:
    raise BadRequest(
        "this server has its models from its start; it creates, copies, deletes and pushes none", status=403
    )


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
