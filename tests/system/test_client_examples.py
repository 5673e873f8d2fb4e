"""The examples in deploy/clients run against a real server. `make clients` installs the packages that they need."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "deploy" / "clients"
PACKAGES = ROOT / "build" / "clients"  # folder with an environment of Python packages for each client
NODE_PACKAGES = CLIENTS / "ai-sdk" / "node_modules"
OUTPUT = r"^chat: .*^stream: .*^schema: .*name\W+[^\n]{1,30}size\W+(small|large).*^tool: .*(Paris|Rome)"
TIMEOUT_S = 240


async def run(serving: Callable[..., Any], command: str, script: Path, environment: Mapping[str, str]) -> str:
    """Run an example against a server with the bundled model, and return its output."""
    async with serving(tool_call_parser="hermes") as real:
        url = f"http://{real.server.openai_address}/v1"
        process = await asyncio.create_subprocess_exec(
            *(command, str(script), url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize(("name", "package"), [("langchain", "langchain_openai"), ("litellm", "litellm")])
async def test_a_python_client(serving: Callable[..., Any], name: str, package: str) -> None:
    python = PACKAGES / name / "bin" / "python"
    if not list(PACKAGES.glob(f"{name}/lib/*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed; `make clients` installs it")
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    output = await run(serving, str(python), CLIENTS / name / "chat.py", offline)
    assert re.search(OUTPUT, output, re.M | re.S), output


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not NODE_PACKAGES.is_dir(), reason="the AI SDK is not installed; `make clients` installs it")
async def test_the_ai_sdk(serving: Callable[..., Any]) -> None:
    output = await run(serving, "node", CLIENTS / "ai-sdk" / "chat.mjs", {})
    assert re.search(OUTPUT, output, re.M | re.S), output


@pytest.mark.parametrize("name", ["langchain/chat.py", "litellm/chat.py", "ai-sdk/chat.mjs"])
def test_an_example_names_the_command_that_serves_it(name: str) -> None:
    command = "server: quire serve --served-model-name quire --tool-call-parser hermes  # the parser is for the bundled"
    assert command in (CLIENTS / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["langchain/chat.py", "litellm/chat.py", "ai-sdk/chat.mjs"])
def test_the_documentation_shows_the_example(name: str) -> None:
    page = (ROOT / "docs" / "use-it-with.md").read_text("utf-8")
    assert (CLIENTS / name).read_text("utf-8") in page
