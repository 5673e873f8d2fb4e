"""The model runner: loads a model, owns its memory and threads, and executes the scheduler's steps on the kernels.

It keeps no state between steps except the KV pages, and must not import requests, queues or asyncio. Its methods block;
the engine calls them from one thread.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence, Set
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....kernels import Pool, Program, Sampler
from ....kernels.lora import LoraTable
from ....kernels.ops import Attention, Linear, Op, padded
from ....pager import KVArena, OutOfMemory, Pager, images_between
from ....scheduler.plan import PlacedImage, SampledToken, ScheduledSequence, StepPlan, StepResult
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ...common.types import SamplingParams
from .. import DecoderSpec, PackedModel, model_path, pack_model, read_spec
from ..vision import DynamicVisionSpec, PackedTower, VisionSpec, pack_tower, read_vision
from .adapters import Adapters
from .capacity import Capacity, decide_capacity
from .image_positions import ImagePositions
from .image_runner import ImageRunner
from .sampling import AllowedTokens, Masks, SamplingSpec, sampling_rows
from .trials import decoder_trials
from .tuned import tune
from .tuning import Choices, Effort, Times, Trial, time_functions

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def load_model(
    config: EngineConfig,
    stop: threading.Event | None = None,
    *,
    populate: bool = True,
    on_planned: Callable[[Capacity], None] | None = None,
) -> ModelRunner:
    """Read, pack and bind a model. Raises ModelError or ConfigError, before any large allocation where possible.

    With `populate`, the KV cache is backed by memory at once, else as it is used. `on_planned` is called before the
    weights are read. Raises Unavailable soon after another thread has set `stop`.
    """
    path = model_path(config.model)
    capacity = decide_capacity(config, read_spec(path))
    if on_planned is not None:
        on_planned(capacity)
    model = pack_model(path, config.weights, stop)
    vision = read_vision(path, config.max_image_tokens)
    tower = None if vision is None else pack_tower(path, vision, config.weights, stop)
    return ModelRunner(config, model, capacity, tower, populate=populate)


class ModelRunner:
    """A loaded model bound to memory and threads. The constructor takes all memory, in the amounts `capacity` plans."""

    def __init__(
        self,
        config: EngineConfig,
        model: PackedModel,
        capacity: Capacity,
        tower: PackedTower | None = None,
        *,
        populate: bool = True,
        pool: Pool | None = None,
    ) -> None:
        """`pool` has the threads of another model in the same process; without it the runner has its own threads."""
        self.model = model
        self.spec = model.spec
        self.path = model.path
        self.capacity = capacity
        self.max_rows = config.max_num_batched_tokens  # tokens of one step
        self._max_sequences = config.max_num_seqs
        self.arena = _allocate_pages(capacity, populate=populate)
        self.state_layout = capacity.state_layout
        plan = model.compile(
            max_positions=capacity.max_model_len,
            max_tokens=self.max_rows,
            max_samples=capacity.max_num_samples,
            states=self.state_layout,
            lora=capacity.lora,
            shows_hidden=capacity.shows_hidden,
        )
        table = None if capacity.lora is None else LoraTable(capacity.lora.slots, capacity.lora.widths())
        self.ops = plan.ops
        self.pool = pool = pool or Pool(capacity.cpus.threads)
        try:
            self._program = Program(
                plan.ops,
                plan.arena_bytes,
                self.arena.memory,
                capacity.layout,
                capacity.num_pages,
                pool,
                max_rows=self.max_rows,
                max_samples=capacity.max_num_samples,
                max_sequences=config.max_num_seqs,
                vocab_size=self.spec.vocab_size,
                isa=capacity.isa,
                num_states=capacity.num_states,
                lora=table,
            )
            stride = padded(self.spec.vocab_size)
            self._sampler = Sampler(self.spec.vocab_size, stride, capacity.max_num_samples, pool, capacity.isa)
        except MemoryError as error:
            raise ConfigError(
                f"steps of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} sequences need "
                f"{plan.arena_bytes:,} bytes, which the system does not give; lower max_num_batched_tokens and "
                "max_num_seqs"
            ) from error
        self.adapters = None
        self.adapter_keys: dict[str, str] = {}  # name -> key
        if capacity.lora is not None and table is not None:
            self.adapters = Adapters(capacity.lora, table, plan.ops, model.pairs, capacity.memory.lora_bytes)
            self.adapter_keys = {name: self.adapters.load(name, path) for name, path in config.lora.items()}
        self.images = None if tower is None else ImageRunner(tower, config.image_cache_memory, pool, capacity.isa)
        self._positions = None if tower is None else _image_positions(model.spec, tower.spec, plan.ops)
        self._logits: Floats = self._program.view(plan.logits)  # [max_num_samples, padded vocab]
        self._maxima: Floats = self._program.view(plan.maxima)  # [max_num_samples, padded(padded vocab / 32)]
        self._given_hidden = self._program.view(plan.inputs[0]) if plan.inputs else None  # [max_rows, padded hidden]
        self._hidden = None if plan.hidden is None else self._program.view(plan.hidden)
        self._sampling_s = 0.0
        self.tuned = self._tune()

    def execute(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        """Run a step. A sample whose logits are not finite gets an error of its own; the others are untouched.

        The runner waits for `masks` after all rows are computed. A sample whose mask is not ready then is deferred.
        """
        start = time.perf_counter()
        deferred = frozenset[int]() if self.images is None else self.images.prepare(plan.sequences, plan.images_s)
        images_s = time.perf_counter() - start
        sequences = plan.sequences
        if deferred:
            sequences = tuple([each for each in sequences if each.request_id not in deferred])
        if sequences:
            self._forward(sequences, _last_rows(sequences))
        sampled = self._sample(sequences, masks.wait() if masks else AllowedTokens())
        if deferred:
            sampled = _with_deferred(plan.sequences, sampled, deferred)
        return StepResult(plan.step_id, sampled, time.perf_counter() - start - images_s, (), deferred, images_s)

    def score(
        self,
        token_ids: Sequence[int],
        first_position: int,
        tables: Sequence[Sequence[int]],
        num_samples: int,
        images: Sequence[PlacedImage] = (),
        end: int | None = None,
        *,
        state: int = 0,
        adapter: str = "",
    ) -> Floats:
        """Return the logits [num_samples, vocab] after each of the `num_samples` tokens before token_ids[end].

        `tables` are page ids, one table for each layer group; `images` are all of the sequence, in order; `state`
        is the slot of its state, `adapter` the key of its adapter. The result is a view that the next call overwrites.
        """
        sampling = SamplingSpec(SamplingParams(), 0, frozenset(), adapter=adapter)
        sequence = ScheduledSequence(
            0, tables, first_position, token_ids, num_samples, sampling, token_ids, 0, state=max(state, 0)
        )
        seen = images_between(images, first_position, first_position + len(token_ids))
        end = len(token_ids) if end is None else end
        self._forward([sequence._replace(images=seen, prompt_images=images)], range(end - num_samples, end))
        return self._logits[:num_samples, : self.spec.vocab_size]

    def give_hidden(self, first: int, rows: Floats) -> None:
        """Set the hidden states [rows, hidden] that a head reads for the rows of the next step from `first` on."""
        assert self._given_hidden is not None, "only a head reads hidden states"
        given = self._given_hidden[first : first + len(rows)]
        given[:, : rows.shape[1]] = rows
        given[:, rows.shape[1] :] = 0.0

    def hidden_rows(self, first: int, end: int) -> Floats:
        """Return the normed rows [end - first, hidden] of the last step, which the next step overwrites.

        They are those of all rows, but of a head only those of the rows that sample.
        """
        assert self._hidden is not None, "the capacity says that steps show their hidden states"
        return self._hidden[first:end, : self.spec.hidden_size]

    @property
    def state_memory(self) -> npt.NDArray[np.uint8]:  # [slots, bytes of a state]
        """The memory of all states."""
        return self._program.states

    def copy_state(self, source: int, destination: int) -> None:
        """Copy the state in slot `source` to slot `destination`."""
        self.state_memory[destination] = self.state_memory[source]

    def op_seconds(self) -> dict[str, float]:
        """Return the seconds spent in each kind of op since the last call; the lm_head apart from the other layers."""
        spent: dict[str, float] = {}
        for op, seconds in zip(self.ops, self._program.op_seconds(), strict=True):
            spent[_op_name(op)] = spent.get(_op_name(op), 0.0) + seconds
        sampling_s = self._sampling_s
        self._sampling_s = 0.0
        return {**spent, "sampling": sampling_s}

    def time_functions(self, levels: Sequence[str], effort: Effort) -> dict[str, list[Times]]:
        """Return the seconds of each function in one layer at these levels, the program's own first, by trial.

        The contents of the KV cache are lost.
        """
        dtype = self.capacity.layout.dtype
        measured = time_functions(self._program, self.ops, dtype, self._trials(), [*levels], effort)
        self._program.choose(self.tuned)
        return measured

    def open_pager(self, *, enable_prefix_caching: bool) -> Pager:
        """Return a pager of the runner's pages, without states and without a file to spill to."""
        layout = self.capacity.layout
        return Pager(
            layout.page_size,
            self.capacity.num_pages,
            windows=layout.group_windows,
            copy_page=self.arena.copy_page,
            enable_prefix_caching=enable_prefix_caching,
        )

    def close(self) -> None:
        """Release weights, KV memory and threads now, not at the next garbage collection. Idempotent."""
        self.arena.close()
        self.ops.clear()
        if hasattr(self, "_program"):
            del self.model, self._program, self._sampler, self.pool
            del self._logits, self._maxima, self._hidden, self._given_hidden
            self.images = None

    def _tune(self) -> Choices:
        """Let the program run its fastest functions; return the functions of levels below the capacity's level."""
        return tune(self._program, self.ops, self.capacity.layout.dtype, self._trials(), self.capacity)

    def _trials(self) -> list[Trial]:
        sizes = {
            "max_rows": self.max_rows,
            "max_sequences": self._max_sequences,
            "max_model_len": self.capacity.max_model_len,
        }
        return list(decoder_trials(self._program, self.capacity.layout, self.capacity.num_pages, **sizes))

    def _forward(self, sequences: Sequence[ScheduledSequence], samples: Sequence[int]) -> None:
        """Compute all rows of a step; the logits of the rows `samples` are then in `self._logits`, in order."""
        by_group = zip(*(sequence.tables for sequence in sequences), strict=True)
        tables = [table for group in by_group for table in group]
        page_ids = array("i")
        for table in tables:
            page_ids.extend(table)
        row_start = _starts([len(sequence.token_ids) for sequence in sequences])
        token_ids = (token for sequence in sequences for token in sequence.token_ids)
        given_of = given = last_seen = None
        if self.images is not None:
            given_of, given = self.images.embeddings(sequences) or (None, None)
            last_seen = self.images.last_seen(sequences)
        adapters = None
        if self.adapters is not None:
            keys = [cast(SamplingSpec, sequence.sampling).adapter for sequence in sequences]
            adapters = self.adapters.rows(keys, [len(sequence.token_ids) for sequence in sequences])
        rotary = None if self._positions is None else self._positions.rotary(sequences)
        self._program.run(
            np.fromiter(token_ids, np.int32, int(row_start[-1])),
            row_start,
            np.array([sequence.first_position for sequence in sequences], np.int32),
            np.frombuffer(page_ids, np.int32),
            _starts([len(table) for table in tables]),
            np.array(samples, np.int32),
            given_of,
            given,
            rotary,
            last_seen,
            np.array([sequence.state for sequence in sequences], np.int32) if self.state_layout.nbytes else None,
            adapters=adapters,
        )

    def _sample(self, sequences: Sequence[ScheduledSequence], allowed: AllowedTokens) -> tuple[SampledToken, ...]:
        owners = [sequence.request_id for sequence in sequences for _ in range(sequence.num_samples)]
        if not owners:
            return ()
        rows, adjustments = sampling_rows(sequences, allowed.first)
        start = time.perf_counter()
        tokens, logprobs, top_ids, top_logprobs = self._sampler.sample(
            self._logits, self._maxima, rows, adjustments, allowed.masks
        )
        self._sampling_s += time.perf_counter() - start
        wanted: list[int] = rows["logprobs"].tolist()
        missing = allowed.missing
        return tuple(
            _unmasked(request_id, missing[request_id])
            if request_id in missing
            else _sampled(request_id, token, logprob, n, top_ids[i], top_logprobs[i])
            for i, (request_id, token, logprob, n) in enumerate(
                zip(owners, tokens.tolist(), logprobs.tolist(), wanted, strict=True)
            )
        )


def _allocate_pages(capacity: Capacity, *, populate: bool) -> KVArena:
    try:
        return KVArena(capacity.layout, capacity.num_pages, populate=populate)
    except OutOfMemory as error:
        raise ConfigError(f"kv_cache_memory: {error}") from error


def _image_positions(
    spec: DecoderSpec, tower: VisionSpec | DynamicVisionSpec, ops: Sequence[Op]
) -> ImagePositions | None:
    """Return the positions of tokens in images for a model with M-RoPE, whose layers share one rotary table."""
    rope = next((rope for rope in spec.ropes if rope is not None), None)
    if rope is None or not rope.axes or not isinstance(tower, DynamicVisionSpec):
        return None
    table = next(op.rotary for op in ops if isinstance(op, Attention))
    assert table is not None, "layers with a rope have a table"
    return ImagePositions(table, rope.axes, tower.sizes.block)


def _op_name(op: Op) -> str:
    if isinstance(op, Linear) and op.maxima is not None:
        return "lm_head"
    return type(op).__name__.lower()


def _last_rows(sequences: Sequence[ScheduledSequence]) -> list[int]:
    """Return the rows of a step that sample: the last ones of each sequence."""
    rows: list[int] = []
    end = 0
    for sequence in sequences:
        end += len(sequence.token_ids)
        rows += range(end - sequence.num_samples, end)
    return rows


def _starts(counts: Sequence[int]) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _with_deferred(
    sequences: Sequence[ScheduledSequence], sampled: Sequence[SampledToken], deferred: Set[int]
) -> tuple[SampledToken, ...]:
    """Return the samples of all sequences in order: samples of deferred sequences are deferred."""
    computed = iter(sampled)
    return tuple(
        SampledToken(each.request_id, 0, is_deferred=True) if each.request_id in deferred else next(computed)
        for each in sequences
        for _ in range(each.num_samples)
    )


def _unmasked(request_id: int, error: str | None) -> SampledToken:
    """Return the result of a sample that has no mask: an error, or that it is deferred."""
    return SampledToken(request_id, 0, error=error, is_deferred=error is None)


def _sampled(
    request_id: int, token: int, logprob: float, wanted: int, top_ids: npt.NDArray[Any], top_logprobs: npt.NDArray[Any]
) -> SampledToken:
    if token < 0:
        return SampledToken(request_id, 0, error="the model's logits are not finite numbers")
    if wanted < 0:
        return SampledToken(request_id, token)
    ids = top_ids[:wanted].tolist()
    values = top_logprobs[:wanted].tolist()
    top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
    return SampledToken(request_id, token, logprob, top)
