"""Send hostile grammars from many connections while bystanders read, see campaign.py.

usage: fuzz_grammars.py [--seconds 60] [--seed 1] [--clients 8] [-- FLAGS OF quire serve]

The grammars are nested, ambiguous, exponential, huge, or take long to compile; each is changed a little each time, so
that it is compiled again. Every answer must be text, or a typed error of the request. The memory that is left when
large grammars have ended must stay flat, and all of it below the limit of the grammars of running requests. Printed is
the p99 of the gap between two tokens of another stream before and during the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import time
from collections.abc import Callable
from typing import Any

from campaign import CampaignReport, quietest, run
from quire import AsyncClient, SamplingParams, StructuredOutputs
from quire.runtime.common.errors import GenerationFailed, InvalidRequest, Overloaded, QuireError
from quire.runtime.engine.structured.compiled_grammars import MAX_LIVE
from quire.runtime.tools.percentiles import percentiles
from server_process import ServerProcess

QUIET_S = 5.0
GIVE_UP_S = 120.0  # a request that takes longer is a breach


def word(chance: random.Random, length: int = 8) -> str:
    return "".join(chance.choices(string.ascii_lowercase, k=length))


def nested(chance: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": chance.randrange(1, 9)}
    for _ in range(chance.choice([20, 60, 130, 400])):
        kind = chance.randrange(4)
        if kind == 0:
            schema = {"type": "object", "properties": {word(chance): schema}, "required": []}
        elif kind == 1:
            schema = {"type": "array", "items": schema}
        else:
            schema = {"anyOf" if kind == 2 else "allOf": [schema, {}]}
    return {"json": schema}


def ambiguous(chance: random.Random) -> dict[str, Any]:
    letter = chance.choice("abc")
    return {
        "lark": chance.choice(
            [
                f'start: x\nx: x x | "{letter}" |',
                f'start: x "!"\nx: x x x | x "{letter}" | "{letter}" x | "{letter}"',
                f"start: (/[a-z]{{0,9}}/ | /[{letter}-z]*/ | WORD)*\nWORD: /.{{1,30}}/",
                f'start: y*\ny: /{letter}*/ y | y /{letter}*/ | "{word(chance)}"',
            ]
        )
    }


def exponential(chance: random.Random) -> dict[str, Any]:
    n = chance.randrange(20, 2000)
    return {
        "regex": chance.choice(
            [
                f"(a|b)*a(a|b){{{n}}}",
                f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}",
                f"(.*{word(chance, 3)}.*){{{n % 90}}}",
                "|".join(f"{word(chance)}.{{{i}}}" for i in range(n % 300)),
                f"(x+x+)+{{{n}}}y",
                f"([^a]*{word(chance, 2)}|[^b]*){{{n}}}",
            ]
        )
    }


def huge(chance: random.Random) -> dict[str, Any]:
    size = chance.choice([1_000, 100_000, 250_000, 1_000_000])
    return {"regex": chance.choice([word(chance, size), f"[{word(chance, size)}]", "(" * size, "a|" * (size // 2)])}


def many(chance: random.Random) -> dict[str, Any]:
    count = chance.choice([10, 1000, 10_000, 100_000])
    values = [f"{word(chance, 4)} {i}" for i in range(count)]
    properties = {value: {"type": "integer"} for value in values}
    return chance.choice(
        [
            {"json": {"enum": values}},
            {"choice": tuple(values)},
            {"json": {"type": "object", "properties": properties, "required": values[: count // 2]}},
            {"json": {"anyOf": [{"const": value} for value in values]}},
            {"lark": "start: " + " | ".join(json.dumps(value) for value in values)},
        ]
    )


def recursive(chance: random.Random) -> dict[str, Any]:
    names = [word(chance) for _ in range(chance.choice([1, 3, 40]))]
    return chance.choice(
        [
            {"json": {"$ref": "#"}},
            {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
            {"json": {"type": "object", "additionalProperties": {"$ref": "#"}, "title": word(chance)}},
            {"json": {"allOf": [{"properties": {name: {"$ref": "#"}}} for name in names]}},
            {"gbnf": f'root ::= root root | "{names[0]}" root |'},
            {"lark": f"start: {names[0]}\n{names[0]}: {names[0]} | {names[-1]}x\n{names[-1]}x: {names[0]}"},
        ]
    )


def nonsense(chance: random.Random) -> dict[str, Any]:
    text = "".join(chance.choices(string.printable + "é€\U0001f600\x00", k=chance.randrange(1, 200)))
    kind = chance.choice(["json", "regex", "lark", "gbnf", "choice"])
    return {kind: (text,) if kind == "choice" else text}


def ordinary(chance: random.Random) -> dict[str, Any]:
    names = [word(chance, 3) for _ in range(4)]
    properties = {name: chance.choice([{"type": "integer"}, {"enum": names}, {"type": "string"}]) for name in names}
    return {"json": {"type": "object", "properties": properties, "required": names, "additionalProperties": False}}


KINDS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    nested,
    ambiguous,
    exponential,
    huge,
    many,
    recursive,
    nonsense,
    ordinary,
)


async def attack(server: ServerProcess, report: CampaignReport, options: argparse.Namespace) -> None:
    """Read one stream quietly, then while clients send grammars."""
    gaps: list[float] = []
    reading = asyncio.create_task(_read(server, gaps))
    await asyncio.sleep(min(QUIET_S, options.seconds / 4))
    quiet = percentiles(gaps, (50, 99, 100))
    gaps.clear()
    clients = [_send(server, report, random.Random(options.seed * 1000 + n)) for n in range(options.clients)]
    try:
        await asyncio.gather(*clients)
    finally:
        reading.cancel()
        for name, found in (("quiet", quiet), ("attacked", percentiles(gaps, (50, 99, 100)))):
            p50, p99, most = (1e3 * value for value in found)
            print(f"{name:9} gap between tokens: p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {most:.1f} ms")


async def _read(server: ServerProcess, gaps: list[float]) -> None:
    async with AsyncClient(server.address) as client:
        while True:
            last = None
            params = SamplingParams(max_tokens=400, temperature=1.0, seed=1, ignore_eos=True)
            async for _ in client.generate("The", params):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def _send(server: ServerProcess, report: CampaignReport, chance: random.Random) -> None:
    async with AsyncClient(server.address) as client:
        while True:
            kind = chance.choice(KINDS)
            try:
                structure = StructuredOutputs(**kind(chance))
                params = SamplingParams(
                    max_tokens=chance.choice([5, 60, 200]),
                    temperature=1.0,
                    seed=chance.getrandbits(32),
                    n=chance.choice([1, 1, 3]),
                    structured_outputs=structure,
                )
                async with asyncio.timeout(GIVE_UP_S):
                    await client.complete("The", params)
                outcome = "text"
            except InvalidRequest:
                outcome = "refused"
            except GenerationFailed as error:
                outcome = "failed"
                report.breach(f"{kind.__name__}: {error}")
            except Overloaded:
                outcome = "overloaded"
            except TimeoutError:
                outcome = "no answer"
                report.breach(f"{kind.__name__}: no answer for {GIVE_UP_S:.0f} s: {params!r:.1000}")
            except QuireError as error:
                outcome = type(error).__name__
                report.breach(f"{kind.__name__}: {error!r}")
            report.cases[f"{kind.__name__} {outcome}"] += 1


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--clients", type=int, default=8)
    raise SystemExit(run(attack, arguments, most_bytes=MAX_LIVE, level=quietest))
