"""Measure the loss of an embedding model with each type of weights: the distance of vectors to those in f32.

usage: python -m tests.bench.embedding_accuracy MODEL FILE

FILE has one text per line. For each type: 1 - cosine to the vector in f32, mean and largest, and the share of texts
whose nearest other text is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quire import LLM

TYPES = ("bf16", "q8", "q4")


def directions(model: str, weights: Any, texts: list[str]) -> npt.NDArray[np.float64]:
    """Return the vectors of texts with length 1."""
    with LLM(model, weights=weights) as llm:
        vectors = llm.embed(texts, truncate_prompt_tokens=-1).astype(np.float64)
    found: npt.NDArray[np.float64] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def nearest(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Return the index of the nearest other vector of each."""
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -2)
    return cosines.argmax(axis=1)


def main() -> None:
    model, file = sys.argv[1:]
    texts = [line for line in Path(file).read_text().splitlines() if line]
    exact = directions(model, "f32", texts)
    print(f"{len(texts)} texts\n{'weights':<8}{'mean':>10}{'largest':>10}{'same nearest':>14}")
    for weights in TYPES:
        vectors = directions(model, weights, texts)
        distances = 1 - (vectors * exact).sum(axis=1)
        same = (nearest(vectors) == nearest(exact)).mean()
        print(f"{weights:<8}{distances.mean():>10.1e}{distances.max():>10.1e}{same:>14.1%}", flush=True)


if __name__ == "__main__":
    main()
