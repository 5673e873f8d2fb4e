"""The size of a request's text, its conversation, and the scheduler's requests."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.prompts import PromptImage
from quire.runtime.common.types import SamplingParams, StructuredOutputs, ToolChoice
from quire.runtime.engine.continuation import Continuation, ReplayedOutput
from quire.runtime.engine.facade import MAX_COUNTED, GenerateRequest
from quire.runtime.engine.input import (
    MAX_KEY_TOKENS,
    PreparedInput,
    conversation_of,
    fitted,
    prepare,
    scheduled_requests,
)
from quire.runtime.engine.text_processor import TextProcessor
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.runner import SamplingSpec
from quire.scheduler import BeamSpec, PlacedImage, Request, RequestSpec


def test_the_bytes_of_a_prompt_and_of_messages() -> None:
    assert 1000 < GenerateRequest(prompt="x" * 1000).text_bytes() < 1200
    parts = ({"role": "user", "content": [{"type": "text", "text": "é" * 1000}]},)
    assert 1000 < GenerateRequest(prompt=None, messages=parts).text_bytes() < 3000
    assert GenerateRequest(prompt=(1, 2)).text_bytes() == 0, "nothing is to be tokenized"


def test_counting_the_bytes_of_hostile_messages_is_bounded() -> None:
    """A list of a million numbers is counted by its own size, without a visit to each number."""
    visited = 0

    class Counted(int):
        def __sizeof__(self) -> int:
            nonlocal visited
            visited += 1
            return 32

    messages = ({"role": "user", "content": [Counted()] * 100_000},)
    assert GenerateRequest(prompt=None, messages=messages).text_bytes() > 800_000
    assert visited < MAX_COUNTED


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "room", "fitted_tokens"), [(9, 0, 20, 9), (9, 0, 5, 5), (9, 7, 5, 7), (9, 0, -3, 1)]
)
def test_max_tokens_fit_the_context(max_tokens: int, min_tokens: int, room: int, fitted_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    request = fitted(GenerateRequest(prompt="x", sampling_params=params), room)
    assert request.sampling_params.max_tokens == fitted_tokens


def test_an_echoed_prompt_is_output_after_its_first_token() -> None:
    def scheduled(prompt: tuple[int, ...], max_tokens: int) -> RequestSpec:
        request = GenerateRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=max_tokens), echo=True)
        (made,) = scheduled_requests(request, prompt, first_id=1, seed=0, eos_token_ids=frozenset({0}), submitted=0.0)
        return made.spec

    spec = scheduled((5, 6, 7), 4)
    assert (spec.prompt_token_ids, spec.echoed, spec.max_tokens) == ((5,), (6, 7), 6)
    assert scheduled((5, 6), 0).max_tokens == 1
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        scheduled((5,), 0)


def scheduled(params: SamplingParams, continuation: Continuation | None = None, **fields: Any) -> list[Request]:
    request = GenerateRequest(prompt=(5, 6), sampling_params=params, **fields)
    return scheduled_requests(
        request,
        (5, 6),
        first_id=10,
        seed=3,
        eos_token_ids=frozenset({0}),
        submitted=100.0,
        conversation=b"c",
        continuation=continuation,
        images=(PromptImage(position=1, tokens=1, pixels=np.arange(18, dtype=np.uint8).reshape(2, 3, 3), digest=b"d"),),
    )


def test_the_scheduler_gets_all_that_a_request_asks_for() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=(8,), n=2)
    made = scheduled(params, tenant="t", cache_salt="s", priority=2, deadline_ms=1500, pin_ms=2500)
    assert [each.spec for each in made] == [
        RequestSpec(
            10 + index,
            (5, 6),
            max_tokens=9,
            min_tokens=4,
            stop_token_ids=frozenset({0, 8}),
            sampling=SamplingSpec(params, 3 + index, frozenset({0, 8}), "t"),
            tenant="t",
            cache_salt="s",
            conversation=b"c",
            priority=2,
            deadline=101.5,
            pin_s=2.5,
            images=(PlacedImage(1, 1, b"d", height=2, width=3, pixels=bytes(range(18))),),
        )
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [
        ({"n": 2, "best_of": 3}, [0, 0, 0]),
        ({"n": 2, "best_of": 3, "logprobs": 5}, [5, 5, 5]),
        ({"n": 2, "beam_width": 4, "length_penalty": 0.5}, [8]),
        ({"n": 2}, [None, None]),
    ],
)
def test_sequences_have_the_logprobs_that_their_ranking_needs(params: Any, logprobs: list[int | None]) -> None:
    made = scheduled(SamplingParams(**params))
    assert [each.spec.sampling.params.logprobs for each in made] == logprobs  # type: ignore[attr-defined]
    beam = BeamSpec(4, 0.5, 2) if "beam_width" in params else None
    assert [each.spec.beam for each in made] == [beam] * len(made)


def test_outputs_that_go_on_have_ids_in_order_and_the_seeds_of_their_samples() -> None:
    still_open = tuple(ReplayedOutput(choice, (7,) * choice, None, None) for choice in (1, 3))
    made = scheduled(SamplingParams(n=4), Continuation(still_open, (), 9))
    assert [each.request_id for each in made] == [10, 11]
    assert [each.spec.sampling.seed for each in made] == [4, 6]  # type: ignore[attr-defined]
    assert [tuple(each.generated) for each in made] == [(7,), (7, 7, 7)]


WEATHER = ({"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}},)
OWN_RULES = StructuredOutputs(lark='start: "a" start | "b"')
SCHEMA = StructuredOutputs(json={"type": "integer"})


@pytest.mark.parametrize(
    ("tools", "answer", "is_own"),
    [
        (WEATHER, None, True),
        (WEATHER, SCHEMA, True),
        (WEATHER, OWN_RULES, False),
        ((), OWN_RULES, False),
        ((), SCHEMA, False),
    ],
)
def test_a_grammar_of_tool_calls_is_the_servers_own_unless_a_client_has_written_rules(
    tools: tuple[dict[str, Any], ...], answer: StructuredOutputs | None, is_own: bool
) -> None:
    request = GenerateRequest(
        prompt=None,
        messages=({"role": "user", "content": "Hello"},),
        tools=tools,
        tool_choice=ToolChoice(needed="auto" if tools else "none"),
        sampling_params=SamplingParams(structured_outputs=answer),
    )
    checked = Mock()
    prepared = prepare(request, TextProcessor.load(BUNDLED_MODEL, "hermes"), Mock(), checked)
    assert prepared.has_own_grammar == is_own
    (made,) = scheduled_requests(
        request,
        prepared.token_ids,
        first_id=1,
        seed=7,
        eos_token_ids=frozenset({0}),
        submitted=0.0,
        has_own_grammar=prepared.has_own_grammar,
    )
    assert (made.spec.sampling.has_own_grammar, made.spec.sampling.seed) == (is_own, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": (1, 2)}, {"prompt": "a"}, {"prompt": None, "messages": ({"role": "user", "content": "a"},)}],
    ids=["token ids", "text", "chat"],
)
def test_the_grammar_of_every_kind_of_prompt_is_checked_for_its_tenant(prompt: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=SCHEMA)
    checked = Mock()
    request = GenerateRequest(**prompt, sampling_params=params, tenant="t")
    assert prepare(request, TextProcessor.load(BUNDLED_MODEL), Mock(), checked).params == params
    checked.check.assert_called_once_with("t", SCHEMA)


def test_the_options_of_a_chat_are_checked_with_the_grammar_of_its_calls() -> None:
    request = GenerateRequest(
        prompt=None,
        messages=({"role": "user", "content": "a"},),
        tools=WEATHER,
        tool_choice=ToolChoice(needed="required"),
        sampling_params=SamplingParams(beam_width=2),
    )
    validator = Mock()
    prepared = prepare(request, TextProcessor.load(BUNDLED_MODEL, "hermes"), validator, Mock())
    (with_grammar,) = validator.check_options.call_args.args
    assert with_grammar.sampling_params == prepared.params
    assert prepared.params.structured_outputs is not None


SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "Hello"}
SECOND = {"role": "user", "content": "More"}
ANSWER = {"role": "assistant", "content": "Hi"}


def conversation(*messages: dict[str, Any], token_ids: tuple[int, ...] = (), **fields: Any) -> bytes:
    request = GenerateRequest(prompt=None, **fields)
    return conversation_of(request, PreparedInput(token_ids, request.sampling_params, messages))


def test_a_chat_keeps_its_conversation_from_turn_to_turn() -> None:
    first = conversation(SYSTEM, FIRST, token_ids=(1, 2))
    assert conversation(SYSTEM, FIRST, ANSWER, SECOND, token_ids=(1, 2, 3, 4)) == first
    assert conversation(SYSTEM, FIRST, ANSWER | {"tool_calls": []}) == first
    for other in ((FIRST,), (SYSTEM, SECOND), (SYSTEM, SECOND, FIRST), (SYSTEM,), (SYSTEM, SYSTEM, FIRST)):
        assert conversation(*other) != first
    assert conversation({"role": "user", "content": "ab"}) != conversation({"role": "usera", "content": "b"})
    assert conversation({"role": "assistant", "tool_calls": [1]}), "it has no content"
    assert len(first) == 16


def test_tenants_and_salts_share_no_conversation() -> None:
    found = {conversation(FIRST, tenant=tenant, cache_salt=salt) for tenant in ("", "a") for salt in ("", "a", "b")}
    assert len(found) == 6


def test_a_given_key_is_the_conversation() -> None:
    key = conversation(FIRST, prompt_cache_key="a")
    assert conversation(SECOND, token_ids=(7,), prompt_cache_key="a") == key
    assert conversation(token_ids=(7,), prompt_cache_key="a") == key
    assert len({key, conversation(FIRST), conversation(FIRST, prompt_cache_key="b")}) == 3
    assert conversation(FIRST, prompt_cache_key="a", tenant="b") != key
    assert conversation(FIRST, prompt_cache_key="\ud800") != key


def test_a_prompt_without_messages_is_known_by_its_first_tokens() -> None:
    """The largest power of two, so that a prompt that grows by a turn seldom changes."""
    prompt = tuple(range(3 * MAX_KEY_TOKENS))
    found = {conversation(token_ids=prompt[:length]) for length in range(1, len(prompt) + 1)}
    assert len(found) == MAX_KEY_TOKENS.bit_length()
    assert conversation(token_ids=prompt[:700]) == conversation(token_ids=prompt[:512])
    assert conversation(token_ids=prompt) == conversation(token_ids=prompt[:MAX_KEY_TOKENS])
    assert conversation(token_ids=(*prompt[:511], 0)) != conversation(token_ids=prompt[:512])
    assert conversation(token_ids=prompt[:512], tenant="a") != conversation(token_ids=prompt[:512])
    assert conversation(token_ids=(2**64 - 1,))
