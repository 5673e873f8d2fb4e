"""Adapters that operators load and unload while the server runs, by vLLM's paths and fields."""

from __future__ import annotations

from ...common.errors import InvalidRequest, ModelError, ModelNotFound
from ..app_context import AppContext
from ..http.errors import BadRequest, HTTPAnswer
from ..http.fields import Fields
from ..http.request_cycle import RequestCycle
from ..http.request_reader import RequestReader

LOAD = frozenset({"lora_name", "lora_path", "load_inplace", "pinned", "model"})
UNLOAD = frozenset({"lora_name", "lora_int_id", "model"})


class AdapterAnswers:
    """Answers requests to load and unload adapters, which need the rights of an operator."""

    def __init__(self, context: AppContext, reader: RequestReader) -> None:
        self._context = context
        self._reader = reader

    async def load(self, cycle: RequestCycle) -> None:
        """Load the adapter at a path of the server's machine, for a model, and serve it under a name."""
        with self._reader.reporting(cycle):
            self._check_rights(cycle)
            fields, changed = await self._reader.fields(cycle, LOAD)
            name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
            former = self._context.models.find(name)
            if former is not None and (former.model is not changed.model or not former.lora or former.target != name):
                raise BadRequest(f"lora_name {name!r} is the name of a model", "lora_name")
            try:
                await changed.model.engine.load_adapter(
                    name,
                    path,
                    is_pinned=fields.get("pinned", bool, False),
                    in_place=fields.get("load_inplace", bool, False),
                )
            except InvalidRequest as error:
                raise BadRequest(str(error), "lora_name") from None
            except ModelError as error:
                status = 404 if isinstance(error, ModelNotFound) else 400
                raise BadRequest(str(error), "lora_path", status=status) from None
        cycle.respond(_success(name, "added"))

    async def unload(self, cycle: RequestCycle) -> None:
        """Refuse new requests for an adapter."""
        with self._reader.reporting(cycle):
            self._check_rights(cycle)
            fields, _ = await self._reader.fields(cycle, UNLOAD)
            name = _text(fields, "lora_name")
            found = self._context.models.find(name)
            if found is None or not found.lora or found.target != name:
                message = f"lora_name {name[:80]!r} is no adapter here"
                raise BadRequest(message, "lora_name", error_code="not_found", status=404)
            found.model.engine.unload_adapter(name)
        cycle.respond(_success(name, "removed"))

    def _check_rights(self, cycle: RequestCycle) -> None:
        """Raise BadRequest unless the request comes from an operator, or from the only tenant."""
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        if not tenant.limits.operator and self._context.keyring.num_tenants > 1:
            raise BadRequest(
                "only a tenant with operator = true in auth_tokens may load and unload adapters",
                error_code="permission_denied",
                status=403,
            )


def _text(fields: Fields, name: str) -> str:
    fields.required(name)
    return fields.get(name, str, "")


def _success(name: str, change: str) -> HTTPAnswer:
    text = f"Success: LoRA adapter '{name}' {change} successfully."
    return HTTPAnswer(200, text.encode(), "text/plain; charset=utf-8")
