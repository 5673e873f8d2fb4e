"""How far a load test is, on one line that is drawn twice a second, where there is a terminal to draw on.

It must not measure. One invariant: drawing happens between the loop's other work and costs it well under a millisecond,
for what it takes is added to latencies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .driver import Tally

INTERVAL_S = 0.5


@contextlib.contextmanager
def shown(tally: Tally, *, quiet: bool) -> Iterator[None]:
    """While the block runs in a running event loop."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawing = asyncio.get_running_loop().create_task(_draw(live, tally))
        try:
            yield
        finally:
            drawing.cancel()


async def _draw(live: Live, tally: Tally) -> None:
    last_s, last_tokens = time.perf_counter(), 0
    while True:
        await asyncio.sleep(INTERVAL_S)
        now_s = time.perf_counter()
        rate = (tally.tokens - last_tokens) / (now_s - last_s)
        last_s, last_tokens = now_s, tally.tokens
        live.update(Text(progress_line(tally, rate)), refresh=True)


def progress_line(tally: Tally, tokens_per_s: float) -> str:
    of = "" if tally.total is None else f" of {tally.total:,}"
    return (
        f"sent {tally.sent:,}{of}   done {tally.done:,}   running {tally.running:,}   failed {tally.failed:,}   "
        f"{tokens_per_s:,.0f} tokens/s"
    )
