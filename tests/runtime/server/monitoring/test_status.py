"""The status page: its contents, its bounded size, and that no client's string becomes markup or code."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from quire.runtime.common.errors import Quarantined, Unavailable
from quire.runtime.common.types import Usage
from quire.runtime.engine.facade import EngineInfo, EngineStats, HostStatus, RequestStats, StepStats
from quire.runtime.net.listen import listen_tcp
from quire.runtime.server.models.catalog import ModelCatalog
from quire.runtime.server.models.residency import Residency
from quire.runtime.server.monitoring.http import OperatorServer
from quire.runtime.server.monitoring.metrics import NUM_RECENT, PrometheusObserver
from quire.runtime.server.monitoring.model_operations import ModelOperations
from quire.runtime.server.monitoring.readiness import Readiness
from quire.runtime.server.monitoring.status import (
    MAX_NAME_CHARACTERS,
    MAX_PROBLEM_CHARACTERS,
    MAX_SHOWN_HOSTS,
    MAX_SHOWN_LIVE,
    FleetStatus,
    RequestStatus,
    Status,
    StatusCollector,
)

from tests.support import samples
from tests.support.samples import HOSTS

HOSTILE = '<img src=x onerror="alert(1)">&lt;</td><script>alert(2)</script>'

STATS = EngineStats(
    step=7123,
    running=2,
    waiting=3,
    pages_total=2000,
    pages_owned=700,
    pages_cached=400,
    pages_free=900,
    prefix_queries_tokens=1000,
    prefix_hits_tokens=250,
    preemptions=4,
    waiting_by_reason={"pages": 3},
    pages_reserved=100,
    pages_pinned=50,
    recomputed_tokens=12345,
    restarts=1,
    replayed_requests=6,
    quarantined_requests=2,
)
INFO = msgspec.structs.replace(samples.INFO, max_model_len=8192, num_pages=2000)
STEP = StepStats(
    duration_s=0.02,
    prefill_tokens=60,
    decode_tokens=2,
    context_tokens=(40, 8, 6),
    schedule_s=1e-4,
    commit_s=1e-4,
    publish_s=1e-4,
)
ENDED = RequestStats(
    tenant=HOSTILE,
    finish_reason="length",
    error=None,
    prompt_tokens=1234,
    usage=Usage(
        prompt_tokens=1234,
        completion_tokens=56,
        cached_tokens=992,
        queue_ms=20,
        prefill_ms=30,
        decode_ms=400,
        stall_ms=7,
    ),
    e2e_s=0.46,
    time_to_first_token_s=0.055,
)
LIVE = RequestStatus(
    tenant=HOSTILE,
    request_id="18446744073709551615",
    age_s=1.5,
    state="prefill",
    prompt_tokens=4000,
    prefilled=1024,
    generated=0,
)


@dataclass
class FakeEngine:
    answers: bool = True
    hosts: list[HostStatus] | None = None

    def stats(self) -> EngineStats:
        if not self.answers:
            raise Unavailable("gone")
        return STATS

    def host_statuses(self) -> list[HostStatus] | None:
        return self.hosts

    @property
    def info(self) -> EngineInfo:
        return INFO


@dataclass
class Page:
    """A collector and its sources."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    observer: PrometheusObserver = field(default_factory=lambda: PrometheusObserver(version="1.2.3"))
    live: list[Any] = field(default_factory=lambda: [LIVE])
    address: str = ""

    def __post_init__(self) -> None:
        engine: Any = self.engine
        self.progress = Readiness(engine.stats, 30)
        self.collector = StatusCollector(
            ModelCatalog.of_one(HOSTILE, engine),
            self.observer,
            problem=self.progress.problem,
            num_connections=lambda: 5,
            live_requests=lambda limit: self.live[:limit],
        )
        self.observer.on_step(STEP)
        for _ in range(30):
            self.observer.on_tokens(1, 0.02)
        self.observer.on_finished(ENDED)
        failed = {"finish_reason": None, "error": Quarantined(HOSTILE), "usage": None, "time_to_first_token_s": None}
        self.observer.on_finished(msgspec.structs.replace(ENDED, tenant="", **failed))
        self.observer.on_rejected(Unavailable("draining"))
        self.observer.on_cancelled("slow_reader")
        self.collector.history.tick()


class Answer(NamedTuple):
    status_code: int
    headers: dict[str, str]
    text: str


Get = Callable[[str], Awaitable[Answer]]


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    page = Page()
    listening = await listen_tcp("127.0.0.1", 0)
    server = OperatorServer(
        page.observer.registry, page.progress, page.collector.collect, listening.socket, ModelOperations(Residency([]))
    )
    page.address = str(listening.address)
    try:
        yield page
    finally:
        await server.close()
        listening.close()


@pytest.fixture
def get(page: Page) -> Get:
    def ask(path: str) -> Answer:
        with closing(HTTPConnection(page.address, timeout=60)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode())

    return lambda path: asyncio.to_thread(ask, path)


def test_the_status_has_the_numbers_that_were_counted() -> None:
    status = Page().collector.collect()
    assert (status.version, status.problem, status.connections, status.batch_size) == ("1.2.3", None, 5, 3)
    assert (status.engine, status.info, status.requests) == (STATS, INFO, [LIVE])
    failed, finished = status.recent
    assert (failed.outcome, failed.ok, failed.generated) == ("aborted", False, 0)
    assert (finished.outcome, finished.ok, finished.cached_tokens, finished.generated) == ("length", True, 992, 56)
    assert (finished.queue_ms, finished.prefill_ms, finished.decode_ms, finished.stall_ms) == (20, 30, 400, 7)
    assert (finished.e2e_ms, finished.time_to_first_token_ms) == (460, 55)
    assert status.outcomes.finished == {"length": 1}
    assert status.outcomes.failed == {"aborted": 1}
    assert status.outcomes.rejected == {"unavailable": 1}
    assert status.outcomes.cancelled == {"slow_reader": 1}
    assert status.latencies.inter_token.count == 30
    assert status.latencies.inter_token.p50 == pytest.approx(0.02, rel=0.1)
    assert [(tick.running, tick.waiting, tick.kv_cache_usage) for tick in status.ticks] == [(2, 3, 0.35)]


def test_the_status_is_collected_while_the_engine_does_not_answer() -> None:
    page = Page()
    page.engine.answers = False
    status = page.collector.collect()
    assert status.engine is None
    assert status.problem == "the engine does not answer: gone"


def test_the_status_has_a_bounded_size() -> None:
    page = Page()
    page.live = [msgspec.structs.replace(LIVE, tenant="é" * 10_000)] * 1000
    for _ in range(1000):
        page.observer.on_finished(msgspec.structs.replace(ENDED, tenant="x" * 10_000))
    status = page.collector.collect()
    assert (len(status.requests), len(status.recent)) == (MAX_SHOWN_LIVE, NUM_RECENT)
    assert {len(each.tenant) for each in (*status.requests, *status.recent)} == {MAX_NAME_CHARACTERS + 1}


def test_the_fleet_has_its_hosts_by_state_and_bits() -> None:
    page = Page()
    assert page.collector.collect().fleet is None
    page.engine.hosts = HOSTS
    up, down = HOSTS
    assert page.collector.collect().fleet == FleetStatus(
        num_hosts={"up": 1, "down": 1}, bits={"f00d": 1, "": 1}, moved_requests=6, hosts=[down, up]
    )


def test_of_a_large_fleet_the_hosts_that_need_attention_are_shown() -> None:
    page = Page()
    (up, down) = HOSTS
    busy = msgspec.structs.replace(up, address="busy", requests=9)
    broken = msgspec.structs.replace(down, problem="x" * 10_000)
    page.engine.hosts = [up] * 1000 + [busy, broken]
    fleet = page.collector.collect().fleet
    assert fleet is not None
    assert fleet.num_hosts == {"up": 1001, "down": 1}
    assert [host.address for host in fleet.hosts] == ["b:7072", "busy"] + ["a:7072"] * (MAX_SHOWN_HOSTS - 2)
    assert len(fleet.hosts[0].problem or "") == MAX_PROBLEM_CHARACTERS + 1


async def test_the_json_is_the_struct(get: Get) -> None:
    answer = await get("/status.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    status = msgspec.json.decode(answer.text, type=Status, strict=True)
    assert status.requests == [LIVE]
    assert set(msgspec.json.decode(answer.text)) == set(Status.__struct_fields__)


@pytest.mark.parametrize(
    ("path", "media_type"), [("/", "text/html"), ("/status.js", "text/javascript"), ("/status.css", "text/css")]
)
async def test_the_page_may_load_only_its_own_files(get: Get, path: str, media_type: str) -> None:
    answer = await get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "*" not in policy


async def test_nothing_is_loaded_from_another_host(get: Get) -> None:
    html, js, css = [(await get(path)).text for path in ("/", "/status.js", "/status.css")]
    links = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert {link for link in links if not link.startswith("data:")} == {
        "status.css", "status.js", "metrics", "status.json",
    }  # fmt: skip
    assert not re.search(r"@import|url\(", css)
    assert "://" not in js
    assert not re.search(r"<style|style=|\son\w+=|<script>", html), "the policy would block it"


async def test_the_script_sets_text_and_no_markup(get: Get) -> None:
    js = (await get("/status.js")).text
    html = (await get("/")).text
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setTimeout\(\"", js
    )
    asked_for = set(re.findall(r'\$\("([\w-]+)"\)', js))
    assert asked_for
    assert asked_for <= set(re.findall(r'id="([\w-]+)"', html))


# In a browser


CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--enable-logging=stderr",
    "--virtual-time-budget=1500",  # milliseconds for the page's timers, without waiting for answers
    "--timeout=60000",
)


class Texts(HTMLParser):
    """The text of every element with an id and of every table cell, and all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.by_id: dict[str, str] = {}
        self.cells: list[str] = []
        self.tags: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("meta", "link"):
            return
        self._open.append((tag, dict(attrs).get("id")))
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.by_id[name] = self.by_id.get(name, "") + data
        if any(tag == "td" for tag, _ in self._open):
            self.cells[-1] += data


async def rendered(address: str, profile: Path) -> tuple[Texts, str]:
    """Return the page's document after one of its periods, and the lines of the browser's console."""
    process = await asyncio.create_subprocess_exec(
        "chromium",
        *CHROMIUM_FLAGS,
        f"--user-data-dir={profile}",
        "--dump-dom",
        f"http://{address}/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            out, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Texts(out.decode()), "\n".join(line for line in said.decode().splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on PATH")
async def test_a_browser_draws_the_numbers_of_the_json(page: Page, tmp_path: Path) -> None:
    page.engine.hosts = [msgspec.structs.replace(each, problem=HOSTILE) for each in HOSTS]
    shown, console = await rendered(page.address, tmp_path)
    assert console == ""
    fleet = shown.cells[shown.cells.index("b:7072") :][:20]
    assert fleet[:4] == ["b:7072", "down", "–", "1"]
    assert fleet[10:] == ["a:7072", "up", "2 + 1", "3", "500 ms", "40 %", "30 %", "2", "0", "f00d"]
    assert "img" not in shown.tags
    assert shown.tags.count("script") == 1
    tick = page.collector.history.ticks[-1]
    expected = {
        "ready": "ready",
        "model": HOSTILE,
        "generation": f"{int(tick.generation_tokens_per_s + 0.5):,}",
        "running": "2",
        "waiting": "3",
        "waiting-note": "3 for pages",
        "usage": "35 %",
        "usage-note": "22,400 tokens",
        "pool-note": "2,000 pages of 32 tokens, 5 per square",
        "pages-legend": "owned 700pinned 50cached 350reserved 100free 800",
        "hosts-note": "1 up, 1 down, 6 requests moved",
        "bits-note": "Bits ids: f00d (1).",
        "cache-note": "Prompt tokens found in the prefix cache: 25 %.",
    }
    assert {name: shown.by_id[name] for name in expected} == expected
    assert "restarts1replayed requests6quarantined requests2steps7,123" in shown.by_id["engine"]
    assert shown.by_id["outcomes"] == "finished: length1failed: aborted1rejected: unavailable1cancelled: slow_reader1"
    tenant = page.collector.collect().requests[0].tenant
    assert shown.cells.count(tenant) == 2
    assert [str(2**64 - 1), "prefill", "1,024 of 4,000", "0", "1.50 s"] == shown.cells[shown.cells.index(tenant) + 1 :][
        :5
    ]
    assert "aborted" in shown.cells
    assert shown.by_id["latencies"].startswith("first token")
