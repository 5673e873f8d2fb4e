"""A request's `model` selects an adapter, whose name the answer has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from quire.runtime.server.http.errors import BadRequest
from quire.runtime.server.http.fields import Fields
from quire.runtime.server.http.served_models import check_model
from quire.runtime.server.models.catalog import ModelCatalog
from quire.runtime.server.openai.api import CHAT_ENDPOINT, COMPLETION_ENDPOINT

from tests.support.samples import INFO

ADAPTED = msgspec.structs.replace(INFO, encoder=None, adapters={"sql": "sql@00", "chat": "chat@11"})
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def models() -> ModelCatalog:
    return ModelCatalog.of_one("base", cast(Any, SimpleNamespace(info=ADAPTED)))


def test_adapters_are_listed_after_the_model_and_known_by_name():
    assert models().names == ("base", "sql", "chat")
    assert [check_model(models(), Fields({"model": name}), "text").lora for name in ("base", "sql")] == ["", "sql"]
    with pytest.raises(BadRequest, match="'b' does not exist here; this server has 'base' and 'sql' and 'chat'"):
        check_model(models(), Fields({"model": "b"}), "text")


@pytest.mark.parametrize(("endpoint", "body"), [(CHAT_ENDPOINT, CHAT), (COMPLETION_ENDPOINT, {"prompt": ["a", "b"]})])
def test_the_model_of_a_body_is_the_adapter_of_all_its_requests(endpoint, body):
    call = endpoint.read(Fields(body), check_model(models(), Fields({"model": "sql"}), "text"), "t")
    assert (call.model, {request.lora for request in call.requests}) == ("sql", {"sql"})
    plain = endpoint.read(Fields(body), check_model(models(), Fields({"model": "base"}), "text"), "t")
    assert (plain.model, {request.lora for request in plain.requests}) == ("base", {""})
