"""From a model folder to something that runs: the spec, the packed weights, and a program for given capacities.

It must not know requests or who owns pages. The one invariant: everything that can be wrong with a folder is found
before the first large allocation.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import isdir
from pathlib import Path
from typing import get_args

from ...pager.layout import KVLayout
from ..common.config import KVCacheDtype, WeightDtype
from ..common.errors import ConfigError, ModelNotFound
from .decoder import emit_decoder
from .families.registry import read_spec
from .program import ProgramBuilder, ProgramPlan
from .rope import rotary_table
from .spec import DecoderSpec
from .weights import Checkpoint
from .weights.packing import DecoderWeights, pack_weights
from .weights.tensors import check_tensors

BUNDLED_MODEL = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A loaded model. Its weights are read-only; any number of programs may be compiled from it."""

    folder: Path
    spec: DecoderSpec
    weights: DecoderWeights

    def compile(self, *, max_positions: int, max_tokens: int, max_samples: int) -> ProgramPlan:
        """The program of a step of up to `max_tokens` rows, `max_samples` of them sampling, below `max_positions`."""
        rotary = rotary_table(self.spec.rope, self.spec.head_dim, max_positions)
        builder = ProgramBuilder(max_tokens, max_samples)
        return builder.build(emit_decoder(builder, self.spec, self.weights, rotary))


def pack_model(folder: str | Path | None, weights: WeightDtype) -> PackedModel:
    """Check, then pack the folder's weights as `weights`; None is the bundled model.

    Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, MissingTensor or WrongTensor, each naming the culprit, or
    ModelError when the system has no memory for the weights.
    """
    if weights not in get_args(WeightDtype):
        raise ConfigError(f"weights is {weights!r}; it must be one of {', '.join(get_args(WeightDtype))}")
    path = model_folder(folder)
    spec = read_spec(path)
    checkpoint = Checkpoint(path)
    check_tensors(spec, checkpoint)
    return PackedModel(path, spec, pack_weights(spec, checkpoint, weights))


def model_folder(model: str | Path | None) -> Path:
    """What a setting names: a folder, or None for the bundled model. Raises ModelNotFound."""
    if model is None:
        return BUNDLED_MODEL
    if not isdir(model):
        raise ModelNotFound(f"{model} is not a folder")
    return Path(model)


def kv_layout(spec: DecoderSpec, kv_dtype: KVCacheDtype, page_size: int) -> KVLayout:
    """The KV cache a spec implies."""
    return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype, page_size, spec.windows)
