"""Make the pictures of the documentation in docs/pictures: run it with the environment's Python.

usage: python -m docs.make_pictures [--chromium PROGRAM] [NAME ...]

It needs `quire` with the extra `dev`, and Chromium for the screenshots. Without names it makes all of them: memory-map,
roofline, status-page, load-test-report, chat-page, search-page.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from tests.system.chromium import ALT, Browser, Tab
from tests.system.test_chat_page import ask

PICTURES = Path(__file__).parent / "pictures"
QUIRE = (sys.executable, "-P", "-m", "quire.runtime.cli.main")
PLAN_FLAGS = ("--weights", "q8", "--kv-cache-memory", "1GiB", "--max-model-len", "8192", "--threads", "2")
READY_LINE = re.compile(r"clients (\S+)\s+metrics http://([^/\s]+)\S*\s+api http://([^/\s]+)")
SHAPE = Path(__file__).resolve().parents[1] / "tests" / "data" / "qwen3-0.6b"


def memory_map() -> None:
    """Let `quire plan` draw the memory of Qwen3-0.6B."""
    quire("plan", str(SHAPE), *PLAN_FLAGS, "--plot", str(PICTURES / "memory-map.svg"))


def roofline() -> None:
    """Let `quire bench` draw the bundled model under this machine's roofline."""
    quire("bench", "--shapes", "1x128,8x128,32x128", "--plot", str(PICTURES / "roofline.svg"))


def status_page(chromium: str) -> None:
    """Photograph the status page of a server under load."""
    with server() as (address, operator, _):
        host, port = address.split(":")
        flags = (
            "--num-prompts",
            "400",
            "--request-rate",
            "12",
            "--random-input-len",
            "128",
            "--random-output-len",
            "256",
        )
        command = (*QUIRE, "loadtest", "--host", host, "--port", port, *flags)
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(15)  # time to collect figures for the page
            photograph(chromium, f"http://{operator}/", PICTURES / "status-page.png", "1280,1000")
        finally:
            load.terminate()
            load.wait()


def load_test_report(chromium: str) -> None:
    """Photograph the report of a sweep over four request rates."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        quire(
            *("loadtest", "--num-prompts", "100", "--random-input-len", "128", "--random-output-len", "64"),
            *("--sweep", "5,10,20,40", "--report", str(report)),
        )
        photograph(chromium, report.as_uri(), PICTURES / "load-test-report.png", "1100,1500")


def chat_page() -> None:
    """Photograph the chat page with two conversations, light, and the tokens of an answer, dark."""
    with server() as (_, _, api):
        _in_browser(_chat, api)


def search_page() -> None:
    """Photograph the search over texts that a server with an embedding model has."""
    with server("demo_embedding") as (_, _, api):
        _in_browser(_search, api)


def _in_browser(visit: Callable[[Browser, str], Coroutine[None, None, None]], api: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            asyncio.run(visit(browser, api))
        finally:
            browser.close()


async def _search(browser: Browser, api: str) -> None:
    async with aiohttp.ClientSession() as session:
        tab = Tab(await session.ws_connect(browser.url, max_msg_size=0))
        await tab.open(f"http://{api}/", (1180, 760))
        await tab.until("!document.getElementById('search').hidden")
        await tab.click("#example")
        await tab.until("document.querySelector('#found li')")
        (PICTURES / "search-page.png").write_bytes(await tab.photograph())
        await tab.close()


async def _chat(browser: Browser, api: str) -> None:
    is_done = "document.querySelectorAll('article.done').length"
    async with aiohttp.ClientSession() as session:
        tab = Tab(await session.ws_connect(browser.url, max_msg_size=0))
        await tab.open(f"http://{api}/", (1180, 760))
        await tab.press("s", ALT)
        for field, value in (("seed", "7"), ("max_tokens", "60")):
            await tab.evaluate(f"document.querySelector('#fields [name={field}]').select()")
            await tab.type(value)
        for number, question in enumerate(("What is a queue?", "How do I sort a list?"), 1):
            await ask(tab, question)
            await tab.until(f"{is_done} === {number}")
        await tab.press("n", ALT)
        await ask(tab, "Write a function that returns the n-th line of a file.")
        await tab.until(f"{is_done} === 1")
        await tab.press("ArrowDown", ALT)
        (PICTURES / "chat-page.png").write_bytes(await tab.photograph())
        await tab.press("ArrowUp", ALT)
        await tab.press("s", ALT)
        await tab.press("v", ALT)
        await tab.prefer("dark")
        await tab.evaluate("document.querySelector('.tokens').focus()")
        for _ in range(12):
            await tab.press("ArrowRight")
        (PICTURES / "chat-page-tokens.png").write_bytes(await tab.photograph())
        await tab.close()


def quire(*arguments: str) -> str:
    return subprocess.run([*QUIRE, *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def server(*model: str) -> Iterator[tuple[str, str, str]]:
    """Yield the addresses for clients, operators and the HTTP API of a server on the bundled model, or another one."""
    command = [*QUIRE, "serve", *model, "--port", "0", "--operator-port", "0", "--openai-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(filter(None, map(READY_LINE.search, process.stdout)), None)
            assert found is not None, "the server did not start"
            yield found[1], found[2], found[3]
        finally:
            process.terminate()


def photograph(chromium: str, url: str, picture: Path, size: str) -> None:
    """Save a screenshot of `url` in Chromium, after its scripts have run for three seconds of virtual time."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000")
    command = (chromium, *flags, f"--window-size={size}", f"--screenshot={picture}", url)
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default="chromium", help="the program that takes screenshots")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    makers: dict[str, Callable[[], None]] = {
        "memory-map": memory_map,
        "roofline": roofline,
        "status-page": lambda: status_page(arguments.chromium),
        "load-test-report": lambda: load_test_report(arguments.chromium),
        "chat-page": chat_page,
        "search-page": search_page,
    }
    if unknown := set(arguments.names) - set(makers):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(makers)}")
    PICTURES.mkdir(exist_ok=True)
    for name, make in makers.items():
        if not arguments.names or name in arguments.names:
            make()
            print(name)


if __name__ == "__main__":
    main()
