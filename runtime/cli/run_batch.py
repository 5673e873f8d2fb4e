"""`quire run-batch`: answer a file of requests with a model in this process, or by a server.

Answers are written in the order of the lines. A run that was interrupted or killed continues after the answers that it
finds in the output, without repeating or losing a line.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import uvloop
from cyclopts import Parameter

from ..common.errors import ConfigError
from ..common.logs import log_to_stderr
from ..common.settings import Settings
from ..model import model_name, model_path
from ..server.batches.line_files import AnswerFile, count_lines, read_lines
from ..server.batches.lines import BatchLine, LineAnswer
from ..server.batches.run import AnsweredLine, FixedSlots, OrderedRun
from ..server.openai.local_requests import without_sockets
from ..server.tenancy.tenants import Tenant
from ..tools.batch_requests import RemoteRequests
from .flags import BatchFlags, MemoryFlags, ModelFolder, SchedulingFlags, read_settings, settings_from
from .serve import open_engine

PROGRESS_LINE_S = 5.0
REMOTE_CONCURRENCY = 64
BATCH_LOG_LEVEL: Literal["warning"] = "warning"
LINES_PER_SLOT = 2  # lines in the engine per sequence that it runs: the queue is never empty

Send = Callable[[BatchLine], Awaitable[LineAnswer]]


def run_batch(
    model: ModelFolder = None,
    /,
    *,
    input_file: Annotated[Path, Parameter(name=("--input-file", "-i"), help="The requests, one JSON line each.")],
    output_file: Annotated[
        Path, Parameter(name=("--output-file", "-o"), help="The answers; an unfinished file is continued.")
    ],
    server: Annotated[
        str | None, Parameter(help="URL of a server that answers, such as http://127.0.0.1:8000/v1. Default: MODEL.")
    ] = None,
    api_key: Annotated[str | None, Parameter(help="Key for that server. Default: OPENAI_API_KEY.")] = None,
    max_concurrency: Annotated[
        int | None, Parameter(help="Requests at a time. Default: 64 at a server, else as many as the engine takes.")
    ] = None,
    quiet: Annotated[bool, Parameter(help="Show no progress.", negative="")] = False,
    memory: MemoryFlags | None = None,
    scheduling: SchedulingFlags | None = None,
    batch: BatchFlags | None = None,
) -> None:
    """Answer all lines. Raises ConfigError or ModelError before, and Unavailable if the run must be continued later."""
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, not {max_concurrency}")
    if server is not None and model is not None:
        raise ConfigError("give MODEL or --server, not both: a server has its own model")
    settings = (settings_from if server is None else read_settings)(model, memory, scheduling, batch)
    with _answers(input_file, output_file) as (lines, answers):
        progress = BatchProgress(answers, count_lines(input_file), quiet=quiet)
        if answers.num_lines < progress.total:
            uvloop.run(_run(settings, server, api_key, max_concurrency, lines, progress))
        progress.print_end()


@contextmanager
def _answers(input_file: Path, output_file: Path) -> Iterator[tuple[Iterator[tuple[int, bytes]], AnswerFile]]:
    """Yield the lines that have no answer, and the file of answers. Raises ConfigError."""
    try:
        input_file.open("rb").close()
    except OSError as error:
        raise ConfigError(f"--input-file: {input_file} cannot be read: {error.strerror}") from None
    if not input_file.is_file():
        raise ConfigError(f"--input-file: {input_file} is not a file; it is read twice")
    if output_file.exists() and not output_file.is_file():
        raise ConfigError(f"--output-file: {output_file} is not a file; an unfinished run is continued from it")
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError("--output-file is the input file; name another one")
    answers = AnswerFile(output_file)
    try:
        lines = read_lines(input_file)
        answers.resume(lines)
        yield lines, answers
    finally:
        answers.close()


class BatchProgress:
    """The state of a run, and its lines on standard error."""

    def __init__(self, answers: AnswerFile, total: int, *, quiet: bool) -> None:
        self.answers = answers
        self.total = total
        self._quiet = quiet
        self._first = answers.num_lines
        self._started_s = time.monotonic()
        if self._first:
            self._print(f"{answers.path} has {self._first:,} of {total:,} answers; the run continues after these")

    async def watch(self) -> None:
        """Print the progress, and put the answers on the disk, every `PROGRESS_LINE_S`."""
        while True:
            await asyncio.sleep(PROGRESS_LINE_S)
            await asyncio.to_thread(self.answers.sync)
            self._print(self._state())

    def print_end(self) -> None:
        """Put all answers on the disk, and print the totals."""
        self.answers.sync()
        self._print(self._state())

    def _state(self) -> str:
        answers = self.answers
        rate = (answers.num_lines - self._first) / max(time.monotonic() - self._started_s, 1e-3)
        return f"{answers.num_lines:,} of {self.total:,} lines, {answers.num_errors:,} errors, {rate:,.1f} lines/s"

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(f"quire: {line}", file=sys.stderr, flush=True)


async def _run(
    settings: Settings,
    server: str | None,
    api_key: str | None,
    max_concurrency: int | None,
    lines: Iterator[tuple[int, bytes]],
    progress: BatchProgress,
) -> None:
    """Answer the lines. Raises the error that ends the run."""
    opening = _local(settings) if server is None else _remote(server, api_key or os.environ.get("OPENAI_API_KEY"))
    async with opening as (send, concurrency):

        def write(answered: AnsweredLine) -> None:
            progress.answers.write(answered.data, is_error=answered.is_error)

        watching = asyncio.create_task(progress.watch())
        running = asyncio.create_task(OrderedRun(send, write, FixedSlots(max_concurrency or concurrency)).run(lines))
        try:
            done, _ = await asyncio.wait({watching, running}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (watching, running):
                task.cancel()
            await asyncio.gather(watching, running, return_exceptions=True)


@asynccontextmanager
async def _local(settings: Settings) -> AsyncIterator[tuple[Send, int]]:
    """Yield a function that answers with the model, and the number of lines that it should have at a time."""
    log_to_stderr("console", BATCH_LOG_LEVEL)
    server = msgspec.structs.replace(settings.server, log_level=BATCH_LOG_LEVEL)
    settings = msgspec.structs.replace(settings, server=server)
    name = settings.server.served_model_name or model_name(model_path(settings.engine.model))
    tenant = Tenant("")
    async with open_engine(settings) as engine, without_sockets(engine, settings.server, name) as requests:
        num_sequences = engine.info.max_num_seqs * max(1, engine.info.num_processes)
        yield (lambda line: requests.send(tenant, line)), LINES_PER_SLOT * num_sequences


@asynccontextmanager
async def _remote(server: str, api_key: str | None) -> AsyncIterator[tuple[Send, int]]:
    """Yield a function that answers by a server, and the number of lines that it should have at a time."""
    requests = RemoteRequests(server, api_key)
    try:
        yield requests.send, REMOTE_CONCURRENCY
    finally:
        await requests.close()
