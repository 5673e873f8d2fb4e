"""The weights and the two programs of towers of images of any size."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.ops import INPUT_DTYPES, KVDtype
from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.pack import PackedMatrix
from ..encoder.emit import emit_blocks
from ..encoder.weights import BertLayerWeights, NormWeights, build_layer, build_norm
from ..program import ProgramBuilder, ProgramPlan
from ..weights.packing import Part, Vector, WeightFactory
from .dynamic import DynamicVisionSpec


@dataclass(frozen=True, slots=True)
class DynamicVisionWeights:
    """The weights of a tower and of the merger after it."""

    patches: PackedMatrix  # [hidden, patch_columns]
    patch_bias: Vector | None
    first_norm: NormWeights
    layers: tuple[BertLayerWeights, ...]  # the last one has the norm after all layers
    up: PackedMatrix  # [square_columns, square_columns]
    up_bias: Vector
    down: PackedMatrix  # [out_size, square_columns]
    down_bias: Vector


def build_dynamic(spec: DynamicVisionSpec, dtype: PackedDtype, factory: WeightFactory) -> DynamicVisionWeights:
    """Make all weights with `factory`."""
    body, names = spec.body, spec.body.names

    def matrix(name: str, out_features: int, in_features: int) -> PackedMatrix:
        return factory.matrix(out_features, in_features, dtype, [Part(f"{name}.weight", (out_features, in_features))])

    def bias(name: str, size: int) -> Vector:
        return factory.vector(size, [Part(f"{name}.bias", (size,))])

    (up, down), first = spec.merger, f"{names.layer.format(0)}{names.attention_norm}"
    return DynamicVisionWeights(
        patches=matrix(spec.patch_embedding, body.hidden_size, spec.patch_columns),
        patch_bias=bias(spec.patch_embedding, body.hidden_size) if spec.patch_bias else None,
        first_norm=build_norm(first, body.hidden_size, body.norm_bias, factory),
        layers=tuple(build_layer(body, layer, dtype, factory) for layer in range(body.num_layers)),
        up=matrix(up, spec.square_columns, spec.square_columns),
        up_bias=bias(up, spec.square_columns),
        down=matrix(down, spec.out_size, spec.square_columns),
        down_bias=bias(down, spec.out_size),
    )


def emit_dynamic_patches(spec: DynamicVisionSpec, weights: DynamicVisionWeights, keys_values: KVDtype) -> ProgramPlan:
    """Emit layers(patches). The texts of a step are the windows of an image, or the image."""
    body, norm = spec.body, weights.first_norm
    builder = ProgramBuilder(spec.num_patches, spec.num_windows, keys_values)
    patches = builder.input("patches", spec.patch_columns)
    patches = builder.convert(patches, INPUT_DTYPES[weights.patches.dtype])
    x = builder.linear(patches, weights.patches, weights.patch_bias, "residual")
    dtype = INPUT_DTYPES[weights.layers[0].qkv.dtype]
    normed = builder.norm_rows(x, body.norm_kind, norm.weight, norm.bias, body.norm_eps, dtype)
    no_tables = (None,) * body.num_layers
    return builder.build(emit_blocks(builder, body, weights.layers, x, normed, no_tables, rotary_dim=body.head_dim))


def emit_dynamic_squares(spec: DynamicVisionSpec, weights: DynamicVisionWeights) -> ProgramPlan:
    """Emit down(gelu(up(squares)))."""
    builder = ProgramBuilder(spec.num_tokens, 1)
    squares = builder.input("squares", spec.square_columns)
    squares = builder.convert(squares, INPUT_DTYPES[weights.up.dtype])
    dtype = INPUT_DTYPES[weights.down.dtype]
    squares = builder.activated(squares, weights.up, weights.up_bias, spec.square_columns, "gelu", dtype)
    return builder.build(builder.linear(squares, weights.down, weights.down_bias, "image rows"))
