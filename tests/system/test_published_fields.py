"""Every field that OpenAI, vLLM, SGLang and llama.cpp publish is used, ignored on purpose, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import HTTPClient, connection

DOCS = Path(__file__).resolve().parents[2] / "docs" / "http-api.md"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
}
TOOL = {"type": "function", "function": {"name": "f"}}

# Field -> a value that asks for something. `used` fields mean what their API says, `ignored` ones change nothing.
USED: dict[str, dict[str, Any]] = {
    CHAT: {
        # OpenAI: CreateChatCompletionRequest
        "model": "quire", "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "logprobs": True,
        "max_completion_tokens": 2, "max_tokens": 2, "n": 2, "parallel_tool_calls": True, "presence_penalty": 0.5,
        "prompt_cache_key": "k", "reasoning_effort": "low", "response_format": {"type": "text"}, "seed": 5,
        "service_tier": "flex", "stop": ["x"], "store": True, "stream": True, "temperature": 0.5, "tool_choice": "none",
        "tools": [TOOL], "top_p": 0.5,
        # vLLM and SGLang
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [5], "include_stop_str_in_output": True,
        "ignore_eos": True, "min_tokens": 1, "chat_template_kwargs": {"a": 1}, "structured_outputs": {"regex": "a"},
        "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"', "regex": "a",
        "ebnf": 'root ::= "a"', "priority": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
        "cache_salt": "s",
        # llama.cpp
        "json_schema": {}, "grammar": 'root ::= "a"',
    },
    COMPLETIONS: {"best_of": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    RESPONSES: {
        "background": False, "include": ["message.output_text.logprobs"], "instructions": "a", "store": True,
        "reasoning": {"effort": "low"}, "service_tier": "flex", "stream": True, "text": {"format": {"type": "text"}},
        "tool_choice": "none", "tools": [{"type": "function", "name": "f"}], "temperature": 0.5, "top_p": 0.5,
        "parallel_tool_calls": True, "prompt_cache_key": "k",
    },
}  # fmt: skip
IGNORED: dict[str, dict[str, Any]] = {
    CHAT: {
        "user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"}, "verbosity": "low", "cache_prompt": False, "id_slot": 3,
        "repeat_last_n": 32, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_exponent": 2.0, "xtc_threshold": 0.2,
        "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 5, "dry_sequence_breakers": ["\n"],
    },
    COMPLETIONS: {"user": "u"},
    RESPONSES: {
        "metadata": {"a": "b"}, "safety_identifier": "s", "user": "u", "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False}, "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: {
        # OpenAI
        "audio": {"voice": "a"}, "functions": [{"name": "f"}], "function_call": "auto", "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "a"}, "web_search_options": {"a": 1}, "moderation": {"a": 1},
        # vLLM
        "add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True,
        "documents": [{"text": "a"}], "chat_template": "{{ 1 }}", "mm_processor_kwargs": {"a": 1},
        "media_io_kwargs": {"a": 1}, "include_reasoning": False, "use_beam_search": True,
        "length_penalty": 0.5, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 5, "truncation_side": "right", "prompt_logprobs": 1, "allowed_token_ids": [5],
        "bad_words": ["a"], "logits_processors": ["a"], "request_id": "a", "kv_transfer_params": {"a": 1},
        "ec_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "repetition_detection": {"a": 1},
        "guided_whitespace_pattern": " ", "echo": True, "best_of": 2,
        # SGLang
        "rid": "a", "lora_path": "a", "extra_key": "a", "stop_regex": "a", "no_stop_trim": True,
        "separate_reasoning": False, "stream_reasoning": False, "return_hidden_states": True,
        "custom_logit_processor": "a", "session_params": {"a": 1},
        # llama.cpp
        "n_predict": 5, "n_probs": 2, "n_keep": 5, "n_discard": 5, "n_indent": 2, "min_keep": 2, "t_max_predict_ms": 5,
        "samplers": ["top_k"], "typical_p": 0.5, "top_n_sigma": 1.0, "repeat_penalty": 1.1, "dynatemp_range": 0.5,
        "xtc_probability": 0.5, "dry_multiplier": 0.8, "mirostat": 1, "penalize_nl": True, "post_sampling_probs": True,
        "return_tokens": True, "return_progress": True, "timings_per_token": True, "response_fields": ["content"],
        "lora": [{"id": 0, "scale": 0.5}], "reasoning_format": "none", "reasoning_budget": 5,
        "thinking_forced_open": True, "parse_tool_calls": False, "grammar_lazy": True, "grammar_triggers": [{"a": 1}],
        "preserved_tokens": ["a"],
        # other paths
        "max_output_tokens": 5, "instructions": "a", "previous_response_id": "a", "conversation": "a",
        "max_new_tokens": 5,
    },
    COMPLETIONS: {
        "suffix": "a", "tools": [TOOL], "messages": [], "reasoning_effort": "low", "store": True,
        "prompt_embeds": "a", "service_tier": "flex", "verbosity": "low", "max_completion_tokens": 5,
        "image_data": [{"data": "a", "id": 1}], "multimodal_data": ["a"], "input_prefix": "a", "input_suffix": "a",
        "input_extra": [{"text": "a"}], "detokenize": False,
    },
    RESPONSES: {
        "conversation": "a", "prompt": {"id": "a"}, "truncation": "auto",
        "context_management": [{"type": "compaction"}], "n": 2, "logprobs": True, "logit_bias": {"5": 1},
        "max_tokens": 5, "max_completion_tokens": 5,
        "response_format": {"type": "json_object"}, "messages": [], "verbosity": "low", "reasoning_effort": "low",
        "moderation": {"a": 1},
    },
}  # fmt: skip
# Refused fields whose default elsewhere asks for nothing here.
NEUTRAL: dict[str, Any] = {
    "typical_p": 1.0, "repeat_penalty": 1, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "n_keep": 0,
    "top_n_sigma": -1.0, "dynatemp_range": 0.0, "reasoning_format": "auto", "timings_per_token": False,
    "use_beam_search": False, "skip_special_tokens": True, "no_stop_trim": False, "return_progress": False,
    "t_max_predict_ms": -1, "lora": [], "n_probs": 0, "documents": None, "modalities": ["text"],
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_published_fields_are_used_or_ignored_on_purpose(system: Any, path: str) -> None:
    async with connection(system) as client:
        for name, value in {**USED[path], **IGNORED[path]}.items():
            reply = await ask(client, path, name, value)
            assert reply.status == 200, (name, reply.content)
    assert "quire_http_unknown_fields_total 0.0" in system.metrics()


@pytest.mark.parametrize("path", BODIES)
async def test_published_fields_that_are_missing_here_are_refused_by_name(system: Any, path: str) -> None:
    async with connection(system) as client:
        for name, value in REFUSED[path].items():
            reply = await ask(client, path, name, value)
            assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "unsupported_parameter"), (
                name
            )
    assert system.engine.requests == []


async def test_fields_that_ask_for_nothing_are_accepted(system: Any) -> None:
    async with connection(system) as client:
        for name, value in NEUTRAL.items():
            assert (await ask(client, CHAT, name, value)).status == 200, name
        for name, value in (("mirostat", False), ("skip_special_tokens", 1), ("n_keep", "0")):
            assert (await ask(client, CHAT, name, value)).error["param"] == name


def test_the_document_names_every_field_that_is_ignored_or_refused() -> None:
    text = DOCS.read_text()
    names = {name for table in (IGNORED, REFUSED) for path in table for name in table[path]}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_event_has_the_usage_so_far_if_asked(system: Any, path: str) -> None:
    async with connection(system) as client:
        events = (await client.ask("POST", path, {**BODIES[path], "max_tokens": 7, **STREAM})).events
        *counts, last = [(each["usage"]["completion_tokens"], each["usage"]["prompt_tokens"]) for each in events]
        assert counts == sorted(counts)
        assert (counts[-1], last) == ((7, 3), (7, 3))
        assert {each["usage"]["total_tokens"] - each["usage"]["completion_tokens"] for each in events} == {3}
        alone = {**BODIES[path], "stream": True, "stream_options": {"continuous_usage_stats": True}}
        assert all("usage" not in each for each in (await client.ask("POST", path, alone)).events)


async def test_the_usage_so_far_is_that_of_the_choice_and_the_same_in_a_stored_stream(serving: Any) -> None:
    async with serving() as real, connection(real) as client:
        body = {"prompt": ["a b", "c d e f"], "n": 2, "max_tokens": 5, "ignore_eos": True, "temperature": 0, **STREAM}
        *events, last = (await client.ask("POST", COMPLETIONS, body)).events
        ends = {each["choices"][0]["index"]: each["usage"] for each in events}
        assert [each["completion_tokens"] for _, each in sorted(ends.items())] == [5] * 4
        assert ends[0]["prompt_tokens"] == ends[1]["prompt_tokens"] < ends[2]["prompt_tokens"]
        assert last["usage"]["prompt_tokens"] == ends[0]["prompt_tokens"] + ends[2]["prompt_tokens"]
        echo = {"prompt": "a b", "max_tokens": 3, "echo": True, "logprobs": 0, "ignore_eos": True, **STREAM}
        counts = [each["usage"]["completion_tokens"] for each in (await client.ask("POST", COMPLETIONS, echo)).events]
        assert (counts[0], *counts[-2:]) == (0, 3, 3)
        kept = {"prompt": "a b", "max_tokens": 5, "ignore_eos": True, "temperature": 0, **STREAM}
        keyed = (await client.ask("POST", COMPLETIONS, kept, {"idempotency-key": "k"})).data
        usages = [line for line in keyed if '"usage"' in line]
        assert usages
        assert all(f'"prompt_tokens":{ends[0]["prompt_tokens"]}' in line for line in usages)


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        (CHAT, {"continuous_usage_stats": 1}, "stream_options.continuous_usage_stats"),
        (CHAT, {"include_usage": "yes"}, "stream_options.include_usage"),
        (CHAT, {"include_obfuscation": True}, "stream_options.include_obfuscation"),
        (RESPONSES, {"include_obfuscation": True}, "stream_options.include_obfuscation"),
        (RESPONSES, {"include_usage": 5}, "stream_options.include_usage"),
        (CHAT, [], "stream_options"),
    ],
)
async def test_a_wrong_stream_option_is_named(system: Any, path: str, options: Any, param: str) -> None:
    async with connection(system) as client:
        reply = await client.ask("POST", path, {**BODIES[path], "stream": True, "stream_options": options})
        assert (reply.status, reply.error["param"]) == (400, param)


async def ask(client: HTTPClient, path: str, name: str, value: Any) -> Any:
    return await client.ask("POST", path, {**BODIES[path], name: value})
