"""The lines of a batch: what is a request, what is refused, and the form of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.runtime.server.batches.lines import (
    MAX_LINE_BYTES,
    LineAnswer,
    LineRefused,
    answer_line,
    read_line,
    refusal_line,
)


def line(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "p", "seed": 5},
        **changes,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def test_a_request_keeps_the_bytes_of_its_body() -> None:
    request = read_line(
        3, b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body": { "input" : [1.50e0] } }\n'
    )
    assert (request.custom_id, request.url, request.body) == ("a", "/v1/embeddings", b'{ "input" : [1.50e0] }')
    assert len(request.name) == 32


@pytest.mark.parametrize("body", [{}, {"prompt": "p"}, {"seed": None, "prompt": "p"}])
def test_a_request_without_a_seed_gets_the_seed_of_its_line(body: dict[str, Any]) -> None:
    made = [json.loads(read_line(number, line(body=body)).body) for number in (1, 1, 2)]
    assert made[0] == {**body, "seed": made[0]["seed"]} == made[1]
    assert 0 <= made[0]["seed"] < 2**48
    assert made[0]["seed"] != made[2]["seed"]


def test_a_seed_is_kept() -> None:
    assert json.loads(read_line(1, line()).body) == {"prompt": "p", "seed": 5}


@pytest.mark.parametrize(
    ("data", "custom_id", "code", "message"),
    [
        (b"no", "", "invalid_json_line", "not a JSON object"),
        (b"[]", "", "invalid_json_line", "not a JSON object"),
        (b'{"a":', "", "invalid_json_line", "not a JSON object"),
        (b'{"custom_id":"\xff"}', "", "invalid_json_line", "not a JSON object"),
        (b"[" * 100_000, "", "invalid_json_line", "not a JSON object"),
        (b" " * (MAX_LINE_BYTES + 1), "", "invalid_request", f"at most {MAX_LINE_BYTES}"),
        (line(custom_id=None), "", "missing_required_parameter", "custom_id is missing"),
        (line(custom_id=5), "", "invalid_request", "custom_id must be text, not 5"),
        (line(custom_id=""), "", "invalid_request", "1 to 512 characters, not 0"),
        (line(custom_id="x" * 513), "", "invalid_request", "1 to 512 characters, not 513"),
        (line(method=None), "a", "missing_required_parameter", "method is missing"),
        (line(method="GET"), "a", "invalid_request", "method must be POST, not 'GET'"),
        (line(url=None), "a", "missing_required_parameter", "url is missing"),
        (line(url="/v1/files"), "a", "invalid_url", "url must be one of /v1/chat/completions, "),
        (line(url=["/v1/completions"]), "a", "invalid_request", "url must be text"),
        (line(body=None), "a", "missing_required_parameter", "body is missing"),
        (line(body="{}"), "a", "invalid_request", "body must be an object, not '{}'"),
        (line(body={"stream": True}), "a", "invalid_request", "body.stream cannot be true in a batch"),
        (line(body={"background": True}), "a", "invalid_request", "body.background cannot be true in a batch"),
        (line(model="m"), "a", "invalid_request", "unknown field 'model'; allowed: custom_id, method, url, body"),
    ],
    ids=range(20),
)
def test_a_line_that_is_no_request_has_an_answer_with_the_reason(
    data: bytes, custom_id: str, code: str, message: str
) -> None:
    with pytest.raises(LineRefused) as caught:
        read_line(7, data)
    answer = json.loads(refusal_line(7, data, caught.value))
    assert message in answer["error"]["message"]
    assert answer == {
        "id": answer["id"],
        "custom_id": custom_id or None,
        "response": None,
        "error": {"code": code, "message": str(caught.value)},
    }


def test_the_answer_has_the_body_as_it_is() -> None:
    request = read_line(0, line())
    written = answer_line(request, LineAnswer(200, b'{"logprob":-0.10000000149011612}'))
    assert written == (
        b'{"id":"batch_req_%b","custom_id":"a","response":{"status_code":200,"request_id":"%b",'
        b'"body":{"logprob":-0.10000000149011612}},"error":null}\n' % (request.name.encode(), request.name.encode())
    )


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error":{"message":"m","type":"t","code":"c"}}', {"code": "c", "message": "m"}),
        (b'{"error":{"message":"m","type":"t","code":null}}', {"code": "t", "message": "m"}),
        (b'{"detail":"gone"}', {"code": "404", "message": '{"detail":"gone"}'}),
        (b'"<html>"', {"code": "404", "message": '"<html>"'}),
    ],
)
def test_an_error_of_the_server_is_in_both_places(body: bytes, error: dict[str, str]) -> None:
    answer = json.loads(answer_line(read_line(0, line()), LineAnswer(404, body)))
    assert answer["error"] == error
    assert answer["response"]["status_code"] == 404
    assert answer["response"]["body"] == json.loads(body)
