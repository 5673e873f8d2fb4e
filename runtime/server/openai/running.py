"""One call in the engine: its requests, one per prompt, their output as an answer, and their ends.

A call ends in one way: all its requests are answered, or the first error ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ...common.errors import Cancelled, QuireError
from ...common.types import OutputChunk, Usage
from ...engine.facade import EngineFacade, Generation, NewParser
from ..requests.live_requests import LiveRequest, LiveRequests
from ..requests.request_log import quire_error
from .calls import Call
from .errors import HTTPAnswer
from .exchange import Exchange, HeldAnswer
from .formats import Format, PromptSize, total_usage
from .logprobs import CompletionLogprobs
from .prompt_logprobs import PromptPart

Echo = tuple[str, int | None]  # a text, and the id of the token that it is, if its logprobs are shown


class CallOutput(Protocol):
    """How a call's output becomes its answer: `begin`, `take` for each chunk, `end` unless it fails, `close`."""

    form: Format

    def begin(self, echoes: Sequence[Echo], new_parser: NewParser | None) -> None:
        """Begin the answer: the engine has accepted every request of the call.

        Each choice begins with its echo, if there are echoes. `new_parser` makes the parser of each choice's text, if
        that text may have reasoning or tool calls.
        """

    def take(self, index: int, chunk: OutputChunk) -> None:
        """Take the next chunk of a choice."""

    def end(self, usage: Usage) -> None:
        """End the answer: every request has ended."""

    def close(self) -> None:
        """Release what is held. Idempotent."""


class HeldOutput(HeldAnswer):
    """A call's output, parts of which are held until its end."""

    def __init__(self, exchange: Exchange, form: Format) -> None:
        super().__init__(exchange, "stream it, or ask for less")
        self.form = form


class StreamedOutput(HeldOutput):
    """Sends each chunk as events."""

    def begin(self, echoes: Sequence[Echo], new_parser: NewParser | None) -> None:
        """Send the head of the stream and the first events."""
        _prepare(self.form, echoes, new_parser)
        self._exchange.begin_events()
        self._exchange.send_events(self.form.opening())

    def take(self, index: int, chunk: OutputChunk) -> None:
        """Send the chunk."""
        self._exchange.send_events(self.form.events(index, chunk))
        if self.form.held_bytes != self._held_bytes:
            self.hold(self.form.held_bytes - self._held_bytes)

    def end(self, usage: Usage) -> None:
        """Send the last events."""
        self._exchange.send_events(self.form.ending(usage))
        self._exchange.end_events()


class WholeOutput(HeldOutput):
    """Holds the output until its end."""

    def begin(self, echoes: Sequence[Echo], new_parser: NewParser | None) -> None:
        """Send nothing yet."""
        _prepare(self.form, echoes, new_parser)

    def take(self, index: int, chunk: OutputChunk) -> None:
        """Hold the chunk."""
        if not self._is_closed:
            self.hold(self.form.choices[index].add(chunk))

    def end(self, usage: Usage) -> None:
        """Send the answer."""
        self.close()
        self._exchange.respond(HTTPAnswer(200, self.form.whole(usage)))


def _prepare(form: Format, echoes: Sequence[Echo], new_parser: NewParser | None) -> None:
    form.read_with(new_parser)
    for choice, echo in zip(form.choices, echoes, strict=False):
        choice.echo(*echo)


class Prompt:
    """One prompt of a call while it is live."""

    def __init__(self, live: LiveRequest, first_choice: int) -> None:
        self.live = live
        self.first_choice = first_choice
        self.generated = 0  # tokens
        self.outcome: OutputChunk | QuireError | None = None
        self._has_ended = False
        live.reader = self

    def end(self) -> None:
        """Release the request. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self.live.end(self.outcome)


class CallRunner:
    """Runs one call. `submit` it, then await `run` in the same task."""

    def __init__(self, exchange: Exchange, call: Call, engine: EngineFacade) -> None:
        self._exchange = exchange
        self._requests = list(call.requests)  # until they are accepted: they hold the prompts
        self._echo = call.echo
        self._prompt_logprobs = call.prompt_logprobs
        self._num_logprobs = call.num_logprobs
        self._n = call.params.n
        self._engine = engine
        self._prompts: list[Prompt] = []
        self._failure: QuireError | None = None
        self._ended = asyncio.Event()

    def submit(self, requests: LiveRequests) -> None:
        """Submit every prompt. Raises the refusal of all or the first; that of a later one ends the call in `run`."""
        tenant = self._exchange.tenant
        assert tenant is not None, "authenticated"
        requests.check_fit(tenant, self._requests)
        for index, request in enumerate(self._requests):
            try:
                live = requests.submit(tenant, self._exchange.number, request)
            except QuireError as error:
                if not self._prompts:
                    raise
                self._fail(error)
                return
            self._exchange.lives.append(live)
            self._prompts.append(Prompt(live, index * self._n))

    async def run(self, output: CallOutput) -> QuireError | None:
        """Answer the call with `output`, or return the first refusal or error of its requests."""
        try:
            accepted = await asyncio.gather(*(each.live.accepted() for each in self._prompts), return_exceptions=True)
            streams = []
            for each in accepted:
                if isinstance(each, BaseException):
                    self._fail(each)
                else:
                    streams.append(each)
            if self._failure is None:
                if self._prompt_logprobs is not None:
                    self._show_prompts(output.form, streams, self._prompt_logprobs)
                self._note_starts(output.form, streams)
                output.form.prompt_sizes = [
                    PromptSize(len(stream.prompt_token_ids), len(stream.prompt_token_ids) - 1 if request.echo else 0)
                    for request, stream in zip(self._requests, streams, strict=True)
                ]
                output.begin(await self._echoes(streams) if self._echo else [], streams[0].new_parser)
                self._requests.clear()
                for prompt, stream in zip(self._prompts, streams, strict=True):
                    stream.deliver(partial(self._take, output, prompt))
                await self._ended.wait()
            if self._failure is not None:
                return self._failure
            usages = [each.outcome.usage for each in self._prompts if isinstance(each.outcome, OutputChunk)]
            output.end(total_usage([usage for usage in usages if usage is not None]))
            return None
        finally:
            output.close()
            self._cancel_all()  # those that live on if this task was cancelled
            self._exchange.lives.clear()
            for prompt in self._prompts:
                prompt.end()

    def _show_prompts(self, form: Format, streams: Sequence[Generation], num_shown: int) -> None:
        """Have each choice take the logprobs of its prompt from what the engine echoes."""
        for prompt, stream in zip(self._prompts, streams, strict=True):
            for choice in form.choices[prompt.first_choice : prompt.first_choice + self._n]:
                choice.prompt = PromptPart(stream.prompt_token_ids, self._engine.token, num_shown, self._num_logprobs)
                if self._num_logprobs is None:
                    choice.logprobs = None

    def _note_starts(self, form: Format, streams: Sequence[Generation]) -> None:
        """Have the offsets of each choice count from the start of a text, if no token before it has text."""
        for prompt, stream, request in zip(self._prompts, streams, self._requests, strict=True):
            choices = form.choices[prompt.first_choice : prompt.first_choice + self._n]
            counted = [each.logprobs for each in choices if isinstance(each.logprobs, CompletionLogprobs)]
            if not counted or request.sampling_params.structured_outputs is not None:
                continue
            tokens = map(self._engine.token, stream.prompt_token_ids)
            has_text = any(token.data and not token.is_special for token in tokens)
            for logprobs in counted:
                logprobs.has_text = has_text

    async def _echoes(self, streams: Sequence[Generation]) -> list[Echo]:
        """Return what each choice begins with: the prompt, or its first token where the engine echoes the others."""
        echoes: list[Echo] = []
        for request, stream in zip(self._requests, streams, strict=True):
            ids = stream.prompt_token_ids
            if request.echo:
                token = self._engine.token(ids[0])
                echo: Echo = token.data_after(has_text=False).decode(errors="replace"), ids[0]
            elif isinstance(request.prompt, str):
                echo = request.prompt, None
            else:
                echo = await self._engine.detokenize(ids, tenant=request.tenant), None
            echoes += [echo] * self._n
        return echoes

    def _take(self, output: CallOutput, prompt: Prompt, item: OutputChunk | QuireError) -> None:
        """Pass on the next chunk of a prompt, or note the error that ended it. Never raises: the engine calls it."""
        if isinstance(item, Exception):
            prompt.outcome = self._fail(item)
        else:
            prompt.generated += len(item.token_ids)
            prompt.outcome = item if item.usage is not None else None
            if self._failure is None and not self._exchange.is_over:
                try:
                    if item.finish_reason == "cancelled":
                        raise Cancelled("the request was cancelled")
                    output.take(prompt.first_choice + item.choice, item)
                except Exception as error:
                    self._fail(error)
        if prompt.outcome is not None:
            prompt.end()
            if all(each.outcome is not None for each in self._prompts):
                self._ended.set()

    def _fail(self, error: BaseException) -> QuireError:
        """Note what ends the call, unless something has already, and cancel all that is live. Return the error."""
        if not isinstance(error, Exception):
            raise error
        failure = quire_error(error, client_id=self._exchange.number).with_traceback(None)  # that holds the prompt
        self._failure = self._failure or failure
        self._cancel_all()
        return failure

    def _cancel_all(self) -> None:
        for prompt in self._prompts:
            if prompt.outcome is None:
                prompt.live.cancel("client")
