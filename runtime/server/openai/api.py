"""The paths of the API: what a request needs to be allowed, and what answers it."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from structlog.contextvars import bound_contextvars

from ...common.errors import QuireError, Unavailable
from ...common.prompts import shown
from ...engine.facade import EngineInfo
from ..monitoring import Readiness
from ..request_handler import AppContext
from ..request_log import quire_error
from .errors import BadRequest, HTTPAnswer
from .exchange import Exchange
from .fields import KNOWN, TOKENIZE, Call, Fields, chat_call, check_model, checked_messages, completion_call
from .formats import ChatFormat, CompletionFormat, Format
from .json_body import parse_object
from .responses import RESPONSE_KNOWN, ResponseFormat, response_call
from .running import CallOutput, CallRunner, StreamedOutput, WholeOutput

BEARER = b"bearer "
MODELS = "/v1/models"
NOT_SERVED = {
    "/v1/embeddings": "this model generates text; it makes no embeddings",
}

ReadCall = Callable[[Fields, EngineInfo, str], Call]


class Route(NamedTuple):
    """What answers one method of a path."""

    answer: Callable[[Exchange], Awaitable[None]]
    takes_body: bool = False
    needs_key: bool = True


class Api:
    """Answers the requests of every HTTP connection of one server."""

    def __init__(self, context: AppContext, readiness: Readiness, model: str) -> None:
        self._context = context
        self._readiness = readiness
        self._model = model
        self._started = int(time.time())
        self._routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": Route(self._health, needs_key=False)},
            "/version": {"GET": Route(self._version, needs_key=False)},
            MODELS: {"GET": Route(self._models)},
            "/v1/chat/completions": {"POST": Route(self._chat, takes_body=True)},
            "/v1/completions": {"POST": Route(self._completion, takes_body=True)},
            "/v1/responses": {"POST": Route(self._response, takes_body=True)},
            "/tokenize": {"POST": Route(self._tokenize, takes_body=True)},
            "/detokenize": {"POST": Route(self._detokenize, takes_body=True)},
        }

    def route(self, exchange: Exchange) -> Route:
        """Return what answers the request, whose tenant is set. Raises BadRequest or Unauthenticated."""
        self._check_host(exchange.headers)
        path = exchange.target.partition("?")[0]
        methods = self._routes.get(path)
        if methods is None and path.startswith(f"{MODELS}/"):
            methods = {"GET": Route(self._one_model)}
        if methods is None:
            raise self._not_found(path)
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise BadRequest(f"{path} allows {allowed}", status=405, headers={"allow": allowed})
        if route.needs_key:
            exchange.tenant = self._context.keyring.authenticate(_key(exchange.headers))
        if route.takes_body:
            _check_body_headers(exchange.headers)
        return route

    async def answer(self, exchange: Exchange, route: Route) -> None:
        """Answer the request. Never raises."""
        with bound_contextvars(request=exchange.log_id):
            try:
                if exchange.tenant is not None:
                    await exchange.tenant.frame_turns.take()
                await route.answer(exchange)
            except Exception as error:
                exchange.refuse(quire_error(error, client_id=exchange.number), KNOWN)

    # Requests to the engine

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, chat_call, ChatFormat)

    async def _completion(self, exchange: Exchange) -> None:
        await self._generate(exchange, completion_call, CompletionFormat)

    async def _response(self, exchange: Exchange) -> None:
        await self._generate(exchange, response_call, ResponseFormat, RESPONSE_KNOWN)

    async def _generate(
        self, exchange: Exchange, read_call: ReadCall, form_class: type[Format], known: Set[str] = KNOWN
    ) -> None:
        context, tenant = self._context, exchange.tenant
        assert tenant is not None, "authenticated"
        with self._reporting(exchange):
            if context.leaves_at is not None:
                raise Unavailable("the server is shutting down; send this request elsewhere")
            call = read_call(self._fields(exchange, known), context.engine.info, tenant.name)
        runner = CallRunner(exchange, call, context.engine)
        try:
            runner.submit(context.requests)
        except QuireError as error:
            context.requests.log.refused(tenant.name, exchange.number, error.code, error.retry_after_ms)
            raise
        # The engine has checked the number of choices.
        form = form_class(call, self._model, context.engine.token)
        output: CallOutput = StreamedOutput(exchange, form) if call.stream else WholeOutput(exchange, form)
        del call  # holds the prompt
        if (failure := await runner.run(output)) is not None:
            exchange.refuse(failure, known)

    async def _tokenize(self, exchange: Exchange) -> None:
        tenant = exchange.tenant
        assert tenant is not None, "authenticated"
        engine, texts = self._context.engine, self._context.requests.texts.of(tenant.name)
        with self._reporting(exchange):
            fields = self._fields(exchange)
            fields.check_supported(TOKENIZE)
            if "messages" in fields.values:
                messages = checked_messages(fields.values["messages"])
                release = texts.reserve(len(exchange.body))
                tokenizing = engine.tokenize_chat(messages, tenant=tenant.name)
            else:
                text = fields.take("prompt", str, "")
                release = texts.reserve(sys.getsizeof(text))
                adds_special = fields.take("add_special_tokens", bool, True)
                tokenizing = engine.tokenize(text, adds_special, tenant=tenant.name)
            try:
                tokens = await tokenizing
            finally:
                release()
            texts_of_tokens = None
            if fields.take("return_token_strs", bool, False):
                texts_of_tokens = [engine.token(token).data.decode(errors="replace") for token in tokens]
        body = {"count": len(tokens), "max_model_len": engine.info.max_model_len}
        exchange.respond(_json({**body, "tokens": tokens, "token_strs": texts_of_tokens}))

    async def _detokenize(self, exchange: Exchange) -> None:
        tenant = exchange.tenant
        assert tenant is not None, "authenticated"
        with self._reporting(exchange):
            tokens = self._fields(exchange).take("tokens", list, [])
            if set(map(type, tokens)) - {int}:
                raise BadRequest(f"tokens must be a list of token ids, not {shown(tokens)}", "tokens")
            text = await self._context.engine.detokenize(tuple(tokens), tenant=tenant.name)
        exchange.respond(_json({"prompt": text}))

    def _fields(self, exchange: Exchange, known: Set[str] = KNOWN) -> Fields:
        """Return the body's fields, once its model is checked. Raises BadRequest."""
        fields = Fields(parse_object(exchange.body))
        exchange.body = b""
        self._context.observer.http_unknown_fields.value += fields.num_unknown(known)
        check_model(fields, self._model)
        return fields

    @contextmanager
    def _reporting(self, exchange: Exchange) -> Iterator[None]:
        """Count and log a refusal that the engine does not see, and raise it again."""
        try:
            yield
        except QuireError as error:
            assert exchange.tenant is not None, "authenticated"
            self._context.observer.on_rejected(error)
            self._context.requests.log.refused(exchange.tenant.name, exchange.number, error.code, error.retry_after_ms)
            raise

    # What needs no engine

    async def _health(self, exchange: Exchange) -> None:
        problem = self._readiness.problem()
        if problem is not None:
            raise Unavailable(problem)
        exchange.respond(HTTPAnswer(200, b"", "text/plain; charset=utf-8"))

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(_json({"version": version("quire")}))

    async def _models(self, exchange: Exchange) -> None:
        exchange.respond(_json({"object": "list", "data": [self._model_card()]}))

    async def _one_model(self, exchange: Exchange) -> None:
        name = unquote(exchange.target.partition("?")[0].removeprefix(f"{MODELS}/"))
        check_model(Fields({"model": name}), self._model)
        exchange.respond(_json(self._model_card()))

    def _model_card(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": self._started, "owned_by": "quire"}

    # Refusals by path and headers

    def _not_found(self, path: str) -> BadRequest:
        advice = f"the paths are {', '.join(self._routes)}"
        if path in NOT_SERVED:
            advice = NOT_SERVED[path]
        elif f"/v1{path}" in self._routes or path.removeprefix("/v1") in self._routes:
            advice = "the base URL of this server ends with /v1, once"
        return BadRequest(f"there is no {path[:200]!r} here; {advice}", error_code="not_found", status=404)

    def _check_host(self, headers: Mapping[str, bytes]) -> None:
        """Raise BadRequest for the name of another site, unless keys are required.

        Without keys a web page could point its own name at this address, and a browser would let it read the answers.
        """
        if self._context.config.has_keys:
            return
        host = headers.get("host", b"").decode("ascii", "replace")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() in ("", "localhost", self._context.config.api_host):
            return
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            raise BadRequest(
                f"the host {host[:200]!r} is not this machine's address; use its address, or set up keys (`token`)",
                status=403,
            ) from None


def _key(headers: Mapping[str, bytes]) -> str | None:
    """Return the key that the client presents."""
    value = headers.get("authorization", b"")
    return value[len(BEARER) :].strip().decode(errors="replace") if value[: len(BEARER)].lower() == BEARER else None


def _check_body_headers(headers: Mapping[str, bytes]) -> None:
    """Raise BadRequest for a body that is not plain JSON, which a browser sends to no other site unasked."""
    kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise BadRequest(
            f"content-type must be application/json, not {kind.decode(errors='replace')[:80]!r}", status=415
        )
    if headers.get("content-encoding", b"identity").lower() != b"identity":
        raise BadRequest("a compressed body is not supported; leave out content-encoding", status=415)


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
