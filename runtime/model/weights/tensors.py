"""The tensors that a spec implies, by name and shape, and the check that a checkpoint has them.

A checkpoint that passed `check_tensors` can be packed without errors. Other tensors are ignored: old checkpoints have
rotary buffers, and tied ones may have a copy of the head.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import WrongTensor
from ..spec import DecoderSpec
from . import Checkpoint
from .safetensors import READABLE

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """Return the common prefix of a layer's tensor names, which is the same in all families."""
    return f"model.layers.{layer}."


def expected_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every (name, shape) that the spec implies. Matrices are [out_features, in_features], as in torch."""
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        for name, shape in _layer_tensors(spec):
            yield layer_prefix(layer) + name, shape
    yield FINAL_NORM, (spec.hidden_size,)
    if not spec.tie_embeddings:
        yield LM_HEAD, (spec.vocab_size, spec.hidden_size)


def _layer_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    yield "input_layernorm.weight", (hidden,)
    yield from _linear("self_attn.q_proj", spec.q_size, hidden, spec.qkv_bias)
    yield from _linear("self_attn.k_proj", spec.kv_size, hidden, spec.qkv_bias)
    yield from _linear("self_attn.v_proj", spec.kv_size, hidden, spec.qkv_bias)
    if spec.qk_norm:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    yield from _linear("self_attn.o_proj", hidden, spec.q_size, spec.o_bias)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate_proj", intermediate, hidden, spec.mlp_bias)
    yield from _linear("mlp.up_proj", intermediate, hidden, spec.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, intermediate, spec.mlp_bias)


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    """Check presence, shape and dtype of every tensor, reading none. Raises MissingTensor or WrongTensor."""
    for name, shape in expected_tensors(spec):
        found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        where = f"tensor {name} in {checkpoint.folder}"
        if found != shape:
            raise WrongTensor(f"{where} is {list(found)}; config.json implies {list(shape)}")
        if dtype not in READABLE:
            raise WrongTensor(f"{where} is {dtype}; it must be one of {', '.join(READABLE)}")
