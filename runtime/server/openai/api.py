"""The paths of the API: what a request needs to be allowed, and what answers it."""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from structlog.contextvars import bound_contextvars

from ...common.errors import QuireError, Unavailable
from ...common.prompts import shown
from ...engine.facade import EngineInfo, GenerateRequest
from ...engine.validator import check_num_images
from ..monitoring import OperatorServer, Readiness
from ..pages import PAGE_HEADERS, PageFile, read_page
from ..request_handler import AppContext
from ..request_log import quire_error
from ..stored_index import ToStore
from .calls import Call, chat_call, chat_prompt, checked_messages, completion_call
from .embeddings import (
    EMBEDDING_FIELDS,
    RERANK_FIELDS,
    SCORE_FIELDS,
    EmbeddingCall,
    answer_embedding,
    embedding_call,
    rerank_call,
    score_call,
)
from .errors import BadRequest, HTTPAnswer
from .exchange import Exchange
from .fields import KNOWN, TOKENIZE, Fields, check_model
from .formats import ChatFormat, CompletionFormat
from .image_urls import ImageFetcher
from .json_body import PARSED_AT_ONCE, BodyReader, parse_object
from .responses import RESPONSE_KNOWN, ResponseFormat, response_call
from .running import CallRunner, StreamedOutput, WholeOutput
from .stored import Endpoint, KeptRequests, idempotency_key
from .structure import structure_field

BEARER = b"bearer "
MODELS = "/v1/models"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
CHAT_ENDPOINT = Endpoint(chat_call, ChatFormat, KNOWN, "chat.completion.deleted")
COMPLETION_ENDPOINT = Endpoint(completion_call, CompletionFormat, KNOWN)
RESPONSE_ENDPOINT = Endpoint(response_call, ResponseFormat, RESPONSE_KNOWN, "response")
PAGE = ("chat.html", "chat.css", "chat.js", "api.js", "conversations.js", "view.js")  # in the folder `page`
EMBEDDING_CALLS = {
    "/v1/embeddings": (embedding_call, EMBEDDING_FIELDS),
    "/v1/rerank": (rerank_call, RERANK_FIELDS),
    "/rerank": (rerank_call, RERANK_FIELDS),
    "/v1/score": (score_call, SCORE_FIELDS),
    "/score": (score_call, SCORE_FIELDS),
}


class Route(NamedTuple):
    """What answers one method of a path."""

    answer: Callable[[Exchange], Awaitable[None]]
    takes_body: bool = False
    needs_key: bool = True


class Api:
    """Answers the requests of every HTTP connection of one server."""

    def __init__(
        self, context: AppContext, readiness: Readiness, model: str, operators: OperatorServer | None = None
    ) -> None:
        """Answer /metrics, too, if `operators` are given."""
        self._context = context
        self._readiness = readiness
        self._model = model
        self._started = int(time.time())
        self._images = ImageFetcher(context.config.allowed_image_hosts, context.config.max_frame_bytes)
        self._bodies = BodyReader()
        self._kept = KeptRequests(context, model, self._bodies)
        self._routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": Route(self._health, needs_key=False)},
            "/version": {"GET": Route(self._version, needs_key=False)},
            MODELS: {"GET": Route(self._models)},
            CHATS: {"POST": Route(partial(self._generate, CHAT_ENDPOINT), takes_body=True)},
            "/v1/completions": {"POST": Route(partial(self._generate, COMPLETION_ENDPOINT), takes_body=True)},
            RESPONSES: {"POST": Route(partial(self._generate, RESPONSE_ENDPOINT), takes_body=True)},
            "/tokenize": {"POST": Route(self._tokenize, takes_body=True)},
            "/detokenize": {"POST": Route(self._detokenize, takes_body=True)},
        }
        for path, (read_call, known) in EMBEDDING_CALLS.items():
            self._routes[path] = {"POST": Route(partial(self._embed, read_call, known), takes_body=True)}
        if operators is not None:
            self._routes["/metrics"] = {"GET": Route(partial(_send_metrics, operators), needs_key=False)}
        page = read_page(files(__package__) / "page", *PAGE)
        self._page = {path: {"GET": Route(partial(_send_file, file), needs_key=False)} for path, file in page.items()}

    @property
    def _model_names(self) -> tuple[str, ...]:
        """The names of the served model and of an embedding model beside it, which both embed."""
        info = self._context.engine.info
        beside = info.encoder is not None and info.generates and info.encoder.name
        return (self._model, beside) if beside and beside != self._model else (self._model,)

    def close(self) -> None:
        """Read no long body any more. Idempotent."""
        self._bodies.close()

    def route(self, exchange: Exchange) -> Route:
        """Return what answers the request, whose tenant is set. Raises BadRequest or Unauthenticated."""
        self._check_host(exchange.headers)
        path = exchange.target.partition("?")[0]
        methods = self._routes.get(path) or self._page.get(path) or self._routes_below(path)
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

    def _routes_below(self, path: str) -> Mapping[str, Route] | None:
        """Return what answers the methods of a path that contains a name."""
        if path.startswith(f"{MODELS}/"):
            return {"GET": Route(self._one_model)}
        kept = self._kept
        parent, _, last = path.rpartition("/")
        for base, endpoint in ((CHATS, CHAT_ENDPOINT), (RESPONSES, RESPONSE_ENDPOINT)):
            if parent == base and last:
                get, delete = partial(kept.retrieve, endpoint, last), partial(kept.delete, endpoint, last)
                return {"GET": Route(get), "DELETE": Route(delete)}
        base, _, name = parent.rpartition("/")
        if base == RESPONSES and last == "cancel":
            return {"POST": Route(partial(kept.cancel, RESPONSE_ENDPOINT, name), takes_body=True)}
        if base == RESPONSES and last == "input_items":
            return {"GET": Route(partial(kept.input_items, RESPONSE_ENDPOINT, name))}
        return None

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

    async def _generate(self, endpoint: Endpoint, exchange: Exchange) -> None:
        context, tenant = self._context, exchange.tenant
        assert tenant is not None, "authenticated"
        with self._reporting(exchange):
            if context.leaves_at is not None:
                raise Unavailable("the server is shutting down; send this request elsewhere")
            key = idempotency_key(exchange.headers)
            num_bytes = len(exchange.body)
            fields = await self._fields(exchange, endpoint.known)
            num_bytes += await self._fetch_images(fields, tenant.name)
            if endpoint is RESPONSE_ENDPOINT and "previous_response_id" in fields.values:
                num_bytes += await self._kept.add_previous(endpoint, fields, exchange)
            exchange.structure_field = structure_field(fields.values.keys())
            read = partial(_read_call, endpoint, fields, context.engine.info, tenant.name)
            to_store, call = await self._bodies.read(tenant.name, num_bytes, read)
        try:
            if key is not None or call.store:
                answer = self._kept.submit(exchange, endpoint, call, key, to_store if call.store else None)
            else:
                answer = self._submit(exchange, endpoint, call)
        except QuireError as error:
            context.requests.log.refused(tenant.name, exchange.number, error.code, error.retry_after_ms)
            raise
        del call, fields, read  # they hold the prompt
        if (failure := await answer) is not None:
            exchange.refuse(failure, endpoint.known)

    def _submit(self, exchange: Exchange, endpoint: Endpoint, call: Call) -> Awaitable[QuireError | None]:
        """Submit a call whose output is not kept, and return what answers it. Raises a refusal."""
        runner = CallRunner(exchange, call, self._context.engine)
        runner.submit(self._context.requests)
        # The engine has checked the number of choices.
        form = endpoint.form_class(call, self._model, self._context.engine.token)
        return runner.run(StreamedOutput(exchange, form) if call.stream else WholeOutput(exchange, form))

    async def _embed(
        self, read_call: Callable[[Fields, str], EmbeddingCall], known: Set[str], exchange: Exchange
    ) -> None:
        context, tenant = self._context, exchange.tenant
        assert tenant is not None, "authenticated"
        with self._reporting(exchange):
            if context.leaves_at is not None:
                raise Unavailable("the server is shutting down; send this request elsewhere")
            call = read_call(await self._fields(exchange, known, self._model_names), tenant.name)
        try:
            live = context.requests.embed(tenant, exchange.number, call.request)
        except QuireError as error:
            context.requests.log.refused(tenant.name, exchange.number, error.code, error.retry_after_ms)
            exchange.refuse(error, known)
            return
        answering = answer_embedding(exchange, live, call.new_form(self._model_names[-1]))
        del call  # it holds the texts
        if (failure := await answering) is not None:
            exchange.refuse(failure, known)

    async def _tokenize(self, exchange: Exchange) -> None:
        tenant = exchange.tenant
        assert tenant is not None, "authenticated"
        engine, texts = self._context.engine, self._context.requests.texts.of(tenant.name)
        num_bytes = len(exchange.body)
        with self._reporting(exchange):
            fields = await self._fields(exchange)
            fields.check_supported(TOKENIZE)
            await self._fetch_images(fields, tenant.name)
            if "messages" in fields.values:
                read = partial(_chat_to_tokenize, fields, engine.info, tenant.name)
                request = await self._bodies.read(tenant.name, num_bytes, read)
                release = texts.reserve(request.text_bytes())
                tokenizing = engine.tokenize_chat(request)
            else:
                fields.required("prompt")
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
            fields = await self._fields(exchange)
            fields.required("tokens")
            tokens = fields.take("tokens", list, [])
            if set(map(type, tokens)) - {int}:
                raise BadRequest(f"tokens must be a list of token ids, not {shown(tokens)}", "tokens")
            text = await self._context.engine.detokenize(tuple(tokens), tenant=tenant.name)
        exchange.respond(_json({"prompt": text}))

    async def _fetch_images(self, fields: Fields, tenant: str) -> int:
        """Replace the URLs of images at listed hosts by data URLs; return their bytes. Raises a refusal."""
        images = self._images.remote_images(fields.values)
        if not images:
            return 0
        check_num_images(len(images), self._context.engine.info)
        release = self._context.requests.texts.of(tenant).reserve(self._images.max_bytes)
        try:
            return await self._images.fetch(images)
        finally:
            release()

    async def _fields(self, exchange: Exchange, known: Set[str] = KNOWN, models: Sequence[str] = ()) -> Fields:
        """Return the body's fields, once its model is checked. Raises BadRequest, or the refusal of a long body."""
        tenant, body = exchange.tenant, exchange.body
        assert tenant is not None, "authenticated"
        exchange.body = b""
        is_long = len(body) > PARSED_AT_ONCE
        release = self._context.requests.texts.of(tenant.name).reserve(len(body) if is_long else 0)
        try:
            fields = Fields(await self._bodies.read(tenant.name, len(body), partial(parse_object, body)))
        finally:
            release()
        self._context.observer.http_unknown_fields.value += fields.num_unknown(known)
        check_model(fields, models or (self._model,))
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
        exchange.respond(_json({"object": "list", "data": [self._model_card(name) for name in self._model_names]}))

    async def _one_model(self, exchange: Exchange) -> None:
        name = unquote(exchange.target.partition("?")[0].removeprefix(f"{MODELS}/"))
        check_model(Fields({"model": name}), self._model_names)
        exchange.respond(_json(self._model_card(name)))

    def _model_card(self, name: str) -> dict[str, object]:
        card: dict[str, object] = {"id": name, "object": "model", "created": self._started, "owned_by": "quire"}
        if name == self._model and self._context.engine.info.max_images:
            card["input_modalities"] = ["text", "image"]
        return card

    # Refusals by path and headers

    def _not_found(self, path: str) -> BadRequest:
        advice = f"the paths are {', '.join(self._routes)}"
        if f"/v1{path}" in self._routes or path.removeprefix("/v1") in self._routes:
            advice = "the base URL of this server ends with /v1, once"
        elif path.rstrip("/") in self._routes:
            advice = "this path has no slash at its end"
        return BadRequest(f"there is no {path[:200]!r} here; {advice}", error_code="not_found", status=404)

    def _check_host(self, headers: Mapping[str, bytes]) -> None:
        """Raise BadRequest for the name of another site, unless keys are required.

        Without keys a web page could point its own name at this address, and a browser would let it read the answers.
        """
        if self._context.config.has_keys:
            return
        host = headers.get("host", b"").decode("ascii", "replace")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() in ("", "localhost", self._context.config.openai_host):
            return
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            raise BadRequest(
                f"the host {host[:200]!r} is not this machine's address; use its address, or set up keys (`token`)",
                status=403,
            ) from None


def _read_call(endpoint: Endpoint, fields: Fields, info: EngineInfo, tenant: str) -> tuple[ToStore | None, Call]:
    """Return what to keep of a request if it is stored, and its call. Raises InvalidRequest."""
    return endpoint.to_store(fields), endpoint.read_call(fields, info, tenant)


def _chat_to_tokenize(fields: Fields, info: EngineInfo, tenant: str) -> GenerateRequest:
    """Return the request whose prompt is to be tokenized. Raises BadRequest."""
    for name in ("prompt", "add_special_tokens"):
        if fields.values.get(name):
            raise BadRequest(f"{name} cannot be used with messages", name)
    return chat_prompt(fields.values, checked_messages(fields.values["messages"], info), tenant)


def _key(headers: Mapping[str, bytes]) -> str | None:
    """Return the key that the client presents."""
    value = headers.get("authorization", b"")
    return value[len(BEARER) :].strip().decode(errors="replace") if value[: len(BEARER)].lower() == BEARER else None


def _check_body_headers(headers: Mapping[str, bytes]) -> None:
    """Raise BadRequest for a body that is not plain JSON, which a browser sends to no other site unasked."""
    if headers.get("content-length", b"0") == b"0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise BadRequest(
            f"content-type must be application/json, not {kind.decode(errors='replace')[:80]!r}", status=415
        )
    if headers.get("content-encoding", b"identity").lower() != b"identity":
        raise BadRequest("a compressed body is not supported; leave out content-encoding", status=415)


async def _send_file(file: PageFile, exchange: Exchange) -> None:
    exchange.respond(HTTPAnswer(200, file.content, file.media_type, PAGE_HEADERS))


async def _send_metrics(operators: OperatorServer, exchange: Exchange) -> None:
    answer = await operators.metrics()
    exchange.respond(HTTPAnswer(answer.status_code, answer.content, answer.media_type))


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
