"""The supported families, and the reading of a folder's config.json into a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...common.errors import UnsupportedModel
from ..config_json import CONFIG_FILE, ConfigTable, read_config
from ..spec import DecoderSpec
from .llama import read_llama
from .mistral import read_mistral
from .qwen2 import read_qwen2
from .qwen3 import read_qwen3

Reader = Callable[[ConfigTable], DecoderSpec]

ARCHITECTURES: dict[str, Reader] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}
MODEL_TYPES: dict[str, Reader] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
}


def read_spec(folder: str | Path) -> DecoderSpec:
    """Read a folder's config.json. Raises ModelNotFound, CorruptCheckpoint or UnsupportedModel."""
    config = read_config(folder)
    return _reader(config)(config)


def _reader(config: ConfigTable) -> Reader:
    """Return the reader for `architectures[0]`, or for `model_type` if config.json has no architectures."""
    if "architectures" not in config:
        return _pick(config, "model_type", config.text("model_type"), MODEL_TYPES)
    names = config.values["architectures"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.refused("architectures", f"a list whose first name is one of {', '.join(ARCHITECTURES)}")
    return _pick(config, "architectures[0]", names[0], ARCHITECTURES)


def _pick(config: ConfigTable, key: str, name: str, readers: dict[str, Reader]) -> Reader:
    if name not in readers:
        raise UnsupportedModel(f"{CONFIG_FILE}: {config.where}{key} is {name}; it must be one of {', '.join(readers)}")
    return readers[name]
