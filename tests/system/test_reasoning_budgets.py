"""Budgets of reasoning: its end is forced, with the same bits in any batch, after a preemption and after a crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from quire import AsyncClient, ChatOptions, InvalidRequest, SamplingParams
from quire.runtime.engine import GenerateRequest, TextProcessor
from quire.runtime.engine.markup.markup import CHANNEL_TOKENS
from quire.runtime.model.runner import ReasoningMarkers
from quire.scheduler import speculative

from tests.support.bits import Preemptor, asked, bits, chunks_of, one_by_one, prompt, running, together
from tests.support.scripted_model import write_scripted_model

from .test_survival import engine_pool
from .test_tool_calls import BOUNDED, NAMED, TEMPLATE, TOOLS, Client, ask, calls, client

__all__ = ["client"]

# After the end marker the script answers, wherever the marker came.
THOUGHTS = "One two three four"
MARKERS = ["<think>", "</think>"]
SCRIPTS = {"<|0|>": f"<think>{THOUGHTS}</think>Hello."}
# Markers of random bits: tokens of the bundled model, to which they mean nothing.
BUNDLED = ReasoningMarkers((7,), 8, (9,))


def reasoning_of(answer: Any) -> tuple[str | None, str | None, int]:
    """Return the reasoning, the answer, and the number of tokens of reasoning."""
    message = answer.choices[0].message
    return (
        getattr(message, "reasoning_content", None),
        message.content,
        answer.usage.completion_tokens_details.reasoning_tokens,
    )


async def test_the_end_comes_at_the_budget(client: Client) -> None:
    async with client("<think></think>", SCRIPTS, special=MARKERS) as connected:
        whole = await ask(connected, "<|0|>")
        text, answer, num_tokens = reasoning_of(whole)
        assert (text, answer) == (THOUGHTS, "Hello.")
        assert num_tokens == 4
        for budget in range(num_tokens):
            cut = await ask(connected, "<|0|>", extra_body={"thinking_token_budget": budget})
            text, answer, used = reasoning_of(cut)
            assert THOUGHTS.startswith(text or "")
            assert (answer, used) == ("Hello.", budget)
            assert cut.usage is not None
            assert whole.usage is not None
            assert cut.usage.completion_tokens == whole.usage.completion_tokens - num_tokens + budget
        for budget in (num_tokens, num_tokens + 1, 100, 2**31 - 1):
            free = await ask(connected, "<|0|>", extra_body={"thinking_token_budget": budget})
            assert reasoning_of(free) == (THOUGHTS, "Hello.", num_tokens)
        # The template begins the reasoning; several choices count together.
        begun = await ask(
            connected, "", n=3, extra_body={"thinking_token_budget": 2, "chat_template_kwargs": {"end": "<|0|><think>"}}
        )
        assert [each.message.content for each in begun.choices] == ["Hello."] * 3
        assert reasoning_of(begun)[2] == 6


async def test_reasoning_that_is_switched_off_has_a_budget_of_0(client: Client) -> None:
    async with client("<think></think>", SCRIPTS, whole=MARKERS) as connected:  # tokens that are ordinary text
        for fields in ({"reasoning_effort": "none"}, {"extra_body": {"enable_thinking": False}}):
            assert reasoning_of(await ask(connected, "<|0|>", **fields)) == (None, "Hello.", 0)
        both = await ask(connected, "<|0|>", reasoning_effort="none", extra_body={"thinking_token_budget": 3})
        assert reasoning_of(both)[2] == 3
        response = await connected.responses.create(model="quire", input="<|0|>", reasoning={"effort": "none"})
        assert response.output_text == "Hello."
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == 0


async def test_calls_and_schemas_come_after_the_budget(client: Client) -> None:
    async with client("<tool_call><think></think>", SCRIPTS, special=MARKERS) as connected:
        extra: Any = {"extra_body": {"thinking_token_budget": 2}, "max_tokens": 200}
        required = await ask(connected, "<|0|>", tools=BOUNDED, tool_choice=NAMED, **extra)
        assert [name for name, _ in calls(required)] == ["weather"]
        auto = await ask(connected, "<|0|>", tools=TOOLS, **extra)
        assert auto.choices[0].message.content == "Hello."
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
        shaped = await ask(connected, "<|0|>", response_format=form, **extra)
        assert shaped.choices[0].message.content in ("1", "2")
        assert [reasoning_of(each)[2] for each in (required, auto, shaped)] == [2, 2, 2]


async def test_channels_end_at_the_budget(client: Client) -> None:
    scripts = {"<|0|>": "<|channel|>analysis<|message|>One two three", "<|end|>": "<|start|>"}
    signs = "<|channel|><|message|>"
    async with client(signs, scripts, special=CHANNEL_TOKENS, whole=["analysis"]) as connected:
        for budget in (0, 1, 2):
            cut = await ask(connected, "<|0|>", max_tokens=12, extra_body={"thinking_token_budget": budget})
            text, _, num_tokens = reasoning_of(cut)
            assert num_tokens == budget
            assert "One two three".startswith(text or "")


async def test_a_budget_that_no_token_can_end_is_refused(client: Client) -> None:
    async with client("<think></think>", {"<|0|>": "<think>So.</think>Hello."}, added=["<think>"]) as connected:
        with pytest.raises(openai.BadRequestError, match="no token that ends reasoning; leave the budget out"):
            await ask(connected, "<|0|>", extra_body={"thinking_token_budget": 5})
        # A switch is not a budget.
        assert reasoning_of(await ask(connected, "<|0|>", reasoning_effort="none"))[:2] == ("So.", "Hello.")
    async with client("<think></think>", SCRIPTS, special=MARKERS) as connected:
        for budget in (-1, 2**31, 1.5, "7", True):
            with pytest.raises(openai.BadRequestError, match="thinking_token_budget must be"):
                await ask(connected, "<|0|>", extra_body={"thinking_token_budget": budget})


async def test_the_protocol_has_budgets(serving: Callable[..., Any], tmp_path: Path) -> None:
    template = f"{{# <think> </think> #}}{TEMPLATE}"
    model = write_scripted_model(tmp_path / "model", SCRIPTS, template=template, special=MARKERS)
    async with serving(model=str(model)) as real, AsyncClient(real.server.address) as client:
        messages = [{"role": "user", "content": "<|0|>"}]
        params = SamplingParams(max_tokens=50, thinking_token_budget=3)
        output = await client.complete(None, params, messages=messages, chat=ChatOptions())
        assert (output.outputs[0].text, output.usage.reasoning_tokens) == ("Hello.", 3)
        plain = await client.complete("Hello <|0|>", params)
        assert (plain.token_ids, plain.usage.reasoning_tokens) == (output.token_ids, 3)
        with pytest.raises(InvalidRequest, match="thinking_token_budget cannot be used with beam_width"):
            await client.complete("Hello", SamplingParams(beam_width=2, thinking_token_budget=3))


def requests(num_tokens: int = 24) -> list[GenerateRequest]:
    """Return requests that reason for 0, 1, 5 and more tokens than they may generate."""
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.0, "seed": 6, "n": 3},
    ]
    return [
        asked((*prompt(5 + 11 * index), *BUNDLED.open), max_tokens=num_tokens, thinking_token_budget=budget, **sampling)
        for index, (budget, sampling) in enumerate((b, s) for b in (0, 1, 5, 100) for s in samplings)
    ]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the bundled model markers of reasoning."""
    monkeypatch.setattr(TextProcessor, "reasoning_markers", lambda self, vocab_size: BUNDLED)


@pytest.mark.usefixtures("marked")
async def test_the_same_bits_in_batches_chunks_preemptions_and_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(enable_prefix_caching=False, threads=1) as engine:
        alone = await one_by_one(engine, requests())
        for request, budget in zip(requests(), (each for each in (0, 1, 5, 100) for _ in range(3)), strict=True):
            chunks = await chunks_of(engine, request)
            outputs: list[list[int]] = [[] for _ in range(request.sampling_params.n)]
            for chunk in chunks:
                outputs[chunk.choice].extend(chunk.token_ids)
            for tokens in outputs:
                assert BUNDLED.close in tokens[: budget + 1] or len(tokens) <= budget
    for name in ("MARGIN", "FORCED_MARGIN"):
        monkeypatch.setattr(speculative, name, 0.0)
    for chunk, drafts in ((None, 0), (3, 5)):
        async with running(chunk, num_speculative_tokens=drafts) as engine:
            engine.set_observer(Preemptor(engine, 9))
            assert await together(engine, requests()) == alone


@pytest.mark.usefixtures("marked")
async def test_the_same_bytes_after_a_crash() -> None:
    async with running() as engine:
        expected = await together(engine, requests(60))
    async with engine_pool() as pool:
        streams = [aiter(await pool.submit(request)) for request in requests(60)]
        received = [[await anext(stream) for _ in range(3)] for stream in streams]
        os.kill(pool.core.members[0].pid or 0, signal.SIGKILL)
        for chunks, stream in zip(received, streams, strict=True):
            chunks += [chunk async for chunk in stream]
        assert [bits(chunks) for chunks in received] == expected


@pytest.mark.usefixtures("marked")
async def test_an_output_that_another_server_began_keeps_its_budget() -> None:
    request = asked((*prompt(5), *BUNDLED.open), thinking_token_budget=5, seed=3, temperature=1.0, max_tokens=20)
    async with running() as engine:
        chunks = await chunks_of(engine, request)
        tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
        assert chunks[-1].usage is not None
        for num_known in (0, 4, 5, 6, 19):
            continued = GenerateRequest(
                prompt=request.prompt, sampling_params=request.sampling_params, generated=(tokens[:num_known],)
            )
            rest = await chunks_of(engine, continued)
            assert tuple(token for chunk in rest for token in chunk.token_ids) == tokens[num_known:]
            assert rest[-1].usage is not None
            assert rest[-1].usage.reasoning_tokens == chunks[-1].usage.reasoning_tokens
