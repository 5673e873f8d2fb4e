"""The cost of the weights' data type in accuracy.

Two figures: the loss of the bundled model on held-out text, and the difference from transformers' logits in f32 on the
small models of `tests/goldens`, whose weights are random.

Q4_0 is q4 with plain scales, as in GGUF: the weight of largest magnitude of a block becomes -8. KV caches are f32.

    python -m tests.bench.weight_accuracy
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from quire.runtime.model import BUNDLED_MODEL, pack_model
from quire.runtime.model.packed_model import PackedModel
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint

from tests.runtime.model.conftest import kernel_logits

TESTS = Path(__file__).parents[1]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def main() -> None:
    print(f"{'weights':<8}{'loss':>8}{'more':>9}   rms difference of logits, relative to their deviation")
    print(" " * 28 + "".join(f"{family:>10}" for family in FAMILIES))
    reference = loss(packed(BUNDLED_MODEL, "f32"))
    for weights in ("f32", "bf16", "q8", "q4", "Q4_0"):
        value = loss(packed(BUNDLED_MODEL, weights))
        differences = "".join(f"{difference(family, weights):>10.4f}" for family in FAMILIES)
        print(f"{weights:<8}{value:>8.4f}{value / reference - 1:>9.2%}   {differences}")


def packed(folder: Path, weights: str) -> PackedModel:
    if weights != "Q4_0":
        return pack_model(folder, weights)
    read = SafetensorsCheckpoint.chunks

    def plain(*arguments: Any) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        return ((first_row, plain_q4(arguments[1], rows)) for first_row, rows in read(*arguments))

    with patch.object(SafetensorsCheckpoint, "chunks", plain):
        return pack_model(folder, "q4")


def plain_q4(name: str, tensor: Any) -> Any:
    """Return a layer's matrix rounded to Q4_0, which q4 then represents exactly; other tensors as they are."""
    if tensor.ndim != 2 or not name.startswith("model.layers."):
        return tensor
    bits = tensor.dtype == np.uint16
    w = (tensor.astype(np.uint32) << 16).view(np.float32) if bits else tensor.astype(np.float32)
    blocks = np.zeros((len(w), -(-w.shape[1] // 32) * 32), np.float32)
    blocks[:, : w.shape[1]] = w
    blocks = blocks.reshape(-1, 32)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = (top / -8).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    values = np.clip(np.rint(blocks * inverse), -8, 7) * scale
    return np.ascontiguousarray(values.reshape(len(w), -1)[:, : w.shape[1]])


def loss(model: PackedModel) -> float:
    """Return the mean negative log-likelihood of the held-out text, in nats."""
    token_ids = json.loads((TESTS / "data" / "heldout.json").read_text())["token_ids"]
    logits = kernel_logits(model, token_ids, chunk=512).astype(np.float64)
    top = logits.max(axis=1)
    normalizer = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
    return float((normalizer - logits[np.arange(len(logits)), np.roll(token_ids, -1)])[:-1].mean())


def difference(family: str, weights: str) -> float:
    with np.load(TESTS / "goldens" / family / "golden.npz") as data:
        token_ids = data["token_ids"].tolist()
        expected = data["logits"].astype(np.float64)
    logits = kernel_logits(packed(TESTS / "goldens" / family, weights), token_ids)
    return float(np.sqrt(((logits - expected) ** 2).mean()) / expected.std())


if __name__ == "__main__":
    main()
