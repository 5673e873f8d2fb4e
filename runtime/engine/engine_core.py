"""`EngineCore`: the core that computes in this process, with a decoder, an encoder, or both.

Like every core it must not import text, frames or sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from ...pager import OutOfPages, PageTable
from ...scheduler import (
    AdmissionEstimate,
    EncodeRequest,
    EngineLoop,
    FinalCounters,
    FinishedStep,
    FinishReason,
    PlacedImage,
    Request,
    StepPlan,
    StepResult,
    least_whole_chunk,
    whole_chunk,
)
from ..common.config import EngineConfig
from ..common.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from ..common.job_threads import JobThreads
from ..model.runner import Capacity, ModelRunner
from ..model.runner.capacity import EncoderCapacity
from .build import build_kv_events, build_scheduler, load_models
from .core import CoreListener, LoadedAdapter, Prefilled
from .core_parts import DecoderPart
from .embedding.encoder import EncoderPart
from .facade import EngineStats, HostStatus, StepStats
from .structured.grammars import Grammars
from .structured.step_masks import StepMasks

_log = structlog.get_logger("quire.engine")


class EngineCore:
    """Implements `Core` with one scheduler, one model runner and one step thread.

    Everything but the computation of a step runs on the event loop's thread, so there are no locks.
    """

    engine_loop: EngineLoop  # set by `start`
    _listener: CoreListener  # set by `start`

    def __init__(self, config: EngineConfig, decoder: DecoderPart, encoder: EncoderPart) -> None:
        """Take over the decoder and the encoder, and close them with the core.

        If it raises ConfigError, both stay the caller's.
        """
        self.config = config
        self.pager = decoder.open_pager()
        self._decoder = decoder
        self._encoder = encoder
        self._kv_events = build_kv_events(config, self.pager)
        self.scheduler = build_scheduler(
            config,
            self.pager,
            decoder.max_num_samples,
            encoder.limits,
            whole_images=decoder.whole_images,
            draft_cost=decoder.draft_cost,
            draft_reads_steps=decoder.draft_reads_steps,
        )
        self._step_threads = JobThreads(2, "quire-step")  # one may compute masks while the other runs the next step
        self._computing = threading.Lock()  # held while a thread uses a model
        self._stepping = asyncio.Lock()  # held during a step, and while adapters change
        self.grammars = Grammars(decoder.path)
        fingerprint = hashlib.sha256(decoder.bits_id() + encoder.bits_id()).hexdigest()[:16]
        self.info = msgspec.structs.replace(decoder.describe(), encoder=encoder.info, fingerprint=fingerprint)
        self._started = False
        self._scoring = asyncio.Lock()  # held while `logits` computes
        self._closed = False
        self._misses_itl_target = False  # the latency target is missed, and this has been logged

    @classmethod
    async def load(
        cls,
        config: EngineConfig,
        *,
        populate: bool = True,
        on_planned: Callable[[Capacity | EncoderCapacity], None] | None = None,
    ) -> EngineCore:
        """Load the model and allocate all memory. Raises ModelError or ConfigError. Cancelling it stops the load.

        Without `populate`, the KV cache is only mapped; the system backs each page when it is first used.
        `on_planned` is called in another thread before the weights are read.
        """
        stop = threading.Event()
        try:
            decoder, encoder = await asyncio.to_thread(
                load_models, config, stop, populate=populate, on_planned=on_planned
            )
        except asyncio.CancelledError:
            stop.set()
            raise
        try:
            return cls(config, decoder, encoder)
        except BaseException:
            encoder.close()
            decoder.close()
            raise

    @property
    def runner(self) -> ModelRunner:
        """The model that generates text. Raises UnsupportedModel if the only model is an encoder."""
        return self._decoder.runner

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self._decoder.kv_bytes

    @property
    def is_broken(self) -> bool:
        """Whether the engine loop ended because of an internal error."""
        return self._started and self.engine_loop.is_broken

    def start(self, listener: CoreListener) -> None:
        """See `Core.start`."""
        self._listener = listener
        self._kv_events.publish()  # pages of a snapshot
        self.engine_loop = EngineLoop(self.scheduler, self._execute, listener.publish, self._observe)
        self.engine_loop.start(listener.ended)
        self._started = True

    def check_room(self, tenant: str, count: int) -> None:
        """See `Core.check_room`."""
        self.engine_loop.check_room(tenant, count)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """See `Core.add`. It does not suspend."""
        if self._scoring.locked():
            raise Unavailable("this engine is computing logits; try again")
        return self.engine_loop.add(*requests)

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """See `Core.add_encoding`. It does not suspend."""
        return self.engine_loop.add_encoding(request)

    def cancel(self, request_id: int) -> None:
        """See `Core.cancel`."""
        self.engine_loop.cancel(request_id)

    def drop(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> FinalCounters | None:
        """See `Core.drop`."""
        update = self.scheduler.finish(request_id, reason, error)
        return None if update is None else update.counters

    def has_adapter(self, key: str) -> bool:
        """Return whether a request with this adapter, an empty key for none, can be computed."""
        return not key or (self.runner.adapters is not None and key in self.runner.adapters)

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        """See `Core.load_adapter`. Steps run while the files are read."""
        adapters = self.runner.adapters
        if adapters is None:
            raise InvalidRequest("this model was started without adapters; start it with --max-loras")
        key, packed = await asyncio.to_thread(adapters.pack, name, path)
        evicted: list[str] = []
        if packed is not None:
            async with self._stepping:
                evicted = adapters.put(key, packed, frozenset(kept), leaving)
        return LoadedAdapter(key, adapters.nbytes_of(key), tuple(evicted))

    def host_statuses(self) -> Sequence[HostStatus] | None:
        return None

    def stats(self) -> EngineStats:
        """See `Core.stats`."""
        if self.is_broken:
            raise Unavailable("the engine has stopped after an internal error; restart it")
        stats = self.scheduler.stats()
        images = self._decoder.image_counts()
        encoder = stats.encoder
        return msgspec.structs.replace(
            msgspec.convert(stats, EngineStats, from_attributes=True),
            encoder_waiting=encoder.waiting,
            encoder_running=encoder.running,
            encoded_texts=encoder.texts,
            encoded_tokens=encoder.tokens,
            encoded_images=images.encoded,
            image_cache_hits=images.cache_hits,
        )

    async def drain(self) -> None:
        """See `Core.drain`."""
        await self.engine_loop.drain()

    async def stop(self) -> None:
        """See `Core.stop`. Pages keep their content until `close`."""
        if self._started:
            await self.engine_loop.close()

    async def close(self) -> None:
        """See `Core.close`. Raises the error that broke the engine loop, if there is one."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.stop()
            async with self._scoring:  # `logits` ends before its next chunk
                pass
        finally:  # even if the loop is broken or this call is cancelled
            self._kv_events.close()
            self._step_threads.close()
            self.grammars.close()
            with self._computing:
                self._encoder.close()
                self._decoder.close()

    async def logits(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage] = (), adapter: str = ""
    ) -> npt.NDArray[np.float32]:
        """Return the raw logits [len(token_ids), vocab] after each token, for evaluation.

        The computation bypasses the scheduler and the prefix cache. Raises Unavailable while requests run; no request
        is accepted in the meantime.
        """
        if self._closed or self.scheduler.has_work or self._scoring.locked():
            raise Unavailable("logits are computed between requests; wait until the running ones have ended")
        max_num_samples = self.runner.capacity.max_num_samples
        out = np.empty((len(token_ids), self.runner.spec.vocab_size), np.float32)
        async with self._scoring:
            table = self.pager.open((), images=images)
            try:
                while (first := table.num_tokens) < len(token_ids):
                    num_tokens = min(max_num_samples, len(token_ids) - first)
                    if self._decoder.whole_images:
                        num_tokens = whole_chunk(images, first, num_tokens) or least_whole_chunk(images, first)
                    table.append(num_tokens)
                    chunk = token_ids[first : first + num_tokens]
                    for begin in range(0, num_tokens, max_num_samples):  # more than once for a large image only
                        if self._closed:
                            raise Unavailable("the engine was closed in the meantime")
                        sampled = range(begin, min(begin + max_num_samples, num_tokens))
                        score = partial(self._score, chunk, first, table, sampled, images, adapter)
                        out[first + begin : first + sampled.stop] = await self._step_threads.call(score)
                    self.pager.commit(table, token_ids)
                return out
            except OutOfPages as error:
                raise ContextLengthExceeded(f"{len(token_ids)} tokens do not fit the KV cache: {error}") from error
            finally:
                table.release()

    # Called by the engine loop

    async def _execute(self, plan: StepPlan) -> StepResult:
        self._listener.begin(plan)
        try:
            masks = self.grammars.begin(plan.sequences)
            compute = partial(self._compute, plan, masks)
            async with self._stepping:
                return await self._step_threads.call(compute, None if masks is None else masks.compute_next)
        except Exception:
            _log.exception("step failed", step=plan.step_id, sequences=len(plan.sequences))
            raise

    def _compute(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """Run a step, in its thread."""
        with self._computing:
            result = self._decoder.run(plan, masks)
            if not plan.encoder:
                return result
            return dataclasses.replace(result, encoder=self._encoder.run(plan.encoder))

    def _score(
        self,
        token_ids: Sequence[int],
        first: int,
        table: PageTable,
        sampled: range,
        images: Sequence[PlacedImage],
        adapter: str,
    ) -> npt.NDArray[np.float32]:
        with self._computing:
            return self.runner.score(
                token_ids,
                first,
                table.pages,
                len(sampled),
                images,
                sampled.stop,
                state=table.state,
                adapter=adapter,
            )

    def _observe(self, step: FinishedStep) -> None:
        deferred = [s for s in step.plan.sequences if s.request_id in step.result.deferred]
        sequences = [s for s in step.plan.sequences if s.request_id not in step.result.deferred]
        if bool(self.scheduler.itl_overrun) != self._misses_itl_target:
            self._log_itl_target(step.plan.num_decode_rows)
        encoder_s = sum([each.duration_s for each in step.result.encoder]) + step.result.images_s
        stats = StepStats(
            duration_s=step.result.duration_s + encoder_s,
            prefill_tokens=step.plan.num_prefill_tokens - sum([len(s.token_ids) for s in deferred]),
            decode_tokens=step.plan.num_decode_rows,
            context_tokens=tuple([s.first_position + len(s.token_ids) for s in sequences]),
            schedule_s=step.schedule_s,
            commit_s=step.commit_s,
            publish_s=step.publish_s,
            encoder_s=encoder_s,
        )
        prefilled = [
            Prefilled(s.request_id, s.first_position + len(s.token_ids)) for s in sequences if not s.num_samples
        ]
        self._listener.observe(stats, prefilled)
        self._kv_events.publish()

    def _log_itl_target(self, num_decode_rows: int) -> None:
        """Log once that decoding alone exceeds the latency target, and once that it no longer does."""
        overrun = self.scheduler.itl_overrun
        target_ms = self.config.itl_target_ms
        self._misses_itl_target = bool(overrun)
        if overrun and target_ms is not None:
            _log.warning(
                "inter-token target cannot be met: decoding alone takes longer",
                target_ms=target_ms,
                decode_ms=round(overrun * target_ms, 1),
                sequences=num_decode_rows,
            )
        else:
            _log.info("inter-token target can be met again", target_ms=target_ms)
