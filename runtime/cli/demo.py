"""`quire demo`: start a server on the bundled model and stream from it as several users.

It shows their texts, a table of their latencies, one chat over the HTTP API, and an embedding model's search in the
documentation. Every user sends two requests. The second continues the first one's text, so it finds a prompt in the
prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.request import Request, urlopen

import msgspec
from cyclopts import Parameter
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..client import AsyncClient
from ..common.errors import ConfigError
from ..common.types import SamplingParams, Usage
from .documentation import read_documentation
from .local_server import local_server

NUM_TURNS = 2
QUESTION = "What is a queue?"
CHAT_TIMEOUT_S = 60
OPENING = "This module provides access to "
PROMPTS = (
    OPENING + "the :mod:`json` encoder.",
    OPENING + "a thread-safe queue.",
    ".. function:: open(path, mode)\n\n   Open a file and",
    ".. class:: Task(coro, *, loop=None)\n\n   A",
    "The following example shows how to sort a list::\n\n",
    "If *timeout* is not ``None``, then",
    "Changed in version 3.11: Added the",
    "Regular expressions can contain both special and",
)
DOCUMENTATION = Path(__file__).parents[2] / "docs"
FOUND = 3  # sections shown for a search
SEARCHES = (
    "memory of the KV cache",
    "limit the requests of a tenant",
    "a server that crashes or restarts",
    "speculative decoding with draft tokens",
    "embed texts with a client",
)


@dataclass
class Turn:
    """One stream from its reader's view; times in seconds of one clock."""

    start: float
    first_token: float = 0.0
    end: float = 0.0
    tokens: int = 0
    usage: Usage | None = None


@dataclass
class User:
    """One user of the demo."""

    prompt: str
    text: str = ""  # generated text, without the prompt
    turns: list[Turn] = field(default_factory=list)


def demo(
    *,
    users: Annotated[int, Parameter(help="Users that stream at the same time.")] = 8,
    max_tokens: Annotated[int, Parameter(help="Tokens per stream.")] = 120,
) -> None:
    """Run the demo. Raises Unavailable if the server does not start, ConfigError if there are no users."""
    if users < 1:
        raise ConfigError(f"--users must be at least 1, not {users}")
    asyncio.run(_demo([User(PROMPTS[index % len(PROMPTS)]) for index in range(users)], max_tokens))


async def _demo(users: list[User], max_tokens: int) -> None:
    console = Console()
    async with local_server("--embedding-model", "demo_embedding") as server:
        console.print(Text(server.ready_line, style="dim"))
        async with AsyncClient(server.address) as client:
            start = time.monotonic()
            streams = asyncio.gather(*(_converse(client, user, seed, max_tokens) for seed, user in enumerate(users)))
            try:
                await _show(console, users, streams)
            finally:  # has an effect only after an interrupt
                streams.cancel()
                await asyncio.gather(streams, return_exceptions=True)
            seconds = time.monotonic() - start
            found = await _search(client)
        answer = await asyncio.to_thread(_chat, server.api_url)
    console.print(_table(users))
    total = sum(turn.tokens for user in users for turn in user.turns)
    rate = total / seconds
    console.print(f"{total} tokens for {len(users)} concurrent users in {seconds:.2f} s: {rate:.0f} tokens/s")
    console.print(Panel(Text(answer), title=f"POST {server.api_url}/chat/completions: {QUESTION}"))
    console.print(found)


async def _search(client: AsyncClient) -> Table:
    """Return the sections of the documentation that are closest to each of `SEARCHES`, the closest first."""
    passages = read_documentation(DOCUMENTATION)
    texts = [f"{passage.title}\n{passage.text}" for passage in passages]
    start = time.monotonic()
    vectors = await client.embed([*SEARCHES, *texts], truncate_prompt_tokens=-1)
    seconds = time.monotonic() - start
    queries = vectors[: len(SEARCHES)]
    documents = vectors[len(SEARCHES) :]
    order = (-queries @ documents.T).argsort(axis=1)
    table = Table(title=f"the documentation, searched: {len(texts)} passages embedded in {seconds:.2f} s")
    for column in ("search", "page", "section"):
        table.add_column(column)
    for search, indices in zip(SEARCHES, order.tolist(), strict=True):
        sections = dict.fromkeys((passages[index].page, passages[index].title) for index in indices)
        for number, (page, title) in enumerate(list(sections)[:FOUND]):
            table.add_row("" if number else search, page, Text(title), end_section=number == FOUND - 1)
    return table


def _chat(api_url: str) -> str:
    """Return the answer to `QUESTION` over OpenAI's API."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "seed": 1}
    request = Request(
        f"{api_url}/chat/completions", msgspec.json.encode(body), {"content-type": "application/json"}, method="POST"
    )
    with urlopen(request, timeout=CHAT_TIMEOUT_S) as answer:
        return str(msgspec.json.decode(answer.read())["choices"][0]["message"]["content"]).strip()


async def _converse(client: AsyncClient, user: User, seed: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, seed=seed, ignore_eos=True)
    for _ in range(NUM_TURNS):
        turn = Turn(start=time.monotonic())
        user.turns.append(turn)
        async for chunk in client.generate(user.prompt + user.text, params):
            turn.first_token = turn.first_token or time.monotonic()
            turn.tokens += len(chunk.token_ids)
            turn.usage = chunk.usage
            user.text += chunk.text
        turn.end = time.monotonic()


async def _show(console: Console, users: list[User], streams: asyncio.Future[list[None]]) -> None:
    """Draw the users' texts as they grow, if the output is a terminal; print them at the end."""
    with Live(_panels(console, users), console=console, refresh_per_second=12, transient=True) as live:
        while not streams.done():
            await asyncio.wait([streams], timeout=1 / 12)
            live.update(_panels(console, users))
    await streams
    console.print(_panels(console, users))


def _panels(console: Console, users: list[User]) -> Columns:
    width = max(36, console.width // (2 if console.width >= 80 else 1) - 1)
    return Columns([_panel(number, user, width) for number, user in enumerate(users, 1)])


def _panel(number: int, user: User, width: int) -> Panel:
    lines = Text(user.prompt, style="bold") + Text(user.text, style="not bold")
    shown = Text("\n").join(lines.wrap(Console(width=width), width - 4)[-6:])
    return Panel(shown, title=f"user {number}", width=width, height=8)


def _table(users: list[User]) -> Table:
    table = Table(title="what each user saw")
    for column in ("user", "turn", "prompt tokens", "cached", "generated", "TTFT ms", "tokens/s"):
        table.add_column(column, justify="right")
    for user_number, user in enumerate(users, 1):
        for turn_number, turn in enumerate(user.turns, 1):
            table.add_row(f"{user_number}", f"{turn_number}", *_measured(turn))
    return table


def _measured(turn: Turn) -> list[str]:
    if turn.usage is None:  # interrupted
        return []
    rate = (turn.tokens - 1) / max(1e-9, turn.end - turn.first_token)
    return [
        f"{turn.usage.prompt_tokens}",
        f"{turn.usage.cached_tokens}",
        f"{turn.tokens}",
        f"{(turn.first_token - turn.start) * 1000:.1f}",
        f"{rate:.1f}",
    ]
