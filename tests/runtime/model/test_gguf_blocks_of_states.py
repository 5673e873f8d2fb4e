"""GGUF files of families with states, in the mixtures of block types that llama-quantize writes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.model import pack_model
from quire.runtime.model.weights.decoder_weights import plan_weights

from tests.support.ggml import random_blocks
from tests.support.gguf_files import CHANGED, Tensor, describe, stored_tensors, write
from tests.support.matrices import packed_matrices
from tests.support.random_models import write_random_model

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 32, "mamba_n_groups": 2}
EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
NEMOTRON = {"head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2}
SIZES: dict[str, dict[str, Any]] = {
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"moe_intermediate_size": 256},
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA | EXPERTS,
    "qwen3_next": DELTA | EXPERTS,
    "granite_hybrid": MAMBA | {"shared_intermediate_size": 256},
    "granite_hybrid_moe": MAMBA | {"shared_intermediate_size": 256, "intermediate_size": 256},
    "falcon_h1": MAMBA,
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON | {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256},
}
MIXTURES = {  # name -> types of most matrices, and of the matrices that it keeps more exactly; dtypes in memory
    "Q4_K_M": ("Q4_K", "Q6_K", {"q4_k", "q6_k"}),
    "Q5_K_M": ("Q5_K", "Q6_K", {"q5_k", "q6_k"}),
    "Q3_K_L": ("Q3_K", "Q5_K", {"q6_k", "q5_k"}),
    "Q2_K": ("Q2_K", "Q3_K", {"q8", "q6_k"}),
    "IQ4_XS": ("IQ4_XS", "Q5_K", {"q8", "q5_k"}),
}
MORE_EXACT = ("attn_v.", "ffn_down", "output.", "token_embd.", "ssm_out.")
CASES = [(family, "Q4_K_M") for family in SIZES]
CASES += [("nemotron_h", "IQ4_XS"), ("qwen3_5", "Q2_K"), ("granite_hybrid", "Q3_K_L"), ("lfm2", "Q5_K_M")]


def quantized(name: str, tensor: Tensor, mixture: str) -> Tensor:
    """Return a matrix as blocks of random weights. Vectors and small matrices keep their numbers, as in real files."""
    rows, columns = prod(tensor.shape[:-1]), tensor.shape[-1]
    is_matrix = len(tensor.shape) > 1 and min(tensor.shape[-2:]) > 32 and tensor.kind != "F32"
    if not is_matrix or columns % 256:
        return tensor
    kind = MIXTURES[mixture][any(part in name for part in MORE_EXACT)]
    generator = np.random.default_rng(len(name))
    return Tensor(tensor.shape, kind, random_blocks(generator, kind, rows, columns, size=0.03).tobytes())


@pytest.mark.parametrize(("family", "mixture"), CASES)
def test_matrices_keep_the_numbers_of_their_blocks(family: str, mixture: str, tmp_path: Path) -> None:
    folder = write_random_model(family, tmp_path / family, **{**WIDE, **CHANGED.get(family, {}), **SIZES[family]})
    tensors = {name: quantized(name, each, mixture) for name, each in stored_tensors(folder, "F16").items()}
    path = write(tmp_path / "a.gguf", describe(folder) | {"general.quantization_version": 2}, tensors)
    model, in_f32 = (pack_model(path, weights) for weights in ("auto", "f32"))
    for matrix, like in zip(packed_matrices(model.weights), packed_matrices(in_f32.weights), strict=True):
        step = np.abs(like.unpack()).max() / 127 if matrix.dtype == "q8" else 0
        np.testing.assert_allclose(matrix.unpack(), like.unpack(), rtol=0, atol=step)
    planned = plan_weights(model.spec, "auto")[1]
    assert planned.total() == sum(matrix.nbytes for matrix in packed_matrices(model.weights))
    assert set(planned) - {"f32"} == MIXTURES[mixture][2]
