"""The reading of a folder with a vision tower into a `VisionSpec`.

Towers are those of SigLIP: learned positions, layer norms before attention and MLP, and GELU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from ..config_json import (
    MAX_HEADS,
    MAX_VOCAB,
    MAX_WIDTH,
    ConfigTable,
    num_layers,
    read_config,
    read_head_dim,
    read_object,
)
from ..encoder.bert import ACTIVATIONS
from ..encoder.family import read_named
from ..encoder.spec import BertSpec, EncoderNames
from ..files import is_gguf
from .spec import CHANNELS, VisionSpec

MAX_IMAGE_SIZE = 1 << 12  # pixels of a side
MAX_PATCHES = 1 << 14  # of an image
MAX_SCALE = 16
PROCESSOR_FILES = {"preprocessor_config.json": "", "processor_config.json": "image_processor"}  # file -> key in it
PROCESSOR_DEFAULTS: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * CHANNELS,
    "image_std": [0.5] * CHANNELS,
}
IDEFICS3_DEFAULTS: dict[str, Any] = {  # of transformers' Idefics3VisionConfig and SmolVLMVisionConfig
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


def read_vision(path: str | Path) -> VisionSpec | None:
    """Read what the tower of a folder is from its config files; None for a model without a supported tower.

    Raises ModelError.
    """
    if is_gguf(path):
        return None
    config = read_config(path)
    names = config.values.get("architectures")
    kind = names[0] if isinstance(names, list) and names else config.values.get("model_type")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    return None if reader is None else reader(config, _read_processor(Path(path)))


def _read_idefics3(config: ConfigTable, processor: ConfigTable) -> VisionSpec:
    """Read the tower of an `Idefics3ForConditionalGeneration` or a `SmolVLMForConditionalGeneration`."""
    vision = config.table("vision_config").with_defaults(IDEFICS3_DEFAULTS)
    text = config.table("text_config").with_defaults({"hidden_size": 4096})
    return _read_siglip(
        vision,
        processor,
        prefix="model.vision_model.",
        scale=config.integer("scale_factor", 1, MAX_SCALE, 2),
        out_size=text.integer("hidden_size", 1, MAX_WIDTH),
        image_token_id=config.integer("image_token_id", 0, MAX_VOCAB, 128_257),
        connector="model.connector.modality_projection.proj",
    )


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
    image_size = config.integer("image_size", 1, MAX_IMAGE_SIZE)
    patch_size = config.integer("patch_size", 1, image_size)
    grid = image_size // patch_size
    if grid**2 > MAX_PATCHES:
        raise config.refused("patch_size", f"large enough for at most {MAX_PATCHES} patches of an image")
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
        head_dim=read_head_dim(config),
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
    normalises = processor.flag("do_normalize", True)
    return VisionSpec(
        body=body,
        image_size=image_size,
        patch_size=patch_size,
        scale=scale,
        out_size=out_size,
        image_token_id=image_token_id,
        rescale=processor.positive("rescale_factor") if processor.flag("do_rescale", True) else 1.0,
        mean=_means(processor) if normalises else (0.0,) * CHANNELS,
        std=processor.numbers("image_std", CHANNELS) if normalises else (1.0,) * CHANNELS,
        patch_embedding=f"{prefix}embeddings.patch_embedding",
        connector=connector,
    )


READERS: Mapping[str, Callable[[ConfigTable, ConfigTable], VisionSpec]] = {
    "Idefics3ForConditionalGeneration": _read_idefics3,
    "SmolVLMForConditionalGeneration": _read_idefics3,
    "idefics3": _read_idefics3,
    "smolvlm": _read_idefics3,
}


def _read_processor(folder: Path) -> ConfigTable:
    """Return how the processor normalises pixels; with its defaults where the folder does not say."""
    for name, key in PROCESSOR_FILES.items():
        if isfile(folder / name):
            values = read_object(folder / name, key)
            return ConfigTable(values, f"{key}." if key else "", name).with_defaults(PROCESSOR_DEFAULTS)
    return ConfigTable(PROCESSOR_DEFAULTS, source="preprocessor_config.json")


def _means(processor: ConfigTable) -> tuple[float, ...]:
    values = processor.values.get("image_mean")
    if not isinstance(values, list) or len(values) != CHANNELS:
        raise processor.refused("image_mean", f"a list of {CHANNELS} numbers")
    if any(isinstance(each, bool) or not isinstance(each, int | float) or not abs(each) <= 1e6 for each in values):
        raise processor.refused("image_mean", f"{CHANNELS} numbers from -1e6 to 1e6")
    return tuple(map(float, values))
