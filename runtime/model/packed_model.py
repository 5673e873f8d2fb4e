"""Packed models: the spec, the packed weights, and the program for given capacities.

Every error in a model's files is found before the first large allocation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from ...pager.layout import KVLayout
from ..common.config import KVCacheDtype, WeightDtype
from ..common.errors import ConfigError
from .decoder import emit_decoder
from .families.registry import open_head, open_model
from .files import model_path
from .lora import LoraLayout
from .program import ProgramBuilder, ProgramPlan
from .rope import rotary_tables
from .spec import DecoderSpec
from .states import StateLayout, lay_out_states
from .weights.decoder_weights import pack_weights
from .weights.layer_weights import DecoderWeights
from .weights.paired_rows import PairedRows, Pairs


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model's spec and packed weights. The weights are read-only; programs for several capacities may share them."""

    path: Path  # path of the folder or GGUF file
    spec: DecoderSpec
    weights: DecoderWeights
    pairs: Mapping[str, Pairs] = field(default_factory=dict)  # rows of tensors that were reordered for the rotation

    def compile(
        self,
        *,
        max_positions: int,
        max_tokens: int,
        max_samples: int,
        states: StateLayout | None = None,
        lora: LoraLayout | None = None,
        shows_hidden: bool = False,
    ) -> ProgramPlan:
        """Return the program for steps of `max_tokens` rows, `max_samples` of which sample, below `max_positions`.

        `states` is the layout of sequences' states; None: without draft tokens. `lora` is that of adapters. See
        `emit_decoder` for `shows_hidden`.
        """
        rotary = rotary_tables(self.spec.ropes, self.spec.head_dim, max_positions)
        targets = None if lora is None else lora.targets(self.weights)
        builder = ProgramBuilder(max_tokens, max_samples, lora=targets)
        states = states or lay_out_states(self.spec)
        return builder.build(emit_decoder(builder, self.spec, self.weights, rotary, states, shows_hidden=shows_hidden))


def pack_model(model: str | Path | None, weights: WeightDtype, stop: threading.Event | None = None) -> PackedModel:
    """Check a folder or GGUF file, then pack its weights as dtype `weights`; None is the bundled model.

    Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, MissingTensor or WrongTensor, each naming the file or
    key, or ModelError when the system has no memory for the weights. Raises Unavailable soon after another thread has
    set `stop`.
    """
    if weights not in get_args(WeightDtype):
        raise ConfigError(f"weights is {weights!r}; it must be one of {', '.join(get_args(WeightDtype))}")
    path = model_path(model)
    spec, checkpoint = open_model(path)
    pairs = checkpoint.pairs if isinstance(checkpoint, PairedRows) else {}
    return PackedModel(path, spec, pack_weights(spec, checkpoint, weights, stop), pairs)


def pack_head(model: PackedModel, weights: WeightDtype, stop: threading.Event | None = None) -> PackedModel:
    """Pack the head of a model that predicts further tokens. Raises as `pack_model` does."""
    spec, checkpoint = open_head(model.path)
    pairs = checkpoint.pairs if isinstance(checkpoint, PairedRows) else {}
    return PackedModel(model.path, spec, pack_weights(spec, checkpoint, weights, stop, model.weights), pairs)


def kv_layout(spec: DecoderSpec, kv_dtype: KVCacheDtype, page_size: int) -> KVLayout:
    """Return the layout of the KV cache that a spec implies."""
    windows = tuple(spec.windows[layer] for layer in spec.kv_layers)
    heads = tuple(map(spec.kv_heads_of, spec.kv_layers)) if spec.kv_heads else ()
    rank = 0 if spec.latent is None else spec.latent.rank
    return KVLayout(len(windows), spec.num_kv_heads, spec.head_dim, kv_dtype, page_size, windows, heads, rank)
