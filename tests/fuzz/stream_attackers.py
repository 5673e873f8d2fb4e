"""Clients that abuse streams over HTTP, in a process of low priority; started by hostile_http.py.

usage: stream_attackers.py stored|unread SECONDS SEED ADDRESS TOKENS CLIENTS

`stored` stores streams of two tenants, leaves them at any event, resumes them after any event, cancels and deletes
them, each client `MOST_KEPT` at a time. An event that is read twice has the same bytes, the first one that comes is the
one that was asked for, and another tenant finds nothing. `unread` opens a stream of 16 choices with 20 logprobs per
client and never reads it. At the end it prints one line of JSON: cases by name, breaches, and its own CPU seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

import uvloop
from campaign import CampaignReport
from raw_http import ANSWER_S, WrongAnswer

NICE = 10
MOST_KEPT = 8
UNREAD_S = 10.0
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
UNREAD = {"prompt": "This module", "max_tokens": 1500, "ignore_eos": True, "logprobs": 20, "n": 16, "stream": True}
REFUSED = (429, 503)
CANCELLED = b'data: {"error":{"message":"the request was cancelled"'

Client = Coroutine[Any, Any, None]

_EVENT = re.compile(rb"id: (\d+)\n(.*)", re.DOTALL)
_NAME = re.compile(rb'"id":"((?:resp|chatcmpl)[^"]*)"')


class Stream:
    """One request of HTTP/1.0, whose answer ends with the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address: str, token: str, method: str, path: str, body: bytes = b"", **headers: str) -> Stream:
        host, _, port = address.rpartition(":")
        stream = cls(*await asyncio.open_connection(host, int(port)))
        lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
        lines["authorization"] = f"Bearer {token}"
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
        stream.writer.write(f"{method} {path} HTTP/1.0\r\n{head}\r\n".encode() + body)
        return stream

    async def status(self) -> int:
        """Read the head. Raises WrongAnswer for an internal error."""
        status = int((await self.reader.readuntil(b"\r\n\r\n")).split()[1])
        if status == 500:
            raise WrongAnswer(f"an internal error: {(await self.reader.read())[:300]!r}")
        return status

    async def events(self, most: int) -> dict[int, bytes]:
        """Return at most this many events, by number."""
        found: dict[int, bytes] = {}
        while len(found) < most:
            try:
                event = await self.reader.readuntil(b"\n\n")
            except asyncio.IncompleteReadError:
                break
            event = event.lstrip(b":\n")
            if event.startswith(CANCELLED):  # no event of the output: it has no number
                break
            if (match := _EVENT.fullmatch(event)) is None:
                raise WrongAnswer(f"an event without a number: {event[:300]!r}")
            found[int(match[1])] = match[2]
        return found

    def abort(self) -> None:
        self.writer.transport.abort()


class Tenant:
    """The objects that the clients of one tenant share: the ids that the other tenant must not find."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.kept: dict[str, dict[int, bytes]] = {}  # path of a stored output -> its events


class StoringClient:
    """A client that stores streams of one tenant and retrieves them."""

    def __init__(self, address: str, tenants: list[Tenant], index: int, report: CampaignReport, rng: Random) -> None:
        self._address = address
        self._tenant = tenants[index % 2]
        self._other = tenants[1 - index % 2]
        self._kept: dict[str, dict[int, bytes]] = {}
        self._report = report
        self._rng = rng

    async def act(self) -> str:
        """Attack once, and return the result. Raises WrongAnswer."""
        rng = self._rng
        if not self._kept or (len(self._kept) < MOST_KEPT and rng.random() < 0.4):
            return await self._store()
        path = rng.choice(list(self._kept))
        action = rng.randrange(10)
        if action < 6:
            return await self._resume(path)
        if action == 6 and path.startswith(RESPONSES):
            return f"cancelled {await self._ask('POST', f'{path}/cancel', self._tenant.token)}"
        if action == 7 and self._other.kept:
            return await self._look_at_other(rng.choice(list(self._other.kept)))
        del self._kept[path]
        del self._tenant.kept[path]
        deleted, found = [await self._ask(method, path, self._tenant.token) for method in ("DELETE", "GET")]
        if found != 404:
            raise WrongAnswer(f"{path} was answered {found} after its deletion, which was answered {deleted}")
        return f"deleted {deleted}"

    async def _store(self) -> str:
        rng = self._rng
        base = self._rng.choice((CHATS, RESPONSES))
        length = {"max_output_tokens" if base == RESPONSES else "max_tokens": rng.randrange(1, 200)}
        own = {"input": "Why?"} if base == RESPONSES else {"messages": [{"role": "user", "content": "Why?"}]}
        fields = {**own, **length, "store": True, "stream": True, "ignore_eos": True, "temperature": 1.0}
        stream = await Stream.open(self._address, self._tenant.token, "POST", base, json.dumps(fields).encode())
        try:
            if (status := await stream.status()) != 200:
                return f"not stored {status}"
            events = await stream.events(rng.randrange(1, 200))
        finally:
            stream.abort()
        if (name := _NAME.search(b"".join(events.values()))) is None:
            return "stored, not named"
        path = f"{base}/{name[1].decode()}"
        self._kept[path] = self._tenant.kept[path] = events
        return "stored"

    async def _resume(self, path: str) -> str:
        rng = self._rng
        known = self._kept[path]
        after = rng.randrange(-1, max(known) + 1)
        query = "?stream=true" + (f"&starting_after={after}" if after >= 0 and rng.random() < 0.5 else "")
        headers = {"last_event_id": str(after)} if after >= 0 and "after" not in query else {}
        stream = await Stream.open(self._address, self._tenant.token, "GET", path + query, **headers)
        try:
            if (status := await stream.status()) != 200:
                if status not in REFUSED:
                    raise WrongAnswer(f"{path} was answered {status}")
                return f"not resumed {status}"
            events = await stream.events(rng.randrange(1, 200))
        finally:
            stream.abort()
        if list(events) != list(range(after + 1, after + 1 + len(events))):
            raise WrongAnswer(f"after event {after} came {list(events)[:5]}")
        if any(known.get(number, event) != event for number, event in events.items()):
            raise WrongAnswer(f"an event of {path} has other bytes than before")
        known |= events
        return "resumed"

    async def _look_at_other(self, path: str) -> str:
        method, end = self._rng.choice((("GET", ""), ("GET", "?stream=true"), ("DELETE", "")))
        if (status := await self._ask(method, path + end, self._tenant.token)) != 404:
            raise WrongAnswer(f"{method} {path}{end} of another tenant was answered {status}")
        return "not found"

    async def _ask(self, method: str, path: str, token: str) -> int:
        stream = await Stream.open(self._address, token, method, path)
        try:
            return await stream.status()
        finally:
            stream.abort()


async def _store(client: StoringClient, report: CampaignReport, rng: Random) -> None:
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                report.cases[await client.act()] += 1
        except TimeoutError:
            report.breach(f"stored: no answer within {ANSWER_S:.0f} s")
        except WrongAnswer as error:
            report.breach(f"stored: {error!r}")
        except (OSError, asyncio.IncompleteReadError):
            report.cases["reset"] += 1
        await asyncio.sleep(rng.random() * 0.02)


async def _never_read(address: str, token: str, report: CampaignReport, rng: Random) -> None:
    """Open a stream, do not read it for a while, leave, and open the next one."""
    while True:
        try:
            body = json.dumps(UNREAD).encode()
            stream = await Stream.open(address, token, "POST", "/v1/completions", body)
        except OSError:
            report.cases["not connected"] += 1
            await asyncio.sleep(1)
            continue
        stream.writer.transport.pause_reading()  # type: ignore[attr-defined]  # an `asyncio.Transport`
        await asyncio.sleep(UNREAD_S * (1 + rng.random()))
        report.cases["not read"] += 1
        stream.abort()


def _clients(kind: str, seed: str, address: str, tokens: str, clients: int, report: CampaignReport) -> Iterator[Client]:
    tenants = [Tenant(token) for token in tokens.split(",")]
    for index in range(clients):
        rng = Random(f"{seed}:{index}")
        if kind == "stored":
            yield _store(StoringClient(address, tenants, index, report, rng), report, rng)
        else:
            yield _never_read(address, tenants[0].token, report, rng)


async def _run(kind: str, seconds: float, seed: str, address: str, tokens: str, clients: int) -> CampaignReport:
    report = CampaignReport()
    tasks = [asyncio.create_task(each) for each in _clients(kind, seed, address, tokens, clients, report)]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            report.breach(f"an attack failed in itself: {error!r}")
        task.cancel()
    await asyncio.wait(tasks)
    return report


def main() -> None:
    kind, seconds, seed, address, tokens, clients = sys.argv[1:]
    os.nice(NICE)
    report = uvloop.run(_run(kind, float(seconds), seed, address, tokens, int(clients)))
    print(json.dumps({"cases": report.cases, "breaches": report.breaches, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
