"""Headless Chromium for tests of pages, driven by its debugging protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

TIMEOUT_S = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
    "--remote-debugging-port=0",
)
ALT, SHIFT = 1, 8  # modifiers of the protocol
KEYS = {  # name -> code, number on Windows, text
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "/": ("Slash", 191, ""),
}


needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on PATH")


class Browser:
    """A Chromium process. `close` ends it."""

    def __init__(self, profile: Path) -> None:
        command = ("chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank")
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = self._debugging_url(profile / "DevToolsActivePort")

    def _debugging_url(self, file: Path) -> str:
        """Wait for the file with the port and the path of the debugging protocol."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            port, _, path = file.read_text().partition("\n") if file.exists() else ("", "", "")
            if path:
                return f"ws://127.0.0.1:{port}{path.strip()}"
            assert self._process.poll() is None, "chromium has ended"
            assert time.monotonic() < deadline, "chromium does not start"
            time.sleep(0.02)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(TIMEOUT_S)


class Tab:
    """One page in its own profile, with its reports: uncaught errors, and loads that its policy blocks."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self._reading = asyncio.create_task(self._read())

    async def open(self, url: str, size: tuple[int, int] = (1200, 800)) -> None:
        """Open the page in a new profile and wait until it is loaded."""
        context = (await self.call("Target.createBrowserContext", disposeOnDetach=True))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        self._session = {
            "sessionId": (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        }
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.go(url)

    async def go(self, url: str) -> None:
        """Load another page, or the same one again."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def reload(self) -> None:
        """Load the page again."""
        await self.evaluate("window.isOld = true")
        await self.call("Page.reload")
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params, **self._session}))
        async with asyncio.timeout(TIMEOUT_S):
            message = await answer
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = await self.call("Runtime.evaluate", **options)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until the expression is true or an element, and return its value."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    if value := await self.evaluate(f"(value => value instanceof Element || value)({expression})"):
                        return value
                except AssertionError as error:
                    if not re.search("context|navigated", str(error)):  # the page was replaced meanwhile
                        raise
                await asyncio.sleep(0.01)

    async def text(self, selector: str) -> str:
        """Return the shown text of the first element that the selector finds."""
        shown: str = await self.until(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return shown

    async def click(self, selector: str) -> None:
        await self.until(f"document.querySelector({json.dumps(selector)})")
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        """Type into the focused element."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        code, number, text = KEYS.get(key) or (f"Key{key.upper()}", ord(key.upper()), "")
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def photograph(self) -> bytes:
        """Return the picture of the page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        await self._socket.close()
        await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            match event:
                case {"id": number}:
                    self._answers.pop(number).set_result(event)
                case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                    self.problems.append(details.get("exception", {}).get("description") or details["text"])
                case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "source": source} as entry}}:
                    if source != "network":  # a status of 400 and above, which pages expect
                        self.problems.append(entry["text"])


OpenTab = Callable[[str], Awaitable[Tab]]
