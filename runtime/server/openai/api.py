"""The paths of the API: the conditions of each request, and its handler."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from structlog.contextvars import bound_contextvars

from ...common.default_sampling import page_sampling
from ...common.errors import QuireError, Unavailable
from ...engine.facade import EngineInfo
from ..app_context import AppContext
from ..monitoring import OperatorServer, Readiness
from ..monitoring.pages import PAGE_HEADERS, PageFile, read_page
from ..requests.indexes import ToStore
from ..requests.request_log import quire_error
from ..tenancy.tenants import Turns
from .answer_writers import BodyWriter, EventWriter
from .calls import Call, chat_call, completion_call
from .embeddings import (
    CLASSIFY_FIELDS,
    EMBEDDING_FIELDS,
    RERANK_FIELDS,
    SCORE_FIELDS,
    EmbeddingCall,
    answer_embedding,
    classify_call,
    embedding_call,
    rerank_call,
    score_call,
)
from .errors import STRUCTURED_OUTPUTS, BadRequest, HTTPAnswer
from .fields import KNOWN, Fields
from .formats import ChatFormat, CompletionFormat
from .logprobs import Vocabulary
from .model_cards import ServedModels, model_card
from .playback import Playback
from .request_cycle import RequestCycle
from .request_reader import RequestReader
from .responses import RESPONSE_KNOWN, ResponseFormat, response_call
from .stored import Endpoint, KeptRequests, idempotency_key
from .structure import structure_field
from .tokens import TokenAnswers

BEARER = b"bearer "
MODELS = "/v1/models"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
CHAT_ENDPOINT = Endpoint(chat_call, ChatFormat, KNOWN, "chat.completion.deleted", {"prompt": "messages"})
COMPLETION_ENDPOINT = Endpoint(completion_call, CompletionFormat, KNOWN)
RESPONSE_NAMES = {"prompt": "input", "messages": "input", "reasoning_effort": "reasoning.effort"}
RESPONSE_ENDPOINT = Endpoint(response_call, ResponseFormat, RESPONSE_KNOWN, "response", RESPONSE_NAMES)
PAGE = (  # files in the folder `page`
    "chat.html", "chat.css", "chat.js", "api.js", "conversations.js", "elements.js", "inline.js", "markdown.js",
    "markdown_view.js", "search.js", "token_view.js", "turn_view.js", "view.js",
)  # fmt: skip
PAGE_SETTINGS = "/settings.json"  # path of the page's settings
EMBEDDING_CALLS = {
    "/v1/embeddings": (embedding_call, EMBEDDING_FIELDS),
    "/v1/rerank": (rerank_call, RERANK_FIELDS),
    "/v2/rerank": (rerank_call, RERANK_FIELDS),  # path of Cohere's client
    "/rerank": (rerank_call, RERANK_FIELDS),
    "/v1/score": (score_call, SCORE_FIELDS),
    "/score": (score_call, SCORE_FIELDS),
    "/classify": (classify_call, CLASSIFY_FIELDS),
}


class Route(NamedTuple):
    """The handler of one method of a path, and the conditions of the request."""

    answer: Callable[[RequestCycle], Awaitable[None]]
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
        self.turns = Turns()  # turns in which connections begin requests
        self._models = ServedModels(model, context.engine)
        self._reader = RequestReader(context, self._models)
        self._vocabulary = Vocabulary(context.engine.token)
        self._kept = KeptRequests(context, model, self._reader.bodies, self._vocabulary)
        tokens = TokenAnswers(context, self._reader, self._kept, self._models)
        self._routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": Route(self._health, needs_key=False)},
            "/version": {"GET": Route(self._version, needs_key=False)},
            MODELS: {"GET": Route(self._list_models)},
            CHATS: {"POST": Route(partial(self._generate, CHAT_ENDPOINT), takes_body=True)},
            "/v1/completions": {"POST": Route(partial(self._generate, COMPLETION_ENDPOINT), takes_body=True)},
            RESPONSES: {"POST": Route(partial(self._generate, RESPONSE_ENDPOINT), takes_body=True)},
            INPUT_TOKENS: {"POST": Route(partial(tokens.count_input, RESPONSE_ENDPOINT), takes_body=True)},
            "/tokenize": {"POST": Route(tokens.tokenize, takes_body=True)},
            "/detokenize": {"POST": Route(tokens.detokenize, takes_body=True)},
        }
        for path, (read_call, known) in EMBEDDING_CALLS.items():
            self._routes[path] = {"POST": Route(partial(self._embed, read_call, known), takes_body=True)}
        if operators is not None:
            self._routes["/metrics"] = {"GET": Route(partial(_send_metrics, operators), needs_key=False)}
        page = read_page(files(__package__) / "page", *PAGE)
        self._page = {path: {"GET": Route(partial(_send_file, file), needs_key=False)} for path, file in page.items()}
        self._page[PAGE_SETTINGS] = {"GET": Route(self._page_settings)}

    def close(self) -> None:
        """Stop reading long bodies. Idempotent."""
        self._reader.bodies.close()

    def route(self, cycle: RequestCycle) -> Route:
        """Return the route of the request; set its tenant if the route needs a key.

        Raises BadRequest or Unauthenticated.
        """
        self._check_host(cycle.headers)
        path = cycle.target.partition("?")[0]
        methods = self._routes.get(path) or self._page.get(path) or self._routes_below(path)
        if methods is None:
            raise self._not_found(path)
        route = methods.get("GET" if cycle.method == "HEAD" else cycle.method)
        if route is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise BadRequest(f"{path} allows {allowed}", status=405, headers={"allow": allowed})
        if route.needs_key:
            cycle.tenant = self._context.keyring.authenticate(_key(cycle.headers))
        if route.takes_body:
            _check_body_headers(cycle.headers)
        return route

    def _routes_below(self, path: str) -> Mapping[str, Route] | None:
        """Return the routes of a path that contains a name."""
        if path.startswith(f"{MODELS}/") and path != f"{MODELS}/":
            return {"GET": Route(self._one_model)}
        kept = self._kept
        parent, _, last = path.rpartition("/")
        for base, endpoint in ((CHATS, CHAT_ENDPOINT), (RESPONSES, RESPONSE_ENDPOINT)):
            if parent == base and last:
                get = partial(kept.retrieve, endpoint, last)
                delete = partial(kept.delete, endpoint, last)
                return {"GET": Route(get), "DELETE": Route(delete)}
        base, _, name = parent.rpartition("/")
        if base == RESPONSES and last == "cancel":
            return {"POST": Route(partial(kept.cancel, RESPONSE_ENDPOINT, name), takes_body=True)}
        if base == RESPONSES and last == "input_items":
            return {"GET": Route(partial(kept.input_items, RESPONSE_ENDPOINT, name))}
        return None

    async def answer(self, cycle: RequestCycle, route: Route) -> None:
        """Answer the request. Never raises."""
        with bound_contextvars(request=cycle.log_id):
            try:
                if cycle.tenant is not None:
                    await cycle.tenant.frame_turns.wait()
                await route.answer(cycle)
            except Exception as error:
                cycle.refuse(quire_error(error, client_id=cycle.number), KNOWN)

    # Requests to the engine

    async def _generate(self, endpoint: Endpoint, cycle: RequestCycle) -> None:
        context = self._context
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        with self._reader.reporting(cycle):
            self._check_accepting()
            key = idempotency_key(cycle.headers)
            num_bytes = len(cycle.body)
            fields = await self._reader.fields(cycle, endpoint.known)
            num_bytes += await self._reader.fetch_images(fields, tenant.name)
            if endpoint is RESPONSE_ENDPOINT:
                num_bytes += await self._kept.add_stored(endpoint, fields, cycle)
            cycle.field_names = {**endpoint.field_names, STRUCTURED_OUTPUTS: structure_field(fields.values.keys())}
            read = partial(_read_call, endpoint, fields, context.engine.info, tenant.name)
            to_store, call = await self._reader.bodies.read(tenant.name, num_bytes, read)
        try:
            if key is not None or call.store:
                answer = self._kept.submit(cycle, endpoint, call, key, to_store if call.store else None)
            else:
                answer = self._submit(cycle, endpoint, call)
        except QuireError as error:
            context.requests.log.refused(tenant.name, cycle.number, error.code, error.retry_after_ms)
            raise
        del call, fields, read  # the objects hold the prompt
        if (failure := await answer) is not None:
            cycle.refuse(failure, endpoint.known)

    def _submit(self, cycle: RequestCycle, endpoint: Endpoint, call: Call) -> Awaitable[QuireError | None]:
        """Submit a call whose output is not kept, and return the function that answers it. Raises a refusal."""
        playback = Playback(cycle, call, self._context.engine)
        playback.submit(self._context.requests)
        # The engine has checked the number of choices.
        form = endpoint.form_class(call, self._model, self._vocabulary)
        return playback.run((EventWriter if call.stream else BodyWriter)(cycle, form))

    async def _embed(
        self, read_call: Callable[[Fields, str], EmbeddingCall], known: Set[str], cycle: RequestCycle
    ) -> None:
        context = self._context
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        with self._reader.reporting(cycle):
            self._check_accepting()
            call = read_call(await self._reader.fields(cycle, known, "vectors"), tenant.name)
        try:
            live = context.requests.embed(tenant, cycle.number, call.request)
        except QuireError as error:
            context.requests.log.refused(tenant.name, cycle.number, error.code, error.retry_after_ms)
            cycle.refuse(error, known)
            return
        encoder = context.engine.info.encoder
        labels = encoder.labels if encoder is not None else ()
        answering = answer_embedding(cycle, live, call.new_form(self._models.encoder, labels))
        del call  # the call holds the texts
        if (failure := await answering) is not None:
            cycle.refuse(failure, known)

    def _check_accepting(self) -> None:
        """Raise Unavailable while the server drains."""
        if self._context.leaves_at is not None:
            raise Unavailable("the server is shutting down; send this request elsewhere")

    # Answers without the engine

    async def _health(self, cycle: RequestCycle) -> None:
        problem = self._readiness.problem()
        if problem is not None:
            raise Unavailable(problem)
        cycle.respond(HTTPAnswer(200, b"", "text/plain; charset=utf-8"))

    async def _version(self, cycle: RequestCycle) -> None:
        cycle.respond(_json({"version": version("quire")}))

    async def _list_models(self, cycle: RequestCycle) -> None:
        cycle.respond(_json({"object": "list", "data": [self._model_card(name) for name in self._models.names]}))

    async def _one_model(self, cycle: RequestCycle) -> None:
        name = unquote(cycle.target.partition("?")[0].removeprefix(f"{MODELS}/"))
        self._models.check(Fields({"model": name}), "any")
        cycle.respond(_json(self._model_card(name)))

    def _model_card(self, name: str) -> dict[str, object]:
        return model_card(name, self._context.engine.info, self._started, is_main=name == self._model)

    async def _page_settings(self, cycle: RequestCycle) -> None:
        """Answer with the sampling parameters that the page sends unless its user sets others."""
        cycle.respond(_json({"sampling": page_sampling(self._context.engine.info.default_sampling)}))

    # Refusals by path and headers

    def _not_found(self, path: str) -> BadRequest:
        advice = f"the paths are {', '.join(self._routes)}"
        without_v1 = path.removeprefix("/v1")
        if f"/v1{path}" in self._routes or (without_v1.startswith("/v1/") and without_v1 in self._routes):
            advice = "the base URL of this server ends with /v1, once"
        elif without_v1 in self._routes:
            advice = f"the path is {without_v1}, without /v1"
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
                f"the host {host[:200]!r} is not this machine's address; use its address, or set up keys (--token or "
                "--auth-tokens)",
                status=403,
            ) from None


def _read_call(endpoint: Endpoint, fields: Fields, info: EngineInfo, tenant: str) -> tuple[ToStore | None, Call]:
    """Return the data to keep of a stored request, and its call. Raises InvalidRequest."""
    return endpoint.to_store(fields), endpoint.read_call(fields, info, tenant)


def _key(headers: Mapping[str, bytes]) -> str | None:
    """Return the client's key."""
    value = headers.get("authorization", b"")
    return value[len(BEARER) :].strip().decode(errors="replace") if value[: len(BEARER)].lower() == BEARER else None


def _check_body_headers(headers: Mapping[str, bytes]) -> None:
    """Raise BadRequest for a body that is not plain JSON: browsers send no JSON to another site without its consent."""
    if headers.get("content-length", b"0") == b"0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise BadRequest(
            f"content-type must be application/json, not {kind.decode(errors='replace')[:80]!r}", status=415
        )
    if headers.get("content-encoding", b"identity").lower() != b"identity":
        raise BadRequest("a compressed body is not supported; leave out content-encoding", status=415)


async def _send_file(file: PageFile, cycle: RequestCycle) -> None:
    cycle.respond(HTTPAnswer(200, file.content, file.media_type, PAGE_HEADERS))


async def _send_metrics(operators: OperatorServer, cycle: RequestCycle) -> None:
    answer = await operators.metrics()
    cycle.respond(HTTPAnswer(answer.status_code, answer.content, answer.media_type))


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
