"""The decoder, the same for all families: emits the program of a model, from the embedding to the logits.

The program depends on the spec and the packed weights alone; differences between families are fields of the spec. Must
not import families.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kernels.ops import INPUT_DTYPES
from ...pager.layout import place_layers
from .program import Heads, Logits, ProgramBuilder, Value
from .spec import DecoderSpec
from .weights.packing import DecoderWeights, LayerWeights


def emit_decoder(
    builder: ProgramBuilder, spec: DecoderSpec, weights: DecoderWeights, rotary: npt.NDArray[np.float32]
) -> Logits:
    """Emit the ops from token ids to the logits of the rows that sample. `rotary` is f32 [positions, head_dim]."""
    x = builder.embed(weights.embedding)
    for layer, layer_weights in enumerate(weights.layers):
        _attention_block(builder, spec, layer_weights, layer, x, rotary)
        _mlp_block(builder, spec, layer_weights, x)
    sampled = builder.gather(x)
    normed = builder.norm(sampled, weights.final_norm, spec.norm_eps, INPUT_DTYPES[weights.lm_head.dtype])
    return builder.logits(normed, weights.lm_head)


def _attention_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    index: int,
    x: Value,
    rotary: npt.NDArray[np.float32],
) -> None:
    """Emit x += o(attention(qkv(norm(x))))."""
    group, slot = place_layers(spec.windows)[index]
    heads = Heads(group, slot, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    normed = builder.norm(x, layer.input_norm, spec.norm_eps, INPUT_DTYPES[layer.qkv.dtype])
    qkv = builder.linear(normed, layer.qkv, layer.qkv_bias, "qkv")
    attended = builder.attention(
        qkv, heads, layer.q_norm, layer.k_norm, spec.norm_eps, rotary, spec.windows[index], INPUT_DTYPES[layer.o.dtype]
    )
    builder.linear_add(attended, layer.o, layer.o_bias, x)


def _mlp_block(builder: ProgramBuilder, spec: DecoderSpec, layer: LayerWeights, x: Value) -> None:
    """Emit x += down(silu(gate(norm(x))) * up(norm(x)))."""
    normed = builder.norm(x, layer.mlp_norm, spec.norm_eps, INPUT_DTYPES[layer.gate_up.dtype])
    activated = builder.swiglu(
        normed, layer.gate_up, layer.gate_up_bias, spec.intermediate_size, INPUT_DTYPES[layer.down.dtype]
    )
    builder.linear_add(activated, layer.down, layer.down_bias, x)
