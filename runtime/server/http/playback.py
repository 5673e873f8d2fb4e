"""`Playback`: the logs of one call, one per prompt, played into one answer.

A call ends in one way: all its requests are answered, or the first error ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ...common.errors import QuireError
from ...engine.facade import EngineFacade
from ..app_context import AppContext
from ..requests.live_requests import LiveRequests
from ..requests.output_log import OutputLog
from ..requests.output_reader import OutputReader, Pace
from .answer_writers import AnswerWriter, BodyWriter, EventWriter
from .calls import Call
from .formats import Format, PromptSize, total_usage
from .logprobs import CompletionLogprobs
from .prompt_logprobs import PromptPart
from .request_cycle import RequestCycle

FRAMES_PER_CHUNK = 4  # cost in frames of a chunk that waited, since it is read and rendered again


def log_reader(cycle: RequestCycle, log: OutputLog) -> OutputReader:
    """Return a reader of a log for a cycle."""
    pace = Pace(
        cycle.send_buffer,
        cycle.authenticated.output_turns,
        waits_while_long=log.is_kept,  # otherwise waiting would only move the memory
        frames_per_chunk=FRAMES_PER_CHUNK,
    )
    reader = OutputReader(log, pace)
    cycle.cancels.append(reader.leave)
    return reader


async def answer_call(cycle: RequestCycle, call: Call, form: Format, context: AppContext) -> None:
    """Submit a call whose output is not kept, and answer it. Raises a refusal."""
    try:
        playback = Playback(cycle, call, context.models.engine(call.requests[0].model))
        playback.submit(context.requests)
    except QuireError as error:
        context.requests.log.refused(cycle.authenticated.name, cycle.number, error.code, error.retry_after_ms)
        raise
    writer = (EventWriter if call.stream else BodyWriter)(cycle, form)
    del call  # the call holds the prompt
    if (failure := await playback.run(writer)) is not None:
        cycle.refuse(failure, cycle.form.known)


class Playback:
    """Answers one call. `submit` it, or `add` the reader of its only request; then await `run` in the same task."""

    def __init__(self, cycle: RequestCycle, call: Call, engine: EngineFacade) -> None:
        self._cycle = cycle
        self._requests = list(call.requests)  # requests, which hold the prompts, until they are accepted
        self._echo = call.echo
        self._prompt_logprobs = call.prompt_logprobs
        self._num_logprobs = call.num_logprobs
        self._n = call.params.n
        self._engine = engine
        self._readers: list[OutputReader] = []
        self._failure: QuireError | None = None
        self._ended = asyncio.Event()

    def submit(self, requests: LiveRequests) -> None:
        """Submit every prompt.

        Raises a refusal of the call or of its first prompt; a later refusal ends the call in `run`.
        """
        tenant = self._cycle.authenticated
        requests.check_fit(tenant, self._requests)
        for request in self._requests:
            try:
                live = requests.submit(tenant, self._cycle.number, request)
            except QuireError as error:
                if not self._readers:
                    raise
                self._fail(error)
                return
            self.add(log_reader(self._cycle, OutputLog(live)))

    def add(self, reader: OutputReader) -> None:
        """Answer the next prompt with the output of `reader`."""
        self._readers.append(reader)

    async def accepted(self) -> QuireError | None:
        """Wait until the engine has accepted every request. Return the first refusal."""
        for refusal in await asyncio.gather(*(reader.accepted() for reader in self._readers)):
            if refusal is not None:
                self._fail(refusal)
        return self._failure

    async def run(self, writer: AnswerWriter) -> QuireError | None:
        """Write the answer with `writer`, or return the first refusal or error of its requests."""
        try:
            if await self.accepted() is None:
                await self._prepare(writer.form)
                writer.begin()
                for index, reader in enumerate(self._readers):
                    reader.start(partial(writer.write, index * self._n), partial(self._note_over, reader))
                await self._ended.wait()
            if self._failure is not None:
                return self._failure
            usages = [reader.usage for reader in self._readers]
            writer.end(total_usage([usage for usage in usages if usage is not None]))
            return None
        finally:
            writer.close()
            self._cycle.cancels.clear()
            for reader in self._readers:
                reader.end()

    async def _prepare(self, form: Format) -> None:
        """Pass the shown parts of the prompts, and the parsers, to `form`. The prompts are released."""
        logs = [reader.log for reader in self._readers]
        if self._prompt_logprobs is not None:
            self._show_prompts(form, logs, self._prompt_logprobs)
        self._note_starts(form, logs)
        form.prompt_sizes = [
            PromptSize(log.num_prompt_tokens, log.num_prompt_tokens - 1 if request.echo else 0)
            for request, log in zip(self._requests, logs, strict=True)
        ]
        form.read_with(logs[0].new_parser)
        if self._echo:
            await self._add_echoes(form, logs)
        self._requests.clear()

    def _show_prompts(self, form: Format, logs: Sequence[OutputLog], num_shown: int) -> None:
        """Make each choice take the logprobs of its prompt from the engine's echo."""
        for index, log in enumerate(logs):
            for choice in form.choices[index * self._n : (index + 1) * self._n]:
                choice.prompt = PromptPart(log.prompt_token_ids, self._engine.token, num_shown, self._num_logprobs)
                if self._num_logprobs is None:
                    choice.logprobs = None

    def _note_starts(self, form: Format, logs: Sequence[OutputLog]) -> None:
        """Make the offsets of each choice count from the start of its text, unless a token before it has text."""
        for index, (log, request) in enumerate(zip(logs, self._requests, strict=True)):
            if request.sampling_params.structured_outputs is not None:
                continue
            for choice in form.choices[index * self._n : (index + 1) * self._n]:
                if isinstance(choice.logprobs, CompletionLogprobs):
                    choice.logprobs.has_text = log.prompt_has_text

    async def _add_echoes(self, form: Format, logs: Sequence[OutputLog]) -> None:
        """Begin each choice with the prompt, or with its first token where the engine echoes the others."""
        for index, (request, log) in enumerate(zip(self._requests, logs, strict=True)):
            first: int | None = None
            if request.echo:
                first = log.prompt_token_ids[0]
                text = self._engine.token(first).data_after(has_text=False).decode(errors="replace")
            elif isinstance(request.prompt, str):
                text = request.prompt
            else:
                text = await self._engine.detokenize(log.prompt_token_ids, tenant=request.tenant)
            for choice in form.choices[index * self._n : (index + 1) * self._n]:
                choice.echo(text, first)

    def _note_over(self, reader: OutputReader) -> None:
        """End the reader of one prompt, and the call if the reader failed or was the last one."""
        reader.end()
        if reader.failure is not None:
            self._fail(reader.failure)
        if all(each.is_over for each in self._readers):
            self._ended.set()

    def _fail(self, error: QuireError) -> None:
        """Note the error that ends the call, unless there is an earlier one, and cancel all live requests."""
        self._failure = self._failure or error
        for reader in self._readers:
            reader.mute()
            if not (reader.is_over or reader.log.has_ended):
                reader.cancel("client")
