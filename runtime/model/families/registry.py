"""The supported families, and the reading of a folder's config.json or a GGUF file's metadata into a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...common.errors import ModelError, UnsupportedModel
from ..config_json import CONFIG_FILE, ConfigTable, read_config
from ..files import is_gguf
from ..quantization_config import read_quantization
from ..spec import DecoderSpec, TensorNames
from ..weights import Checkpoint
from ..weights.fused_columns import FusedColumns
from ..weights.gguf import open_gguf
from ..weights.gguf_checkpoint import GGUFCheckpoint
from ..weights.paired_rows import PairedRows, neighboring_pairs
from ..weights.quantization import Quantization
from ..weights.quantized import QuantizedCheckpoint
from ..weights.safetensors import SafetensorsCheckpoint
from ..weights.split_latents import SplitLatents
from ..weights.tensors import check_tensors
from .arcee import ARCEE
from .cohere import COHERE
from .cohere2 import COHERE2
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from .ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from .exaone4 import EXAONE4
from .falcon_h1 import FALCON_H1
from .family import Family
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3, GEMMA3_WITH_IMAGES
from .gemma4 import GEMMA4, GEMMA4_WITH_IMAGES
from .glm import GLM, GLM4
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITE
from .granite_hybrid import GRANITE_HYBRID
from .granite_moe import GRANITE_MOE
from .granite_swa import GRANITE_SWA
from .hunyuan import HUNYUAN
from .idefics3 import IDEFICS3
from .internlm3 import INTERNLM3
from .lfm2 import LFM2
from .lfm2_moe import LFM2_MOE
from .llama import LLAMA
from .minicpm import MINICPM, MINICPM3
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .olmoe import OLMOE
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_5_vl import QWEN2_5_VL
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .qwen3_vl import QWEN3_VL
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .stablelm import STABLELM
from .starcoder2 import STARCODER2
from .unsupported import MISSING_PARTS

FAMILIES = (
    LLAMA,
    ARCEE,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    SMOLLM3,
    GRANITE,
    GRANITE_MOE,
    GRANITE_SWA,
    GRANITE_HYBRID,
    FALCON_H1,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    OLMO2,
    OLMO_HYBRID,
    OLMO3,
    OLMOE,
    EXAONE4,
    INTERNLM3,
    MINICPM,
    MINICPM3,
    SEED_OSS,
    ERNIE4_5,
    ERNIE4_5_MOE,
    GLM,
    GLM4,
    GLM4_MOE,
    COHERE,
    COHERE2,
    STABLELM,
    STARCODER2,
    HUNYUAN,
    GLM4_MOE_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MINISTRAL3,
    PHI,
    PHI3,
    GEMMA2,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    GEMMA4,
    GEMMA4_WITH_IMAGES,
    GPT_OSS,
    LFM2,
    LFM2_MOE,
    IDEFICS3,
    QWEN2_5_VL,
    QWEN3_VL,
)


HEAD_PREFIX = "mtp."  # beginning of the names of a head's tensors


def read_spec(path: str | Path) -> DecoderSpec:
    """Read a folder's config.json, or a GGUF file's header. Raises ModelError.

    A folder needs no weights unless it is quantized: then its tensors show which matrices are quantized.
    """
    if is_gguf(path):
        return _open_gguf(path)[0]
    config = read_config(path)
    family = _family(config)
    return family.read(config) if _quantization(family, config, path) is None else _open_folder(path, config)[0]


def open_model(path: str | Path) -> tuple[DecoderSpec, Checkpoint]:
    """Return the spec and the tensors of a folder or GGUF file, all checked and none read. Raises ModelError."""
    if is_gguf(path):
        return _open_gguf(path)
    return _open_folder(path, read_config(path))


def read_head(path: str | Path) -> DecoderSpec:
    """Read the head of a folder's model that predicts further tokens (MTP). Raises ModelError if there is none."""
    return open_head(path)[0]


def open_head(path: str | Path) -> tuple[DecoderSpec, Checkpoint]:
    """Return the spec and the tensors of a model's head, all checked and none read. See `read_head`."""
    if is_gguf(path):
        raise UnsupportedModel(f"draft_model mtp: {path} is a GGUF file; heads are read from folders")
    config = read_config(path)
    family = _family(config)
    if family.head is None:
        have = ", ".join(each.architectures[0] for each in FAMILIES if each.head is not None)
        raise UnsupportedModel(f"draft_model mtp: {path} has no head that predicts further tokens; {have} may have one")
    spec = family.head(config, read_spec(path))
    stored = SafetensorsCheckpoint(path)
    if not any(name.startswith(f"{spec.names.fusion}.") for name in stored.names()):
        raise UnsupportedModel(
            f"draft_model mtp: {path} has no head that predicts further tokens: no {spec.names.fusion}"
        )
    if _has_fused_experts(name for name in stored.names() if name.startswith(HEAD_PREFIX)):
        spec = replace(spec, names=_fused_experts(spec.names))
    how = _quantization(family, config, path)
    if how is None:
        tensors = FusedColumns(stored, spec)
        check_tensors(spec, tensors)
        return spec, tensors
    checkpoint = QuantizedCheckpoint(stored, how)
    names = check_tensors(spec, FusedColumns(checkpoint, spec))
    orders = checkpoint.sort_by_group(names)
    return replace(spec, quantized=checkpoint.quantized(names), input_orders=orders), FusedColumns(checkpoint, spec)


def open_tensors(path: str | Path) -> Checkpoint:
    """Return the tensors of a folder or GGUF file of any family, as they are stored. Raises ModelError.

    The tensors of a quantized matrix appear as one tensor if their format is supported.
    """
    if is_gguf(path):
        return GGUFCheckpoint(open_gguf(path))
    stored = SafetensorsCheckpoint(path)
    try:
        how = read_quantization(read_config(path), path)
        return stored if how is None else QuantizedCheckpoint(stored, how)
    except ModelError:
        return stored


def _open_folder(path: str | Path, config: ConfigTable) -> tuple[DecoderSpec, Checkpoint]:
    family = _family(config)
    how = _quantization(family, config, path)
    spec = family.read(config)
    stored = SafetensorsCheckpoint(path)
    own = (name for name in stored.names() if not name.startswith(HEAD_PREFIX))
    if family.tensors is None and _has_fused_experts(own):
        spec = replace(spec, names=_fused_experts(spec.names))
    if how is None:
        tensors: Checkpoint = stored if family.tensors is None else family.tensors(stored, spec)
        tensors = tensors if spec.latent is None else SplitLatents(tensors, spec)
        check_tensors(spec, tensors)
        return spec, _with_pairs(family, spec, tensors)
    if spec.latent is not None:
        raise config.refused("quantization_config", "absent: latent attention needs the tensor kv_b_proj in numbers")
    checkpoint = QuantizedCheckpoint(stored, how)
    names = check_tensors(spec, checkpoint)
    orders = checkpoint.sort_by_group(names)
    return replace(spec, quantized=checkpoint.quantized(names), input_orders=orders), _with_pairs(
        family, spec, checkpoint
    )


def _with_pairs(family: Family, spec: DecoderSpec, tensors: Checkpoint) -> Checkpoint:
    """Return the tensors in the order of rows that the packing reads."""
    return PairedRows(tensors, neighboring_pairs(spec)) if family.neighboring_pairs else tensors


def _has_fused_experts(names: Iterable[str]) -> bool:
    return any(name.endswith(".mlp.experts.gate_up_proj") for name in names)


def _fused_experts(names: TensorNames) -> TensorNames:
    """Return the names of a folder with two tensors for all experts of a layer, as in transformers 5."""
    return replace(
        names,
        router="mlp.gate",
        expert_gate_up=("mlp.experts.gate_up_proj",),
        expert_down="mlp.experts.down_proj",
    )


def _quantization(family: Family, config: ConfigTable, path: str | Path) -> Quantization | None:
    """Return the quantization of a folder; None without one, and for a family that reads its own form."""
    return read_quantization(config, path) if family.tensors is None else None


def _open_gguf(path: str | Path) -> tuple[DecoderSpec, Checkpoint]:
    file = open_gguf(path)
    formats = [(family.gguf, family.read) for family in FAMILIES if family.gguf is not None]
    architecture = file.metadata.text("general.architecture")
    named = [pair for pair in formats if pair[0].architecture == architecture]
    if not named:
        known = dict.fromkeys(form.architecture for form, _ in formats)
        raise file.metadata.refused("general.architecture", f"one of {', '.join(known)}")
    has_experts = file.metadata.get(f"{architecture}.expert_count", 0) != 0
    fitting = [pair for pair in named if pair[0].experts == has_experts] or named
    marked = [pair for pair in fitting if pair[0].is_marked(file.metadata)]
    form, read = (marked or fitting)[0]
    return form.open(file, read)


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
    if name in MISSING_PARTS:
        raise UnsupportedModel(f"{CONFIG_FILE}: {config.where}{key} is {name}; Quire lacks {MISSING_PARTS[name]}")
    if name not in families:
        allowed = ", ".join(families)
        raise UnsupportedModel(f"{CONFIG_FILE}: {config.where}{key} is {name:.80}; it must be one of {allowed}")
    return families[name]
