"""MPNet: RoBERTa's shape, and a bias on each score by the distance of key and query; all layers share the biases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....kernels.ops import BIAS_PADDING
from ..config_json import ConfigTable
from .bert import read_bert_from, read_roberta_head
from .family import EncoderFamily
from .spec import BertSpec, EncoderNames

FIRST_POSITION = 2  # whatever config.json calls the padding token
NUM_DISTANCES = 32  # the only number that transformers supports; half for keys before the query, half after
EXACT_DISTANCES = 8  # exact distances on each side; the other ones are ranges that grow up to FARTHEST
FARTHEST = 128
NAMES = EncoderNames(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    o="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def read_mpnet(config: ConfigTable) -> BertSpec:
    """Read an `MPNetModel`."""
    spec = read_bert_from(config, "mpnet", FIRST_POSITION)
    num_distances = config.integer("relative_attention_num_buckets", NUM_DISTANCES, NUM_DISTANCES, NUM_DISTANCES)
    return replace(spec, num_types=0, num_distances=num_distances, names=NAMES)


def distance_bias(weights: npt.NDArray[np.float32], num_heads: int, positions: int) -> npt.NDArray[np.float32]:
    """Return the bias of `EphemeralAttention` for texts of up to `positions` tokens.

    `weights` [NUM_DISTANCES * num_heads] has a number for each range of distances and head.
    """
    distances = np.arange(1 - positions, positions)  # distance of the key from the query
    sizes = np.abs(distances).astype(np.float32)
    ranges = NUM_DISTANCES // 2 - EXACT_DISTANCES
    far = np.log(np.maximum(sizes, 1) / EXACT_DISTANCES) / np.float32(np.log(FARTHEST / EXACT_DISTANCES)) * ranges
    far = np.minimum(EXACT_DISTANCES + far.astype(np.int64), NUM_DISTANCES // 2 - 1)
    rows = np.where(sizes < EXACT_DISTANCES, sizes.astype(np.int64), far) + (distances > 0) * (NUM_DISTANCES // 2)
    bias = np.zeros((num_heads, bias_columns(positions)), np.float32)
    bias[:, : len(rows)] = weights.reshape(NUM_DISTANCES, num_heads)[rows].T
    return bias


def bias_columns(positions: int) -> int:
    """Return the columns of `distance_bias`."""
    return 2 * positions - 1 + BIAS_PADDING


MPNET = EncoderFamily("MPNet", ("mpnet",), read_mpnet, read_roberta_head, prefix="mpnet.")
