"""Messages of the engine link are received as they were sent, to the last bit."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Prefilled
from quire.runtime.model.runner import SamplingSpec
from quire.runtime.protocol.framing import with_prefix
from quire.runtime.workers import link_end
from quire.runtime.workers.engine_link import (
    FROM_ENGINE,
    TO_ENGINE,
    AddRequests,
    ReadmitRequest,
    StepReport,
    StopEngine,
)
from quire.runtime.workers.link_end import EngineLink
from quire.scheduler import (
    BeamSpec,
    FinalCounters,
    Hypothesis,
    PlacedImage,
    Request,
    RequestSpec,
    RequestUpdate,
    SampledToken,
)

ENCODE = msgspec.msgpack.Encoder().encode


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50),
    generated=st.lists(st.integers(0, 2**31 - 1), max_size=9),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(allow_nan=False),
    bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    tenant=st.text(max_size=5),
    deadline=st.none() | st.floats(0, 1e9),
)
def test_requests_are_received_as_they_were_sent(
    prompt: list[int],
    generated: list[int],
    seed: int,
    temperature: float,
    bias: dict[int, float],
    tenant: str,
    deadline: float | None,
) -> None:
    params = SamplingParams(temperature=temperature, logit_bias=bias, max_tokens=10)
    spec = RequestSpec(
        2**40,
        prompt,
        max_tokens=10,
        stop_token_ids=frozenset({1, 2}),
        sampling=SamplingSpec(params, seed, frozenset({1})),
        tenant=tenant,
        deadline=deadline,
        beam=BeamSpec(4, 0.7, 2),
    )
    readmit = TO_ENGINE.decode(ENCODE(ReadmitRequest(spec, tuple(generated))))  # type: ignore[arg-type]
    assert isinstance(readmit, ReadmitRequest)
    assert dataclasses.astuple(readmit.request) == dataclasses.astuple(spec)
    assert Request(readmit.request, readmit.generated).output_token_ids == generated
    add = TO_ENGINE.decode(ENCODE(AddRequests.of([spec, spec], ((), (7,)))))
    assert isinstance(add, AddRequests)
    assert add.specs() == [readmit.request, readmit.request]
    assert add.generated == ((), (7,))


def test_the_prompt_of_samples_is_sent_once() -> None:
    image = PlacedImage(1, 2, b"digest", 1, 1, bytes(30_000))
    spec = RequestSpec(1, tuple(range(5000)), max_tokens=10, echoed=(7,) * 1000, images=(image,))
    samples = [dataclasses.replace(spec, request_id=number) for number in range(1, 65)]
    one, many = (AddRequests.of(samples[:count]) for count in (1, 64))
    assert len(ENCODE(many)) < 2 * len(ENCODE(one))
    assert many.specs() == samples
    assert all(each.prompt_token_ids is many.specs()[0].prompt_token_ids for each in many.specs())


@given(st.floats())
def test_updates_are_received_to_the_last_bit(logprob: float) -> None:
    token = SampledToken(1, 5, logprob, ((5, logprob), (6, -math.inf)))
    counters = FinalCounters((0.5, logprob), 1, 2, (Hypothesis((token,), logprob, logprob, "stop"),))
    report = StepReport((RequestUpdate(1, (token,), "stop", None, counters),), 3, 4)
    received = FROM_ENGINE.decode(ENCODE(report))
    assert isinstance(received, StepReport)
    (update,) = received.updates
    assert isinstance(update.tokens[0], SampledToken)
    assert update.tokens[0].logprob is not None
    assert struct.pack("<d", update.tokens[0].logprob) == struct.pack("<d", logprob)
    assert update.counters is not None
    assert isinstance(update.counters.hypotheses[0].tokens[0], SampledToken)
    assert ENCODE(received) == ENCODE(report)


async def test_messages_arrive_whole_and_in_order_and_then_the_end() -> None:
    ours, theirs = socket.socketpair()
    received: list[object] = []
    lost = asyncio.Event()
    link = await EngineLink.open(ours, FROM_ENGINE, received.append, lost.set)
    reports = [StepReport((), step, step, None) for step in range(100)]
    payloads = [ENCODE(report) for report in reports]
    data = b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    for start in range(0, len(data), 7):
        await loop.sock_sendall(theirs, data[start : start + 7])
    await loop.sock_sendall(theirs, struct.pack(">I", 1000) + b"an incomplete message")
    theirs.close()
    await lost.wait()
    assert received == reports
    link.close()


async def test_messages_that_came_together_are_handled_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_end, "TURN_S", 0.0)  # one message takes longer
    ours, theirs = socket.socketpair()
    loop, seen, lost = asyncio.get_running_loop(), list[object](), asyncio.Event()

    def receive(report: StepReport) -> None:
        seen.append(report)
        loop.call_soon(seen.append, "another callback")

    reports = [StepReport((), step, step) for step in range(20)]
    theirs.sendall(b"".join(with_prefix(ENCODE(report)) for report in reports))
    link = await EngineLink.open(ours, FROM_ENGINE, receive, lost.set)
    while len(seen) < 2 * len(reports):
        await asyncio.sleep(0)
    assert seen == [each for report in reports for each in (report, "another callback")]
    seen.clear()
    theirs.sendall(b"".join(with_prefix(ENCODE(report)) for report in reports))
    theirs.close()
    await lost.wait()
    assert [each for each in seen if each != "another callback"] == reports
    link.close()


async def test_what_comes_in_a_turn_that_goes_on_with_messages_waits_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_end, "TURN_S", 0.0)  # one message takes longer
    ours, theirs = socket.socketpair()
    seen: list[StepReport] = []
    link = await EngineLink.open(ours, FROM_ENGINE, seen.append, lambda: None)
    reports = [StepReport((), step, step) for step in range(4)]
    data = [with_prefix(ENCODE(report)) for report in reports]
    link.data_received(data[0] + data[1])
    assert seen == reports[:1]
    await asyncio.sleep(0)
    assert seen == reports[:2]
    link.data_received(data[2])
    assert seen == reports[:2]
    await asyncio.sleep(0)
    assert seen == reports[:3]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    link.data_received(data[3])
    assert seen == reports, "the link was idle in the last turn"
    link.close()
    theirs.close()


async def test_a_report_that_takes_long_is_handled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_end, "TURN_S", 0.0)  # one update takes longer
    ours, theirs = socket.socketpair()
    loop, seen, lost = asyncio.get_running_loop(), list[object](), asyncio.Event()

    def receive(report: StepReport) -> None:
        seen.append(report)
        loop.call_soon(seen.append, "another callback")

    updates = [RequestUpdate(number, (SampledToken(0, number),)) for number in range(4)]
    first, report = StepReport((updates[0],), 1, 1), StepReport(tuple(updates[1:]), 5, 2, None, (Prefilled(9, 8),))
    theirs.sendall(b"".join(with_prefix(ENCODE(each)) for each in (first, report)))
    link = await EngineLink.open(ours, FROM_ENGINE, receive, lost.set)
    while len(seen) < 2 * len(updates):
        await asyncio.sleep(0)
    parts = [first, *[StepReport((each,), 5, 2) for each in updates[1:3]], replace(report, updates=(updates[3],))]
    assert seen == [each for part in parts for each in (part, "another callback")]
    seen.clear()
    theirs.sendall(with_prefix(ENCODE(report)))
    theirs.close()
    await lost.wait()
    assert [each for each in seen if isinstance(each, StepReport)] == parts[1:], "before the end"
    link.close()


@pytest.mark.parametrize(
    ("num_updates", "sizes"), [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (4, [4, 1]), (5, [5]), (9, [5])]
)
def test_parts_of_a_report_have_every_update_once(num_updates: int, sizes: list[int]) -> None:
    report = StepReport(tuple(map(RequestUpdate, range(5))), 1, 2, None, (Prefilled(9, 8),))
    parts = report.parts(num_updates)
    assert [len(part.updates) for part in parts] == sizes
    assert [update for part in parts for update in part.updates] == list(report.updates)
    assert [part.prefilled for part in parts] == [*[()] * (len(parts) - 1), report.prefilled]


async def test_what_was_sent_before_a_close_is_received_although_a_write_fails_first() -> None:
    ours, theirs = socket.socketpair()
    received: list[object] = []
    lost = asyncio.Event()
    link = await EngineLink.open(ours, FROM_ENGINE, received.append, lost.set)
    report = StepReport((), 1, 2)
    theirs.sendall(struct.pack(">I", len(ENCODE(report))) + ENCODE(report))
    theirs.close()
    link.send(StopEngine())
    await lost.wait()
    assert received == [report]
