"""The decoder of an engine core: a model that generates text, or a null object whose steps have no sequences.

Like the core, this file must not import text, frames or sockets. The encoder's part is in `embedding/encoder.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from ...pager import Pager, SpillFile
from ...scheduler import StepPlan, StepResult
from ..common.config import EngineConfig
from ..common.errors import UnsupportedModel
from ..model.config_json import generation_end_ids
from ..model.files import sampled_fingerprint
from ..model.runner import DraftRunner, HeadRunner, ModelRunner
from ..model.vision import DynamicVisionSpec, VisionSpec
from .bits import bits_id
from .embedding.encoder import LoadedEncoder
from .facade import CoreInfo, ImageInfo
from .structured.step_masks import StepMasks


class ImageCounts(NamedTuple):
    """Counters of a vision tower."""

    encoded: int = 0
    cache_hits: int = 0


class DecoderPart(Protocol):
    """The model that generates text, and its pages."""

    path: Path  # folder of the model that has the vocabulary
    max_num_samples: int  # rows of a step that sample
    whole_images: bool  # see `SchedulerConfig`
    kv_bytes: int  # bytes of the KV cache, states and a draft model's pages included
    draft_cost: float | None  # estimated time of the draft model's step over the model's; None: there is none
    draft_reads_steps: bool  # the draft model is a head, which reads the rows of every step

    @property
    def runner(self) -> ModelRunner:
        """The model runner. Raises UnsupportedModel if the only model is an encoder."""

    def open_pager(self) -> Pager:
        """Return a pager over the KV cache."""

    def describe(self) -> CoreInfo:
        """Return the core's description, without the encoder and the fingerprint."""

    def bits_id(self) -> bytes:
        """Return the bits id of the loaded model."""

    def image_counts(self) -> ImageCounts:
        """Return the counters of the vision tower."""

    def run(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """Run the sequences of a step. Blocks."""

    def close(self) -> None:
        """Free memory, threads and files. Idempotent."""


class LoadedDecoder:
    """A `DecoderPart` that computes with a model runner. It owns the runner and its spill file."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        spill_file: SpillFile | None = None,
        draft: DraftRunner | HeadRunner | None = None,
    ) -> None:
        self.runner = runner
        self.path = runner.path
        self.max_num_samples = runner.capacity.max_num_samples
        self.whole_images = runner.images is not None and runner.images.spec.whole_images
        memory = runner.capacity.memory
        self.kv_bytes = memory.kv_bytes + memory.state_bytes + memory.draft_kv_bytes
        self.draft_cost = None if draft is None else draft.cost
        self.draft_reads_steps = isinstance(draft, HeadRunner)
        self._config = config
        self._spill_file = spill_file
        self._draft = draft

    def open_pager(self) -> Pager:
        """See `DecoderPart.open_pager`."""
        capacity = self.runner.capacity
        return Pager(
            capacity.layout.page_size,
            capacity.num_pages,
            windows=capacity.layout.group_windows,
            copy_page=self.runner.arena.copy_page,
            enable_prefix_caching=self._config.enable_prefix_caching,
            store=self._spill_file,
            states=capacity.open_states(self.runner.copy_state),
            num_cached_states=capacity.num_cached_states,
            state_interval=capacity.state_interval,
            message_ends=generation_end_ids(self.path).union(self.runner.spec.eos_token_ids),
        )

    def describe(self) -> CoreInfo:
        """See `DecoderPart.describe`."""
        runner = self.runner
        capacity = self.runner.capacity
        return CoreInfo(
            vocab_size=runner.spec.vocab_size,
            max_model_len=capacity.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            num_pages=capacity.num_pages,
            page_size=capacity.layout.page_size,
            eos_token_ids=frozenset(runner.spec.eos_token_ids),
            isa=capacity.isa,
            threads=capacity.cpus.threads,
            threads_reason=capacity.cpus.reason,
            images=None if runner.images is None else _describe_tower(runner.images.spec),
            adapters=runner.adapter_keys,
            adapter_paths=self._config.lora,
            max_adapters=self._config.max_loras or 0,
        )

    def bits_id(self) -> bytes:
        """See `DecoderPart.bits_id`."""
        return bits_id(self.runner, self._config, sampled_fingerprint(self.path))

    def image_counts(self) -> ImageCounts:
        """See `DecoderPart.image_counts`."""
        images = self.runner.images
        return ImageCounts() if images is None else ImageCounts(images.num_encoded, images.num_cache_hits)

    def run(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """See `DecoderPart.run`."""
        if not plan.sequences:
            return StepResult(plan.step_id, (), 0.0)
        result = self.runner.execute(plan, masks)
        if masks is not None:
            result = masks.advance(result, plan.max_forced)
        if self._draft is not None and plan.drafting is not None:
            result = self._draft.propose(plan, plan.drafting, result)
        return result

    def close(self) -> None:
        """See `DecoderPart.close`."""
        if self._draft is not None:
            self._draft.close()
        if self._spill_file is not None:
            self._spill_file.close()
        self.runner.close()


class NoDecoder:
    """The `DecoderPart` of a core whose only model is an encoder: no step has sequences."""

    kv_bytes = 0
    whole_images = False
    draft_cost: float | None = None
    draft_reads_steps = False

    def __init__(self, encoder: LoadedEncoder, config: EngineConfig) -> None:
        self.path = encoder.encoder.path
        self.max_num_samples = config.max_num_seqs
        self._encoder = encoder
        self._config = config

    @property
    def runner(self) -> ModelRunner:
        """See `DecoderPart.runner`."""
        raise UnsupportedModel("this model is an encoder: it makes embeddings or scores, and generates no text")

    def open_pager(self) -> Pager:
        """Return an unused pager without memory."""
        return Pager(self._config.page_size, 1, enable_prefix_caching=False)

    def describe(self) -> CoreInfo:
        """Describe the encoder in place of a decoder."""
        encoder = self._encoder.encoder
        info = self._encoder.info
        return CoreInfo(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            num_pages=0,
            page_size=self._config.page_size,
            isa=encoder.isa,
            threads=encoder.cpus.threads,
            threads_reason=encoder.cpus.reason,
            generates=False,
        )

    def bits_id(self) -> bytes:
        """Return nothing: the encoder has an id of its own."""
        return b""

    def image_counts(self) -> ImageCounts:
        """See `DecoderPart.image_counts`."""
        return ImageCounts()

    def run(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """Return the result of a step without sequences."""
        return StepResult(plan.step_id, (), 0.0)

    def close(self) -> None:
        """See `DecoderPart.close`."""


def _describe_tower(spec: VisionSpec | DynamicVisionSpec) -> ImageInfo:
    if isinstance(spec, DynamicVisionSpec):
        return ImageInfo(token_id=spec.image_token_id, num_tokens=spec.num_tokens, block=spec.sizes.block)
    return ImageInfo(token_id=spec.image_token_id, size=spec.image_size, num_tokens=spec.num_tokens)
