"""`Trials`: processes that try grammars before an engine compiles them; see `trial_process.py`.

Must not import grammars.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ...common.errors import Unavailable

MAX_PROCESSES = 2
TRIAL_PROCESS_BYTES = 24 << 20  # memory of a process at start
MAX_BYTES = 128 << 20  # growth by a grammar: a regular expression of 100 KB takes 60 MiB
MAX_LEFT_BYTES = 32 << 20  # growth that may remain after a grammar
MAX_CPU_S = 2  # CPU seconds per grammar, approximate
IDLE_S = 30  # idle time after which a process ends
TRIAL_WAIT_S = 30  # wall time per grammar, for overloaded machines
TRIAL_PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("trial_process.py")))
TRIAL_COMMAND = (*TRIAL_PROGRAM, *map(str, (MAX_CPU_S, MAX_BYTES, MAX_LEFT_BYTES)))
TOO_MUCH = f"compiling it takes more than {MAX_CPU_S} s or {MAX_BYTES >> 20} MiB"
FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP, signal.SIGXCPU)
# Exit statuses of a process that its grammar ended: where memory is refused, Rust aborts and Python's thread returns.
# All other statuses have external causes.
ENDS_BY_GRAMMARS = (0, *(-number for number in FAULTS))


class Trials:
    """A pool of trial processes.

    Any thread may call `refusal`, which starts a process if none is idle, or waits for one of `MAX_PROCESSES`.
    """

    def __init__(self) -> None:
        self._free = threading.Semaphore(MAX_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._trying: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None  # timer that ends idle processes
        self._is_closed = False

    def refusal(self, grammar: str, limits: Mapping[str, int]) -> str:
        """Return the fault of a grammar in llguidance's form under these limits; an empty text if it can be used.

        A process that is killed from outside is replaced once. Raises Unavailable if a grammar cannot be tried, and
        after `close`.
        """
        request = json.dumps([grammar, limits]).encode() + b"\n"
        with self._free:
            answer = self._answer(self._begun(), request)
            if answer is None:
                answer = self._answer(self._begun(is_new=True), request)
        if answer is None:
            raise _not_now("the processes that check them are ended from outside")
        return answer

    def close(self) -> None:
        """End the processes, even while they try a grammar. Idempotent."""
        with self._lock:
            self._is_closed = True
            trying = list(self._trying)
        for process in trying:
            process.kill()  # the thread that waits for its answer reads the end of the pipe
        self._end_idle()

    def _begun(self, *, is_new: bool = False) -> subprocess.Popen[bytes]:
        """Return a process for one grammar. Raises Unavailable."""
        if self._is_closed:
            raise _closed()
        process = (None if is_new else self._idle_process()) or _started()
        with self._lock:
            if not self._is_closed:
                self._trying.add(process)
                return process
        _end(process)
        raise _closed()

    def _answer(self, process: subprocess.Popen[bytes], request: bytes) -> str | None:
        """Return the result of `refusal`; None if the process was killed from outside. Raises Unavailable."""
        goes_on = False
        try:
            answer = _ask(process, request)
            goes_on = answer is not None and answer[1]
        finally:
            with self._lock:
                self._trying.discard(process)
            if goes_on:
                self._keep(process)
            else:
                _end(process)
        if answer is not None:
            return answer[0]
        if self._is_closed:
            raise _closed()
        return TOO_MUCH if process.returncode in ENDS_BY_GRAMMARS else None

    def _end_idle(self) -> None:
        with self._lock:
            idle = self._idle
            self._idle = []
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for process in idle:
            _end(process)

    def _idle_process(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return None

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                if self._timer is None:
                    self._timer = threading.Timer(IDLE_S, self._end_idle)
                    self._timer.daemon = True
                    self._timer.start()
                return
        _end(process)


def _closed() -> Unavailable:
    return Unavailable("the engine was closed before this grammar was tried; try again")


def _not_now(reason: str) -> Unavailable:
    return Unavailable(f"structured_outputs cannot be checked now: {reason}; try again later")


def _started() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            TRIAL_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A process group of the server's session: Ctrl-C in a terminal reaches the server only, and when the server
            # ends, the system also ends a stopped process of the group.
            process_group=0,
        )
    except OSError as error:
        raise _not_now(str(error.strerror)) from error


def _ask(process: subprocess.Popen[bytes], request: bytes) -> tuple[str, bool] | None:
    """Return a process's answer, and whether it continues; None if it has ended instead. Raises Unavailable."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    give_up_at = time.monotonic() + TRIAL_WAIT_S
    pipe = process.stdin.fileno()
    unsent = memoryview(request)
    os.set_blocking(pipe, False)
    with contextlib.suppress(BrokenPipeError):
        while unsent:
            _wait(pipe, select.POLLOUT, give_up_at)
            unsent = unsent[os.write(pipe, unsent) :]
    _wait(process.stdout.fileno(), select.POLLIN, give_up_at)
    line = process.stdout.readline()
    return tuple(json.loads(line)) if line.endswith(b"\n") else None


def _wait(pipe: int, event: int, give_up_at: float) -> None:
    """Wait until a pipe has room or data, or its other end is closed. Raises Unavailable."""
    ready = select.poll()
    ready.register(pipe, event)
    if not ready.poll(max(0.0, give_up_at - time.monotonic()) * 1e3):
        raise _not_now(f"there was no answer in {TRIAL_WAIT_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
