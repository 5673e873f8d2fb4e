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
from quire import AsyncClient, CompletionOutput, OutputChunk, SamplingParams, StructuredOutputs, Unavailable
from quire.runtime.common.types import join_chunks

if TYPE_CHECKING:
    from tests.ray.ray_fleet import RayFleet

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

NUM_HOSTS = 3
NUM_OVER_HANDLES = 2
OVER_HANDLES: dict[str, Any] = {"host_links": "handles", "weights": "q4", "shutdown_timeout": 60}
MAX_HARMS = 3
NUM_BEGUN = 20  # tokens of each stream before something is done to it
MAX_TOKENS = 600
JSON = StructuredOutputs(json={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 300})
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "logprobs": 2},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "best_of": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "stop": ("no such string", "\n\n\n\n\n\n"), "min_tokens": MAX_TOKENS - 10},
    {"temperature": 1.0, "structured_outputs": JSON, "ignore_eos": False},
    {"beam_width": 3, "n": 2, "max_tokens": 60, "logprobs": 0},
)
PROMPTS = ("The module provides", "Colors: ", "def main", "Return a new")
NUM_STREAMS = 2 * len(KINDS)


def streams(count: int = NUM_STREAMS) -> list[tuple[str, SamplingParams]]:
    """Return streams of all kinds, each with its own prompt."""
    found = []
    for index in range(count):
        params = {
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "seed": index,
            **KINDS[index % len(KINDS)],
        }
        if "beam_width" in params:
            del params["seed"]
        found.append((f"{index} {PROMPTS[index % len(PROMPTS)]}", SamplingParams(**params)))
    return found


Outputs = list[Sequence[CompletionOutput]]


class Reader:
    """Reads one stream to its end, and then again until `is_stopping`: so it runs however long something takes."""

    def __init__(self, client: AsyncClient, prompt: str, params: SamplingParams) -> None:
        self.outputs: Outputs = []  # outputs of each time
        self.has_begun = asyncio.Event()  # a search has no tokens before its end
        self.is_stopping = False
        self._client = client
        self._asked = prompt, params

    async def read(self, may_be_refused: bool) -> None:
        """Read. `may_be_refused`: the server may be leaving, and then refuses streams."""
        while not self.is_stopping:
            chunks: list[OutputChunk] = []
            num_tokens = 0
            try:
                async for chunk in self._client.generate(*self._asked):
                    chunks.append(chunk)
                    num_tokens += len(chunk.token_ids)
                    if num_tokens >= NUM_BEGUN:
                        self.has_begun.set()
            except Unavailable:
                if chunks or not may_be_refused:
                    raise
                return
            self.outputs.append(join_chunks(chunks))


async def outputs(address: str) -> Outputs:
    """Return the outputs of all streams, which are read once and together."""
    async with AsyncClient(address) as client:
        return [each.outputs for each in await asyncio.gather(*(client.complete(*asked) for asked in streams()))]


async def check_outputs_during(
    harm: Callable[[], object], address: str, wanted: Outputs, may_be_refused: bool = False
) -> None:
    """Check that streams have their outputs each time, from before `harm` begins until after its end."""
    async with AsyncClient(address) as client, asyncio.TaskGroup() as reading:
        readers = [Reader(client, *asked) for asked in streams()]
        for reader in readers:
            reading.create_task(reader.read(may_be_refused))
        for reader in readers:
            await reader.has_begun.wait()
        await asyncio.to_thread(harm)
        for reader in readers:
            reader.is_stopping = True
    for reader, output in zip(readers, wanted, strict=True):
        assert reader.outputs == [output] * len(reader.outputs)
        assert reader.outputs


@pytest.fixture(scope="module")
def fleet() -> Iterator[RayFleet]:
    pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
    from tests.ray.ray_fleet import ray_fleet

    with ray_fleet(NUM_HOSTS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def wanted(fleet: RayFleet) -> Outputs:
    """Return the outputs of all streams at all hosts, to which nothing is done."""

    async def of_fleet() -> Outputs:
        return await outputs(await fleet.address())

    fleet.deploy(NUM_HOSTS)
    return asyncio.run(of_fleet())


async def check_moves(fleet: RayFleet, wanted: Outputs, harm: Callable[[], object]) -> None:
    """Check that streams keep their outputs while `harm` is done, until some of them have moved.

    `harm` is done again if the host had no stream at that moment: engines do not wait for readers, so that streams may
    have ended there that are still being read here.
    """
    num_moves = fleet.num_moves()

    def harm_until_streams_move() -> None:
        for _ in range(MAX_HARMS):
            harm()
            if fleet.num_moves() > num_moves:
                return
        raise AssertionError("no stream has moved")

    await check_outputs_during(harm_until_streams_move, await fleet.address(), wanted)


async def check_killed_replica(fleet: RayFleet, wanted: Outputs, num_hosts: int) -> None:
    """Check that streams keep their outputs when a replica with an engine host is killed; Serve starts another one."""

    def kill() -> None:
        replica = fleet.busiest_host()
        os.kill(replica, signal.SIGKILL)
        fleet.until(lambda: replica not in fleet.hosts() and len(fleet.hosts()) == num_hosts)
        fleet.until(lambda: fleet.status == "RUNNING")

    await check_moves(fleet, wanted, kill)


async def test_streams_over_handles_keep_their_bytes_when_a_replica_is_killed(fleet: RayFleet) -> None:
    fleet.deploy(NUM_OVER_HANDLES, **OVER_HANDLES)
    wanted = await outputs(await fleet.address())
    await check_killed_replica(fleet, wanted, NUM_OVER_HANDLES)


async def test_streams_keep_the_bits_with_which_they_began_while_an_update_changes_them(fleet: RayFleet) -> None:
    fleet.deploy(NUM_OVER_HANDLES, **OVER_HANDLES)
    old = await fleet.address()
    wanted = await outputs(old)
    await check_outputs_during(lambda: fleet.deploy(NUM_HOSTS), old, wanted, may_be_refused=True)
    assert (new := await fleet.address()) != old
    assert await outputs(new) != wanted


async def test_streams_keep_their_bytes_when_a_replica_is_killed(fleet: RayFleet, wanted: Outputs) -> None:
    await check_killed_replica(fleet, wanted, NUM_HOSTS)


async def test_streams_keep_their_bytes_when_a_host_is_taken_away(fleet: RayFleet, wanted: Outputs) -> None:
    def take_away() -> None:
        fleet.deploy(NUM_HOSTS)
        fleet.deploy(NUM_HOSTS - 1)

    await check_moves(fleet, wanted, take_away)


async def test_streams_keep_their_bytes_when_a_node_is_killed(fleet: RayFleet, wanted: Outputs) -> None:
    num_moves = fleet.num_moves()

    def kill() -> None:
        fleet.kill_node_of(fleet.busiest_host())
        fleet.until(lambda: fleet.num_moves() > num_moves)

    await check_moves(fleet, wanted, kill)
