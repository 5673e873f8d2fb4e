"""`LiveOutputs`: the outputs of requests that have not ended. The core's updates become chunks of their streams.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import msgspec

from ...scheduler import FinalCounters, RequestUpdate
from ..common.errors import GenerationFailed, Overloaded, QuireError, Unavailable
from ..common.types import FinishReason, OutputChunk, Usage
from .adapters import NO_ADAPTER, Adapter
from .core import Core, CoreListener, Prefilled
from .embedding.embedder import Embedder
from .embedding.no_embedder import NoEmbedder
from .error_mapping import failure_error
from .facade import EngineObserver, RequestStats, SilentObserver, StepStats
from .output import SequenceOutput, StreamingOutput


class LiveOutputs:
    """Passes updates of sequences to their outputs, other updates to the embedder, and ends to the observer."""

    def __init__(self, core: Core, embedder: Embedder | NoEmbedder, release_adapter: Callable[[Adapter], None]) -> None:
        """`release_adapter` is called once for each request that ends or is discarded."""
        self.observer: EngineObserver = SilentObserver()
        self.image_bytes = 0  # pixels of all live requests
        self._core = core
        self._embedder = embedder
        self._release_adapter = release_adapter
        self._sequences: dict[int, SequenceOutput] = {}  # request id of the core -> its output, until it ends

    @property
    def listener(self) -> CoreListener:
        """The callables for the core."""
        return CoreListener(self._publish, self._fail_request, self._observe_step, self._fail_all)

    def add(self, output: StreamingOutput, max_image_bytes: int | None) -> None:
        """Register the sequences of a request.

        Raises Overloaded for images beyond `max_image_bytes`, None for no limit.
        """
        num_bytes = output.image_bytes
        if max_image_bytes is not None and self.image_bytes + num_bytes > max_image_bytes:
            raise Overloaded(
                f"the images of this request take {num_bytes} bytes, those of others {self.image_bytes}, and all may "
                f"take {max_image_bytes} (`max_image_memory`)"
            )
        self.image_bytes += num_bytes
        self._sequences.update((sequence.request.request_id, sequence) for sequence in output.sequences)

    def discard(self, output: StreamingOutput, why: str) -> None:
        """Forget a request that was added, and end its sequences on the core, without a report."""
        self._drop_sequences(output, why)
        self._release(output)

    def end_former(self, output: StreamingOutput, ends: Sequence[OutputChunk]) -> None:
        """Publish the ends of outputs whose tokens all come from another server, with the usage if none is open."""
        for index, end in enumerate(ends, 1):
            is_last = index == len(ends) and not output.sequences
            usage = output.usage() if is_last else None
            if usage is None:
                output.stream.put_read(end)
            else:
                output.stream.end(msgspec.structs.replace(end, usage=usage), is_read=True)
                self._report(output, end.finish_reason, None, usage, time.monotonic())

    def stop(self) -> None:
        """End every request that the core still ends with Unavailable."""
        for sequence in self._sequences.values():
            sequence.output.error = Unavailable("the engine was closed before this request ended; try again")

    # CoreListener

    def _observe_step(self, stats: StepStats, prefilled: Sequence[Prefilled]) -> None:
        self.observer.on_step(stats)
        for request_id, num_tokens in prefilled:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.is_first_to_prefill():
                sequence.output.stream.note_prefill(num_tokens)

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:  # an encode request, or a sequence of a failed request
                self._embedder.receive(update)
                continue
            output = sequence.output
            num_before = sequence.num_tokens
            try:
                tokens, text = sequence.read(update)
                chunks = output.chunks(sequence, tokens, text)
            except Exception as error:  # the detokenizer failed: only this request ends
                text = f"the generated tokens could not be turned into text: {error}"
                self._fail(output, GenerationFailed(text), now)
                continue
            num_tokens = sequence.num_tokens - num_before
            if num_tokens:
                last_s = sequence.last_tokens_s
                sequence.last_tokens_s = now
                if last_s is None:
                    sequence.first_token_s = now
                self.observer.on_tokens(num_tokens, None if last_s is None else now - last_s)
            if sequence.finish_reason is not None:
                self._end(sequence, update, chunks, now)
                continue
            for chunk in chunks:
                output.stream.put(chunk)
            if update.error is not None and update.request_id in self._sequences:  # a reader may cancel its request
                self._fail(output, output.error or failure_error(update.error, output.request.deadline_ms), now)

    def _fail_request(self, request_id: int, error: QuireError, counters: FinalCounters) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            self._embedder.fail(request_id, error)
        else:
            sequence.counters = counters
            self._fail(sequence.output, sequence.output.error or error, time.monotonic())

    def _fail_all(self) -> None:
        """End the remaining requests after the core has ended; the step that broke it may have ended some."""
        now = time.monotonic()
        self._embedder.fail_all()
        for output in {id(sequence.output): sequence.output for sequence in self._sequences.values()}.values():
            error = output.error or GenerationFailed("the engine stopped unexpectedly")
            output.stream.end(error)
            self._report(output, None, error, output.usage(), now)
        self._sequences.clear()

    # Ends

    def _end(self, sequence: SequenceOutput, update: RequestUpdate, chunks: Sequence[OutputChunk], now: float) -> None:
        """Forget a sequence that has ended. The last chunk of its request's last sequence gets the usage."""
        output = sequence.output
        request_id = update.request_id
        if not update.ended:  # the output ended at a stop string, which the core cannot see
            self._drop(sequence, sequence.finish_reason)
        del self._sequences[request_id]
        if output.num_open:
            for chunk in chunks:
                output.stream.put(chunk)
            return
        usage = output.usage()
        *others, last = chunks
        for chunk in others:
            output.stream.put(chunk)
        output.stream.end(msgspec.structs.replace(last, usage=usage))
        self._report(output, last.finish_reason, None, usage, now)

    def _fail(self, output: StreamingOutput, error: QuireError, now: float) -> None:
        """End a request and all its sequences with one error."""
        self._drop_sequences(output, str(error))
        output.stream.end(error)
        self._report(output, None, error, output.usage(), now)

    def _drop_sequences(self, output: StreamingOutput, why: str) -> None:
        """End the request's sequences on the core without publishing anything; their pages are free immediately."""
        for sequence in output.sequences:
            if self._sequences.pop(sequence.request.request_id, None) is not None:
                self._drop(sequence, error=why)

    def _drop(self, sequence: SequenceOutput, reason: FinishReason | None = None, error: str | None = None) -> None:
        """End a sequence on the core, and keep its counters."""
        counters = self._core.drop(sequence.request.request_id, reason, error)
        if counters is not None:
            sequence.counters = counters

    def _report(
        self,
        output: StreamingOutput,
        reason: FinishReason | None,
        error: QuireError | None,
        usage: Usage,
        now: float,
    ) -> None:
        """Report the end of a request to the observer, and release its resources."""
        first = output.first_token_time()
        self.observer.on_finished(
            RequestStats(
                tenant=output.request.tenant,
                finish_reason=reason,
                error=copy.copy(error),  # the copy has no traceback
                prompt_tokens=usage.prompt_tokens,
                usage=usage,
                e2e_s=now - output.submitted,
                time_to_first_token_s=None if first is None else first - output.submitted,
                time_per_output_token_s=output.time_per_output_token_s(),
                trace_id=output.request.trace_id,
            )
        )
        self._release(output)

    def _release(self, output: StreamingOutput) -> None:
        """Release a request's images and adapter, and its sequences, which refer to the output."""
        self._release_adapter(output.adapter)
        output.adapter = NO_ADAPTER
        self.image_bytes -= output.image_bytes
        output.image_bytes = 0
        output.sequences.clear()
