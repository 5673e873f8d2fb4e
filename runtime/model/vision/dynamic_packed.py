"""The weights and the two programs of towers of images of any size."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.ops import KVDtype
from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.pack import PackedMatrix
from ..encoder.emit import emit_blocks, norm_for
from ..encoder.weights import BertLayerWeights, NormWeights, build_layer, build_norm
from ..program import ProgramBuilder, ProgramPlan, input_form
from ..weights.packing import GROUP, MatrixPlan, Part, Vector, WeightFactory
from .dynamic import DynamicVisionSpec, Merger


@dataclass(frozen=True, slots=True)
class MergerWeights:
    """The weights of a `Merger`."""

    norm: NormWeights | None  # [square_columns]
    up: PackedMatrix  # [square_columns, square_columns]
    up_bias: Vector
    down: PackedMatrix  # [hidden_out, square_columns]
    down_bias: Vector


@dataclass(frozen=True, slots=True)
class DynamicVisionWeights:
    """The weights of a tower and of its mergers."""

    patches: PackedMatrix  # [hidden, patch_columns]
    patch_bias: Vector | None
    first_norm: NormWeights
    layers: tuple[BertLayerWeights, ...]  # the last one has the norm after all layers
    mergers: tuple[MergerWeights, ...]
    positions: Vector | None  # [grid * grid * hidden], learned ones


def build_dynamic(spec: DynamicVisionSpec, dtype: PackedDtype, factory: WeightFactory) -> DynamicVisionWeights:
    """Make all weights with `factory`."""
    body = spec.body
    names = spec.body.names

    def matrix(name: str, out_features: int, in_features: int) -> PackedMatrix:
        part = Part(f"{name}.weight", (out_features, in_features))
        return factory.matrix(MatrixPlan(out_features, in_features, dtype, [part], group=GROUP if dtype == "q8" else 0))

    def bias(name: str, size: int) -> Vector:
        return factory.vector(size, [Part(f"{name}.bias", (size,))])

    def merger(names: Merger) -> MergerWeights:
        return MergerWeights(
            norm=build_norm(names.norm, spec.square_columns, True, factory) if names.norm else None,
            up=matrix(names.up, spec.square_columns, spec.square_columns),
            up_bias=bias(names.up, spec.square_columns),
            down=matrix(names.down, spec.hidden_out, spec.square_columns),
            down_bias=bias(names.down, spec.hidden_out),
        )

    table = Part(f"{spec.positions}.weight", (spec.grid**2, body.hidden_size))
    first = f"{names.layer.format(0)}{names.attention_norm}"
    return DynamicVisionWeights(
        patches=matrix(spec.patch_embedding, body.hidden_size, spec.patch_columns),
        patch_bias=bias(spec.patch_embedding, body.hidden_size) if spec.patch_bias else None,
        first_norm=build_norm(first, body.hidden_size, body.norm_bias, factory),
        layers=tuple(build_layer(body, layer, dtype, factory) for layer in range(body.num_layers)),
        mergers=tuple(map(merger, spec.mergers)),
        positions=factory.vector(spec.grid**2 * body.hidden_size, [table]) if spec.grid else None,
    )


def emit_dynamic_patches(spec: DynamicVisionSpec, weights: DynamicVisionWeights, keys_values: KVDtype) -> ProgramPlan:
    """Emit layers(positions + patches). The texts of a step are the windows of an image, or the image.

    The second result is the residual stream, which mergers may read after any layer.
    """
    body = spec.body
    builder = ProgramBuilder(spec.num_patches, spec.num_windows, keys_values)
    patches = builder.input("patches", spec.patch_columns)
    patches = builder.convert(patches, input_form(weights.patches))
    if spec.grid:
        x = builder.input("positions", body.hidden_size)
        builder.linear_add(patches, weights.patches, weights.patch_bias, x)
    else:
        x = builder.linear(patches, weights.patches, weights.patch_bias, "residual")
    normed = norm_for(builder, x, body.norm_kind, weights.first_norm, body.norm_eps, weights.layers[0].qkv)
    no_tables = (None,) * body.num_layers
    return builder.build(emit_blocks(builder, body, weights.layers, x, normed, no_tables, rotary_dim=body.head_dim), x)


def emit_merger(spec: DynamicVisionSpec, weights: MergerWeights) -> ProgramPlan:
    """Emit down(gelu(up(norm(squares)))), for some squares of an image at a time."""
    builder = ProgramBuilder(spec.squares_at_once, 1)
    squares = builder.input("squares", spec.square_columns)
    form = input_form(weights.up)
    if weights.norm is None:
        squares = builder.convert(squares, form)
    else:
        norm = weights.norm
        squares = builder.norm_rows(squares, "layer", norm.weight, norm.bias, spec.body.norm_eps, form)
    form = input_form(weights.down)
    squares = builder.activated(squares, weights.up, weights.up_bias, spec.square_columns, "gelu", form)
    return builder.build(builder.linear(squares, weights.down, weights.down_bias, "image rows"))
