"""The reading of the towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

import math
from typing import Any, Literal

from ..config_json import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ConfigTable
from ..encoder.bert import ACTIVATIONS
from ..encoder.family import read_named
from ..encoder.spec import BertSpec, EncoderNames, MlpActivation
from .dynamic import ROPE, DynamicVisionSpec, ImageSizes, Merger, read_sizes
from .processor_files import read_normalization
from .spec import CHANNELS

MAX_FRAMES = 16
MAX_WINDOW = 1 << 16  # pixels of a side
TOWER_ACTIVATIONS: dict[str, MlpActivation] = {"silu": "silu"}
QWEN2_5_DEFAULTS: dict[str, Any] = {  # defaults of transformers' config class
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN3_DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
MAX_LEARNED_POSITIONS = 1 << 20
# OpenAI CLIP's means and divisors of pixels, for folders whose processor's file has none.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TOWER_NORM_EPS = 1e-6  # epsilon of all norms; config.json does not have it


def read_qwen2_5_vl(config: ConfigTable, processor: ConfigTable, max_tokens: int) -> DynamicVisionSpec:
    """Read the tower of a `Qwen2_5_VLForConditionalGeneration`."""
    vision = config.table("vision_config").with_defaults(QWEN2_5_DEFAULTS)
    sizes = _read_sizes(vision, processor, max_tokens)
    layers = vision.integer("depth", 1, MAX_LAYERS)
    window = vision.integer("window_size", 1, MAX_WINDOW) // sizes.block
    rescale, mean, std = read_normalization(processor, MEAN, STD)
    if not window:
        raise vision.refused("window_size", f"at least the {sizes.block} pixels of a square of patches")
    return DynamicVisionSpec(
        body=_read_body(
            vision,
            layers,
            "qwen2_5_vl",
            gated=True,
            norm_kind="rms",
            up=("mlp.gate_proj", "mlp.up_proj"),
            down="mlp.down_proj",
            final_norm="visual.merger.ln_q",
        ),
        sizes=sizes,
        frames=vision.integer("temporal_patch_size", 1, MAX_FRAMES),
        window=window,
        sees_all=_read_full_layers(vision, layers),
        hidden_out=_read_hidden_out(config, vision, 8192),
        image_token_id=config.integer("image_token_id", 0, MAX_VOCAB, 151_655),
        patch_embedding="visual.patch_embed.proj",
        patch_bias=False,
        mergers=(Merger("visual.merger.mlp.0", "visual.merger.mlp.2"),),
        rescale=rescale,
        mean=mean,
        std=std,
    )


def read_qwen3_vl(config: ConfigTable, processor: ConfigTable, max_tokens: int) -> DynamicVisionSpec:
    """Read the tower of a `Qwen3VLForConditionalGeneration`."""
    vision = config.table("vision_config").with_defaults(QWEN3_DEFAULTS | {"deepstack_visual_indexes": [8, 16, 24]})
    return _read_qwen3(config, vision, processor, max_tokens, image_token_id=151_655)


def read_qwen3_5_vision(config: ConfigTable, processor: ConfigTable, max_tokens: int) -> DynamicVisionSpec:
    """Read the tower of a `Qwen3_5ForConditionalGeneration` or `Qwen3_5MoeForConditionalGeneration`."""
    vision = config.table("vision_config").with_defaults(QWEN3_DEFAULTS | {"deepstack_visual_indexes": []})
    if vision.values["deepstack_visual_indexes"] != []:
        raise vision.refused("deepstack_visual_indexes", "absent or []: the family has no DeepStack")
    return _read_qwen3(config, vision, processor, max_tokens, image_token_id=248_056)


def _read_qwen3(
    config: ConfigTable, vision: ConfigTable, processor: ConfigTable, max_tokens: int, *, image_token_id: int
) -> DynamicVisionSpec:
    """Read a tower with learned positions; `image_token_id` is the default of the family."""
    sizes = _read_sizes(vision, processor, max_tokens)
    layers = vision.integer("depth", 1, MAX_LAYERS)
    num_positions = vision.integer("num_position_embeddings", 1, MAX_LEARNED_POSITIONS)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise vision.refused("num_position_embeddings", "the square of an integer")
    rescale, mean, std = read_normalization(processor, MEAN, STD)
    return DynamicVisionSpec(
        body=_read_body(
            vision,
            layers,
            "qwen3_vl",
            gated=False,
            norm_kind="layer",
            up=("mlp.linear_fc1",),
            down="mlp.linear_fc2",
            final_norm="visual.merger.norm",
        ),
        sizes=sizes,
        frames=vision.integer("temporal_patch_size", 1, MAX_FRAMES),
        window=0,
        sees_all=(True,) * layers,
        hidden_out=_read_hidden_out(config, vision, 4096),
        image_token_id=config.integer("image_token_id", 0, MAX_VOCAB, image_token_id),
        rescale=rescale,
        mean=mean,
        std=std,
        patch_embedding="visual.patch_embed.proj",
        patch_bias=True,
        mergers=_read_mergers(vision, layers),
        grid=math.isqrt(num_positions),
        positions="visual.pos_embed",
    )


def _read_mergers(vision: ConfigTable, layers: int) -> tuple[Merger, ...]:
    """Return the merger after the last layer, and DeepStack's mergers."""
    levels = vision.values.get("deepstack_visual_indexes")
    if (
        not isinstance(levels, list)
        or any(isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < layers for each in levels)
        or sorted(set(levels)) != levels
    ):
        raise vision.refused("deepstack_visual_indexes", f"a list of layers from 0 to {layers - 1} in ascending order")
    prefix = "visual.deepstack_merger_list.{}."
    return (
        Merger("visual.merger.linear_fc1", "visual.merger.linear_fc2"),
        *(
            Merger(f"{start}linear_fc1", f"{start}linear_fc2", level, f"{start}norm")
            for start, level in ((prefix.format(index), level) for index, level in enumerate(levels))
        ),
    )


def _read_hidden_out(config: ConfigTable, vision: ConfigTable, default: int) -> int:
    """Read the columns of a merger's rows, which are the columns of the text model's embedding."""
    text = config.table("text_config") if "text_config" in config else config
    hidden = text.integer("hidden_size", 1, MAX_WIDTH, default)
    if vision.integer("out_hidden_size", 1, MAX_WIDTH) != hidden:
        raise vision.refused("out_hidden_size", f"{hidden}, the hidden_size of the text model")
    return hidden


def _read_sizes(vision: ConfigTable, processor: ConfigTable, max_tokens: int) -> ImageSizes:
    """Read the sizes of images; the processor's file and the tower must agree on them."""
    sizes = read_sizes(processor, max_tokens)
    for key, value in (("patch_size", sizes.patch_size), ("spatial_merge_size", sizes.scale)):
        if vision.integer(key, 1, MAX_WIDTH) != value:
            raise vision.refused(key, f"{value}, the value in {processor.source}")
    channels = "in_channels" if "in_channels" in vision else "in_chans"
    if vision.integer(channels, 1, MAX_WIDTH, CHANNELS) != CHANNELS:
        raise vision.refused(channels, f"{CHANNELS}")
    return sizes


def _read_body(
    vision: ConfigTable,
    layers: int,
    family: str,
    *,
    gated: bool,
    norm_kind: Literal["layer", "rms"],
    up: tuple[str, ...],
    down: str,
    final_norm: str,
) -> BertSpec:
    """Read the transformer. `up`, `down` and `final_norm` are names of tensors. Only layer norms have a bias."""
    rope = vision.table("rope_parameters")
    if "rope_theta" in rope and rope.values["rope_theta"] != ROPE.theta:
        raise rope.refused("rope_theta", f"{ROPE.theta:.0f}")
    hidden = vision.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = vision.integer("num_heads", 1, MAX_HEADS)
    if hidden % (4 * num_heads) or hidden // num_heads > MAX_HEAD_DIM:
        allowed = f"a multiple of 4 num_heads ({4 * num_heads}), at most {MAX_HEAD_DIM} elements per head"
        raise vision.refused("hidden_size", allowed)
    return BertSpec(
        family=family,
        vocab_size=1,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=num_heads,
        head_dim=hidden // num_heads,
        intermediate_size=vision.integer("intermediate_size", 1, MAX_WIDTH),
        norm_eps=TOWER_NORM_EPS,
        max_position_embeddings=1,
        activation=read_named(vision, "hidden_act", TOWER_ACTIVATIONS if gated else ACTIVATIONS),
        gated=gated,
        ropes=(None,) * layers,
        windows=(0,) * layers,
        norm_kind=norm_kind,
        pre_norms=True,
        norm_bias=norm_kind == "layer",
        names=EncoderNames(
            layer="visual.blocks.{}.",
            qkv=("attn.qkv",),
            o="attn.proj",
            attention_norm="norm1",
            up=up,
            down=down,
            mlp_norm="norm2",
            final_norm=final_norm,
        ),
    )


def _read_full_layers(vision: ConfigTable, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether its patches see the whole image."""
    full = vision.values.get("fullatt_block_indexes")
    if not isinstance(full, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in full):
        raise vision.refused("fullatt_block_indexes", "a list of the numbers of layers")
    return tuple(layer in full for layer in range(layers))
