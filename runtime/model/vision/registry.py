"""The reading of a folder with a vision tower into a `VisionSpec`.

The towers of SigLIP are read here: learned positions, layer norms before attention and MLP, and GELU. `qwen.py`
reads Qwen's towers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.errors import CorruptCheckpoint
from ..config_json import (
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigTable,
    num_layers,
    read_config,
)
from ..encoder.bert import ACTIVATIONS
from ..encoder.family import read_named, read_plain_head_dim
from ..encoder.spec import BertSpec, EncoderNames
from ..files import is_gguf
from .dynamic import DynamicVisionSpec
from .processor_files import read_normalization, read_processor
from .qwen import read_qwen2_5_vl, read_qwen3_5_vision, read_qwen3_vl
from .spec import CHANNELS, VisionSpec

MAX_IMAGE_SIZE = 1 << 12  # pixels of a side
MAX_PATCHES = 1 << 14  # patches of an image
MAX_SCALE = 16
ANY_SIZE = 1 << 16  # tokens of an image if no limit is given
HALVES = (0.5,) * CHANNELS  # SigLIP's means and divisors of pixels
IDEFICS3_DEFAULTS: dict[str, Any] = {  # defaults of transformers' Idefics3VisionConfig and SmolVLMVisionConfig
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": CHANNELS,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
SIGLIP_DEFAULTS: dict[str, Any] = {**IDEFICS3_DEFAULTS, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}


def read_vision(path: str | Path, max_tokens: int = ANY_SIZE) -> VisionSpec | DynamicVisionSpec | None:
    """Read the description of a folder's tower from its config files; None for a model without a supported tower.

    A tower for images of any size is planned for images of at most about `max_tokens` tokens. Raises ModelError.
    """
    if is_gguf(path):
        return None
    config = read_config(path)
    names = config.values.get("architectures")
    kind = names[0] if isinstance(names, list) and names else config.values.get("model_type")
    if not isinstance(kind, str):
        return None
    processor = read_processor(Path(path))
    if kind in DYNAMIC_READERS:
        if "vision_config" not in config:
            return None
        if not processor.values:
            raise CorruptCheckpoint(f"{path} has no preprocessor_config.json, which says how images are prepared")
        return DYNAMIC_READERS[kind](config, processor, max_tokens)
    return READERS[kind](config, processor) if kind in READERS else None


def _read_idefics3(config: ConfigTable, processor: ConfigTable) -> VisionSpec:
    """Read the tower of an `Idefics3ForConditionalGeneration` or a `SmolVLMForConditionalGeneration`."""
    vision = config.table("vision_config").with_defaults(IDEFICS3_DEFAULTS)
    text = config.table("text_config").with_defaults({"hidden_size": 4096})
    if "max_image_size" in processor:
        tile = processor.table("max_image_size")
        size = vision.integer("image_size", 1, MAX_IMAGE_SIZE)
        if "longest_edge" in tile and tile.values["longest_edge"] != size:
            raise tile.refused("longest_edge", f"{size}, which is vision_config.image_size: the tower takes one tile")
    spec = _read_siglip(
        vision,
        processor,
        prefix="model.vision_model.",
        scale=config.integer("scale_factor", 1, MAX_SCALE, 2),
        out_size=text.integer("hidden_size", 1, MAX_WIDTH),
        image_token_id=config.integer("image_token_id", 0, MAX_VOCAB, 128_257),
        connector="model.connector.modality_projection.proj",
    )
    return replace(spec, rounds_positions=True)


def _read_gemma3(config: ConfigTable, processor: ConfigTable) -> VisionSpec | None:
    """Read the tower of a `Gemma3ForConditionalGeneration`; None if its config.json describes none."""
    if "vision_config" not in config:
        return None
    vision = config.table("vision_config").with_defaults(SIGLIP_DEFAULTS)
    text = config.table("text_config").with_defaults({"hidden_size": 2304, "sliding_window": 4096})
    tokens = config.integer("mm_tokens_per_image", 1, MAX_PATCHES, 256)
    grid = _grid(vision)
    side = math.isqrt(tokens)
    if tokens != side**2 or grid % side:
        raise config.refused("mm_tokens_per_image", f"the square of a number that divides the {grid} patches of a side")
    if text.integer("sliding_window", 1, MAX_POSITIONS) < tokens:
        raise text.refused("sliding_window", f"at least {tokens}: the tokens of an image see each other")
    id_key = "image_token_id" if "image_token_id" in config else "image_token_index"
    spec = _read_siglip(
        vision,
        processor,
        prefix="vision_tower.",
        scale=grid // side,
        out_size=text.integer("hidden_size", 1, MAX_WIDTH),
        image_token_id=config.integer(id_key, 0, MAX_VOCAB, 262_144),
        connector="multi_modal_projector.mm_input_projection_weight",
    )
    return replace(spec, mean_norm="multi_modal_projector.mm_soft_emb_norm", whole_images=True)


def _grid(config: ConfigTable) -> int:
    """Return the patches of a side that a vision_config describes."""
    image_size = config.integer("image_size", 1, MAX_IMAGE_SIZE)
    grid = image_size // config.integer("patch_size", 1, image_size)
    if grid**2 > MAX_PATCHES:
        raise config.refused("patch_size", f"large enough for at most {MAX_PATCHES} patches of an image")
    return grid


def _read_siglip(
    config: ConfigTable,
    processor: ConfigTable,
    *,
    prefix: str,
    scale: int,
    out_size: int,
    image_token_id: int,
    connector: str,
) -> VisionSpec:
    """Read a vision_config; the tower's tensors have names with `prefix`."""
    grid = _grid(config)
    if grid % scale:
        raise config.refused("patch_size", f"such that the {grid} patches of a side are a multiple of {scale}")
    if config.integer("num_channels", 1, 1 << 10) != CHANNELS:
        raise config.refused("num_channels", f"{CHANNELS}")
    layers = num_layers(config)
    body = BertSpec(
        family="siglip",
        vocab_size=grid**2,
        hidden_size=config.integer("hidden_size", 1, MAX_WIDTH),
        num_layers=layers,
        num_heads=config.integer("num_attention_heads", 1, MAX_HEADS),
        head_dim=read_plain_head_dim(config),
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        norm_eps=config.positive("layer_norm_eps"),
        max_position_embeddings=grid**2,
        activation=read_named(config, "hidden_act", ACTIVATIONS),
        ropes=(None,) * layers,
        windows=(0,) * layers,
        pre_norms=True,
        names=EncoderNames(
            words=f"{prefix}embeddings.position_embedding",
            layer=f"{prefix}encoder.layers.{{}}.",
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            o="self_attn.out_proj",
            attention_norm="layer_norm1",
            up=("mlp.fc1",),
            down="mlp.fc2",
            mlp_norm="layer_norm2",
            final_norm=f"{prefix}post_layernorm",
        ),
    )
    rescale, mean, std = read_normalization(processor, HALVES, HALVES)
    return VisionSpec(
        body=body,
        image_size=config.integer("image_size", 1, MAX_IMAGE_SIZE),
        patch_size=config.integer("patch_size", 1, MAX_IMAGE_SIZE),
        scale=scale,
        out_size=out_size,
        image_token_id=image_token_id,
        rescale=rescale,
        mean=mean,
        std=std,
        patch_embedding=f"{prefix}embeddings.patch_embedding",
        connector=connector,
    )


READERS: Mapping[str, Callable[[ConfigTable, ConfigTable], VisionSpec | None]] = {
    "Gemma3ForConditionalGeneration": _read_gemma3,
    "gemma3": _read_gemma3,
    "Idefics3ForConditionalGeneration": _read_idefics3,
    "SmolVLMForConditionalGeneration": _read_idefics3,
    "idefics3": _read_idefics3,
    "smolvlm": _read_idefics3,
}
DYNAMIC_READERS: Mapping[str, Callable[[ConfigTable, ConfigTable, int], DynamicVisionSpec]] = {
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5_vl,
    "qwen2_5_vl": read_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": read_qwen3_vl,
    "qwen3_vl": read_qwen3_vl,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5_vision,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_vision,
    "qwen3_5": read_qwen3_5_vision,
    "qwen3_5_moe": read_qwen3_5_vision,
}
