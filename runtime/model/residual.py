"""Both ends of a branch of the residual stream: the norm of its input, and the addition of its output."""

from __future__ import annotations

from ...kernels.pack import PackedMatrix
from .program import NormedValue, ProgramBuilder, RowForm, Value, input_form
from .spec import DecoderSpec
from .weights.layer_weights import LayerWeights
from .weights.packing import Vector


def normed_input(
    builder: ProgramBuilder, spec: DecoderSpec, layer: LayerWeights, x: Value, form: RowForm
) -> Value | NormedValue:
    """Return norm(x) by the first norm of a layer."""
    return normed_rows(builder, spec, layer.input_norm, layer.input_norm_bias, x, form)


def normed_rows(
    builder: ProgramBuilder, spec: DecoderSpec, norm: Vector | None, bias: Vector | None, x: Value, form: RowForm
) -> Value | NormedValue:
    """Return norm(x), or x where the family does not norm it, in the form that the next linear layer reads."""
    if norm is None:
        return builder.convert(x, form)
    if spec.norm_kind == "rms":
        return builder.norm(x, norm, spec.norm_eps, form)
    return builder.norm_rows(x, spec.norm_kind, norm, bias, spec.norm_eps, form)


def rows_form(builder: ProgramBuilder, spec: DecoderSpec, norm: Vector | None, weight: PackedMatrix) -> RowForm:
    """Return the form in which `normed_rows` gives a linear layer its input."""
    return input_form(weight) if norm is not None and spec.norm_kind == "rms" else builder.form_of(weight)


def add_branch(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    branch: Value,
    weight: PackedMatrix,
    bias: Vector | None,
    post_norm: Vector | None,
    x: Value,
    scale: float = 1.0,
    after: float = 1.0,
) -> None:
    """Emit x += scale * linear(branch), or x = (x + norm(linear(branch))) * after in families with such a norm."""
    if post_norm is None:
        builder.linear_add(branch, weight, bias, x, spec.residual_scale * scale)
    else:
        builder.add_norm(builder.linear(branch, weight, bias, "branch"), post_norm, spec.norm_eps, x, after)
