"""Texts and chats as token ids, without output: `/tokenize`, `/detokenize`, and the tokens of a response's input."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import msgspec

from ...common.prompts import shown
from ...engine.facade import EngineInfo, GenerateRequest
from ..app_context import AppContext
from ..http.calls import checked_messages
from ..http.errors import BadRequest, HTTPAnswer
from ..http.fields import Fields
from ..http.request_cycle import RequestCycle
from ..http.request_reader import RequestReader
from ..http.served_models import check_model
from ..models.catalog import ModelName
from .calls import chat_prompt
from .fields import DETOKENIZE, KNOWN, TOKENIZE, check_supported
from .responses import response_call
from .stored import Endpoint, KeptRequests
from .tools import TOOL_FIELDS


class TokenAnswers:
    """Answers requests for token ids and their texts."""

    def __init__(self, context: AppContext, reader: RequestReader, kept: KeptRequests) -> None:
        self._context = context
        self._reader = reader
        self._kept = kept

    async def tokenize(self, cycle: RequestCycle) -> None:
        """Answer with the ids of a text or of a rendered chat."""
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        num_bytes = len(cycle.body)
        with self._reader.reporting(cycle):
            fields, model = await self._reader.fields(cycle, KNOWN, "any")
            engine = model.model.engine
            check_supported(fields, TOKENIZE, instead={})
            num_bytes += await self._reader.fetch_images(fields, engine.info, tenant.name)
            if "messages" in fields.values:
                check_model(self._context.models, fields, "text")
                cycle.field_names = {"prompt": "messages"}
                read = partial(_chat_to_tokenize, fields, engine.info, tenant.name)
                chat = await self._reader.bodies.read(tenant.name, num_bytes, read)
                tokens = await self._reader.tokens_of(engine, chat)
            else:
                tokens = await self._tokens_of_prompt(fields, model, tenant.name)
            texts_of_tokens = None
            if fields.get("return_token_strs", bool, False):
                texts_of_tokens = [
                    engine.token(token, of_encoder=model.is_encoder).data.decode(errors="replace") for token in tokens
                ]
        limits = engine.info.encoder if model.is_encoder and engine.info.encoder is not None else engine.info
        body = {"count": len(tokens), "max_model_len": limits.max_model_len}
        _answer(cycle, {**body, "tokens": tokens, "token_strs": texts_of_tokens})

    async def detokenize(self, cycle: RequestCycle) -> None:
        """Answer with the text of token ids."""
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        with self._reader.reporting(cycle):
            fields, model = await self._reader.fields(cycle, KNOWN, "any")
            check_supported(fields, DETOKENIZE, instead={})
            fields.required("tokens")
            tokens = fields.get("tokens", list, [])
            if set(map(type, tokens)) - {int}:
                raise BadRequest(f"tokens must be a list of token ids, not {shown(tokens)}", "tokens")
            text = await model.model.engine.detokenize(
                tuple(tokens),
                skip_special_tokens=fields.get("skip_special_tokens", bool, True),
                tenant=tenant.name,
                of_encoder=model.is_encoder,
            )
        _answer(cycle, {"prompt": text})

    async def count_input(self, endpoint: Endpoint, cycle: RequestCycle) -> None:
        """Answer with the number of input tokens of a response with these fields."""
        tenant = cycle.tenant
        assert tenant is not None, "authenticated"
        cycle.field_names = endpoint.field_names
        num_bytes = len(cycle.body)
        with self._reader.reporting(cycle):
            fields, model = await self._reader.fields(cycle, endpoint.known)
            num_bytes += await self._reader.fetch_images(fields, model.info, tenant.name)
            num_bytes += await self._kept.add_stored(endpoint, fields, cycle)
            read = partial(response_call, fields, model.info, tenant.name)
            call = await self._reader.bodies.read(tenant.name, num_bytes, read)
            tokens = await self._reader.tokens_of(model.model.engine, call.requests[0])
        _answer(cycle, {"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def _tokens_of_prompt(self, fields: Fields, model: ModelName, tenant: str) -> tuple[int, ...]:
        """Return the token ids of the text in `prompt`. Raises BadRequest or a refusal."""
        fields.required("prompt")
        if chat_fields := sorted(TOOL_FIELDS & fields.values.keys()):
            raise BadRequest(f"{chat_fields[0]} cannot be used with prompt; send messages", chat_fields[0])
        text = fields.get("prompt", str, "")
        adds_special = fields.get("add_special_tokens", bool, True)
        release = self._context.requests.texts.of(tenant).reserve(sys.getsizeof(text))
        try:
            return await model.model.engine.tokenize(text, adds_special, tenant=tenant, of_encoder=model.is_encoder)
        finally:
            release()


def _chat_to_tokenize(fields: Fields, info: EngineInfo, tenant: str) -> GenerateRequest:
    """Return the request whose prompt is to be tokenized. Raises BadRequest."""
    for name in ("prompt", "add_special_tokens"):
        if fields.values.get(name):
            raise BadRequest(f"{name} cannot be used with messages", name)
    return chat_prompt(fields.values, checked_messages(fields.values["messages"], info), tenant)


def _answer(cycle: RequestCycle, body: dict[str, Any]) -> None:
    cycle.respond(HTTPAnswer(200, msgspec.json.encode(body)))
