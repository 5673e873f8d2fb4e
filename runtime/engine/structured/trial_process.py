"""Tries grammars before an engine compiles them: the program of the processes that `trials.py` starts.

usage: python trial_process.py MAX_SECONDS MAX_BYTES MAX_LEFT_BYTES

A call of llguidance cannot be ended; some take gigabytes, or never end. A trial compiles a grammar for a vocabulary of
single bytes and consumes some bytes of text. The process reads lines of JSON, each with a grammar and the names and
values of its limits. It answers each with a line: the fault of the grammar, empty if it can be used, and whether the
process continues. The system kills the process at a grammar that takes too long or too much memory; the process exits
after a grammar that has left it larger by `MAX_LEFT_BYTES`. It imports nothing of Quire, which would take 40 MiB.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

STACK_BYTES = 256 << 20  # 256 KiB of references, the longest grammar, take 70 MB
NUM_TOKENS = 4  # bytes that a grammar consumes in a trial
MAX_TOKEN_S = 0.025  # CPU time of one token, during which the library holds the GIL
DEAD_END = "NoExtension"  # word of the library's message: no byte may follow, and the text may not end
END = 256  # the token that ends a text


class _Bytes:
    """A vocabulary in the form that llguidance reads."""

    bos_token_id = None
    eos_token_id = END
    tokens = (*(bytes([byte]) for byte in range(END)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    """Answer each line until the input ends."""
    max_s, max_bytes, max_left_bytes = map(int, sys.argv[1:])
    _limit(resource.RLIMIT_CORE, 0)
    tables = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[END])
    least_bytes = _data_bytes()
    _limit(resource.RLIMIT_DATA, least_bytes + max_bytes)
    for line in sys.stdin:
        grammar, limits = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + max_s + 1)
        refusal = _tried(tables, grammar, LLParserLimits(**limits))
        goes_on = _data_bytes() < least_bytes + max_left_bytes
        print(json.dumps([refusal, goes_on]), flush=True)
        if not goes_on:
            return


def _limit(kind: int, value: int) -> None:
    """Set the soft limit; the hard limit stays."""
    highest = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest))


def _tried(tables: LLTokenizer, grammar: str, limits: LLParserLimits) -> str:
    try:
        message = LLMatcher.validate_grammar(grammar, limits=limits)
        if not message or message.startswith("WARNING"):
            return _walked(LLMatcher(tables, grammar, log_level=0, limits=limits)) or message
        return message
    except MemoryError:
        raise  # ends the process, as the memory limit does elsewhere
    except BaseException as error:  # a panic of llguidance, too
        return str(error)


def _walked(matcher: LLMatcher) -> str:
    """Consume a few bytes that the grammar allows.

    Reaching a limit is not a fault here, but later an error of the request.
    """
    for _ in range(NUM_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(END) if mask >> byte & 1]
        if matcher.is_error() and DEAD_END in matcher.get_error():
            return "no text matches it, or none that begins as it allows"
        if matcher.is_error() or not allowed:
            break
        began_s = time.thread_time()
        matcher.consume_token(allowed[len(allowed) // 2])
        if time.thread_time() - began_s > MAX_TOKEN_S:
            return f"reading a character of its text takes more than {MAX_TOKEN_S * 1e3:.0f} ms"
    return ""


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        found: dict[str, Any] = dict(line.split(":", 1) for line in file)
    return int(found["VmData"].split()[0]) << 10


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a stopped process must end with its server
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
