"""Send anything to the port of an engine host, with and without its secret, while a bystander's streams run there.

usage: fuzz_link.py [--seconds 600] [--seed 1]

Without the secret: noise, parts of greetings, recorded greetings, floods of connections that stay silent. With it:
random bytes, mutated and random messages, huge lengths, ends in the middle of a message. Exit status 1 if a stream of
the bystander changes a byte or does not end, if the host ends or writes a traceback, or if its memory or descriptors
grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import struct
import time
from collections import Counter
from pathlib import Path

import msgspec
import structlog
import uvloop
from host_process import SECRET, HostProcess, running_hosts
from kill_hosts import FLAGS, Campaign, Progress, fleet, random_streams, read
from quire.runtime.cluster.greeting import greet_host
from quire.runtime.cluster.host_link import FROM_HOST, MAX_UNSENT_TO_HOST_BYTES, Heartbeat, HostLink
from quire.runtime.common.types import SamplingParams
from quire.runtime.model.runner import SamplingSpec
from quire.runtime.protocol.framing import with_prefix
from quire.runtime.workers.engine_link import AddRequests, CancelRequest, DropRequest, ReadmitRequest, as_read
from quire.scheduler import RequestSpec

ATTACK_TIMEOUT_S = 5.0
NUM_ATTACKERS = 4
MAX_GROWTH_BYTES = 24 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Attacker:
    """Attacks one host; `recorded` is a greeting of another connection."""

    def __init__(self, address: str, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._choose = random.Random(seed)
        self._recorded = b""

    async def run(self, until: float) -> None:
        attacks = (self.noise, self.parts, self.replay, self.silence, self.garbage, self.messages, self.lengths)
        while time.monotonic() < until:
            attack = self._choose.choice(attacks)
            with contextlib.suppress(OSError, EOFError, TimeoutError, RuntimeError):  # uvloop's for a closed transport
                async with asyncio.timeout(ATTACK_TIMEOUT_S):
                    await attack()
            self.outcomes[attack.__name__] += 1

    async def noise(self) -> None:
        """Send random bytes instead of a greeting."""
        await self._send(await self._connect(), self._choose.randbytes(self._choose.randrange(400)))

    async def parts(self) -> None:
        """Send a part of a good greeting, or one with a changed bit."""
        changed = bytearray(self._recorded[: self._choose.randrange(97)])
        if changed:
            changed[self._choose.randrange(len(changed))] ^= 1 << self._choose.randrange(8)
        await self._send(await self._connect(), bytes(changed))

    async def replay(self) -> None:
        """Send the greeting of another connection."""
        reader, writer = await self._connect()
        writer.write(self._recorded)
        answer = await reader.read()
        self.outcomes["replay refused" if len(answer) <= 65 else "REPLAY ACCEPTED"] += 1
        writer.close()

    async def silence(self) -> None:
        """Open many connections and say nothing."""
        opened = [await self._connect() for _ in range(30)]
        await asyncio.sleep(self._choose.random())
        for _, writer in opened:
            writer.transport.abort()

    async def garbage(self) -> None:
        """Greet, then send random bytes."""
        await self._send(await self._greeted(), self._choose.randbytes(self._choose.randrange(2000)))

    async def lengths(self) -> None:
        """Greet, then declare a huge message, or end within one."""
        length = self._choose.choice(((1 << 32) - 1, 65 << 20, 1000))
        await self._send(await self._greeted(), struct.pack(">I", length) + self._choose.randbytes(100))

    async def messages(self) -> None:
        """Greet, then send messages: of any form, with any values, or good ones with changed bytes."""
        streams = await self._greeted()
        link = HostLink(*streams, FROM_HOST, MAX_UNSENT_TO_HOST_BYTES)
        for _ in range(self._choose.randrange(1, 12)):
            payload = bytearray(msgspec.msgpack.encode(self._message()))
            if self._choose.random() < 0.3:
                payload[self._choose.randrange(len(payload))] = self._choose.randrange(256)
            streams[1].write(with_prefix(bytes(payload)))
            await asyncio.sleep(self._choose.random() * 0.02)
        reading = asyncio.create_task(link.receive_all(lambda message: None))
        await asyncio.sleep(self._choose.random() * 0.3)
        reading.cancel()
        link.abort()

    def _message(self) -> object:
        choose = self._choose
        number = choose.choice((0, 1, 2, choose.randrange(1 << 40), -1, 1 << 40, (1 << 63) - 1))
        if choose.random() < 0.2:
            return choose.choice(([], ["ADD"], ["ADD", [[1]]], {"a": 1}, [["ADD"] * 40], ["WHAT", 1], 7, None))
        prompt = tuple(choose.choice((1, 5, 4095, 4096, -3)) for _ in range(choose.choice((0, 1, 9))))
        generated = tuple(choose.choice((1, 5, 4095, 4096)) for _ in range(choose.choice((0, 0, 3))))
        params = SamplingParams(temperature=choose.choice((0.0, 0.9)), max_tokens=5)
        spec = as_read(
            RequestSpec(
                number,
                prompt,
                max_tokens=choose.choice((1, 30, 0, -1, 1 << 40)),
                min_tokens=choose.choice((0, 9)),
                sampling=SamplingSpec(params, choose.choice((0, (1 << 64) - 1)), frozenset()),
                deadline=choose.choice((None, 0.0, -1.0, 1e300, 0.5)),
                priority=choose.choice((0, -(1 << 60))),
                pin_s=choose.choice((None, 0.1, 1e300)),
            )
        )
        return choose.choice(
            (
                AddRequests((spec,)),
                AddRequests((spec, spec)),
                ReadmitRequest(spec, generated),
                CancelRequest(number),
                DropRequest(number, None, "x"),
                Heartbeat(),
            )
        )

    async def _connect(self) -> Streams:
        return await asyncio.open_connection(self._host, self._port)

    async def _greeted(self) -> Streams:
        reader, writer = await self._connect()
        sent = bytearray()
        recorder = _Recorder(writer, sent)
        await greet_host(reader, recorder, SECRET.encode())  # type: ignore[arg-type]
        self._recorded = bytes(sent)
        return reader, writer

    async def _send(self, streams: Streams, data: bytes) -> None:
        reader, writer = streams
        writer.write(data)
        if self._choose.random() < 0.5:
            writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()


class _Recorder:
    def __init__(self, writer: asyncio.StreamWriter, sent: bytearray) -> None:
        self._writer = writer
        self._sent = sent

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def write(self, data: bytes) -> None:
        self._sent += data
        self._writer.write(data)


def resident_bytes(host: HostProcess) -> int:
    return int(Path(f"/proc/{host.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(host: HostProcess) -> int:
    return len(os.listdir(f"/proc/{host.process.pid}/fd"))


async def bystand(campaign: Campaign, until: float, outcomes: Counter[str], seed: int) -> None:
    """Run the same streams repeatedly."""
    streams = random_streams(8, random.Random(seed))
    expected = [await read(campaign.engine, stream, Progress()) for stream in streams]
    while time.monotonic() < until:
        for stream, wanted in zip(streams, expected, strict=True):
            async with asyncio.timeout(120):
                found = await read(campaign.engine, stream, Progress())
            outcomes["equal" if found == wanted else "CHANGED"] += 1


async def main(options: argparse.Namespace) -> int:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    outcomes: Counter[str] = Counter()
    with running_hosts(1, *FLAGS) as (host,):
        async with fleet([host]) as campaign:
            await campaign.ready()
            half = time.monotonic() + options.seconds / 2
            attackers = [Attacker(host.address, options.seed + number) for number in range(NUM_ATTACKERS)]
            engine_before = host.processes()[1]
            for until in (half, half + options.seconds / 2):
                await asyncio.gather(
                    bystand(campaign, until, outcomes, options.seed), *(attacker.run(until) for attacker in attackers)
                )
                await asyncio.sleep(1.0)
                memory = resident_bytes(host)
                descriptors = num_descriptors(host)
                print(f"{memory / (1 << 20):.1f} MiB, {descriptors} descriptors", flush=True)
                if until == half:
                    memory_before = memory
                    descriptors_before = descriptors
            breaches = [f"{count} streams {name}" for name, count in outcomes.items() if name != "equal"]
            if memory > memory_before + MAX_GROWTH_BYTES or descriptors > descriptors_before + 8:
                breaches.append("memory or descriptors grow")
            if host.processes()[1] != engine_before:
                breaches.append("an engine process ended")
            if any("REPLAY ACCEPTED" in attacker.outcomes for attacker in attackers):
                breaches.append("a recorded greeting was accepted")
        if "Traceback" in (log := host.log()):
            breaches.append(f"a traceback in the log: {log[log.index('Traceback') :][:3000]}")
    print(dict(sum((attacker.outcomes for attacker in attackers), Counter())), dict(outcomes))
    print("\n".join(breaches) or "no breach")
    return int(bool(breaches))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    raise SystemExit(uvloop.run(main(parser.parse_args())))
