"""Model folders and packed models: the spec, the packed weights, and the program for given capacities.

Every error in a folder is found before the first large allocation.
"""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass
from os.path import exists, isdir
from pathlib import Path
from typing import get_args

from ...pager.layout import KVLayout
from ..common.config import KVCacheDtype, WeightDtype
from ..common.errors import ConfigError, CorruptCheckpoint, ModelNotFound, UnsupportedModel
from .config_json import CONFIG_FILE
from .decoder import emit_decoder
from .families.registry import read_spec
from .program import ProgramBuilder, ProgramPlan
from .rope import rotary_table
from .spec import DecoderSpec
from .weights import Checkpoint
from .weights.packing import DecoderWeights, pack_weights
from .weights.tensors import check_tensors

BUNDLED_MODEL = Path(__file__).parents[1] / "demo_model"
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a model on Hugging Face: organisation/name


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model's spec and packed weights. The weights are read-only; programs for several capacities may share them."""

    folder: Path
    spec: DecoderSpec
    weights: DecoderWeights

    def compile(self, *, max_positions: int, max_tokens: int, max_samples: int) -> ProgramPlan:
        """Return the program for steps of `max_tokens` rows, `max_samples` of which sample, below `max_positions`."""
        rotary = rotary_table(self.spec.rope, self.spec.head_dim, max_positions)
        builder = ProgramBuilder(max_tokens, max_samples)
        return builder.build(emit_decoder(builder, self.spec, self.weights, rotary))


def pack_model(folder: str | Path | None, weights: WeightDtype, stop: threading.Event | None = None) -> PackedModel:
    """Check the folder, then pack its weights as dtype `weights`; None is the bundled model.

    Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, MissingTensor or WrongTensor, each naming the file or
    key, or ModelError when the system has no memory for the weights. Raises Unavailable soon after another thread has
    set `stop`.
    """
    if weights not in get_args(WeightDtype):
        raise ConfigError(f"weights is {weights!r}; it must be one of {', '.join(get_args(WeightDtype))}")
    path = model_folder(folder)
    spec = read_spec(path)
    checkpoint = Checkpoint(path)
    check_tensors(spec, checkpoint)
    return PackedModel(path, spec, pack_weights(spec, checkpoint, weights, stop))


def model_folder(model: str | Path | None) -> Path:
    """Return the folder of a model setting; None is the bundled model. Raises ModelNotFound, UnsupportedModel."""
    if model is None:
        return BUNDLED_MODEL
    if str(model).endswith(".gguf") and not isdir(model):
        raise UnsupportedModel(f"{model}: GGUF files are not supported yet; give a folder in Hugging Face's format")
    if not exists(model) and _REPOSITORY.fullmatch(str(model)):
        raise ModelNotFound(
            f"{model} does not exist; download it first, for example with "
            f"`hf download {model} --local-dir DIR`, and give the folder"
        )
    if not isdir(model):
        raise ModelNotFound(f"{model} {'is not a folder' if exists(model) else 'does not exist'}")
    return Path(model)


def kv_layout(spec: DecoderSpec, kv_dtype: KVCacheDtype, page_size: int) -> KVLayout:
    """Return the layout of the KV cache that a spec implies."""
    return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype, page_size, spec.windows)


def fingerprint(folder: Path) -> bytes:
    """Return a sha256 over names and contents of config.json and all safetensors files; takes about a second per GB.

    Models with the same fingerprint compute the same keys and values. Raises CorruptCheckpoint for an unreadable file.
    """
    digest = hashlib.sha256()
    try:
        for path in [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors*"))]:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be read completely: {error}") from error
    return digest.digest()
