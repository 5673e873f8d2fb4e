"""Requests of many hosts: where they go, how they move, and that each ends once. Hosts and time are fakes."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import structlog
from quire.runtime.cluster import Cluster, Credentials, Members, remote
from quire.runtime.cluster.host_link import HostRequestFailed
from quire.runtime.cluster.members import RESOLVE_INTERVAL_S, Member
from quire.runtime.cluster.remote import RECONNECT_PAUSE_S, HostSource, HostTraits
from quire.runtime.common.errors import ConfigError, Quarantined, Unauthenticated, Unavailable
from quire.runtime.engine import EncoderInfo, Prefilled, StepStats
from quire.runtime.engine.facade import ImageInfo
from quire.runtime.net.address import TCPAddress
from quire.runtime.workers.engine_link import (
    AddAnswer,
    CancelRequest,
    DropRequest,
    FromEngine,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    StatsReport,
    StepReport,
)
from quire.runtime.workers.token_log import MAX_LOST_HOSTS, MAX_UNBEGUN_HOSTS
from quire.scheduler import (
    BeamSpec,
    FinalCounters,
    Hypothesis,
    NotAccepting,
    QueueFull,
    RequestUpdate,
    SampledToken,
    State,
)

from tests.support.engine_hosts import DIGEST, FakeHosts
from tests.support.engine_processes import ESTIMATE, FakeListener, engine_stats, new_encoding, new_requests, until

SECRET = Credentials(b"sixteen or more bytes")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    fake = FakeHosts()
    monkeypatch.setattr(remote, "HostConnection", fake)
    return fake


@asynccontextmanager
async def connected(listener: FakeListener, names: str = "abc", **options: Any) -> AsyncIterator[Cluster]:
    cluster = await Cluster.connect(Members(",".join(f"{name}:1" for name in names)), SECRET, DIGEST, **options)
    cluster.start(listener.listener())
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
async def cluster(hosts: FakeHosts, listener: FakeListener) -> AsyncIterator[Cluster]:
    async with connected(listener) as cluster:
        yield cluster


def where(cluster: Cluster, hosts: FakeHosts, request_id: int) -> str:
    """Return the name of the one host that was sent a request last."""
    (name,) = [
        name[0]
        for name, host in cluster.hosts.items()
        if host.is_ready and request_id in hosts[name[0]].sent_ids()
    ]  # fmt: skip
    return name


async def added(cluster: Cluster, hosts: FakeHosts, request_id: int, **options: Any) -> str:
    await cluster.add(new_requests(request_id, **options))
    return where(cluster, hosts, request_id)


async def test_a_conversation_has_one_home(cluster: Cluster, hosts: FakeHosts) -> None:
    homes = [await added(cluster, hosts, number, conversation=b"one") for number in range(5)]
    assert len(set(homes)) == 1
    others = {await added(cluster, hosts, number, conversation=b"%d" % number) for number in range(5, 25)}
    assert others == {"a", "b", "c"}


async def test_requests_of_a_lost_host_go_on_elsewhere_with_their_tokens(
    cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    lost = await added(cluster, hosts, 1)
    hosts[lost].generate(1, 5, 6)
    hosts[lost].exit(0)
    await until(lambda: cluster.hosts[f"{lost}:1"].num_requests == 0)
    new = where(cluster, hosts, 1)
    assert new != lost
    (readmitted,) = [each for each in hosts[new].sent if isinstance(each, ReadmitRequest)]
    assert readmitted.generated == (5, 6)
    hosts[new].finish(1, 7)
    assert listener.tokens(1) == [5, 6, 7]
    assert listener.ends() == {1: "length"}


async def test_a_silent_host_is_lost_after_a_second(cluster: Cluster, hosts: FakeHosts) -> None:
    lost = await added(cluster, hosts, 1)
    now = asyncio.get_running_loop().time()
    hosts[lost].heartbeats = False
    await until(lambda: cluster.hosts[f"{lost}:1"].num_requests == 0)
    assert 0.9 < asyncio.get_running_loop().time() - now < 1.6


async def test_a_request_that_was_not_answered_is_asked_elsewhere(cluster: Cluster, hosts: FakeHosts) -> None:
    for name in "abc":
        hosts[name].answers_adds = False
    adding = asyncio.create_task(cluster.add(new_requests(1)))
    await asyncio.sleep(0.01)
    first = where(cluster, hosts, 1)
    hosts[first].exit(0)
    await until(lambda: any(1 in hosts[name].sent_ids() for name in "abc" if name != first))
    (second,) = [name for name in "abc" if name != first and 1 in hosts[name].sent_ids()]
    hosts[second].accept(1)
    await adding
    assert cluster.hosts[f"{second}:1"].num_requests == 1


async def test_without_another_host_a_request_that_was_not_answered_is_asked_again(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "a") as cluster:
        hosts["a"].answers_adds = False
        adding = asyncio.create_task(cluster.add(new_requests(1)))
        await asyncio.sleep(0.01)
        assert hosts["a"].sent_ids() == [1]
        hosts["a"].exit(0)
        async with asyncio.timeout(20):
            assert await adding == ESTIMATE
        assert hosts["a"].sent_ids() == [1], "a link is new"


async def test_without_another_host_requests_wait_for_the_lost_one(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "a") as cluster:
        await added(cluster, hosts, 1)
        first = hosts["a"]
        first.generate(1, 5)
        first.exit(0)
        await until(lambda: hosts["a"] is not first and hosts["a"].sent_ids() == [1])
        hosts["a"].finish(1, 6)
        assert listener.tokens(1) == [5, 6]


async def test_waiting_requests_move_to_the_first_host_that_is_back(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "ab") as cluster:
        name = await added(cluster, hosts, 1)
        other = "b" if name == "a" else "a"
        refused = Unavailable("no answer")
        hosts.errors = {f"{name}:1": refused, f"{other}:1": refused}
        hosts[other].exit(0)
        hosts[name].exit(0)
        adding = asyncio.create_task(cluster.add(new_requests(2)))
        await asyncio.sleep(2)
        assert cluster.hosts[f"{name}:1"].num_requests >= 1
        del hosts.errors[f"{other}:1"]
        await until(lambda: set(hosts[other].sent_ids()) >= {1, 2})
        await adding


async def test_requests_fail_when_no_host_is_back_in_time(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "a", restart_timeout_s=3.0) as cluster:
        await added(cluster, hosts, 1)
        hosts.errors["a:1"] = Unavailable("no answer")
        hosts["a"].exit(0)
        await until(lambda: listener.ends() == {1: "Unavailable"})
        with pytest.raises(NotAccepting, match="no answer"):
            await cluster.add(new_requests(2))


async def test_a_request_beneath_which_three_hosts_were_lost_is_quarantined(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "abcd") as cluster:
        await added(cluster, hosts, 1)
        await added(cluster, hosts, 2)
        for _ in range(3):
            name = where(cluster, hosts, 1)
            hosts[name].reply(RequestsBegun((Prefilled(1, 0),)))
            if 2 in hosts[name].sent_ids():  # the request gains tokens, so it is not a suspect
                hosts[name].generate(2, 5, 6)
            hosts.errors[f"{name}:1"] = Unavailable("gone")
            hosts[name].exit(0)
            await until(lambda name=name: cluster.hosts[f"{name}:1"].num_requests == 0)
        assert listener.ends() == {1: "Quarantined"}
        hosts[where(cluster, hosts, 2)].finish(2, 9)
        assert listener.ends()[2] == "length"


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_hosts_that_are_lost_at_once_are_not_the_fault_of_requests(
    is_accepted: bool, hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "abcdef") as cluster:
        for name in "abcdef":
            hosts[name].answers_adds = is_accepted
        adding = asyncio.create_task(cluster.add(new_requests(1)))
        for number in range(5):
            await until(lambda: any(host.num_requests and host.is_ready for host in cluster.hosts.values()))
            name = where(cluster, hosts, 1)
            if is_accepted and not number:
                hosts[name].reply(RequestsBegun((Prefilled(1, 0),)))
            hosts.errors[f"{name}:1"] = Unavailable("gone")
            hosts[name].exit(0)
            await until(lambda name=name: not cluster.hosts[f"{name}:1"].num_requests)
        last = where(cluster, hosts, 1)
        if not is_accepted:
            hosts[last].accept(1)
        await adding
        hosts[last].finish(1, 5)
        assert listener.ends() == {1: "length"}


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_request_that_too_many_lost_hosts_had_is_quarantined(
    is_accepted: bool, hosts: FakeHosts, listener: FakeListener
) -> None:
    names = "abcdefghijklmnopq"
    assert len(names) > MAX_UNBEGUN_HOSTS
    async with connected(listener, names) as cluster:
        for name in names:
            hosts[name].answers_adds = is_accepted
        adding = asyncio.create_task(cluster.add(new_requests(1)))
        for _ in range(MAX_UNBEGUN_HOSTS):
            await until(lambda: any(host.num_requests and host.is_ready for host in cluster.hosts.values()))
            name = where(cluster, hosts, 1)
            hosts.errors[f"{name}:1"] = Unavailable("gone")
            hosts[name].exit(0)
            await until(lambda name=name: not cluster.hosts[f"{name}:1"].num_requests)
        if is_accepted:
            await adding
            assert listener.ends() == {1: "Quarantined"}
        else:
            with pytest.raises(Quarantined, match="hosts were lost"):
                await adding


async def test_a_leaving_host_gets_nothing_new_and_is_not_blamed(
    cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    name = await added(cluster, hosts, 1, conversation=b"x")
    for _ in range(4):
        hosts[name].leave()
        assert await added(cluster, hosts, 100 + _, conversation=b"x") != name
        hosts[name].generate(1, 5)
        hosts[name].exit(0)
        await until(lambda name=name: 1 not in hosts[name].sent_ids() or cluster.hosts[f"{name}:1"].num_requests == 0)
        await until(lambda: all(host.is_ready for host in cluster.hosts.values()))
        name = where(cluster, hosts, 1)
    assert listener.ends() == {}
    assert len(listener.tokens(1)) == 4


async def test_a_host_that_left_may_come_back(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "a") as cluster:
        first = hosts["a"]
        first.leave()
        with pytest.raises(NotAccepting, match="leaving"):
            await cluster.add(new_requests(1))
        first.exit(0)
        await asyncio.sleep(0.01)
        await cluster.add(new_requests(2))  # waits for the host
        assert hosts["a"] is not first
        hosts["a"].fail(2, "NoSuchError")
        assert listener.ends() == {2: "GenerationFailed"}


async def test_a_request_moves_when_its_hosts_engines_are_gone_for_good(
    cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    first = await added(cluster, hosts, 1)
    hosts[first].generate(1, 5)
    hosts[first].fail(1, "Unavailable")
    (second,) = [name for name in "abc" if name != first and 1 in hosts[name].sent_ids()]
    hosts[second].fail(1, "Quarantined")
    assert listener.ends() == {1: "Quarantined"}


async def test_a_request_that_ends_the_engines_of_three_hosts_fails(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "abcd") as cluster:
        await cluster.add(new_requests(1))
        for _ in range(MAX_LOST_HOSTS):
            assert listener.ends() == {}
            (name,) = [name for name in "abcd" if cluster.hosts[f"{name}:1"].num_requests]
            hosts[name].fail(1, "Unavailable")
        assert listener.ends() == {1: "Unavailable"}


async def test_a_request_does_not_return_to_a_host_whose_engines_are_gone(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1)
        (second,) = set("ab") - {first}
        hosts[first].fail(1, "Unavailable")
        assert 1 in hosts[second].sent_ids()
        hosts[second].fail(1, "Unavailable")
        assert listener.ends() == {1: "Unavailable"}
        with pytest.raises(NotAccepting, match="cannot be restarted"):
            await cluster.add(new_requests(2))
        hosts[first].tell_stats(running=0)  # the engines compute again
        assert await added(cluster, hosts, 3) == first


async def test_what_waits_for_a_lost_host_goes_on_where_engines_compute_again(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1)
        (second,) = set("ab") - {first}
        await cluster.hosts[f"{second}:1"].add(new_requests(2))
        hosts[first].fail(1, "Unavailable")
        hosts.errors[f"{second}:1"] = Unavailable("gone")
        hosts[first].fail(1, "Unavailable")  # request 1 has left: the frame is ignored
        hosts[second].exit(0)
        await asyncio.sleep(1)
        assert listener.ends() == {}
        hosts[first].tell_stats(running=0)
        assert sorted(hosts[first].sent_ids()) == [1, 1, 2]


def readmitted(hosts: FakeHosts, name: str) -> dict[int, tuple[int, ...]]:
    sent = [each for each in hosts[name].sent if isinstance(each, ReadmitRequest)]
    return {each.request.request_id: each.generated for each in sent}


async def test_requests_leave_a_host_at_once_whose_engine_was_killed(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1, conversation=b"x")
        (second,) = set("ab") - {first}
        await added(cluster, hosts, 2, conversation=b"x")
        hosts[first].generate(1, 5, 6)
        hosts[first].restart(1, 99)  # the other one is a suspect there
        assert readmitted(hosts, second) == {1: (5, 6)}
        assert [each for each in hosts[first].sent if isinstance(each, DropRequest)] == [
            DropRequest(1, None, "it goes on at another host")
        ]
        hosts[first].generate(1, 7)  # sent before it was dropped
        assert cluster.hosts[f"{first}:1"].status().state == "restarting"
        assert await added(cluster, hosts, 3, conversation=b"x") == second, "new requests do not wait for the engine"
        hosts[first].tell_stats()
        assert cluster.hosts[f"{first}:1"].status().state == "up"
        assert await added(cluster, hosts, 4, conversation=b"x") == first
        hosts[first].finish(2, 9)
        hosts[second].finish(1, 7)
        assert (listener.tokens(1), listener.tokens(2)) == ([5, 6, 7], [9])
        assert cluster.hosts[f"{first}:1"].status().moved_requests == 1


async def test_without_another_host_requests_stay_where_the_engine_is_restarted(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1)
        (second,) = set("ab") - {first}
        hosts.errors[f"{second}:1"] = Unavailable("gone")
        hosts[second].exit(0)
        await until(lambda: not cluster.hosts[f"{second}:1"].is_ready)
        hosts[first].restart(1)
        hosts[first].answers_adds = False
        adding = asyncio.create_task(cluster.add(new_requests(2)))
        await asyncio.sleep(0.01)
        assert hosts[first].sent_ids() == [1, 2], "it waits there"
        del hosts.errors[f"{second}:1"]
        await until(lambda: 2 in hosts[second].sent_ids())
        await adding
        assert readmitted(hosts, second) == {1: ()}
        dropped = [each.request_id for each in hosts[first].sent if isinstance(each, DropRequest)]
        assert sorted(dropped) == [1, 2]
        assert cluster.hosts[f"{first}:1"].num_requests == 0


async def test_a_host_that_was_lost_while_its_engine_restarted_is_ready_when_it_is_back(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "a") as cluster:
        first = hosts["a"]
        first.restart()
        assert not cluster.hosts["a:1"].is_ready
        first.exit(0)
        await until(lambda: hosts["a"] is not first)
        await until(lambda: cluster.hosts["a:1"].is_ready)


async def test_a_host_whose_engine_does_not_start_keeps_no_api_server_from_starting(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    hosts.restarting.add("a:1")
    async with connected(listener, "ab", restart_timeout_s=4.0) as cluster:
        assert {await added(cluster, hosts, number, conversation=b"%d" % number) for number in range(9)} == {"b"}


async def test_a_request_beneath_which_engines_are_killed_stays_at_the_third_host(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "abcd") as cluster:
        await cluster.add(new_requests(1))
        homes = []
        for _ in range(MAX_LOST_HOSTS + 1):
            (home,) = [name[0] for name, host in cluster.hosts.items() if host.num_requests]
            homes.append(home)
            hosts[home].restart(1)
            hosts[home].tell_stats()
        assert homes[2] == homes[3]
        assert len(set(homes[:3])) >= 2
        hosts[homes[3]].generate(1, 5, 6)  # request 1 gains tokens, so it is not a suspect
        hosts[homes[3]].restart(1)
        assert cluster.hosts[f"{homes[3]}:1"].num_requests == 0


async def test_what_waits_for_a_lost_host_goes_on_where_engines_have_restarted(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1)
        (second,) = set("ab") - {first}
        hosts[second].restart()
        hosts.errors[f"{first}:1"] = Unavailable("gone")
        hosts[first].exit(0)
        await asyncio.sleep(1)
        assert readmitted(hosts, second) == {}
        hosts[second].tell_stats()
        assert readmitted(hosts, second) == {1: ()}


async def test_operators_see_every_host(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "ab") as cluster:
        first = await added(cluster, hosts, 1)
        (second,) = set("ab") - {first}
        hosts[second].tell_stats(running=3, pages_total=50, pages_owned=20)
        by_name = {status.address[0]: status for status in cluster.host_statuses()}
        assert {status.state for status in by_name.values()} == {"up"}
        assert (by_name[first].requests, by_name[first].engine) == (1, None)
        assert (by_name[second].requests, by_name[second].isa) == (0, "fake")
        assert by_name[second].engine is not None
        assert (by_name[second].engine.running, by_name[second].engine.pages_owned) == (3, 20)
        hosts.errors[f"{first}:1"] = Unavailable("no answer")
        hosts[first].tell_stats(running=1)
        hosts[first].exit_delay_s = 0.5
        hosts[first].exit(0)
        await until(lambda: not cluster.hosts[f"{first}:1"].is_ready)
        assert [status.engine is None for status in cluster.host_statuses()].count(True) == 1
        await until(lambda: cluster.hosts[f"{first}:1"].problem is not None)
        (lost,) = [status for status in cluster.host_statuses() if status.address[0] == first]
        assert (lost.state, lost.problem, lost.requests, lost.moved_requests) == ("down", "no answer", 0, 1)


async def test_a_lost_host_leaves_its_counters_once_and_nothing_that_it_has_no_more(
    cluster: Cluster, hosts: FakeHosts
) -> None:
    for name in "abc":
        hosts[name].tell_stats(step=10, running=3, pages_owned=7)
    assert (cluster.stats().step, cluster.stats().running, cluster.stats().pages_owned) == (30, 9, 21)
    hosts.errors["a:1"] = Unavailable("no answer")
    hosts["a"].exit(0)
    await until(lambda: not cluster.hosts["a:1"].is_ready)
    assert (cluster.stats().step, cluster.stats().running, cluster.stats().pages_owned) == (30, 6, 14)
    assert cluster.hosts["a:1"].load.num_requests == 0
    del hosts.errors["a:1"]
    await until(lambda: cluster.hosts["a:1"].is_ready)
    hosts["a"].tell_stats(step=2, running=1, pages_owned=1)  # a host counts from the beginning of a link
    assert (cluster.stats().step, cluster.stats().running, cluster.stats().pages_owned) == (32, 7, 15)


async def test_sizes_at_the_start_are_those_of_all_hosts(hosts: FakeHosts, listener: FakeListener) -> None:
    hosts.infos = {
        "a:1": {"num_pages": 100, "threads": 2, "max_model_len": 64},
        "b:1": {"num_pages": 50, "threads": 3, "max_model_len": 128},
        "c:1": {"num_pages": 7, "threads": 4, "max_model_len": 64},
    }
    async with connected(listener) as cluster:
        await until(lambda: all(host.is_ready for host in cluster.hosts.values()))
        info = cluster.info
    assert (info.num_pages, info.threads, info.num_processes, info.max_model_len) == (157, 9, 3, 64)


async def test_the_state_of_a_host_says_why_it_gets_nothing(cluster: Cluster, hosts: FakeHosts) -> None:
    def state(name: str) -> str:
        return cluster.hosts[f"{name}:1"].status().state

    name = await added(cluster, hosts, 1)
    hosts[name].fail(1, "Unavailable")
    assert state(name) == "failing"
    hosts[name].tell_stats()
    assert state(name) == "up"
    hosts[name].leave()
    assert state(name) == "leaving"
    cluster.hosts[f"{name}:1"].is_retired = True
    assert state(name) == "removed"
    (other, _) = set("abc") - {name}
    assert cluster.hosts[f"{other}:1"].status().moved_requests == 0
    assert cluster.hosts[f"{name}:1"].status().moved_requests == 1


async def test_a_host_that_was_never_reached_is_down(hosts: FakeHosts, listener: FakeListener) -> None:
    hosts.errors["b:1"] = Unavailable("no answer")
    async with connected(listener, "ab") as cluster:
        (status,) = [each for each in cluster.host_statuses() if each.address == "b:1"]
        del hosts.errors["b:1"]
        await until(lambda: cluster.hosts["b:1"].is_ready)
        assert cluster.hosts["b:1"].status().problem is None
    assert (status.state, status.problem, status.bits, status.engine) == ("down", "no answer", "", None)


async def test_draining_waits_for_requests_that_move_meanwhile(
    cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    lost = await added(cluster, hosts, 1)
    draining = asyncio.create_task(cluster.drain())
    await asyncio.sleep(0.01)
    hosts[lost].exit(0)
    await until(lambda: cluster.hosts[f"{lost}:1"].num_requests == 0)
    await asyncio.sleep(0.1)
    assert not draining.done()
    hosts[where(cluster, hosts, 1)].finish(1, 5)
    await draining
    await cluster.stop()
    assert listener.num_ended == 1


async def test_hosts_get_heartbeats(cluster: Cluster, hosts: FakeHosts) -> None:
    await asyncio.sleep(2)
    assert all(hosts[name].num_heartbeats >= 4 for name in "abc")


async def test_attempts_to_connect_are_some_time_apart(hosts: FakeHosts) -> None:
    source = HostSource(Member(TCPAddress("a", 1), "a"), SECRET, HostTraits(DIGEST))
    clock = asyncio.get_running_loop()
    start = clock.time()
    times: list[float] = []
    for _ in range(3):
        (await source.open(lambda message: None, lambda is_held_up: None)).exit(0)  # type: ignore[attr-defined]
        times.append(clock.time() - start)
    assert times == pytest.approx([0, RECONNECT_PAUSE_S, 2 * RECONNECT_PAUSE_S], abs=RECONNECT_PAUSE_S / 4)


async def test_a_refusal_for_lack_of_room_leads_to_another_host(cluster: Cluster, hosts: FakeHosts) -> None:
    for name in "abc":
        hosts[name].answers_adds = False
    adding = asyncio.create_task(cluster.add(new_requests(1)))
    await asyncio.sleep(0.01)
    first = where(cluster, hosts, 1)
    hosts[first].refuse(1, "NotAccepting", None)
    await asyncio.sleep(0.01)
    (second,) = [name for name in "abc" if name != first and 1 in hosts[name].sent_ids()]
    hosts[second].refuse(1, "QueueFull")
    await asyncio.sleep(0.01)
    (third,) = set("abc") - {first, second}
    hosts[third].refuse(1, "QueueFull")
    with pytest.raises(QueueFull):
        await adding


async def test_what_is_done_to_a_moved_request_reaches_its_host(
    cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    for number in (1, 2):
        await added(cluster, hosts, number, conversation=b"x")
    name = where(cluster, hosts, 1)
    hosts[name].exit(0)
    await until(lambda: cluster.hosts[f"{name}:1"].num_requests == 0)
    cluster.cancel(1)
    cluster.drop(2)
    sent = hosts[where(cluster, hosts, 1)].sent
    assert CancelRequest(1) in sent
    assert DropRequest(2, None, None) in sent


async def test_deadlines_travel_as_the_time_that_is_left(
    cluster: Cluster, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in cluster.hosts.values():
        monkeypatch.setattr(host, "_clock", lambda: 1000.0)
    name = await added(cluster, hosts, 1, deadline=1002.5)
    (message,) = hosts[name].sent
    assert message.requests[0].deadline == 2.5  # type: ignore[union-attr]
    await cluster.hosts[f"{name}:1"].add_encoding(new_encoding(2, deadline=1003.0))
    hosts[name].exit(0)
    await until(lambda: cluster.hosts[f"{name}:1"].num_requests == 0)
    moved = [
        each.request
        for other in "abc"
        for each in hosts[other].sent
        if isinstance(each, ReadmitRequest | ReadmitEncoding)
    ]
    assert {spec.request_id: spec.deadline for spec in moved} == {1: 2.5, 2: 3.0}


def tower(num_tokens: int) -> dict[str, Any]:
    return {"images": ImageInfo(token_id=5, num_tokens=num_tokens, block=28)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"infos": {"b:1": {"fingerprint": "other"}}}, "b:1 computes other bits"),
        ({"infos": {"b:1": {"max_model_len": 5}}}, "b:1 has max_model_len 5"),
        ({"digests": {"b:1": "other"}}, "b:1 has another model"),
        ({"infos": {"a:1": tower(64), "b:1": tower(63), "c:1": tower(65)}}, "b:1 takes images of 63 tokens, a:1 of 64"),
    ],
)
async def test_a_host_that_cannot_continue_the_others_requests_ends_the_start(
    change: dict[str, Any], problem: str, hosts: FakeHosts, listener: FakeListener
) -> None:
    vars(hosts).update(change)
    with pytest.raises(ConfigError, match=problem):
        async with connected(listener):
            pass


async def test_a_host_may_have_a_longer_context_than_the_first(hosts: FakeHosts, listener: FakeListener) -> None:
    hosts.infos["b:1"] = {"max_model_len": 128}
    async with connected(listener, "ab") as cluster:
        await until(lambda: all(host.is_ready for host in cluster.hosts.values()))


async def test_a_host_may_take_larger_images_than_the_first(hosts: FakeHosts, listener: FakeListener) -> None:
    hosts.infos = {"a:1": tower(64), "b:1": tower(80)}
    async with connected(listener, "ab") as cluster:
        await until(lambda: all(host.is_ready for host in cluster.hosts.values()))


async def test_such_a_host_is_left_out_when_it_comes_later(hosts: FakeHosts, listener: FakeListener) -> None:
    hosts.errors["b:1"] = Unavailable("not yet")
    hosts.infos["b:1"] = {"fingerprint": "other"}
    async with connected(listener, "ab") as cluster:
        del hosts.errors["b:1"]
        await until(lambda: "b:1" in hosts.opened)
        await asyncio.sleep(1)
        assert not cluster.hosts["b:1"].is_ready
        assert {await added(cluster, hosts, number, conversation=b"%d" % number) for number in range(9)} == {"a"}


async def test_a_wrong_secret_ends_the_start_and_no_answer_does_in_time(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    hosts.errors["b:1"] = Unauthenticated("secret")
    with pytest.raises(Unauthenticated):
        async with connected(listener):
            pass
    hosts.errors = {f"{name}:1": Unavailable(f"{name} is off") for name in "abc"}
    with pytest.raises(Unavailable, match="no engine host was reached in 4 s: a is off; b is off; c is off"):
        async with connected(listener, restart_timeout_s=4.0):
            pass


@pytest.mark.parametrize(
    ("names", "problem"), [("a:1", "in 4 s: a:1: no answer$"), ("dns:a:1", "in 4 s: no such name$")]
)
async def test_a_start_without_any_attempt_that_ended_says_why(
    names: str, problem: str, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lookups = 0

    async def resolve(self: Members) -> list[Member]:
        nonlocal num_lookups
        num_lookups += 1
        if self.may_change:
            raise OSError("no such name")
        return self.fixed

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Members, "resolve", resolve)
    monkeypatch.setattr(hosts, "open", never)
    with structlog.testing.capture_logs() as log, pytest.raises(Unavailable, match=problem):
        await Cluster.connect(Members(names), SECRET, DIGEST, restart_timeout_s=4.0)
    assert num_lookups < 20
    assert len([line for line in log if line["event"] == "engine hosts cannot be resolved"]) == (names != "a:1")


async def test_hosts_come_and_go_with_their_name(
    hosts: FakeHosts, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["a"]

    async def resolve(self: Members) -> list[Member]:
        return [Member(TCPAddress(name, 1), "hosts") for name in known]

    monkeypatch.setattr(Members, "resolve", resolve)
    cluster = await Cluster.connect(Members("dns:hosts:1"), SECRET, DIGEST)
    cluster.start(listener.listener())
    await cluster.add(new_requests(1))
    known[:] = ["b"]
    await asyncio.sleep(RESOLVE_INTERVAL_S + 1)
    assert set(cluster.hosts) == {"a:1", "b:1"}, "the first one still has a request"
    await cluster.add(new_requests(2))
    assert hosts["b"].sent_ids() == [2]
    hosts["a"].finish(1, 5)
    await asyncio.sleep(RESOLVE_INTERVAL_S)
    assert set(cluster.hosts) == {"b:1"}
    assert listener.ends() == {1: "length"}
    await cluster.close()


async def test_a_host_that_comes_back_to_its_name_gets_requests_again(
    hosts: FakeHosts, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["a", "b"]

    async def resolve(self: Members) -> list[Member]:
        if not known:
            raise OSError("no answer")
        return [Member(TCPAddress(name, 1), "hosts") for name in known]

    async def taking(names: str) -> set[str]:
        known[:] = names
        await asyncio.sleep(RESOLVE_INTERVAL_S + 1)
        return {name for name, host in cluster.hosts.items() if host.takes_requests}

    monkeypatch.setattr(Members, "resolve", resolve)
    cluster = await Cluster.connect(Members("dns:hosts:1"), SECRET, DIGEST)
    cluster.start(listener.listener())
    await until(lambda: all(host.is_ready for host in cluster.hosts.values()))
    (other,) = {"a", "b"} - {await added(cluster, hosts, 1)}
    assert await taking("") == {"a:1", "b:1"}, "a failure to resolve changes nothing"
    assert await taking(other) == {f"{other}:1"}
    assert await taking("ab") == {"a:1", "b:1"}
    await cluster.close()


class Reported:
    """Members that another system reports, each with a secret."""

    may_change = True

    def __init__(self) -> None:
        self.secrets: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def report(self, **secrets: bytes) -> None:
        self.secrets = secrets
        self._changed.set()

    async def resolve(self) -> list[Member]:
        return [Member(TCPAddress(name, 1), name, secret) for name, secret in self.secrets.items()]

    async def wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()


async def test_reported_hosts_come_and_go_at_once_each_with_its_secret(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    members = Reported()
    connecting = asyncio.create_task(Cluster.connect(members, SECRET, DIGEST))
    await asyncio.sleep(1)
    members.report(a=b"1")
    cluster = await connecting
    cluster.start(listener.listener())
    await cluster.add(new_requests(1))
    members.report(b=b"2")
    await asyncio.sleep(0.1)
    assert await added(cluster, hosts, 2) == "b"
    assert not cluster.hosts["a:1"].takes_requests
    assert hosts.secrets == {"a:1": b"1", "b:1": b"2"}
    hosts.errors["a:1"] = Unauthenticated("another secret")
    hosts["a"].exit(0)
    await until(lambda: set(hosts["b"].sent_ids()) == {1, 2})
    members.report(a=b"3", b=b"2")
    await asyncio.sleep(0.1)
    del hosts.errors["a:1"]
    await until(lambda: cluster.hosts["a:1"].takes_requests)
    assert hosts.secrets == {"a:1": b"3", "b:1": b"2"}
    await cluster.close()


async def test_a_host_that_left_its_name_is_told_what_becomes_of_its_requests(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    members = Reported()
    members.report(a=b"1")
    cluster = await Cluster.connect(members, SECRET, DIGEST)
    cluster.start(listener.listener())
    await cluster.add(new_requests(1))
    members.report()
    await asyncio.sleep(0.1)
    with pytest.raises(NotAccepting, match="engine host a:1 is leaving"):
        cluster.check_room("", 1)
    cluster.cancel(1)
    assert CancelRequest(1) in hosts["a"].sent
    hosts["a"].finish(1, 5)
    members.report()
    await asyncio.sleep(0.1)
    assert not cluster.hosts
    with pytest.raises(NotAccepting, match="there is no engine host"):
        cluster.check_room("", 1)
    with pytest.raises(Unavailable, match="there is no engine host"):
        cluster.stats()
    await cluster.close()
    members.report(b=b"2")
    await asyncio.sleep(0.1)
    assert not cluster.hosts, "a closed cluster connects to no host"


async def test_requests_do_not_move_to_a_host_that_leaves(hosts: FakeHosts, listener: FakeListener) -> None:
    async with connected(listener, "ab") as cluster:
        await until(lambda: all(host.is_ready for host in cluster.hosts.values()))
        lost = await added(cluster, hosts, 1)
        (leaving,) = {"a", "b"} - {lost}
        hosts[leaving].leave()
        hosts.errors[f"{lost}:1"] = Unavailable("no answer")
        hosts[lost].exit(0)
        await asyncio.sleep(1)
        assert 1 not in hosts[leaving].sent_ids()
        del hosts.errors[f"{lost}:1"]
        await until(lambda: 1 in hosts[lost].sent_ids())


async def test_each_failure_to_resolve_is_logged_once(hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["up", "down", "down", "up", "down"])

    async def resolve(self: Members) -> list[Member]:
        if next(answers, "up") == "down":
            raise OSError("no answer")
        return [Member(TCPAddress("a", 1), "hosts")]

    monkeypatch.setattr(Members, "resolve", resolve)
    with structlog.testing.capture_logs() as log:
        cluster = await Cluster.connect(Members("dns:hosts:1"), SECRET, DIGEST)
        await asyncio.sleep(6 * RESOLVE_INTERVAL_S)
        await cluster.close()
    assert [line["reason"] for line in log if line["event"] == "engine hosts cannot be resolved"] == ["no answer"] * 2


async def test_a_start_without_hosts_names_eight_of_them(hosts: FakeHosts, listener: FakeListener) -> None:
    names = "abcdefghij"
    hosts.errors = {f"{name}:1": Unavailable(f"{name} is off") for name in names}
    with pytest.raises(Unavailable, match=r"in 4 s: a is off; .*; h is off; and 2 more$"):
        async with connected(listener, names, restart_timeout_s=4.0):
            pass


def tokens(request_id: int, *token_ids: int) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(request_id, token_id) for token_id in token_ids)


def counters(
    num_states: int = len(State), *outputs: tuple[SampledToken, ...], logprob: float = -1.0, **other: Any
) -> FinalCounters:
    hypotheses = tuple(Hypothesis(output, logprob, logprob, "length") for output in outputs)
    return FinalCounters((0.0,) * num_states, 0, 0, hypotheses)._replace(**other)


# Messages of a host about request 1, which may have 3 tokens, or of its beam search or texts with the ids 2 and 3.
LIES = {
    "more tokens than asked for": RequestUpdate(1, tokens(1, 5, 6, 7, 8)),
    "a token outside the vocabulary": RequestUpdate(1, tokens(1, 100)),
    "a negative token": RequestUpdate(1, tokens(1, -1)),
    "an unknown alternative": RequestUpdate(1, (SampledToken(1, 5, -1.0, ((5, -1.0), (100, -2.0))),)),
    "a logprob that is no number": RequestUpdate(1, (SampledToken(1, 5, math.nan),)),
    "an alternative's logprob that is no number": RequestUpdate(1, (SampledToken(1, 5, -1.0, ((5, math.nan),)),)),
    "an end without counters": RequestUpdate(1, (), "length"),
    "counters without an end": RequestUpdate(1, tokens(1, 5), counters=counters()),
    "two ends": RequestUpdate(1, (), "length", "it failed", counters()),
    "counters of other states": RequestUpdate(1, (), "length", None, counters(2)),
    "fewer than no cached tokens": RequestUpdate(1, (), "length", None, counters(cached_tokens=-1)),
    "fewer than no tokens again": RequestUpdate(1, (), "length", None, counters(recomputed_tokens=-1)),
    "a time that is no number": RequestUpdate(1, (), "length", None, counters(seconds_in=(math.nan,) * len(State))),
    "hypotheses without a search": RequestUpdate(1, (), "length", None, counters(len(State), tokens(1, 5))),
    "tokens of a search before its end": RequestUpdate(2, tokens(2, 5)),
    "a search without an output": RequestUpdate(2, (), "length", None, counters()),
    "too many outputs of a search": RequestUpdate(2, (), "stop", None, counters(len(State), *[tokens(2, 5)] * 3)),
    "a search with too many tokens": RequestUpdate(2, (), "stop", None, counters(len(State), tokens(2, 5, 6, 7, 8))),
    "a search with an unknown token": RequestUpdate(2, (), "stop", None, counters(len(State), tokens(2, 100))),
    "a search whose logprob is no number": RequestUpdate(
        2, (), "stop", None, counters(len(State), tokens(2, 5), logprob=math.nan)
    ),
    "values of one of two texts": RequestUpdate(3, (), "stop", None, counters(), (bytes(16),)),
    "values of other sizes": RequestUpdate(3, (), "stop", None, counters(), (bytes(16), bytes(12))),
    "values with an error": RequestUpdate(3, (), None, "it failed", counters(), (bytes(16), bytes(16))),
    "values that are no numbers": RequestUpdate(
        3, (), "stop", None, counters(), (bytes(16), array("f", [math.nan] * 4).tobytes())
    ),
    "tokens of texts": RequestUpdate(3, tokens(3, 5), "stop", None, counters(), (bytes(16), bytes(16))),
}
ANSWERS = {
    "an answer that says nothing": AddAnswer(9, None, 0),
    "a refusal of an unknown kind with an estimate": AddAnswer(9, ESTIMATE, 0, "NoSuchRefusal", "no"),
    "a wait that is no number": AddAnswer(9, replace(ESTIMATE, predicted_wait_s=math.nan), 0),
    "a refusal with a wait without end": AddAnswer(9, replace(ESTIMATE, predicted_wait_s=math.inf), 0, "QueueFull"),
}
STEP = StepStats(
    duration_s=0.1, prefill_tokens=0, decode_tokens=1, context_tokens=(5,), schedule_s=0.0, commit_s=0.0, publish_s=0.0
)
REPORTS = {
    "a wait that is no number": StatsReport(engine_stats(), math.nan),
    "fewer than no tokens of a prompt begun": RequestsBegun((Prefilled(1, -1),)),
    "fewer than no tokens of a prompt": StepReport((), 0, 1, STEP, (Prefilled(1, -1),)),
    "fewer than no tokens in a step": StepReport((), 0, 1, msgspec.structs.replace(STEP, decode_tokens=-1)),
    "a duration that is no number": StepReport((), 0, 1, msgspec.structs.replace(STEP, duration_s=math.nan)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_host_that_reports_what_cannot_be_is_lost_and_costs_no_request_a_token(
    lie: RequestUpdate, hosts: FakeHosts, listener: FakeListener
) -> None:
    for name in "ab":
        hosts.infos[f"{name}:1"] = {"encoder": EncoderInfo(vocab_size=50, max_model_len=8, dimensions=4)}
    async with connected(listener, "ab") as cluster:
        honest = cluster.hosts["a:1"]
        liar = cluster.hosts["b:1"]
        await honest.add(new_requests(5))
        await liar.add(new_requests(1, max_tokens=3))
        await liar.add(new_requests(2, max_tokens=3, beam=BeamSpec(2)))
        await liar.add_encoding(new_encoding(3))
        await liar.add(new_requests(4))
        hosts["b"].reply(StepReport((RequestUpdate(4, tokens(4, 7)),), 0, 1))
        hosts["b"].reply(StepReport((RequestUpdate(4, tokens(4, 8)), lie), 0, 2))
        assert hosts["b"].problem is not None
        await until(lambda: set(hosts["a"].sent_ids()) == {1, 2, 3, 4, 5})
        moved = {each.request.request_id: each for each in hosts["a"].sent if isinstance(each, ReadmitRequest)}
        assert (moved[1].generated, moved[2].generated, moved[4].generated) == ((), (), (7,))
        hosts["a"].finish(4, 8, 9)
        assert listener.tokens(4) == [7, 8, 9]
        hosts["a"].finish(1, 5)
        hosts["a"].reply(StepReport((RequestUpdate(2, (), "stop", None, counters(len(State), tokens(2, 5))),), 0, 3))
        hosts["a"].reply(StepReport((RequestUpdate(3, (), "stop", None, counters(), (bytes(16),) * 2),), 0, 4))
        hosts["a"].finish(5, 5)
        assert len(listener.ends()) == 5
        assert cluster.hosts["a:1"].num_requests == cluster.hosts["b:1"].num_requests == 0


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
async def test_what_no_engine_measures_reaches_no_metric(
    report: FromEngine, cluster: Cluster, hosts: FakeHosts, listener: FakeListener
) -> None:
    name = await added(cluster, hosts, 1)
    hosts[name].reply(report)
    assert hosts[name].problem is not None
    await until(lambda: where(cluster, hosts, 1) != name)
    assert not listener.steps


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_host_that_answers_what_cannot_be_is_lost_and_another_one_is_asked(
    answer: AddAnswer, cluster: Cluster, hosts: FakeHosts
) -> None:
    for name in "abc":
        hosts[name].answers_adds = False
    adding = asyncio.create_task(cluster.add(new_requests(9)))
    await asyncio.sleep(0.01)
    first = where(cluster, hosts, 9)
    hosts[first].reply(answer)
    await until(lambda: where(cluster, hosts, 9) != first)
    hosts[where(cluster, hosts, 9)].accept(9)
    assert await adding == ESTIMATE


async def test_what_a_host_says_of_requests_that_it_does_not_have_is_ignored(
    hosts: FakeHosts, listener: FakeListener
) -> None:
    async with connected(listener, "ab") as cluster:
        name = await added(cluster, hosts, 1)
        (other,) = set("ab") - {name}
        hosts[name].generate(1, 5)
        hosts.errors = {f"{each}:1": Unavailable("gone") for each in "ab"}
        hosts[other].exit(0)
        hosts[name].exit(0)
        await until(lambda: not any(host.is_ready for host in cluster.hosts.values()))
        (owner,) = [host for host in cluster.hosts.values() if host.num_requests]
        for number in (1, 77):  # one waits for its host to be back, the other was never there
            update = RequestUpdate(number, tokens(number, 6), "length", None, counters())
            owner.receive(StepReport((update,), 0, 9))
            owner.receive(RequestsBegun((Prefilled(number, 2),)))
            owner.receive(HostRequestFailed(number, "Unavailable", "gone"))
        assert owner.num_requests == 1
        hosts.errors = {}
        ready = lambda: [each for each in "ab" if cluster.hosts[f"{each}:1"].is_ready]  # noqa: E731
        await until(lambda: any(1 in hosts[each].sent_ids() for each in ready()))
        hosts[where(cluster, hosts, 1)].finish(1, 6)
        assert (listener.tokens(1), listener.ends()) == ([5, 6], {1: "length"})


@pytest.mark.parametrize("end", [Cluster.stop, Cluster.close])
async def test_a_cluster_that_stops_while_it_lets_a_host_go_connects_to_no_other(
    end: Callable[[Cluster], Awaitable[None]], hosts: FakeHosts, listener: FakeListener
) -> None:
    members = Reported()
    members.report(a=b"1", b=b"1")
    cluster = await Cluster.connect(members, SECRET, DIGEST)
    cluster.start(listener.listener())
    members.report(a=b"1")
    while "b:1" in cluster.hosts:
        await asyncio.sleep(0)
    await end(cluster)
    members.report(a=b"1", c=b"1")
    await asyncio.sleep(1)
    assert set(hosts.opened) == {"a:1", "b:1"}
    assert all(hosts[name].was_killed for name in "ab")


@pytest.mark.parametrize("seed", range(8))
async def test_every_request_ends_once_whatever_is_lost(seed: int, hosts: FakeHosts, listener: FakeListener) -> None:
    """Random losses, tokens, cancels and ends: every request ends once, with all of its tokens."""
    choose = random.Random(seed)
    async with connected(listener, "abcd") as cluster:
        num_tokens = dict.fromkeys(range(20), 0)
        for number in num_tokens:
            await cluster.add(new_requests(number, conversation=b"%d" % number, max_tokens=100))
        live = set(num_tokens)
        cancelled = set()
        while live:
            ready = [name[0] for name, host in cluster.hosts.items() if host.is_ready]
            number = choose.choice(sorted(live))
            action = choose.random()
            owners = [hosts[name] for name in ready if number in hosts[name].sent_ids()]
            assert len(owners) <= 1
            if number in listener.failures:  # three losses before it gained tokens
                live.discard(number)
            elif action < 0.03 and len(ready) > 1:
                hosts[choose.choice(ready)].exit(0)
                await asyncio.sleep(choose.choice((0.01, 0.4)))
            elif not owners:
                await asyncio.sleep(0.05)
            elif action < 0.08 or num_tokens[number] >= 10:
                if num_tokens[number] < 10:
                    cluster.cancel(number)
                    cancelled.add(number)
                owners[0].finish(number, reason="cancelled" if number in cancelled else "length")
                live.discard(number)
            else:
                count = choose.randrange(1, 4)
                owners[0].generate(number, *range(num_tokens[number], num_tokens[number] + count))
                num_tokens[number] += count
    assert all(isinstance(error, Quarantined) for error in listener.failures.values())
    ends = {each: "cancelled" if each in cancelled else "length" for each in num_tokens}
    assert listener.ends() == ends | dict.fromkeys(listener.failures, "Quarantined")
    assert {each: listener.tokens(each) for each in num_tokens} == {n: list(range(k)) for n, k in num_tokens.items()}
