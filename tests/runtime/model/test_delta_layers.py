"""Layers with a gated delta net: their weights, from tensors of several forms, their states and their ops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire.kernels.ops import Attention, CausalConv, GatedNorm, LinearRecurrence, MatrixState, Ring
from quire.runtime.model import DecoderSpec, PackedModel, read_spec
from quire.runtime.model.spec import GatedDelta
from quire.runtime.model.states import lay_out_states
from quire.runtime.model.weights.decoder_weights import pack_weights
from quire.runtime.model.weights.delta_weights import DeltaWeights
from quire.runtime.model.weights.layer_weights import LayerWeights
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[np.float32]
HIDDEN, HEADS, KEYS, KEY_DIM, VALUE_DIM, TAPS = 64, 4, 2, 6, 10, 3
K, V = KEYS * KEY_DIM, HEADS * VALUE_DIM
RNG = np.random.default_rng(3)


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


QKV, Z, RATES, DECAYS = random(2 * K + V, HIDDEN), random(V, HIDDEN), random(HEADS, HIDDEN), random(HEADS, HIDDEN)
CONV, LOG_A, BIAS, NORM = random(2 * K + V, 1, TAPS), random(HEADS), random(HEADS), random(VALUE_DIM)
OUT = random(HIDDEN, V)
LAYER = {
    "A_log": LOG_A,
    "dt_bias": BIAS,
    "norm.weight": NORM,
    "out_proj.weight": OUT,
}
SEPARATE = {
    "in_proj_qkv.weight": QKV,
    "in_proj_z.weight": Z,
    "in_proj_b.weight": RATES,
    "in_proj_a.weight": DECAYS,
    "conv1d.weight": CONV,
}


def by_key_head(*kinds: Array) -> Array:
    """Return the rows of each key head together: those of the first kind, then those of the second one, …"""
    heads = [kind.reshape(KEYS, -1, HIDDEN) for kind in kinds]
    return np.concatenate([each[head] for head in range(KEYS) for each in heads])


FORMS: dict[str, tuple[dict[str, Array], dict[str, Any]]] = {
    "tensors of all heads": (SEPARATE, {}),
    "rows of each key head together": (
        {
            "in_proj_qkvz.weight": by_key_head(QKV[:K], QKV[K : 2 * K], QKV[2 * K :], Z),
            "in_proj_ba.weight": by_key_head(RATES, DECAYS),
            "conv1d.weight": CONV,
        },
        {
            "delta_qkv": ("linear_attn.in_proj_qkvz",),
            "delta_rates": ("linear_attn.in_proj_ba",),
            "delta_by_key_head": True,
        },
    ),
    "a tensor for each of queries, keys and values": (
        {name: SEPARATE[name] for name in ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")}
        | {f"{name}_proj.weight": rows for name, rows in zip("qkv", np.split(QKV, [K, 2 * K]), strict=True)}
        | {f"{name}_conv1d.weight": rows for name, rows in zip("qkv", np.split(CONV, [K, 2 * K]), strict=True)},
        {
            "delta_qkv": ("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"),
            "delta_conv": ("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
        },
    ),
}


def delta_spec(goldens: Path, **names: Any) -> DecoderSpec:
    """Return the spec of a golden whose first layer has a gated delta net."""
    spec = read_spec(goldens / "qwen2")
    layers = (True, *(False,) * (spec.num_layers - 1))
    delta = GatedDelta(
        num_key_heads=KEYS,
        num_value_heads=HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        taps=TAPS,
        norm_eps=1e-6,
        layers=layers,
    )
    return replace(spec, delta=delta, names=replace(spec.names, **names))


def packed(goldens: Path, folder: Path, form: str) -> PackedModel:
    tensors, names = FORMS[form]
    stored: dict[str, Any] = {}
    for file in (goldens / "qwen2").glob("*.safetensors"):
        stored |= load_file(file)
    stored |= {f"model.layers.0.linear_attn.{name}": tensor for name, tensor in (tensors | LAYER).items()}
    save_file(stored, folder / "model.safetensors")
    spec = delta_spec(goldens, **names)
    return PackedModel(folder, spec, pack_weights(spec, SafetensorsCheckpoint(folder), "f32"))


def first_layer(model: PackedModel) -> tuple[LayerWeights, DeltaWeights]:
    layer = model.weights.layers[0]
    assert isinstance(layer.mixer, DeltaWeights)
    return layer, layer.mixer


@pytest.mark.parametrize("form", FORMS)
def test_the_weights_of_a_layer(goldens: Path, tmp_path: Path, form: str) -> None:
    layer, weights = first_layer(packed(goldens, tmp_path, form))
    np.testing.assert_array_equal(weights.into.unpack(), np.concatenate([QKV, Z]))
    np.testing.assert_array_equal(weights.rates.unpack(), np.concatenate([RATES, DECAYS]) * layer.input_norm)
    np.testing.assert_array_equal(weights.taps, CONV[:, 0].T)
    np.testing.assert_allclose(weights.a, -np.exp(LOG_A), rtol=1e-6)
    np.testing.assert_array_equal(weights.bias, BIAS)
    np.testing.assert_array_equal(weights.norm, np.tile(NORM, HEADS))
    np.testing.assert_array_equal(weights.out.unpack(), OUT)


def test_a_state_has_a_ring_and_matrices_for_each_layer(goldens: Path) -> None:
    layout = lay_out_states(delta_spec(goldens), max_drafts=3)
    ring = Ring(0, TAPS - 1 + 5)
    assert layout.rollback == 5
    assert layout.rings == {0: ring}
    assert layout.matrices == {0: MatrixState(7 * 64 * 4, HEADS, KEY_DIM, VALUE_DIM, 5, "f32")}  # 64 columns, padded
    assert layout.nbytes == 7 * 64 * 4 + layout.matrices[0].nbytes
    small = lay_out_states(delta_spec(goldens), dtype="bf16").matrices[0]
    assert small == MatrixState(4 * 64 * 4, HEADS, KEY_DIM, VALUE_DIM, 2, "bf16")


def test_the_ops_of_a_layer(goldens: Path, tmp_path: Path) -> None:
    model = packed(goldens, tmp_path, "tensors of all heads")
    ops = model.compile(max_positions=64, max_tokens=8, max_samples=2).ops
    (convolution,) = [op for op in ops if isinstance(op, CausalConv)]
    (recurrence,) = [op for op in ops if isinstance(op, LinearRecurrence)]
    (norm,) = [op for op in ops if isinstance(op, GatedNorm)]
    assert (convolution.num_normed, convolution.head_dim, convolution.eps) == (2 * KEYS, KEY_DIM, 1e-6)
    assert (recurrence.query, recurrence.key, recurrence.value) == (0, K, 2 * K)
    assert (recurrence.rate, recurrence.decay, recurrence.num_key_heads) == (0, HEADS, KEYS)
    assert recurrence.scale == KEY_DIM**-0.5
    assert (norm.column, norm.group, norm.gate_first) == (2 * K + V, VALUE_DIM, False)
    attentions = [op for op in ops if isinstance(op, Attention)]
    assert len(attentions) == model.spec.num_layers - 1
    assert [op.layer for op in attentions] == list(range(len(attentions)))
