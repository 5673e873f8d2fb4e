"""The memory that serving a model takes, from config.json and the capacities alone; `quire plan` prints it.

Nothing is loaded or allocated. Each figure equals what `pack_model`, `PackedModel.compile`, the KV arena and `Program`
allocate, because the same code computes both; only the figure for Python is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...kernels import sampler_nbytes, scratch_nbytes
from ...kernels.ops import WeightDtype as PackedDtype
from ...kernels.ops import padded
from ..common.config import KVCacheDtype, WeightDtype
from .decoder import emit_decoder
from .encoder import EncoderMemoryPlan
from .lora import LoraLayout
from .packed_model import kv_layout
from .program import ProgramBuilder, ProgramPlan
from .rope import planned_tables, rotary_nbytes
from .spec import DecoderSpec
from .states import StateLayout, lay_out_states
from .vision import VisionMemoryPlan
from .weights.decoder_weights import plan_weights

PROCESS_BYTES = 68 << 20  # measured for an engine process: Python, numpy and other libraries, with their mapped files


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the program that the arena is planned for; its ops cannot be run."""

    weights: Mapping[PackedDtype, int]  # bytes of the packed matrices by dtype; norms and biases are negligible
    kv_pages: int
    kv_bytes: int
    state_bytes: int  # slots for the states of sequences
    arena_bytes: int
    logits_bytes: int  # inside the arena
    rotary_bytes: int
    scratch_bytes: int  # scratch memory of ops, over all worker threads
    sampling_bytes: int
    encoder: EncoderMemoryPlan | None = None  # encoder that is served next to the decoder
    images: VisionMemoryPlan | None = None  # the model's vision tower and the cache of its results
    lora_bytes: int = 0  # the most that adapters take
    draft: MemoryPlan | None = None  # the draft model
    process_bytes: int = PROCESS_BYTES  # Python and its libraries
    program: ProgramPlan

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total_bytes(self) -> int:
        step = self.arena_bytes + self.rotary_bytes + self.scratch_bytes + self.sampling_bytes
        beside = self.encoder_bytes + self.images_bytes + self.lora_bytes + self.draft_bytes + self.process_bytes
        return self.weights_bytes + self.kv_bytes + self.state_bytes + step + beside

    @property
    def encoder_bytes(self) -> int:
        return 0 if self.encoder is None else self.encoder.total_bytes

    @property
    def images_bytes(self) -> int:
        return 0 if self.images is None else self.images.total_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model, with its pages."""
        return 0 if self.draft is None else self.draft.total_bytes - self.draft.process_bytes

    @property
    def draft_kv_bytes(self) -> int:
        """Bytes of the draft model's pages."""
        return 0 if self.draft is None else self.draft.kv_bytes

    def describe(self) -> str:
        """Return the plan as text, one line per purpose."""
        lines = [
            ("weights", self.weights_bytes, _by_dtype(self.weights)),
            ("KV pages", self.kv_bytes, f"{self.kv_pages:,} pages"),
            *([("states", self.state_bytes, "of sequences")] if self.state_bytes else []),
            ("step arena", self.arena_bytes, f"of which logits {self.logits_bytes:,} B"),
            ("rotary table", self.rotary_bytes, ""),
            ("worker scratch", self.scratch_bytes, ""),
            ("sampling scratch", self.sampling_bytes, ""),
            *([("embedding model", self.encoder_bytes, "weights, batches")] if self.encoder else []),
            *([("vision tower", self.images_bytes, _of_images(self.images))] if self.images else []),
            *([("adapters", self.lora_bytes, "at most")] if self.lora_bytes else []),
            *([("draft model", self.draft_bytes, _of_draft(self.draft))] if self.draft else []),
            ("Python libraries", self.process_bytes, "estimate"),
            ("total", self.total_bytes, ""),
        ]
        return "\n".join(f"{name:<18}{size:>18,} B  {note}".rstrip() for name, size, note in lines)


def _of_images(plan: VisionMemoryPlan) -> str:
    return f"weights {plan.weights_bytes:,} B, image cache {plan.cache_bytes:,} B"


def _of_draft(plan: MemoryPlan) -> str:
    return f"weights {plan.weights_bytes:,} B, KV pages {plan.kv_bytes:,} B"


def _by_dtype(weights: Mapping[PackedDtype, int]) -> str:
    """Return the bytes of each dtype if there are several."""
    return ", ".join(f"{dtype} {size:,} B" for dtype, size in sorted(weights.items())) if len(weights) > 1 else ""


def plan_memory(
    spec: DecoderSpec,
    *,
    weights: WeightDtype,
    kv_dtype: KVCacheDtype,
    page_size: int,
    num_pages: int,
    max_positions: int,
    max_tokens: int,
    max_samples: int,
    workers: int,
    states: StateLayout | None = None,
    num_states: int = 0,
    encoder: EncoderMemoryPlan | None = None,
    images: VisionMemoryPlan | None = None,
    lora: LoraLayout | None = None,
    lora_bytes: int = 0,
    draft: MemoryPlan | None = None,
    shows_hidden: bool = False,
) -> MemoryPlan:
    """Plan the memory of loading, compiling and running with these arguments.

    `encoder`, `images` and `draft` are added. Adapters of the layout `lora` take `lora_bytes`.
    """
    shapes, weights_bytes = plan_weights(spec, weights)
    rotary = planned_tables(spec.ropes, spec.head_dim, max_positions)
    builder = ProgramBuilder(max_tokens, max_samples, lora=None if lora is None else lora.targets(shapes))
    states = states or lay_out_states(spec)
    program = builder.build(emit_decoder(builder, spec, shapes, rotary, states, shows_hidden=shows_hidden))
    return MemoryPlan(
        weights=weights_bytes,
        kv_pages=num_pages,
        kv_bytes=num_pages * kv_layout(spec, kv_dtype, page_size).page_bytes,
        state_bytes=num_states * states.nbytes,
        arena_bytes=program.arena_bytes,
        logits_bytes=program.logits.nbytes,
        rotary_bytes=rotary_nbytes(spec.ropes, spec.head_dim, max_positions)
        + (0 if spec.query_scales is None else 4 * max_positions),
        scratch_bytes=scratch_nbytes(workers, program.ops),
        sampling_bytes=sampler_nbytes(padded(spec.vocab_size), max_samples, workers),
        encoder=encoder,
        images=images,
        lora_bytes=lora_bytes,
        draft=draft,
        program=program,
    )
