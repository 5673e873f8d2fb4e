"""Anthropic's messages: their paths, and their handlers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from ...common.prompts import shown
from ..app_context import AppContext
from ..http.calls import for_model
from ..http.errors import BadRequest, DoorForm, HTTPAnswer
from ..http.fields import Fields
from ..http.json_body import BodyReader
from ..http.playback import answer_call
from ..http.request_cycle import EVENT_HEADERS, RequestCycle
from ..http.request_reader import RequestReader
from ..http.router import Route, Routes
from ..http.served_models import check_model, vocabularies
from ..models.catalog import ModelName
from .calls import FIELD_NAMES, MESSAGE_FIELDS, check_fields, count_request, message_call
from .errors import error_answer, error_event
from .formats import PING, MessageFormat

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
MODELS = "/v1/models"
VERSION_HEADER = "anthropic-version"
MAX_LISTED_MODELS = 1000  # models of one page
ANTHROPIC_FORM = DoorForm(error_answer, error_event, MESSAGE_FIELDS, EVENT_HEADERS, PING, "request-id")


class AnthropicDoor:
    """Anthropic's API. Implements `Door`."""

    form = ANTHROPIC_FORM
    takes_any_type = False

    def __init__(self, context: AppContext, bodies: BodyReader) -> None:
        self._context = context
        self._started = datetime.now(UTC).replace(microsecond=0)
        self._models = context.models
        self._reader = RequestReader(context, partial(check_model, context.models), bodies)
        self._vocabularies = vocabularies(context.models)
        self.paths: dict[str, dict[str, Route]] = {
            MESSAGES: {"POST": Route(self._answer_message, takes_body=True)},
            COUNT_TOKENS: {"POST": Route(self._count_tokens, takes_body=True)},
            MODELS: {"GET": Route(self._list_models)},
        }

    def claims(self, path: str, headers: Mapping[str, bytes]) -> bool:
        """See `Door.claims`."""
        return VERSION_HEADER in headers or path == MESSAGES or path.startswith(f"{MESSAGES}/")

    def routes(self, path: str) -> Routes | None:
        """See `Door.routes`."""
        if path.startswith(f"{MODELS}/") and path != f"{MODELS}/":
            return {"GET": Route(self._one_model)}
        return self.paths.get(path)

    async def _answer_message(self, cycle: RequestCycle) -> None:
        cycle.field_names = FIELD_NAMES
        with self._reader.reporting(cycle):
            self._reader.check_accepting()
            num_bytes = len(cycle.body)
            fields, model = await self._fields(cycle)
            num_bytes += await self._reader.fetch_images(fields, model.info, cycle.authenticated.name)
            read = partial(message_call, fields, model.info, cycle.authenticated.name)
            call = for_model(await self._reader.bodies.read(cycle.authenticated.name, num_bytes, read), model)
        form = MessageFormat(call, call.model, self._vocabularies[model.model.key])
        answering = answer_call(cycle, call, form, self._context)
        del call, fields, read  # the objects hold the prompt
        await answering

    async def _count_tokens(self, cycle: RequestCycle) -> None:
        cycle.field_names = FIELD_NAMES
        with self._reader.reporting(cycle):
            num_bytes = len(cycle.body)
            fields, model = await self._fields(cycle)
            num_bytes += await self._reader.fetch_images(fields, model.info, cycle.authenticated.name)
            read = partial(count_request, fields, model.info, cycle.authenticated.name)
            request = await self._reader.bodies.read(cycle.authenticated.name, num_bytes, read)
            tokens = await self._reader.tokens_of(model.model.engine, request)
        cycle.respond(_json({"input_tokens": len(tokens)}))

    async def _fields(self, cycle: RequestCycle) -> tuple[Fields, ModelName]:
        """Return the fields of a body, and its model. Raises BadRequest, or the refusal of a long body."""
        fields, model = await self._reader.fields(cycle, MESSAGE_FIELDS)
        check_fields(fields)
        return fields, model

    async def _list_models(self, cycle: RequestCycle) -> None:
        query = dict(parse_qsl(cycle.target.partition("?")[2]))
        given = query.get("limit", str(MAX_LISTED_MODELS))
        if not (given.isascii() and given.isdecimal() and len(given) <= len(str(MAX_LISTED_MODELS)) and int(given) > 0):
            raise BadRequest(f"limit must be a number from 1 to {MAX_LISTED_MODELS}, not {shown(given)}", "limit")
        names = list(self._models.names)
        if (after := query.get("after_id")) in names:
            names = names[names.index(after) + 1 :]
        if (before := query.get("before_id")) in names:
            names = names[: names.index(before)]
        page = names[: int(given)]
        first, last = (page[0], page[-1]) if page else (None, None)
        cards = [self._card(name) for name in page]
        cycle.respond(_json({"data": cards, "has_more": len(page) < len(names), "first_id": first, "last_id": last}))

    async def _one_model(self, cycle: RequestCycle) -> None:
        name = unquote(cycle.target.partition("?")[0].removeprefix(f"{MODELS}/"))
        check_model(self._models, Fields({"model": name}), "any")
        cycle.respond(_json(self._card(name)))

    def _card(self, name: str) -> dict[str, object]:
        found = self._models.find(name)
        assert found is not None, "a name of this server"
        info = found.info
        length = info.encoder.max_model_len if found.is_encoder and info.encoder is not None else info.max_model_len
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": self._started.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": length,
            "max_tokens": length,
        }


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
