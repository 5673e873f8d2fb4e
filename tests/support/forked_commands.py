"""Command lines of `quire` and Python programs, each in a fork of one process with all imports: a start costs none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

MAX_MESSAGE_BYTES = 1 << 20
PROGRAM = f"""
import json, os, socket, sys
from quire.runtime.cli import bench, generate, info, plan, serve, token
from quire.runtime.cli.main import main
from quire.runtime.llm import LLM
link = socket.socket(fileno=int(sys.argv[1]))
while True:
    message, streams, _, _ = socket.recv_fds(link, {MAX_MESSAGE_BYTES}, 3)
    if not message:
        break
    process = os.fork()
    if not process:
        link.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        arguments, folder, environment = json.loads(message)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if arguments[0] == "-c":
            exec(arguments[1])  # Its variables live to the end, as in a main program.
            sys.exit()
        sys.argv = ["quire", *arguments]
        main()
    for stream in streams:
        os.close(stream)
    link.send(str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
link.close()
"""


class ForkedCommands:
    """Runs one command line after another, with `flags` of the interpreter."""

    def __init__(self, environment: Mapping[str, str], flags: Sequence[str] = ()) -> None:
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *flags, "-c", PROGRAM, str(end.fileno())],
                env=environment,
                pass_fds=[end.fileno()],
            )

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        given: bytes = b"",
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `quire` with `arguments`, or a program after -c, in `folder`, and `given` as its standard input.

        Its output is captured, except where a stream is given. A status below 0 is the number of a signal.
        """
        with ExitStack() as files:
            standard_input, out, err = (files.enter_context(TemporaryFile()) for _ in range(3))
            standard_input.write(given)
            standard_input.seek(0)
            streams = (out.fileno() if stdout is None else stdout, err.fileno() if stderr is None else stderr)
            message = json.dumps([arguments, str(folder), dict(environment)]).encode()
            socket.send_fds(self._link, [message], [standard_input.fileno(), *streams])
            status = int(self._link.recv(MAX_MESSAGE_BYTES))
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, err)]
        return subprocess.CompletedProcess(["quire", *arguments], status, *texts)

    def close(self) -> None:
        self._link.close()
        self._process.wait()
