"""Requests whose output is kept: requests with an idempotency key, and requests with `store: true`.

An answer is a function of the request's fields and of the kept chunks. It is rendered again for each retrieval, with
the same bytes. A keyed request whose connection is lost waits for its retry for `resume_timeout_ms`; a stored one runs
to its end. Must not import `api`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ...common.errors import QuireError, RequestNotFound
from ...common.prompts import shown
from ...common.types import Usage
from ...engine.facade import EngineInfo
from ..app_context import AppContext
from ..http.answer_writers import AnswerWriter, BodyWriter, EventWriter
from ..http.calls import Call, for_model
from ..http.errors import BadRequest, HTTPAnswer
from ..http.fields import Fields
from ..http.formats import Format
from ..http.json_body import BodyReader
from ..http.logprobs import Vocabulary
from ..http.playback import Playback, log_reader
from ..http.request_cycle import RequestCycle
from ..http.served_models import check_model
from ..models.catalog import ModelName
from ..requests.indexes import ToStore
from ..requests.output_log import OutputLog, StoredEntry
from ..requests.output_reader import OutputReader
from ..requests.resume import Keeping
from .response_items import REFERENCE, name_in, references_in
from .responses import input_items, listed_items

KEY_HEADER = "idempotency-key"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_CHARACTERS = 255
MAX_QUERY_FIELDS = 32
MAX_EVENT_DIGITS = 15
CHUNKS_PER_TURN = 8  # chunks read per turn for an output in its present state
MAX_LISTED = 100  # items of one page
DEFAULT_LISTED = 20
# Fields of a call that are compared elsewhere, or that the client did not set.
UNASKED = frozenset({"requests", "store", "name", "created_s", "fingerprint"})

T = TypeVar("T")


class Endpoint(NamedTuple):
    """One path that generates: the function from its fields to a call, and the form of its answer."""

    read_call: Callable[[Fields, EngineInfo, str], Call]
    form_class: type[Format]
    known: Set[str]
    deleted_object: str = ""  # object name in the answer to DELETE, where outputs can be stored
    field_names: Mapping[str, str] = MappingProxyType({})  # engine's name of a field -> name in the body

    @property
    def id_prefix(self) -> str:
        return self.form_class.id_prefix.decode()

    def read(self, fields: Fields, model: ModelName, tenant: str) -> Call:
        """Return the call of a body for a model. Raises InvalidRequest."""
        return for_model(self.read_call(fields, model.info, tenant), model)

    def to_store(self, fields: Fields) -> ToStore | None:
        """Return the data to keep of a stored request, before `read_call` changes the fields."""
        values = fields.values
        if not (values.get("store") or values.get("background")):
            return None
        known = {name: value for name, value in values.items() if name in self.known}
        return ToStore(self.id_prefix, json.dumps(known).encode())

    def answer_fields(self, call: Call) -> bytes:
        """Return the parts of a client's request besides the engine's: the path, and the form of the answer."""
        asked = {each.name: getattr(call, each.name) for each in dataclass_fields(call) if each.name not in UNASKED}
        return json.dumps([self.id_prefix, asked]).encode()


class KeptRequests:
    """Answers requests whose output is kept, and requests for such output."""

    def __init__(self, context: AppContext, bodies: BodyReader, vocabularies: Mapping[str, Vocabulary]) -> None:
        self._bodies = bodies
        self._replays = context.replays
        self._log = context.requests.log
        self._models = context.models
        self._vocabularies = vocabularies

    def submit(
        self, cycle: RequestCycle, endpoint: Endpoint, call: Call, key: str | None, stored: ToStore | None
    ) -> Awaitable[QuireError | None]:
        """Submit the call, or find the earlier one with its key; return the function that answers it.

        Raises BadRequest or a refusal.
        """
        if len(call.requests) > 1:
            raise BadRequest(f"{KEY_HEADER} needs a request with one prompt", "prompt")
        for name, is_given in (("echo", call.echo), ("prompt_logprobs", call.prompt_logprobs is not None)):
            if is_given:
                raise BadRequest(f"{name} cannot be used with {KEY_HEADER}", name)
        first = _first_event(cycle.headers, {})
        answer_fields = b"" if key is None else endpoint.answer_fields(call)
        keeping = Keeping(key, not call.store, stored, answer_fields)
        submitted = cycle.authenticated, cycle.number, call.requests[0], keeping
        log = self._replays.find(*submitted) or self._replays.open(*submitted)
        reader = log_reader(cycle, log)
        if keeping.is_resumable:
            self._replays.resume_index.add((log.tenant, secrets.token_urlsafe()), 0, reader)
        playback = Playback(cycle, call, self._models.engine(call.requests[0].model))
        playback.add(reader)
        form = self._form(endpoint, call, log)
        queued = form.unfinished("queued", None)
        if call.background and not call.stream and queued is not None:
            return self._answer_before_output(queued, cycle, reader)
        if call.stream:
            cycle.number_events(first)
        return self._answer((EventWriter if call.stream else BodyWriter)(cycle, form), playback, log)

    async def _answer(self, writer: AnswerWriter, playback: Playback, log: OutputLog) -> QuireError | None:
        try:
            return await playback.run(writer)
        finally:
            self._forget_refused(log)

    async def _answer_before_output(
        self, queued: bytes, cycle: RequestCycle, reader: OutputReader
    ) -> QuireError | None:
        try:
            if (refusal := await reader.accepted()) is None:
                cycle.respond(HTTPAnswer(200, queued))
            return refusal
        finally:
            cycle.cancels.clear()
            reader.end()
            self._forget_refused(reader.log)

    def _forget_refused(self, log: OutputLog) -> None:
        """Do not store a request that the engine has refused."""
        if not log.is_accepted and log.error is not None and log.stored_entry is not None:
            self._replays.stored_index.remove(log.stored_entry)

    async def retrieve(self, endpoint: Endpoint, stored_id: str, cycle: RequestCycle) -> None:
        """Answer with a stored output: as events from the requested one on, or as an object."""
        query = _query(cycle)
        entry = self._find(cycle, endpoint, stored_id)
        with_events = query.get("stream", "").lower() == "true" or (
            b"text/event-stream" in cycle.headers.get("accept", b"") or LAST_EVENT_HEADER in cycle.headers
        )
        first = _first_event(cycle.headers, query)
        with _reading(cycle, entry.log) as reader:
            call, form = await self._stored_form(endpoint, entry)
            writer: AnswerWriter = BodyWriter(cycle, form)
            if with_events and cycle.method != "HEAD":
                self._log.resumed(entry.log.tenant, cycle.number, first)
                cycle.number_events(first)
                writer = EventWriter(cycle, form)
            elif form.unfinished("queued", None) is not None:
                await _show_present(form, cycle, reader)
                return
            playback = Playback(cycle, call, self._models.engine(call.requests[0].model))
            playback.add(reader)
            if (failure := await playback.run(writer)) is not None:
                cycle.refuse(failure, endpoint.known)

    async def cancel(self, endpoint: Endpoint, stored_id: str, cycle: RequestCycle) -> None:
        """End a stored response, unless it has ended, and answer with its object."""
        entry = self._find(cycle, endpoint, stored_id)
        with _reading(cycle, entry.log) as reader:
            if not entry.log.has_ended:
                entry.log.request.cancel("client")
            _, form = await self._stored_form(endpoint, entry)
            await reader.ended()
            await _show_present(form, cycle, reader)

    async def delete(self, endpoint: Endpoint, stored_id: str, cycle: RequestCycle) -> None:
        """Forget a stored output, and cancel the request if it runs."""
        entry = self._find(cycle, endpoint, stored_id)
        self._replays.delete(entry)
        cycle.respond(_json({"id": stored_id, "object": endpoint.deleted_object, "deleted": True}))

    async def input_items(self, endpoint: Endpoint, stored_id: str, cycle: RequestCycle) -> None:
        """Answer with the input items of a response, by default the last one first."""
        entry = self._find(cycle, endpoint, stored_id)
        query = _query(cycle)
        name = entry.log.name
        items = await self._read(entry, lambda values: listed_items(input_items(values["input"]), name))
        cycle.respond(_json(_page(items, query)))

    async def add_stored(self, endpoint: Endpoint, fields: Fields, cycle: RequestCycle) -> int:
        """Replace references in the fields' input by stored items, and put the previous response before the input.

        Raises BadRequest. Return the bytes of the stored requests.
        """
        num_bytes = await self._replace_references(endpoint, fields, cycle)
        if "previous_response_id" in fields.values:
            num_bytes += await self._add_previous(endpoint, fields, cycle)
        return num_bytes

    async def _replace_references(self, endpoint: Endpoint, fields: Fields, cycle: RequestCycle) -> int:
        """Replace references by stored items; references to other servers' items are left out later."""
        given = fields.values.get("input")
        if not isinstance(given, list) or not (references := references_in(given)):
            return 0
        items = list(given)
        wanted = set(references.values())
        num_bytes = 0
        found: dict[str, Any] = {}
        for index, item_id in references.items():
            if item_id not in found:  # the item's response has not been read
                found[item_id] = {"type": REFERENCE, "id": item_id}
                with contextlib.suppress(RequestNotFound):
                    entry = self._find(cycle, endpoint, endpoint.id_prefix + name_in(item_id))
                    stored = await self._stored_items(endpoint, entry, cycle)
                    found |= {item["id"]: item for item in stored if item["id"] in wanted}
                    num_bytes += len(entry.fields)
            items[index] = found[item_id]
        fields.values["input"] = items
        return num_bytes

    async def _stored_items(self, endpoint: Endpoint, entry: StoredEntry, cycle: RequestCycle) -> list[dict[str, Any]]:
        """Return the input of a stored response with the ids of its items, and its output if it is complete."""
        name = entry.log.name
        given = await self._read(entry, lambda values: listed_items(input_items(values["input"]), name))
        return given + (await self._whole_output(endpoint, entry, cycle) or [])

    async def _add_previous(self, endpoint: Endpoint, fields: Fields, cycle: RequestCycle) -> int:
        name = fields.get("previous_response_id", str, "")
        try:
            entry = self._find(cycle, endpoint, name)
        except RequestNotFound as error:
            code = "previous_response_not_found"
            raise BadRequest(f"previous_response_id: {error}", "previous_response_id", error_code=code) from None
        output = await self._whole_output(endpoint, entry, cycle)
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
        self, endpoint: Endpoint, entry: StoredEntry, cycle: RequestCycle
    ) -> list[dict[str, Any]] | None:
        """Return the output of a stored response as items of an input, None if it is incomplete."""
        with _reading(cycle, entry.log) as reader:
            _, form = await self._stored_form(endpoint, entry)
            usage = await _read_present(form, cycle, reader)
        if usage is None or entry.log.finish_reason == "cancelled":
            return None
        return [_as_input(item) for item in json.loads(form.whole(usage))["output"]]

    def _find(self, cycle: RequestCycle, endpoint: Endpoint, stored_id: str) -> StoredEntry:
        """Return the endpoint's stored request with this id. Raises RequestNotFound."""
        own_id = stored_id if stored_id.startswith(endpoint.id_prefix) else ""
        return self._replays.stored_index.find(cycle.authenticated.name, own_id)

    async def _stored_form(self, endpoint: Endpoint, entry: StoredEntry) -> tuple[Call, Format]:
        """Return the call of a stored output, and the form of its answer."""
        tenant = entry.log.tenant

        def read(values: dict[str, Any]) -> Call:
            fields = Fields(values)
            return endpoint.read(fields, check_model(self._models, fields, "text"), tenant)

        call = await self._read(entry, read)
        return call, self._form(endpoint, call, entry.log)

    async def _read(self, entry: StoredEntry, read: Callable[[dict[str, Any]], T]) -> T:
        """Return the result of `read` for a stored request's fields."""
        fields = entry.fields
        return await self._bodies.read(entry.log.tenant, len(fields), lambda: read(msgspec.json.decode(fields)))

    def _form(self, endpoint: Endpoint, call: Call, log: OutputLog) -> Format:
        named = replace(call, name=log.name, created_s=log.created_s)
        return endpoint.form_class(named, call.model, self._vocabularies[call.requests[0].model])


def idempotency_key(headers: Mapping[str, bytes]) -> str | None:
    """Return the client's key, None without one. Raises BadRequest."""
    if KEY_HEADER not in headers:
        return None
    key = headers[KEY_HEADER].decode("ascii", "replace")
    if not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii()):
        raise BadRequest(f"{KEY_HEADER} must have 1 to {MAX_KEY_CHARACTERS} ASCII characters", KEY_HEADER)
    return key


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items for a query, in the form of OpenAI's lists. Raises BadRequest."""
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


@contextmanager
def _reading(cycle: RequestCycle, log: OutputLog) -> Iterator[OutputReader]:
    """Count as a reader of a log, so that it is not dropped. Raises Overloaded if it has too many readers."""
    log.check_readers()
    reader = log_reader(cycle, log)
    try:
        yield reader
    finally:
        cycle.cancels.clear()
        reader.end()


async def _read_present(form: Format, cycle: RequestCycle, reader: OutputReader) -> Usage | None:
    """Add the chunks so far to `form`. Return the usage if the request has ended."""
    log = reader.log
    usage = None
    position = 0
    form.read_with(log.new_parser)
    while position < log.num_chunks and not reader.is_stopped:
        await cycle.authenticated.output_turns.wait()
        last = min(position + CHUNKS_PER_TURN, log.num_chunks)
        for chunk in map(log.chunk, range(position, last)):
            form.choices[chunk.choice].add(chunk)
            usage = chunk.usage
        position = last
    return usage


async def _show_present(form: Format, cycle: RequestCycle, reader: OutputReader) -> None:
    """Answer with the object of a stored response in its present state."""
    log = reader.log
    usage = await _read_present(form, cycle, reader)
    if log.error is not None:
        content = form.unfinished("failed", log.error)
    elif log.finish_reason == "cancelled":
        content = form.unfinished("cancelled", None)
    elif usage is None:
        content = form.unfinished("in_progress" if log.generated else "queued", None)
    else:
        content = form.whole(usage)
    assert content is not None, "only responses are shown before their end"
    cycle.respond(HTTPAnswer(200, content))


def _is_broken_call(item: dict[str, Any]) -> bool:
    """Return whether an output item is a call with incomplete arguments, which a template cannot show."""
    if item["type"] != "function_call" or (item["status"] == "completed" and not item["arguments"]):
        return False
    try:
        return not isinstance(json.loads(item["arguments"]), dict)
    except (ValueError, RecursionError):
        return True


def _as_input(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item as an input item, without logprobs."""
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


def _query(cycle: RequestCycle) -> dict[str, str]:
    """Return the fields of the query. Raises BadRequest."""
    try:
        return dict(parse_qsl(cycle.target.partition("?")[2], max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise BadRequest(f"the query has more than {MAX_QUERY_FIELDS} fields") from None


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
