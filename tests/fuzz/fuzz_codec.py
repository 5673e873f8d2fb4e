"""Feed broken frames to the decoder: for any bytes it must return frames or Malformed, or raise ProtocolError.

usage: fuzz_codec.py [--seconds 60] [--seed 1] [--atheris]

Each case is decoded in one piece and in random pieces, with the same result; decoded frames are encoded and decoded
again, with the same result; every 25th case runs under tracemalloc, to check that memory is bounded by the bytes sent.
`--atheris` searches for code paths by coverage instead of at random (pip install atheris, if Python has a wheel of it).
Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from mutations import Case, framed, message, mutated, packed
from quire.runtime.common.errors import InvalidRequest, ProtocolError
from quire.runtime.protocol import codec
from quire.runtime.protocol.codec import Decoder, Malformed, encode
from quire.runtime.protocol.frames import CLIENT_FRAMES, MAX_FRAME_BYTES, SERVER_FRAMES

SCHEMAS = (CLIENT_FRAMES, SERVER_FRAMES)
TRACED = 25  # one case in TRACED runs under tracemalloc
MAX_PEAK_PER_BYTE = 128  # a one-byte msgpack array is a Python object of 64 bytes, held twice while it is converted
MAX_PEAK_BASE = 4 << 20  # bytes allowed for any frame, however short
REPORTED_BREACHES = 5


class Breach(Exception):
    """The decoder broke its contract."""


def main() -> int:
    options = _options()
    if options.atheris:
        return _fuzz_by_coverage(options)
    rng = Random(options.seed)
    outcomes = Counter[str]()
    breaches: list[str] = []
    slowest_s = peak_per_byte = 0.0
    cases = 0
    deadline = time.perf_counter() + options.seconds
    while time.perf_counter() < deadline and len(breaches) < REPORTED_BREACHES:
        case = mutated(rng)
        cases += 1
        started = time.perf_counter()
        try:
            outcomes[check(case.data, rng)] += 1
        except Breach as breach:
            breaches.append(f"case {cases} of seed {options.seed}: {breach}: {case.data.hex()}")
        slowest_s = max(slowest_s, time.perf_counter() - started)
        if cases % TRACED == 0:
            peak_per_byte = max(peak_per_byte, _peak(case, breaches) / max(len(case.data), 4096))
    print(f"cases        {cases}")
    print(f"outcomes     {', '.join(f'{name} {count}' for name, count in outcomes.most_common())}")
    print(f"slowest      {slowest_s * 1000:.1f} ms for one case, decoded three times")
    print(f"memory       at most {peak_per_byte:.1f} bytes per byte sent (of cases over 4 KiB; {TRACED}th cases)")
    print(f"breaches     {len(breaches)}")
    for breach in breaches:
        print(f"  {breach}")
    return 1 if breaches else 0


def check(data: bytes, rng: Random) -> str:
    """Decode `data` and return the outcome in a word. Raises Breach."""
    outcome = ""
    for schema in SCHEMAS:
        whole, error = _decode([data], schema)
        pieces = _decode(_pieces(data, rng), schema)
        if repr((whole, error)) != repr(pieces):
            raise Breach(f"in one piece {(whole, error)}, in several {pieces}")
        _check_round_trip(whole, schema)
        outcome = outcome or ("refused" if error else "incomplete" if not whole else _word(whole[0]))
    return outcome


def _decode(pieces: list[bytes], schema: Any) -> tuple[list[Any], str]:
    """Return the frames before the protocol error, and the error."""
    decoder = Decoder(schema, MAX_FRAME_BYTES)
    received = []
    error = ""
    try:
        for piece in pieces:
            received += decoder.feed(piece)
    except ProtocolError as refusal:
        error = str(refusal)
    except Exception as crash:
        raise Breach(f"{type(crash).__name__}: {crash}") from crash
    for frame in received:
        if not isinstance(frame, (*schema.values(), Malformed)):
            raise Breach(f"returned a {type(frame).__name__}")
    return received, error


def _pieces(data: bytes, rng: Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(1, 5)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _check_round_trip(received: list[Any], schema: Any) -> None:
    for frame in received:
        if isinstance(frame, Malformed):
            continue
        try:
            again, error = _decode([encode(frame)], schema)
        except InvalidRequest:
            continue  # encoding may add bytes at the size limit: a number may get a wider type
        if error or repr(again) != repr([frame]):
            raise Breach(f"{frame} came back as {again or error}")


def _word(frame: Any) -> str:
    return "malformed" if isinstance(frame, Malformed) else type(frame).__name__.lower()


def _peak(case: Case, breaches: list[str]) -> int:
    """Return the peak of bytes allocated while `case` is decoded once."""
    tracemalloc.start()
    try:
        _decode([case.data], CLIENT_FRAMES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > MAX_PEAK_BASE + MAX_PEAK_PER_BYTE * len(case.data):
        breaches.append(f"{peak} bytes allocated for {len(case.data)}: {case.data[:200].hex()}")
    return peak


def _fuzz_by_coverage(options: argparse.Namespace) -> int:
    import atheris  # not a dependency: not every Python has a wheel

    rng = Random(options.seed)
    for function in filter(inspect.isfunction, (*vars(codec).values(), *vars(Decoder).values())):
        atheris.instrument_func(function)
    with tempfile.TemporaryDirectory() as corpus:
        for index in range(200):
            (Path(corpus) / str(index)).write_bytes(packed(message(rng)))
        limits = [f"-max_total_time={options.seconds:.0f}", f"-seed={options.seed}", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *limits, corpus], lambda payload: check(framed(payload), rng))
        atheris.Fuzz()  # prints its own figures, and exits with a status other than 0 at a Breach
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
