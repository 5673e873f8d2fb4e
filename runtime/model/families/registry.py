"""The supported families, and the reading of a folder's config.json into a `DecoderSpec`."""

from __future__ import annotations

from pathlib import Path

from ...common.errors import UnsupportedModel
from ..config_json import CONFIG_FILE, ConfigTable, read_config
from ..spec import DecoderSpec
from .family import Family
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def read_spec(folder: str | Path) -> DecoderSpec:
    """Read a folder's config.json. Raises ModelNotFound, CorruptCheckpoint or UnsupportedModel."""
    config = read_config(folder)
    return _family(config).read(config)


def _family(config: ConfigTable) -> Family:
    """Return the family of `architectures[0]`, or of `model_type` if config.json has no architectures."""
    if "architectures" not in config:
        types = {name: family for family in FAMILIES for name in family.model_types}
        return _pick(config, "model_type", config.text("model_type"), types)
    architectures = {name: family for family in FAMILIES for name in family.architectures}
    names = config.values["architectures"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.refused("architectures", f"a list whose first name is one of {', '.join(architectures)}")
    return _pick(config, "architectures[0]", names[0], architectures)


def _pick(config: ConfigTable, key: str, name: str, families: dict[str, Family]) -> Family:
    if name not in families:
        raise UnsupportedModel(f"{CONFIG_FILE}: {config.where}{key} is {name}; it must be one of {', '.join(families)}")
    return families[name]
