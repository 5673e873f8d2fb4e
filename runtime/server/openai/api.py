"""The paths of OpenAI's API, and their handlers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import unquote

import msgspec

from ...common.default_sampling import page_sampling
from ...common.errors import QuireError, Unavailable
from ...engine.validator import MAX_PRIORITY
from ..app_context import AppContext
from ..http.answer_writers import BodyWriter, EventWriter
from ..http.calls import Call, as_batch_line
from ..http.embedding import AnswerSource, EmbeddingCall, answer_embedding
from ..http.errors import STRUCTURED_OUTPUTS, DoorForm, HTTPAnswer
from ..http.fields import Fields
from ..http.json_body import BodyReader
from ..http.playback import Playback
from ..http.request_cycle import EVENT_HEADERS, RequestCycle
from ..http.request_reader import RequestReader
from ..http.router import Route, Routes
from ..http.served_models import check_model, vocabularies
from ..models.catalog import ModelName
from ..monitoring import OperatorServer, Readiness
from ..monitoring.pages import PAGE_HEADERS, PageFile, read_page
from ..requests.indexes import ToStore
from .adapters import AdapterAnswers
from .calls import chat_call, completion_call
from .embeddings import (
    CLASSIFY_FIELDS,
    EMBEDDING_FIELDS,
    RERANK_FIELDS,
    SCORE_FIELDS,
    classify_call,
    embedding_call,
    rerank_call,
    score_call,
)
from .errors import error_answer, error_event
from .fields import KNOWN
from .formats import ChatFormat, CompletionFormat
from .model_cards import adapter_card, model_card
from .responses import RESPONSE_KNOWN, ResponseFormat, response_call
from .stored import Endpoint, KeptRequests, idempotency_key
from .structure import structure_field
from .tokens import TokenAnswers

# One line without the empty line that ends an event: after that, clients that saw an `id` would read an empty event.
COMMENT = b":\n"
OPENAI_FORM = DoorForm(error_answer, error_event, KNOWN, EVENT_HEADERS, COMMENT)
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


class OpenAIDoor:
    """OpenAI's API, vLLM's additions and the page. Implements `Door`."""

    form = OPENAI_FORM
    takes_any_type = False

    def __init__(
        self,
        context: AppContext,
        readiness: Readiness,
        bodies: BodyReader,
        operators: OperatorServer | None = None,
    ) -> None:
        """Answer /metrics, too, if `operators` are given."""
        self._context = context
        self._readiness = readiness
        self._started = int(time.time())
        self._models = context.models
        self._reader = RequestReader(context, partial(check_model, context.models), bodies)
        self._vocabularies = vocabularies(context.models)
        self._kept = KeptRequests(context, bodies, self._vocabularies)
        tokens = TokenAnswers(context, self._reader, self._kept)
        adapters = AdapterAnswers(context, self._reader)
        self.paths: dict[str, dict[str, Route]] = {
            "/health": {"GET": Route(self._health, needs_key=False)},
            "/version": {"GET": Route(self._version, needs_key=False)},
            MODELS: {"GET": Route(self._list_models)},
            CHATS: {"POST": Route(partial(self._generate, CHAT_ENDPOINT), takes_body=True)},
            "/v1/completions": {"POST": Route(partial(self._generate, COMPLETION_ENDPOINT), takes_body=True)},
            RESPONSES: {"POST": Route(partial(self._generate, RESPONSE_ENDPOINT), takes_body=True)},
            INPUT_TOKENS: {"POST": Route(partial(tokens.count_input, RESPONSE_ENDPOINT), takes_body=True)},
            "/tokenize": {"POST": Route(tokens.tokenize, takes_body=True)},
            "/detokenize": {"POST": Route(tokens.detokenize, takes_body=True)},
            "/v1/load_lora_adapter": {"POST": Route(adapters.load, takes_body=True)},
            "/v1/unload_lora_adapter": {"POST": Route(adapters.unload, takes_body=True)},
        }
        for path, (read_call, known) in EMBEDDING_CALLS.items():
            self.paths[path] = {"POST": Route(partial(self._embed, read_call, known), takes_body=True)}
        if operators is not None:
            self.paths["/metrics"] = {"GET": Route(partial(_send_metrics, operators), needs_key=False)}
        page = read_page(files(__package__) / "page", *PAGE)
        self._page = {path: {"GET": Route(partial(_send_file, file), needs_key=False)} for path, file in page.items()}
        self._page[PAGE_SETTINGS] = {"GET": Route(self._page_settings)}

    def claims(self, path: str, headers: Mapping[str, bytes]) -> bool:
        """See `Door.claims`."""
        return False

    def routes(self, path: str) -> Routes | None:
        """See `Door.routes`."""
        return self.paths.get(path) or self._page.get(path) or self._routes_below(path)

    def _routes_below(self, path: str) -> Routes | None:
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

    # Requests to the engine

    async def _generate(self, endpoint: Endpoint, cycle: RequestCycle) -> None:
        context = self._context
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        with self._reader.reporting(cycle):
            self._reader.check_accepting()
            key = idempotency_key(cycle.headers)
            num_bytes = len(cycle.body)
            fields, model = await self._reader.fields(cycle, endpoint.known)
            num_bytes += await self._reader.fetch_images(fields, model.info, tenant.name)
            if endpoint is RESPONSE_ENDPOINT:
                num_bytes += await self._kept.add_stored(endpoint, fields, cycle)
            cycle.field_names = {**endpoint.field_names, STRUCTURED_OUTPUTS: structure_field(fields.values.keys())}
            read = partial(_read_call, endpoint, fields, model, tenant.name)
            to_store, call = await self._reader.bodies.read(tenant.name, num_bytes, read)
            if cycle.is_batch:
                call = as_batch_line(call, cycle.given_id or call.name)
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
        key = call.requests[0].model
        playback = Playback(cycle, call, self._models.engine(key))
        playback.submit(self._context.requests)
        # The engine has checked the number of choices.
        form = endpoint.form_class(call, call.model, self._vocabularies[key])
        return playback.run((EventWriter if call.stream else BodyWriter)(cycle, form))

    async def _embed(
        self, read_call: Callable[[Fields, str], EmbeddingCall], known: Set[str], cycle: RequestCycle
    ) -> None:
        context = self._context
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        with self._reader.reporting(cycle):
            self._reader.check_accepting()
            fields, model = await self._reader.fields(cycle, known, "vectors")
            call = read_call(fields, tenant.name)
            request = msgspec.structs.replace(call.request, model=model.model.key)
            name = secrets.token_hex(16)
            if cycle.is_batch:
                request = msgspec.structs.replace(request, priority=MAX_PRIORITY)
                name = cycle.given_id or name
        try:
            live = context.requests.embed(tenant, cycle.number, request)
        except QuireError as error:
            context.requests.log.refused(tenant.name, cycle.number, error.code, error.retry_after_ms)
            cycle.refuse(error, known)
            return
        encoder = model.info.encoder
        labels = encoder.labels if encoder is not None else ()
        form = call.new_form(AnswerSource(model.name, labels, name))
        answering = answer_embedding(cycle, live, form)
        del call, fields, request  # the objects hold the texts
        if (failure := await answering) is not None:
            cycle.refuse(failure, known)

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
        check_model(self._models, Fields({"model": name}), "any")
        cycle.respond(_json(self._model_card(name)))

    def _model_card(self, name: str) -> dict[str, object]:
        found = self._models.find(name)
        assert found is not None, "a name of this server"
        card = model_card(found.target, found.info, self._started, is_main=not found.is_encoder)
        if found.lora and found.lora != found.model.name:
            card = adapter_card(card, found.model.name, found.model.engine.adapter_status(found.lora))
        root = {"root": found.target} if name != found.target else {}
        if (resident := self._models.residency.residents.get(found.model.name)) is not None:
            status = self._models.residency.status(resident)
            card |= {"state": status.state} | ({} if status.ready_in_s is None else {"ready_in_s": status.ready_in_s})
        return {**card, "id": name, **root}

    async def _page_settings(self, cycle: RequestCycle) -> None:
        """Answer with the sampling parameters that the page sends to each model unless its user sets others."""
        found = [(name, self._models.find(name)) for name in self._models.names]
        sampling = {name: page_sampling(model.info.default_sampling) for name, model in found if model is not None}
        cycle.respond(_json({"sampling": sampling}))


def _read_call(endpoint: Endpoint, fields: Fields, model: ModelName, tenant: str) -> tuple[ToStore | None, Call]:
    """Return the data to keep of a stored request, and its call. Raises InvalidRequest."""
    return endpoint.to_store(fields), endpoint.read(fields, model, tenant)


async def _send_file(file: PageFile, cycle: RequestCycle) -> None:
    cycle.respond(HTTPAnswer(200, file.content, file.media_type, PAGE_HEADERS))


async def _send_metrics(operators: OperatorServer, cycle: RequestCycle) -> None:
    answer = await operators.metrics(cycle.headers.get("accept", b""))
    cycle.respond(HTTPAnswer(answer.status_code, answer.content, answer.media_type))


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
