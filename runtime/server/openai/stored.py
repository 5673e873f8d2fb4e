"""Requests whose output is kept: those with an idempotency key, and those with `store: true`.

An answer is a function of the request's fields and of the kept chunks. It is made again whenever it is asked for, with
the same bytes. A keyed request whose connection is lost waits for its retry for `resume_timeout_ms`; a stored one runs
to its end. Must not import `api`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ...common.errors import QuireError, RequestNotFound
from ...common.prompts import shown
from ...engine.facade import EngineInfo
from ..app_context import AppContext
from ..requests.replay_buffer import ReplayBuffer, StoredEntry
from ..requests.stored_index import ToStore
from ..tenancy.tenants import Tenant
from .calls import Call
from .errors import BadRequest, HTTPAnswer
from .exchange import Exchange
from .fields import Fields
from .formats import Format
from .json_body import BodyReader
from .kept_reader import KeptReader
from .logprobs import Vocabulary
from .response_items import name_in, references_in, unknown_item
from .responses import input_items, listed_items
from .running import CallOutput, StreamedOutput, WholeOutput

KEY_HEADER = "idempotency-key"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_CHARACTERS = 255
MAX_QUERY_FIELDS = 32
MAX_EVENT_DIGITS = 15
MAX_LISTED = 100  # items of one page
DEFAULT_LISTED = 20
# Of a call: what is compared elsewhere, or is not the client's.
UNASKED = frozenset({"requests", "store", "name", "created_s", "fingerprint"})

T = TypeVar("T")


class Endpoint(NamedTuple):
    """One path that generates: how its fields become a call, and the form of its answer."""

    read_call: Callable[[Fields, EngineInfo, str], Call]
    form_class: type[Format]
    known: Set[str]
    deleted_object: str = ""  # what the answer to DELETE calls itself, where outputs can be stored
    field_names: Mapping[str, str] = MappingProxyType({})  # of the body, for names that the engine's errors have

    @property
    def id_prefix(self) -> str:
        return self.form_class.id_prefix.decode()

    def to_store(self, fields: Fields) -> ToStore | None:
        """Return what to keep of a request that is to be stored, before `read_call` changes the fields."""
        values = fields.values
        if not (values.get("store") or values.get("background")):
            return None
        known = {name: value for name, value in values.items() if name in self.known}
        return ToStore(self.id_prefix, json.dumps(known).encode())

    def answer_fields(self, call: Call) -> bytes:
        """Return what a client asks for besides the request to the engine: the path, and the form of the answer."""
        asked = {each.name: getattr(call, each.name) for each in dataclass_fields(call) if each.name not in UNASKED}
        return json.dumps([self.id_prefix, asked]).encode()


class KeptRequests:
    """Answers requests whose output is kept, and requests for such output."""

    def __init__(self, context: AppContext, model: str, bodies: BodyReader, vocabulary: Vocabulary) -> None:
        self._bodies = bodies
        self._replays = context.replays
        self._log = context.requests.log
        self._engine = context.engine
        self._model = model
        self._vocabulary = vocabulary

    def submit(
        self, exchange: Exchange, endpoint: Endpoint, call: Call, key: str | None, stored: ToStore | None
    ) -> Awaitable[QuireError | None]:
        """Submit the call, or find the earlier one with its key; return what answers it.

        Raises BadRequest or a refusal.
        """
        tenant = exchange.tenant
        assert tenant is not None, "authenticated"
        if len(call.requests) > 1:
            raise BadRequest(f"{KEY_HEADER} needs a request with one prompt", "prompt")
        for name, is_given in (("echo", call.echo), ("prompt_logprobs", call.prompt_logprobs is not None)):
            if is_given:
                raise BadRequest(f"{name} cannot be used with {KEY_HEADER}", name)
        first = _first_event(exchange.headers, {})
        is_resumable = not call.store
        answer_fields = b"" if key is None else endpoint.answer_fields(call)
        buffer = self._replays.open(
            tenant,
            exchange.number,
            call.requests[0],
            key,
            resumable=is_resumable,
            stored=stored,
            answer_fields=answer_fields,
        )
        reader = KeptReader(buffer, exchange, tenant)
        if is_resumable:
            self._replays.resume_index.add((tenant.name, secrets.token_urlsafe()), 0, reader)
        form = self._form(endpoint, call, buffer)
        queued = form.unfinished("queued", None)
        if call.background and not call.stream and queued is not None:
            return self._answer_before_output(queued, reader)
        if call.stream:
            exchange.number_events(first)
        return self._answer((StreamedOutput if call.stream else WholeOutput)(exchange, form), reader)

    async def _answer(self, output: CallOutput, reader: KeptReader) -> QuireError | None:
        try:
            return await reader.answer(output)
        finally:
            reader.end()
            self._forget_refused(reader.buffer)

    async def _answer_before_output(self, queued: bytes, reader: KeptReader) -> QuireError | None:
        try:
            if (refusal := await reader.accepted()) is None:
                reader.exchange.respond(HTTPAnswer(200, queued))
            return refusal
        finally:
            reader.end()
            self._forget_refused(reader.buffer)

    def _forget_refused(self, buffer: ReplayBuffer) -> None:
        """Do not store a request that the engine has refused."""
        if buffer.admission is None and buffer.error is not None and buffer.stored_entry is not None:
            self._replays.stored_index.remove(buffer.stored_entry)

    async def retrieve(self, endpoint: Endpoint, stored_id: str, exchange: Exchange) -> None:
        """Answer with a stored output: as events from the one that the client asks for, or as an object."""
        query = _query(exchange)
        entry, tenant = self._find(exchange, endpoint, stored_id)
        with_events = query.get("stream", "").lower() == "true" or (
            b"text/event-stream" in exchange.headers.get("accept", b"") or LAST_EVENT_HEADER in exchange.headers
        )
        first = _first_event(exchange.headers, query)
        reader = KeptReader(entry.buffer, exchange, tenant)
        try:
            form = await self._stored_form(endpoint, entry)
            if with_events and exchange.method != "HEAD":
                self._log.resumed(tenant.name, exchange.number, first)
                exchange.number_events(first)
                failure = await reader.answer(StreamedOutput(exchange, form))
            elif form.unfinished("queued", None) is None:
                failure = await reader.answer(WholeOutput(exchange, form))
            else:
                await _show_present(form, reader)
                return
            if failure is not None:
                exchange.refuse(failure, endpoint.known)
        finally:
            reader.end()

    async def cancel(self, endpoint: Endpoint, stored_id: str, exchange: Exchange) -> None:
        """End a stored response, and answer with its object. One that has ended stays as it is."""
        entry, tenant = self._find(exchange, endpoint, stored_id)
        reader = KeptReader(entry.buffer, exchange, tenant)
        try:
            if not entry.buffer.has_ended:
                entry.buffer.request.cancel("client")
            form = await self._stored_form(endpoint, entry)
            await reader.ended()
            await _show_present(form, reader)
        finally:
            reader.end()

    async def delete(self, endpoint: Endpoint, stored_id: str, exchange: Exchange) -> None:
        """Forget a stored output, and cancel the request if it runs."""
        entry, _ = self._find(exchange, endpoint, stored_id)
        self._replays.delete(entry)
        exchange.respond(_json({"id": stored_id, "object": endpoint.deleted_object, "deleted": True}))

    async def input_items(self, endpoint: Endpoint, stored_id: str, exchange: Exchange) -> None:
        """Answer with the items that a response was made from, the last one first unless asked otherwise."""
        entry, _ = self._find(exchange, endpoint, stored_id)
        query = _query(exchange)
        name = entry.buffer.name
        items = await self._read(entry, lambda values: listed_items(input_items(values["input"]), name))
        exchange.respond(_json(_page(items, query)))

    async def add_stored(self, endpoint: Endpoint, fields: Fields, exchange: Exchange) -> int:
        """Replace references in the fields' input by stored items, and put the previous response before the input.

        Raises BadRequest. Return how many bytes the stored requests have.
        """
        num_bytes = await self._replace_references(endpoint, fields, exchange)
        if "previous_response_id" in fields.values:
            num_bytes += await self._add_previous(endpoint, fields, exchange)
        return num_bytes

    async def _replace_references(self, endpoint: Endpoint, fields: Fields, exchange: Exchange) -> int:
        given = fields.values.get("input")
        if not isinstance(given, list) or not (references := references_in(given)):
            return 0
        items, wanted, num_bytes = list(given), set(references.values()), 0
        found: dict[str, Any] = {}
        for index, item_id in references.items():
            if item_id not in found:  # its response has not been read
                try:
                    entry, tenant = self._find(exchange, endpoint, endpoint.id_prefix + name_in(item_id))
                except RequestNotFound:
                    raise unknown_item(index, item_id) from None
                stored = await self._stored_items(endpoint, entry, exchange, tenant)
                found |= {item["id"]: item for item in stored if item["id"] in wanted}
                num_bytes += len(entry.fields)
                if item_id not in found:
                    raise unknown_item(index, item_id)
            items[index] = found[item_id]
        fields.values["input"] = items
        return num_bytes

    async def _stored_items(
        self, endpoint: Endpoint, entry: StoredEntry, exchange: Exchange, tenant: Tenant
    ) -> list[dict[str, Any]]:
        """Return the input of a stored response with the ids of its items, and its output if that is whole."""
        name = entry.buffer.name
        given = await self._read(entry, lambda values: listed_items(input_items(values["input"]), name))
        return given + (await self._whole_output(endpoint, entry, exchange, tenant) or [])

    async def _add_previous(self, endpoint: Endpoint, fields: Fields, exchange: Exchange) -> int:
        name = fields.take("previous_response_id", str, "")
        try:
            entry, tenant = self._find(exchange, endpoint, name)
        except RequestNotFound as error:
            code = "previous_response_not_found"
            raise BadRequest(f"previous_response_id: {error}", "previous_response_id", error_code=code) from None
        output = await self._whole_output(endpoint, entry, exchange, tenant)
        if output is None:
            text = "previous_response_id: that response has not ended, was cancelled or failed"
            raise BadRequest(text, "previous_response_id")
        if own := input_items(fields.values.get("input")):
            output = [item for item in output if not _is_broken_call(item)]
            earlier = await self._read(entry, lambda values: input_items(values["input"]))
            fields.values["input"] = [*earlier, *output, *own]
            fields.num_previous_items = len(earlier) + len(output)
        return len(entry.fields)

    async def _whole_output(
        self, endpoint: Endpoint, entry: StoredEntry, exchange: Exchange, tenant: Tenant
    ) -> list[dict[str, Any]] | None:
        """Return the output of a stored response as items of an input, None if it is not whole."""
        reader = KeptReader(entry.buffer, exchange, tenant)
        try:
            form = await self._stored_form(endpoint, entry)
            usage = await reader.read_present(form)
        finally:
            reader.end()
        if usage is None or entry.buffer.finish_reason == "cancelled":
            return None
        return [_as_input(item) for item in json.loads(form.whole(usage))["output"]]

    def _find(self, exchange: Exchange, endpoint: Endpoint, stored_id: str) -> tuple[StoredEntry, Tenant]:
        """Return what the endpoint has stored under the id, and the tenant. Raises RequestNotFound."""
        tenant = exchange.tenant
        assert tenant is not None, "authenticated"
        own_id = stored_id if stored_id.startswith(endpoint.id_prefix) else ""
        return self._replays.stored_index.find(tenant.name, own_id), tenant

    async def _stored_form(self, endpoint: Endpoint, entry: StoredEntry) -> Format:
        """Return the form of a stored output."""
        info, tenant = self._engine.info, entry.buffer.tenant
        call = await self._read(entry, lambda values: endpoint.read_call(Fields(values), info, tenant))
        return self._form(endpoint, call, entry.buffer)

    async def _read(self, entry: StoredEntry, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what `read` makes of a stored request's fields."""
        fields = entry.fields
        return await self._bodies.read(entry.buffer.tenant, len(fields), lambda: read(msgspec.json.decode(fields)))

    def _form(self, endpoint: Endpoint, call: Call, buffer: ReplayBuffer) -> Format:
        named = replace(call, name=buffer.name, created_s=buffer.created_s)
        return endpoint.form_class(named, self._model, self._vocabulary)


def idempotency_key(headers: Mapping[str, bytes]) -> str | None:
    """Return the client's key, None without one. Raises BadRequest."""
    if KEY_HEADER not in headers:
        return None
    key = headers[KEY_HEADER].decode("ascii", "replace")
    if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii()):
        raise BadRequest(f"{KEY_HEADER} must have 1 to {MAX_KEY_CHARACTERS} ASCII characters", KEY_HEADER)
    return key


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that a query asks for, as OpenAI lists them. Raises BadRequest."""
    limit = _number("limit", query.get("limit", str(DEFAULT_LISTED)), 1, MAX_LISTED)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc, not {shown(order)}", "order")
    if order == "desc":
        items = items[::-1]
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise BadRequest(f"after is not the id of an item: {shown(query['after'])}", "after")
        items = items[ids.index(query["after"]) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}


async def _show_present(form: Format, reader: KeptReader) -> None:
    """Answer with the object of a stored response as it is now."""
    usage, buffer = await reader.read_present(form), reader.buffer
    if buffer.error is not None:
        content = form.unfinished("failed", buffer.error)
    elif buffer.finish_reason == "cancelled":
        content = form.unfinished("cancelled", None)
    elif usage is None:
        content = form.unfinished("in_progress" if buffer.generated else "queued", None)
    else:
        content = form.whole(usage)
    assert content is not None, "only responses are shown before their end"
    reader.exchange.respond(HTTPAnswer(200, content))


def _is_broken_call(item: dict[str, Any]) -> bool:
    """Return whether an item of the output is a call without whole arguments, which no template can show."""
    if item["type"] != "function_call" or (item["status"] == "completed" and not item["arguments"]):
        return False
    try:
        return not isinstance(json.loads(item["arguments"]), dict)
    except (ValueError, RecursionError):
        return True


def _as_input(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the output as one of the input, which has no logprobs."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{"type": part["type"], "text": part["text"]} for part in item["content"]]}


def _first_event(headers: Mapping[str, bytes], query: Mapping[str, str]) -> int:
    """Return the number of the first event to send. Raises BadRequest."""
    if "starting_after" in query:
        return 1 + _number("starting_after", query["starting_after"], 0, 10**MAX_EVENT_DIGITS)
    given = headers.get(LAST_EVENT_HEADER, b"").decode("ascii", "replace")
    return 1 + _number(LAST_EVENT_HEADER, given, 0, 10**MAX_EVENT_DIGITS) if given else 0


def _number(name: str, digits: str, low: int, high: int) -> int:
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_EVENT_DIGITS
    if not is_number or not low <= int(digits) <= high:
        raise BadRequest(f"{name} must be a number from {low} to {high}, not {shown(digits)}", name)
    return int(digits)


def _query(exchange: Exchange) -> dict[str, str]:
    """Return the fields of the query. Raises BadRequest."""
    try:
        return dict(parse_qsl(exchange.target.partition("?")[2], max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise BadRequest(f"the query has more than {MAX_QUERY_FIELDS} fields") from None


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
