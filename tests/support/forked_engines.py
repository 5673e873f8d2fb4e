"""Engine processes that are forks of one process with all imports: a start costs none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from quire.runtime.workers import engine_process

MAX_MESSAGE_BYTES = 1 << 20
PROGRAM = f"""
import json, os, runpy, signal, socket, sys, traceback
from quire.runtime.workers import engine_main
def run(script, code):
    try:
        runpy.run_path(script, run_name="__main__") if code is None else exec(code, {{"__name__": "__main__"}})
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
link = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(link, {MAX_MESSAGE_BYTES}, 3)
    if not message:
        break
    request = json.loads(message)
    if isinstance(request, int):
        ended, status = os.waitpid(request, os.WNOHANG)
        link.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
        continue
    process = os.fork()
    if not process:
        link.close()
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(streams.pop(), 2)
        script, code, folder, environment = request
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [script, *map(str, streams), str(os.getppid())]
        os._exit(run(script, code))
    for stream in streams:
        os.close(stream)
    link.send(str(process).encode())
"""


class ForkedEngine:
    """One process, with the methods of `subprocess.Popen` that `EngineProcess` calls."""

    def __init__(self, engines: ForkedEngines, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._engines = engines

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._engines.ask(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedEngines:
    """The process that forks. The engine processes end with it."""

    def __init__(self) -> None:
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(end.fileno())],
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process with threads cannot be forked
                pass_fds=[end.fileno()],
            )

    def start(self, link_fd: int, heartbeat_fd: int) -> ForkedEngine:
        """Start `engine_process.COMMAND`, the program of an engine process or the script of a test."""
        *_, option, program = engine_process.COMMAND
        script, code = (option, program) if option == "-c" else (program, None)
        request = [script, code, os.getcwd(), dict(os.environ)]
        return ForkedEngine(self, self.ask(request, link_fd, heartbeat_fd, 2))

    def ask(self, request: object, *streams: int) -> Any:
        """Return the id of a new process, or the exit status of the process with this id, None while it runs."""
        socket.send_fds(self._link, [json.dumps(request).encode()], streams)
        return json.loads(self._link.recv(MAX_MESSAGE_BYTES))

    def close(self) -> None:
        self._link.close()
        self._process.wait()
