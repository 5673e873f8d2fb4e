"""Replicas and nodes of a Ray cluster are killed, taken away and updated: streams of all kinds keep their bytes.

Not part of `make test`: run `make test-ray`, which installs Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from quire import AsyncClient, CompletionOutput, OutputChunk, SamplingParams, StructuredOutputs
from quire.runtime.common.types import join_chunks

if TYPE_CHECKING:
    from tests.ray.ray_fleet import RayFleet

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

NUM_HOSTS = 3
NUM_BEGUN = 20  # tokens of each stream before something is done to it
JSON = StructuredOutputs(json={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 300})
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "best_of": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "stop": ("no such string", "\n\n\n\n\n\n"), "min_tokens": 250},
    {"temperature": 1.0, "structured_outputs": JSON, "ignore_eos": False},
    {"beam_width": 3, "n": 2, "max_tokens": 60, "logprobs": 0},
)
PROMPTS = ("The module provides", "Colours: ", "def main", "Return a new")


def streams(max_tokens: int) -> list[tuple[str, SamplingParams]]:
    found = []
    for index, prompt in enumerate(PROMPTS * (len(KINDS) * 2 // len(PROMPTS))):
        params = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 2,
            "seed": index,
            **KINDS[index % len(KINDS)],
        }
        if "beam_width" in params:
            del params["seed"]
        found.append((f"{index} {prompt}", SamplingParams(**params)))
    return found


class Reader:
    """Reads one stream to its end."""

    def __init__(self, client: AsyncClient, prompt: str, params: SamplingParams) -> None:
        self.chunks: list[OutputChunk] = []
        self.is_searching = params.beam_width > 0 or params.best_of is not None  # without chunks before its end
        self.task = asyncio.create_task(self._read(client, prompt, params))

    async def _read(self, client: AsyncClient, prompt: str, params: SamplingParams) -> Sequence[CompletionOutput]:
        async for chunk in client.generate(prompt, params):
            self.chunks.append(chunk)
        return join_chunks(self.chunks)

    @property
    def has_begun(self) -> bool:
        return self.is_searching or sum(len(chunk.token_ids) for chunk in self.chunks) >= NUM_BEGUN


async def outputs(
    address: str, asked: list[tuple[str, SamplingParams]], harm: Callable[[], object] | None = None
) -> list[Any]:
    """Return the outputs of streams; `harm` is done when all have begun and none has ended, but for searches."""
    async with AsyncClient(address) as client:
        readers = [Reader(client, *each) for each in asked]
        if harm is not None:
            async with asyncio.timeout(60):
                while not all(reader.has_begun for reader in readers):
                    await asyncio.sleep(0.01)
            assert not any(reader.task.done() for reader in readers if not reader.is_searching)
            await asyncio.to_thread(harm)
        return [await reader.task for reader in readers]


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
    from tests.ray.ray_fleet import ray_fleet

    with ray_fleet(NUM_HOSTS) as fleet:
        yield fleet


async def unchanged(fleet: RayFleet, max_tokens: int, harm: Callable[[], object]) -> None:
    """Check that streams have the same outputs when `harm` is done, and that some of them have moved by then."""
    asked, num_moves = streams(max_tokens), fleet.num_moves()
    wanted = await outputs(await fleet.address(), asked)
    assert await outputs(await fleet.address(), asked, harm) == wanted
    assert fleet.num_moves() > num_moves


async def test_streams_keep_the_bits_with_which_they_began_while_an_update_changes_them(fleet: RayFleet) -> None:
    fleet.deploy(1, weights="q4", shutdown_timeout=60)
    old, asked = await fleet.address(), streams(600)
    wanted = await outputs(old, asked)
    assert await outputs(old, asked, lambda: fleet.deploy(NUM_HOSTS)) == wanted
    assert (new := await fleet.address()) != old
    assert await outputs(new, asked) != wanted


async def test_streams_keep_their_bytes_when_a_replica_is_killed(fleet: RayFleet) -> None:
    fleet.until(lambda: all(fleet.hosts_at(node) for node in fleet.nodes))
    (pid,) = fleet.hosts_at(fleet.nodes[0])
    await unchanged(fleet, 600, lambda: os.kill(pid, signal.SIGKILL))
    fleet.until(lambda: fleet.hosts_at(fleet.nodes[0]) not in ([], [pid]) and fleet.status == "RUNNING")


async def test_streams_keep_their_bytes_when_a_host_is_taken_away(fleet: RayFleet) -> None:
    await unchanged(fleet, 1200, lambda: fleet.deploy(NUM_HOSTS - 1))
    fleet.deploy(NUM_HOSTS)


async def test_streams_keep_their_bytes_when_a_node_is_killed(fleet: RayFleet) -> None:
    await unchanged(fleet, 600, lambda: fleet.kill_node(fleet.nodes[-1]))
