"""Prompts on their way to token ids, in helper threads where tenants take turns.

Prompts with images have one thread of their own: each takes much memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from ..common.fair_executor import FairExecutor
from .continuation import replay
from .facade import GenerateRequest
from .input import PreparedInput, prepare, stop_ids_of
from .output import NewDetokenizer
from .structured.grammars import CheckedStructures
from .text_processor import TextProcessor
from .validator import Validator


class PromptPreparer:
    """Prepares prompts for one engine, whose thread calls every method."""

    def __init__(self, text_processor: TextProcessor, validator: Validator, eos_token_ids: frozenset[int]) -> None:
        self.executor = FairExecutor()  # shared with other work on texts
        self._image_executor = FairExecutor(1)
        self._num_preparing: Counter[str] = Counter()  # tenant -> sequences whose prompt is being prepared
        self._text_processor = text_processor
        self._eos_token_ids = eos_token_ids
        self._checked = CheckedStructures()
        self._prepare = partial(prepare, text_processor=text_processor, validator=validator, checked=self._checked)

    def num_preparing(self, tenant: str) -> int:
        """Return the sequences of a tenant whose prompt is being prepared."""
        return self._num_preparing[tenant]

    def prepare(self, request: GenerateRequest, num_queued: int) -> PreparedInput | asyncio.Future[PreparedInput]:
        """Return the prepared parts of a request with checked fields, or their future.

        `num_queued` sequences count as being prepared until then.
        """
        needs_thread = request.sampling_params.structured_outputs is not None or request.generated is not None
        if isinstance(request.prompt, tuple) and not needs_thread:
            return PreparedInput(request.prompt, request.sampling_params, images=request.images)
        tenant = request.tenant

        def release(done: asyncio.Future[PreparedInput]) -> None:
            self._num_preparing[tenant] -= num_queued
            if not self._num_preparing[tenant]:
                del self._num_preparing[tenant]
            if not done.cancelled():
                done.exception()  # retrieved, even if the request was given up before it was awaited

        preparing: asyncio.Future[PreparedInput]
        if request.generated is None:
            preparing = self._executor_of(request).submit(request.tenant, self._prepare, request)
        else:
            preparing = asyncio.create_task(self._continued(request))
        self._num_preparing[tenant] += num_queued
        preparing.add_done_callback(release)
        return preparing

    async def token_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the token ids of a request's prompt. Raises InvalidRequest and others."""
        return (await self._executor_of(request).submit(request.tenant, self._prepare, request)).token_ids

    def new_detokenizer(self, prepared: PreparedInput, num_echoed: int = 0) -> NewDetokenizer:
        """Return the factory of detokenizers for a request's sequences."""
        markup = frozenset(prepared.markup.values())
        detokenizer = self._text_processor.detokenizer
        return partial(detokenizer, prepared.params, num_echoed, markup=markup, prompt=prepared.token_ids)

    def close(self) -> None:
        """End the threads and processes. Idempotent."""
        self.executor.close()
        self._image_executor.close()
        self._checked.close()

    def _executor_of(self, request: GenerateRequest) -> FairExecutor:
        return self._image_executor if request.image_files else self.executor

    async def _continued(self, request: GenerateRequest) -> PreparedInput:
        """Return the input with the outputs that another server began: other tenants' prompts come between slices."""
        prepared = await self._executor_of(request).submit(request.tenant, self._prepare, request)
        stop_ids, new_detokenizer = stop_ids_of(prepared.params, self._eos_token_ids), self.new_detokenizer(prepared)
        new_parser = prepared.new_parser if request.reads_output else None
        replaying = replay(request, prepared.params, stop_ids, new_detokenizer, new_parser)
        while (continuation := await self.executor.submit(request.tenant, replaying.__next__)) is None:
            pass
        return prepared._replace(continuation=continuation)
