"""Frames from the engine's structs, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.facade import EmbedRequest
from quire.runtime.protocol.frames import Accepted, AskScores, AskVectors, ChatOptions, Generate
from quire.runtime.server.models.catalog import ModelCatalog
from quire.runtime.server.msgpack.convert import (
    MAX_TOOLS_CHARACTERS,
    accepted_frame,
    embed_request,
    engine_request,
    stats_frame,
)
from quire.scheduler import AdmissionEstimate

from tests.support.samples import INFO, STATS

ENGINE: Any = SimpleNamespace(info=INFO)
MODEL = ModelCatalog.of_one("quire", ENGINE).default("any")


def test_the_options_of_texts_reach_the_engine() -> None:
    options = {"truncate_prompt_tokens": 5, "priority": 7, "deadline_ms": 900}
    assert embed_request(AskVectors(9, ("a", (5, 6)), 2, "query", **options), "tenant", MODEL) == EmbedRequest(
        inputs=("a", (5, 6)), dimensions=2, prompt_name="query", tenant="tenant", **options
    )
    assert embed_request(AskScores(9, "q", ("a", "b"), **options), "tenant", MODEL) == EmbedRequest(
        inputs=("a", "b"), query="q", input_name="documents[{}]", tenant="tenant", **options
    )


def test_tools_may_have_exactly_the_allowed_characters() -> None:
    tool = '{"type": "function", "function": {"name": "f", "description": "%s"}}'

    def of_size(num_characters: int) -> Generate:
        text = tool % ("x" * (num_characters - len(tool % "")))
        return Generate(1, None, messages=({"role": "user", "content": "hi"},), chat=ChatOptions(tools=(text,)))

    (given,) = engine_request(of_size(MAX_TOOLS_CHARACTERS), "", MODEL).tools
    assert given["function"]["name"] == "f"
    with pytest.raises(InvalidRequest, match=f"tools have {MAX_TOOLS_CHARACTERS + 1} characters"):
        engine_request(of_size(MAX_TOOLS_CHARACTERS + 1), "", MODEL)


def test_accepted_frame_gives_the_predicted_wait_in_milliseconds() -> None:
    estimate = AdmissionEstimate(position=3, pages_needed=7, pages_free=2, predicted_wait_s=1.25)
    assert accepted_frame(9, estimate) == Accepted(9, 3, 7, 2, 1250.0)
    assert accepted_frame(9, AdmissionEstimate(0, 1, 1)).predicted_wait_ms is None


def test_a_refused_pin_is_said_to_clients_that_negotiated_it() -> None:
    estimate = AdmissionEstimate(0, 1, 1, pin_refused=True)
    assert accepted_frame(9, estimate, ("pins",)).pin_refused
    assert not accepted_frame(9, estimate, ("progress",)).pin_refused
    assert not accepted_frame(9, AdmissionEstimate(0, 1, 1), ("pins",)).pin_refused


def test_the_seed_is_said_to_clients_that_negotiated_it() -> None:
    estimate = AdmissionEstimate(0, 1, 1)
    assert accepted_frame(9, estimate, ("continue",), 5).seed == 5
    assert accepted_frame(9, estimate, ("pins",), 5).seed is None


def test_stats_frame_keeps_the_names_of_the_protocol() -> None:
    assert list(stats_frame(9, STATS).stats) == [
        "step",
        "running",
        "waiting",
        "pages_total",
        "pages_owned",
        "pages_cached",
        "pages_free",
        "prefix_queries_tokens",
        "prefix_hits_tokens",
        "preemptions",
        "pages_reserved",
        "pages_pinned",
        "pages_spilled",
        "preemptions_spilled",
        "recomputed_tokens",
        "draft_tokens",
        "accepted_draft_tokens",
        "restarts",
        "replayed_requests",
        "quarantined_requests",
        "encoder_waiting",
        "encoder_running",
        "encoded_texts",
        "encoded_tokens",
        "encoded_images",
        "image_cache_hits",
        "states_total",
        "states_cached",
        "states_free",
        "states_kept",
        "state_hits",
        "state_copies",
        "steps_over_itl_target",
        "states_spilled",
        "states_cached_bytes",
        "stateless_tokens",
    ]
