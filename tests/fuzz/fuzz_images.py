"""Read broken image files: each must become pixels or raise InvalidRequest, in little memory and time.

usage: fuzz_images.py [--cases 20000] [--seed 1]

A case is a small file of any format and mode, or one that declares many pixels, with one to four changes: bytes
flipped, numbers replaced by extreme ones, ranges removed, repeated or exchanged with those of another file, the file
truncated, and the checksums of PNG chunks made right again. Images that are read are prepared as a model takes them.
Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import resource
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.images import read_image_processor
from quire.runtime.engine.images.decoding import decode_image

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
FAMILIES = ("smolvlm", "qwen3_vl", "gemma3")
MAX_PIXELS = 1 << 22
MAX_GROWTH = 24 * MAX_PIXELS  # bytes of memory beyond what the process has before the first case
MAX_SECONDS = 2.0  # CPU time of a case
ADDRESS_SPACE = 4 << 30  # more than this process needs, less than a file can claim
REPORTED_BREACHES = 5
PNG = b"\x89PNG\r\n\x1a\n"
EXTREMES = (0, 1, 2, 7, 255, 1 << 15, (1 << 16) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warnings.simplefilter("ignore")  # Pillow warns about false sizes in files
    random = Random(options.seed)
    results = Counter[str]()
    slowest = 0.0
    files = base_files()
    processors = [read_image_processor(GOLDENS / family) for family in FAMILIES]
    before = max_rss()
    for case in range(options.cases):
        data = mutated(random, files)
        started = time.process_time()
        try:
            image = decode_image(data, MAX_PIXELS)
            random.choice(processors).process(image)
            results["read"] += 1
        except InvalidRequest:
            results["refused"] += 1
        except Exception:
            results["breach"] += 1
            if results["breach"] <= REPORTED_BREACHES:
                print(f"case {case}: {traceback.format_exc()}", file=sys.stderr)
        slowest = max(slowest, time.process_time() - started)
    growth = max_rss() - before
    print(", ".join(f"{name} {count}" for name, count in results.most_common()))
    print(f"slowest case {slowest:.2f} s of CPU; memory grew by {growth >> 20} of {MAX_GROWTH >> 20} MiB allowed")
    return 1 if results["breach"] or slowest > MAX_SECONDS or growth > MAX_GROWTH else 0


def max_rss() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def base_files() -> list[bytes]:
    """Return the files that cases are made of: the golden ones, and PNG files that declare much and hold little."""
    files = [path.read_bytes() for path in sorted((GOLDENS / "files").iterdir())]
    rows = zlib.compress(bytes(1 << 22))
    for width, height in ((2048, 2048), (1, 1 << 22), (1 << 22, 1), (1 << 15, 1 << 15), (1 << 31, 1), (10_000, 10_000)):
        for depth, color in ((8, 2), (16, 6), (1, 0), (8, 3)):
            header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
            files.append(PNG + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b""))
    return files


def mutated(random: Random, files: Sequence[bytes]) -> bytes:
    """Return one of the files with some changes; rarely it is valid."""
    data = bytearray(random.choice(files))
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1) if random.random() < 0.5 else random.randrange(min(len(data), 200) + 1)
        length = random.choice((1, 2, 4, 16, 300))
        match random.randrange(7):
            case 0:
                data[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                data[at : at + 4] = struct.pack(random.choice("<>") + "I", random.choice(EXTREMES))
            case 2:
                data[at : at + 2] = struct.pack(random.choice("<>") + "H", random.choice(EXTREMES) & 0xFFFF)
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * random.choice((1, 2, 50))
            case 5:
                other = random.choice(files)
                start = random.randrange(len(other))
                data[at : at + length] = other[start : start + length]
            case 6:
                del data[at:]
    return with_checksums(bytes(data)) if random.random() < 0.7 else bytes(data)


def with_checksums(data: bytes) -> bytes:
    """Return a PNG file whose chunks have the right checksums, so that their contents are read."""
    if not data.startswith(PNG):
        return data
    out = [PNG]
    at = len(PNG)
    while at + 12 <= len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        out.append(png_chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join(out)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


if __name__ == "__main__":
    sys.exit(main())
