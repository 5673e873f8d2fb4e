"""openai-python against a real server: every answer is of its types, and a stream adds up to the whole answer."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseFunctionCallArgumentsDoneEvent
from pydantic import BaseModel, Field
from quire.runtime.engine import LocalEngine, SilentObserver, StepStats

from tests.support.forced_preemption import preempt
from tests.support.http_client import HTTPClient
from tests.support.sdk_types import check_types

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a queue?"}]
ENCODER = Path(__file__).resolve().parents[1] / "goldens" / "encoders" / "bert"
PROMPT = "This module provides access to"


@pytest.fixture
async def client(serving: Callable[..., Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving() as real,
        openai.AsyncOpenAI(base_url=f"http://{real.server.openai_address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


# Fields in OpenAI's specification that this version of its library lacks, and our fields of model cards.
EXTRA_FIELDS: dict[type[BaseModel], set[str]] = {
    ResponseFunctionCallArgumentsDoneEvent: {"name"},
    Model: {"capabilities", "default_sampling_params", "max_model_len"},
}


check = functools.partial(check_types, extra=EXTRA_FIELDS)


def without_ids(answer: BaseModel) -> dict[str, Any]:
    """Return the answer's fields, without the id and the time."""
    return answer.model_dump(exclude={"id", "created"}, exclude_unset=True)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [type(model) for model in models] == [Model]
    check(models[0])
    assert (await client.models.retrieve(models[0].id)).id == models[0].id


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
async def test_a_chat_stream_adds_up_to_the_whole_answer(
    client: openai.AsyncOpenAI, n: int, logprobs: dict[str, Any]
) -> None:
    params: Any = {"model": "quire", "messages": MESSAGES, "max_tokens": 12, "n": n, "seed": 5, **logprobs}
    whole = await client.chat.completions.create(**params)
    assert isinstance(whole, ChatCompletion)
    check(whole)
    async with client.chat.completions.stream(**params, stream_options={"include_usage": True}) as stream:
        async for event in stream:
            if event.type == "chunk":
                assert isinstance(event.chunk, ChatCompletionChunk)
                check(event.chunk)
        final = stream.current_completion_snapshot
    assert whole.usage == final.usage
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert one.message.content == other.message.content
        assert (one.index, one.finish_reason, one.message.role) == (other.index, other.finish_reason, "assistant")
        assert (one.logprobs and one.logprobs.model_dump()) == (other.logprobs and other.logprobs.model_dump())
    if logprobs:
        content = whole.choices[0].logprobs.content  # type: ignore[union-attr]
        assert content is not None
        assert b"".join(bytes(each.bytes or []) for each in content) == whole.choices[0].message.content.encode()  # type: ignore[union-attr]
        assert all(len(each.top_logprobs) == 2 for each in content)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "A queue is"]])
async def test_a_completion_stream_adds_up_to_the_whole_answer(client: openai.AsyncOpenAI, n: int, prompt: Any) -> None:
    params: Any = {"model": "quire", "prompt": prompt, "max_tokens": 8, "n": n, "seed": 5, "logprobs": 2}
    whole = await client.completions.create(**params)
    assert isinstance(whole, Completion)
    check(whole)
    texts: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    usage = None
    async for chunk in await client.completions.create(**params, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])  # type: ignore[arg-type]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert usage == whole.usage
    assert len(whole.choices) == n * (1 if isinstance(prompt, str) else 2)
    for choice in whole.choices:
        assert choice.text == texts[choice.index]
        assert choice.finish_reason == reasons[choice.index]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == logprobs[choice.index]


@pytest.mark.parametrize("given", ["What is a queue?", MESSAGES])
@pytest.mark.parametrize("max_output_tokens", [12, 30])
async def test_a_response_stream_adds_up_to_the_whole_response(
    client: openai.AsyncOpenAI, given: Any, max_output_tokens: int
) -> None:
    params: Any = {
        "model": "quire",
        "input": given,
        "max_output_tokens": max_output_tokens,
        "instructions": "Be short.",
    }
    params |= {"temperature": 0.7, "extra_body": {"seed": 5, "stop": ["."]}, "metadata": {"a": "b"}}
    whole = await client.responses.create(**params)
    check(whole)
    assert whole.usage is not None
    numbers = []
    texts = []
    last = None
    async for event in await client.responses.create(**params, stream=True):
        check(event)
        numbers.append(event.sequence_number)
        texts += [event.delta] if event.type == "response.output_text.delta" else []
        last = event
    assert last is not None
    assert last.type == ("response.completed" if whole.status == "completed" else "response.incomplete")
    assert numbers == list(range(len(numbers)))
    assert "".join(texts) == whole.output_text == last.response.output_text
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert whole.metadata == {"a": "b"}
    assert (whole.incomplete_details is None) == (whole.status == "completed")


async def test_a_stored_response_is_retrieved_resumed_continued_and_deleted(client: openai.AsyncOpenAI) -> None:
    params: Any = {"model": "quire", "max_output_tokens": 12, "store": True, "top_logprobs": 2}
    params["include"] = ["message.output_text.logprobs"]
    stream = await client.responses.create(**params, input="What is a queue?", stream=True)
    events = [event async for event in stream]
    for event in events:
        check(event)
    first: Any = events[-1]
    name = first.response.id
    found = await client.responses.retrieve(name)
    check(found)
    assert found == first.response
    rest = await client.responses.retrieve(name, stream=True, starting_after=4)
    assert [event async for event in rest] == events[5:]
    second = await client.responses.create(**params, input="And a stack?", previous_response_id=name)
    check(second)
    assert second.previous_response_id == name
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    for item in items:
        check(item)
    assert [each.content[0].text for each in items] == ["What is a queue?", found.output_text, "And a stack?"]  # type: ignore[union-attr]
    assert (await client.responses.cancel(name)).status == found.status
    await client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(name)


async def test_a_background_response_is_polled(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="quire", input="a", max_output_tokens=12, background=True)
    async with asyncio.timeout(60):
        while answer.status in ("queued", "in_progress"):
            check(answer)
            answer = await client.responses.retrieve(answer.id)
    check(answer)
    assert answer.status in ("completed", "incomplete")
    assert answer.output_text


async def test_a_stored_chat_is_retrieved_and_deleted(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="quire", messages=MESSAGES, max_tokens=5, store=True)
    check(chat)
    assert await client.chat.completions.retrieve(chat.id) == chat
    check(await client.chat.completions.delete(chat.id))


async def test_the_text_of_a_response_may_be_json(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    answer = await client.responses.create(model="quire", input="A number", text=form, max_output_tokens=40)
    check(answer)
    assert json.loads(answer.output_text)["n"] in (3, 4)


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 32}])
async def test_prompt_logprobs_are_those_of_the_model(serving: Callable[..., Any], settings: dict[str, Any]) -> None:
    """The logprobs of an echoed prompt, with which lm-evaluation-harness scores texts."""
    async with serving(**settings) as real:
        ids = await real.engine.tokenize(PROMPT + " a queue that any number of threads may use.")
        logits = (await real.engine.logits(ids)).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        expected -= logits.max(-1, keepdims=True)
        url = f"http://{real.server.openai_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            for prompt, max_tokens in ((list(ids), 0), (list(ids), 3), ([list(ids), list(ids[:5]), list(ids[:9])], 1)):
                params: Any = {"model": "quire", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
                plain = None if max_tokens == 0 else await client.completions.create(**params)
                echo = await client.completions.create(**params, echo=True, logprobs=1)
                assert echo.usage is not None
                assert plain is None or plain.usage == echo.usage
                for index, choice in enumerate(echo.choices):
                    prompt_ids = ids if len(echo.choices) == 1 else prompt[index]
                    logprobs = choice.logprobs
                    assert logprobs is not None
                    assert logprobs.tokens is not None
                    assert logprobs.token_logprobs is not None
                    assert logprobs.top_logprobs is not None
                    assert logprobs.text_offset is not None
                    assert logprobs.token_logprobs[0] is None
                    assert logprobs.top_logprobs[0] is None
                    assert len(logprobs.tokens) == len(prompt_ids) + max_tokens
                    found = logprobs.token_logprobs[1 : len(prompt_ids)]
                    wanted = [expected[i, token] for i, token in enumerate(prompt_ids[1:])]
                    np.testing.assert_allclose(found, wanted, atol=2e-3)
                    for i, top in enumerate(logprobs.top_logprobs[1 : len(prompt_ids)]):
                        assert max(top.values()) == pytest.approx(expected[i].max(), abs=2e-3)
                    assert "".join(logprobs.tokens) == choice.text
                    assert [
                        choice.text[a:][: len(b)] for a, b in zip(logprobs.text_offset, logprobs.tokens, strict=True)
                    ] == logprobs.tokens
                    if plain is not None:
                        assert choice.text.endswith(plain.choices[index].text)


async def test_errors_are_of_the_right_class(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model="quire", prompt=[5] * 3000, max_tokens=3)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as out_of_range:
        await client.completions.create(model="quire", prompt=PROMPT, temperature=-1)
    assert out_of_range.value.param == "temperature"
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"multipleOf": 2}}}}
    with pytest.raises(openai.BadRequestError, match="cannot be enforced") as unsupported:
        await client.chat.completions.create(model="quire", messages=MESSAGES, response_format=schema, max_tokens=3)
    assert unsupported.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="no embedding model"):
        await client.embeddings.create(model="quire", input="x")


async def test_embeddings(serving: Callable[..., Any]) -> None:
    golden = json.loads((ENCODER / "golden.json").read_text())
    texts = golden["texts"][1:3]
    ids = golden["token_ids"][1:3]
    async with serving(embedding_model=str(ENCODER)) as real:
        url = f"http://{real.server.openai_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            create: Any = functools.partial(client.embeddings.create, model="bert")
            floats = await create(input=texts, encoding_format="float")
            assert isinstance(floats, CreateEmbeddingResponse)
            check(floats)
            assert [(each.index, len(each.embedding)) for each in floats.data] == [(0, 40), (1, 40)]
            assert floats.usage.prompt_tokens == floats.usage.total_tokens == sum(map(len, ids))
            unless_said = await create(input=texts)  # the client asks for base64 and decodes it
            assert [each.embedding for each in unless_said.data] == [each.embedding for each in floats.data]
            encoded = await create(input=texts[0], encoding_format="base64")
            assert (
                np.frombuffer(base64.b64decode(encoded.data[0].embedding), "<f4").tolist() == floats.data[0].embedding
            )
            assert (await create(input=ids, encoding_format="float")).data == floats.data
            assert (await create(input=ids[1], encoding_format="float")).data[0].embedding == floats.data[1].embedding
            short = np.array((await create(input=texts, dimensions=8)).data[1].embedding)
            leading = np.array(floats.data[1].embedding[:8])
            assert np.allclose(short, leading / np.linalg.norm(leading))
            assert "bert" in {model.id async for model in client.models.list()}
            for options, param in (({"input": [""]}, "input"), ({"input": "a", "dimensions": 41}, "dimensions")):
                with pytest.raises(openai.BadRequestError) as refused:
                    await create(**options)
                assert refused.value.param == param


async def test_a_chat_without_a_limit_uses_what_the_context_leaves(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="quire", messages=[{"role": "user", "content": "a " * 1000}], extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


async def test_a_stream_that_is_left_early_frees_its_pages(
    serving: Callable[..., Any],
) -> None:
    async with serving() as real:
        url = f"http://{real.server.openai_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.completions.create(
                model="quire", prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            await real.idle()
            real.check_books()


@pytest.mark.parametrize("prefill", [False, True])
async def test_a_client_that_leaves_the_queue_or_prefill_frees_its_place(
    serving: Callable[..., Any], eventually: Callable[..., Any], prefill: bool
) -> None:
    """The other request runs on; the one that was left is gone from the queue, or its pages are."""
    async with serving(max_num_seqs=1 + prefill, max_num_batched_tokens=16) as real:
        busy = await HTTPClient.open(real.server.openai_address)
        left = await HTTPClient.open(real.server.openai_address)
        body = {"prompt": PROMPT, "max_tokens": 1900, "stream": True, "ignore_eos": True}
        busy.send("POST", "/v1/completions", body)
        await busy.read_until(b"data: ")
        left.send("POST", "/v1/completions", {**body, "prompt": [5] * 1500, "max_tokens": 2})
        await eventually(lambda: real.engine.stats().running == 2 if prefill else real.engine.stats().waiting == 1)
        step = real.engine.stats().step
        left.writer.transport.abort()
        while (real.engine.stats().running, real.engine.stats().waiting) != (1, 0):
            await asyncio.sleep(0)
        assert real.engine.stats().step <= step + 3  # the step in flight, and the steps until the loop sees the end
        assert not busy.reader.at_eof()
        busy.writer.transport.abort()


class Preemptor(SilentObserver):
    """Preempts the running requests after every fourth step."""

    def __init__(self, engine: LocalEngine) -> None:
        self.scheduler = engine.core.scheduler
        self.num_steps = self.num_preempted = 0

    def on_step(self, stats: StepStats) -> None:
        self.num_steps += 1
        if self.num_steps % 4 == 2:
            self.num_preempted += sum(preempt(self.scheduler, each) for each in list(self.scheduler._batch.requests))


async def test_prompt_logprobs_survive_preemption(serving: Callable[..., Any]) -> None:
    prompt = [7 * i % 4000 + 5 for i in range(60)]
    params: Any = {"model": "quire", "prompt": prompt, "max_tokens": 20, "seed": 3, "echo": True, "logprobs": 0}
    async with serving(max_num_seqs=4) as real:
        url = f"http://{real.server.openai_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            alone = (await client.completions.create(**params)).choices[0]
            preemptor = Preemptor(real.engine)
            real.engine.set_observer(preemptor)
            found = (await client.completions.create(**params)).choices[0]
    assert preemptor.num_preempted > 0
    assert (found.text, found.logprobs) == (alone.text, alone.logprobs)


# Structured output


class Size(BaseModel):
    """A pydantic model with the special parts of its schemas: definitions, an enum, a list, a null."""

    unit: Literal["cm", "inch"]
    width: Annotated[int, Field(ge=0, le=99)]


class Item(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    sizes: Annotated[list[Size], Field(max_length=2)]
    comment: Annotated[str, Field(max_length=5)] | None


async def test_a_parsed_answer_is_the_pydantic_model(client: openai.AsyncOpenAI) -> None:
    params: Any = {"model": "quire", "messages": MESSAGES, "max_tokens": 300, "seed": 3, "response_format": Item}
    whole = await client.chat.completions.parse(**params)
    assert isinstance(whole.choices[0].message.parsed, Item)
    async with client.chat.completions.stream(**params) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"structured_outputs": {"json": {"const": [1]}}}, r"\s*\[\s*1\s*\]"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_json": '{"const": "c"}'}, '"c"'),
        ({"guided_grammar": 'root ::= "y"'}, "y"),
        ({"grammar": 'root ::= "y" "z"?'}, "yz?"),
        ({"json_schema": {"const": 7}}, "7"),
        ({"regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"ebnf": 'root ::= "e"'}, "e"),
        ({"response_format": {"type": "json_object", "schema": {"const": "s"}}}, '"s"'),
    ],
    ids=str,
)
async def test_other_servers_names_of_structured_output(
    client: openai.AsyncOpenAI, body: dict[str, Any], pattern: str
) -> None:
    answer = await client.completions.create(model="quire", prompt=PROMPT, max_tokens=20, extra_body=body)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text)
