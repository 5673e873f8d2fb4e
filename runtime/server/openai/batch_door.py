"""`BatchDoor`: `/v1/files` and `/v1/batches` of OpenAI's API, for the files and batches of a store."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from ...common.errors import InvalidRequest, Unavailable
from ...common.prompts import shown
from ..app_context import AppContext
from ..batches.lines import URLS, BatchLine, LineAnswer
from ..batches.store import Batch, BatchStore, StoredFile
from ..batches.worker import BatchWorker, SparePlaces
from ..http.errors import BadRequest, HTTPAnswer
from ..http.fields import Fields
from ..http.json_body import BodyReader, parse_object
from ..http.multipart import read_form
from ..http.request_cycle import RequestCycle
from ..http.router import HTTPRouter, Route, Routes
from .api import OPENAI_FORM, OpenAIDoor
from .local_requests import LocalRequests

FILES = "/v1/files"
BATCHES = "/v1/batches"
PURPOSES = ("batch",)
MOST_LISTED = 10_000
LISTED_FILES = 10_000  # files in a list without a limit; of batches, OpenAI's default is 20
LISTED_BATCHES = 20
WINDOW_S = 24 * 3600  # the only completion window
MAX_METADATA = 16  # keys
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512  # characters
LEAST_EXPIRY_S = 3600
MOST_EXPIRY_S = 30 * 24 * 3600
PIECE_OF_FILE = 256 << 10  # bytes

ObjectT = TypeVar("ObjectT", StoredFile, Batch)


async def open_batches(context: AppContext, door: OpenAIDoor, folder: Path) -> BatchWorker:
    """Open a folder of batches, and run them with the requests of OpenAI's API. Raises ConfigError."""
    config = context.config
    store = await asyncio.to_thread(BatchStore, folder, config.max_batch_bytes, config.batch_window_ms / 1000)
    requests = LocalRequests(context, HTTPRouter(context, [door]), door)

    async def send(name: str, line: BatchLine) -> LineAnswer:
        tenant = context.keyring.tenant(name)
        if tenant is None:
            raise Unavailable(f"the tenant {name!r} has no key any more")
        return await requests.send(tenant, line)

    infos = [model.info for model in context.models.models]
    num_sequences = sum(info.max_num_seqs * max(1, info.num_processes) for info in infos)
    places = SparePlaces(num_sequences, lambda: len(context.requests))
    return BatchWorker(store, send, places)


class BatchDoor:
    """The paths of files and batches. Implements `Door`."""

    form = OPENAI_FORM
    takes_any_type = True  # uploads are forms

    def __init__(self, worker: BatchWorker, bodies: BodyReader) -> None:
        self._store = worker.store
        self._worker = worker
        self._bodies = bodies
        self.paths: dict[str, dict[str, Route]] = {
            FILES: {"GET": Route(self._list_files), "POST": Route(self._upload, takes_body=True)},
            BATCHES: {"GET": Route(self._list_batches), "POST": Route(self._create, takes_body=True)},
        }

    def claims(self, path: str, headers: Mapping[str, bytes]) -> bool:
        """See `Door.claims`."""
        return path.startswith((f"{FILES}/", f"{BATCHES}/")) or path in self.paths

    def routes(self, path: str) -> Routes | None:
        """See `Door.routes`."""
        if path in self.paths:
            return self.paths[path]
        parent, _, last = path.rpartition("/")
        base, _, name = parent.rpartition("/")
        if parent == FILES:
            return {"GET": Route(partial(self._file, last)), "DELETE": Route(partial(self._delete, last))}
        if base == FILES and last == "content":
            return {"GET": Route(partial(self._content, name))}
        if parent == BATCHES:
            return {"GET": Route(partial(self._batch, last))}
        if base == BATCHES and last == "cancel":
            return {"POST": Route(partial(self._cancel, name), takes_body=True)}
        return None

    # Files

    async def _upload(self, cycle: RequestCycle) -> None:
        tenant = cycle.authenticated.name
        body = cycle.body
        cycle.body = b""
        read = partial(read_form, body, cycle.headers.get("content-type", b""))
        form = await self._bodies.read(tenant, len(body), read)
        del body, read
        if (file := form.get("file")) is None:
            raise BadRequest("file is missing", "file", error_code="missing_required_parameter")
        purpose = form["purpose"].text if "purpose" in form else ""
        if purpose not in PURPOSES:
            raise BadRequest(f"purpose must be {' or '.join(PURPOSES)}, not {purpose[:80]!r}", "purpose")
        expires_s = None
        if "expires_after[seconds]" in form:
            expires_s = _expiry(form["expires_after[seconds]"].text, form.get("expires_after[anchor]"))
        add = partial(self._store.add_file, tenant, file.content, file.filename or "file", purpose, expires_s)
        cycle.respond(_json(_file_json(await asyncio.to_thread(add))))

    async def _list_files(self, cycle: RequestCycle) -> None:
        files = await asyncio.to_thread(self._store.files, cycle.authenticated.name)
        options = _options(cycle)
        if "purpose" in options:
            files = [each for each in files if each.purpose == options["purpose"]]
        cycle.respond(_listed(files, options, LISTED_FILES, _file_json))

    async def _file(self, file_id: str, cycle: RequestCycle) -> None:
        file = await asyncio.to_thread(self._store.file, cycle.authenticated.name, file_id)
        cycle.respond(_json(_file_json(file)))

    async def _delete(self, file_id: str, cycle: RequestCycle) -> None:
        await asyncio.to_thread(self._store.delete_file, cycle.authenticated.name, file_id)
        cycle.respond(_json({"id": file_id, "object": "file", "deleted": True}))

    async def _content(self, file_id: str, cycle: RequestCycle) -> None:
        path = await asyncio.to_thread(self._store.content, cycle.authenticated.name, file_id)
        size = path.stat().st_size
        await cycle.respond_pieces("application/octet-stream", size, _pieces(path))

    # Batches

    async def _create(self, cycle: RequestCycle) -> None:
        tenant = cycle.authenticated.name
        body = cycle.body
        fields = Fields(await self._bodies.read(tenant, len(body), partial(parse_object, body)))
        known = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
        if unknown := sorted(fields.values.keys() - known):
            raise BadRequest(f"{unknown[0][:80]} is not a field of a batch", unknown[0][:80])
        for name in ("input_file_id", "endpoint", "completion_window"):
            fields.required(name)
        endpoint = fields.get("endpoint", str, "")
        if endpoint not in URLS:
            raise BadRequest(f"endpoint must be one of {', '.join(URLS)}, not {endpoint[:80]!r}", "endpoint")
        if fields.values["completion_window"] != "24h":
            raise BadRequest(
                f"completion_window must be 24h, not {shown(fields.values['completion_window'])}", "completion_window"
            )
        if "output_expires_after" in fields.values:
            raise BadRequest(
                "output_expires_after is not supported here; leave it out",
                "output_expires_after",
                error_code="unsupported_parameter",
            )
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=fields.get("input_file_id", str, ""),
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=_metadata(fields.values.get("metadata")),
        )
        await asyncio.to_thread(self._add, tenant, batch)
        self._worker.wake()
        cycle.respond(_json(_batch_json(batch)))

    def _add(self, tenant: str, batch: Batch) -> None:
        self._store.file(tenant, batch.input_file_id)
        self._store.check_quota(tenant, 0)
        self._store.put(tenant, batch)

    async def _list_batches(self, cycle: RequestCycle) -> None:
        batches = await asyncio.to_thread(self._store.batches, cycle.authenticated.name)
        cycle.respond(_listed(batches, _options(cycle), LISTED_BATCHES, _batch_json))

    async def _batch(self, batch_id: str, cycle: RequestCycle) -> None:
        batch = await asyncio.to_thread(self._store.batch, cycle.authenticated.name, batch_id)
        cycle.respond(_json(_batch_json(batch)))

    async def _cancel(self, batch_id: str, cycle: RequestCycle) -> None:
        batch = await asyncio.to_thread(self._store.change, cycle.authenticated.name, batch_id, _cancelling)
        self._worker.wake()
        cycle.respond(_json(_batch_json(batch)))


def _cancelling(batch: Batch) -> Batch:
    if batch.has_ended:
        raise InvalidRequest(f"the batch is {batch.status}; only a batch that has not ended can be cancelled")
    if batch.status == "cancelling":
        return batch
    return msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(time.time()))


def _expiry(seconds: str, anchor: Any) -> float:
    if anchor is not None and anchor.text != "created_at":
        raise BadRequest("expires_after.anchor must be created_at", "expires_after")
    if not (seconds.isdecimal() and len(seconds) < 12 and LEAST_EXPIRY_S <= int(seconds) <= MOST_EXPIRY_S):
        raise BadRequest(
            f"expires_after.seconds must be {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}, not {seconds[:40]!r}", "expires_after"
        )
    return int(seconds)


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if (
        not isinstance(given, dict)
        or len(given) > MAX_METADATA
        or not all(isinstance(each, str) and len(each) <= MAX_METADATA_VALUE for each in given.values())
        or any(len(key) > MAX_METADATA_KEY for key in given)
    ):
        raise BadRequest(
            f"metadata must be an object of at most {MAX_METADATA} texts, with keys of at most {MAX_METADATA_KEY} and "
            f"values of at most {MAX_METADATA_VALUE} characters",
            "metadata",
        )
    return given


def _options(cycle: RequestCycle) -> dict[str, str]:
    """Return the parameters in the request's address."""
    return {name: values[-1] for name, values in parse_qs(cycle.target.partition("?")[2]).items()}


def _listed(objects: Sequence[ObjectT], options: Mapping[str, str], default: int, as_json: Any) -> HTTPAnswer:
    """Return a page of a list: the newest first, or the oldest with `order=asc`. Raises BadRequest."""
    limit = options.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) < 8 and 1 <= int(limit) <= MOST_LISTED):
        raise BadRequest(f"limit must be 1 to {MOST_LISTED}, not {limit[:40]!r}", "limit")
    if (order := options.get("order", "desc")) not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc, not {order[:40]!r}", "order")
    found = list(objects if order == "desc" else reversed(objects))
    if (after := options.get("after")) is not None:
        places = [index for index, each in enumerate(found) if each.id == after]
        if not places:
            raise BadRequest(f"after: there is no {after[:80]!r}", "after")
        found = found[places[0] + 1 :]
    page = found[: int(limit)]
    return _json(
        {
            "object": "list",
            "data": [as_json(each) for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": len(found) > len(page),
        }
    )


def _file_json(file: StoredFile) -> dict[str, Any]:
    return {**msgspec.to_builtins(file), "object": "file", "status": "processed", "status_details": None}


def _batch_json(batch: Batch) -> dict[str, Any]:
    fields = msgspec.to_builtins(batch)
    counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
    error = fields.pop("error")
    errors = None
    if error is not None:
        errors = {"object": "list", "data": [{"code": error[0], "message": error[1], "param": None, "line": None}]}
    return {**fields, "object": "batch", "errors": errors, "request_counts": counts}


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_OF_FILE):
            yield piece


def _json(value: Any) -> HTTPAnswer:
    return HTTPAnswer(200, msgspec.json.encode(value))
