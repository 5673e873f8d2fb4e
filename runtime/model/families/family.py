"""The definitions of a family: the names by which a checkpoint is recognized, the reader of its config.json, and
the form of its GGUF files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config_json import ConfigTable
from ..gguf_config import GGUFFormat
from ..spec import DecoderSpec
from ..weights import Checkpoint
from ..weights.safetensors import SafetensorsCheckpoint


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `read` returns the spec of a config.json, or raises UnsupportedModel naming the key."""

    architectures: tuple[str, ...]  # config.json's `architectures[0]`
    model_types: tuple[str, ...]  # config.json's `model_type`, for files without `architectures`
    read: Callable[[ConfigTable], DecoderSpec]
    gguf: GGUFFormat | None = None  # the form of its GGUF files; None: not supported
    tensors: Callable[[SafetensorsCheckpoint, DecoderSpec], Checkpoint] | None = None  # a folder in another form
    # spec of the head that predicts further tokens (MTP), for a config.json and its spec; None: heads are not supported
    head: Callable[[ConfigTable, DecoderSpec], DecoderSpec] | None = None
    neighboring_pairs: bool = False  # interleaved RoPE: a rotated pair is two neighboring rows of q and k in a folder
