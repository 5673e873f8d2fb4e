"""Kill `quire run-batch` at random moments: the output must be that of an undisturbed run, every line once.

usage: python tests/fuzz/kill_batches.py [--lines 10000] [--kills 10] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-P", "-m", "quire.runtime.cli.main", "run-batch", "--kv-cache-memory", "64MiB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        source.write_text("".join(f"{json.dumps(line(number, choose))}\n" for number in range(options.lines)))
        begun_s = time.monotonic()
        expected = finished(source, Path(folder) / "undisturbed.jsonl")
        seconds = time.monotonic() - begun_s
        print(
            f"undisturbed: {options.lines} lines in {seconds:.1f} s, {options.lines / seconds:.1f} lines/s", flush=True
        )
        output = Path(folder) / "out.jsonl"
        for goal in sorted(choose.randrange(options.lines) for _ in range(options.kills)):
            print(f"killed after {killed(source, output, goal)} answers", flush=True)
        if finished(source, output) != expected:
            sys.exit("FAILED: the answers differ from those of an undisturbed run")
    print("every line has the answer of an undisturbed run, once and in order")


def line(number: int, choose: random.Random) -> dict[str, object]:
    """Return a request of some kind; some are errors."""
    body: dict[str, object] = {"max_tokens": choose.randrange(0, 24), "n": choose.choice((1, 1, 1, 2))}
    if choose.random() < 0.5:
        body["temperature"] = choose.choice((0, 0.7))
    if choose.random() < 0.5:
        return request(number, "/v1/completions", {**body, "prompt": f"The module {number}"})
    messages = [{"role": "user", "content": f"Write about {number}"}]
    return request(number, "/v1/chat/completions", {**body, "messages": messages})


def request(number: int, url: str, body: dict[str, object]) -> dict[str, object]:
    return {"custom_id": f"line {number}", "method": "POST", "url": url, "body": body}


def finished(source: Path, output: Path) -> bytes:
    """Run to the end. Return the answers without the times at which they were computed."""
    subprocess.run([*COMMAND, "-i", source, "-o", output, "--quiet"], check=True)
    return re.sub(rb'"created":\d+', b'"created":0', output.read_bytes())


def killed(source: Path, output: Path, goal: int) -> int:
    """Run until the output has `goal` answers and a moment more, and kill. Return the number of answers."""
    process = subprocess.Popen([*COMMAND, "-i", source, "-o", output, "--quiet"])
    while process.poll() is None and num_lines(output) < goal:
        time.sleep(0.05)
    time.sleep(random.random() / 10)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return num_lines(output)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main()
