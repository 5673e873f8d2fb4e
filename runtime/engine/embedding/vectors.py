"""The results made from an encoder's rows: shorter vectors, cosines, scores and probabilities.

A text's vector and score have the same bits in every request: each result is rounded once, from sums in a fixed order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..facade import EncoderInfo

Floats = npt.NDArray[np.float32]


def shortened(rows: Floats, dimensions: int | None, normalize: bool) -> Floats:
    """Return the first `dimensions` elements of each row [n, all], with length 1 again if they are normalized."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    cut = rows[:, :dimensions].astype(np.float64)
    if normalize:
        cut /= np.maximum(np.sqrt(_row_sums(cut * cut)), 1e-12)
    short: Floats = cut.astype(np.float32)
    return short


def cosines(query: Floats, rows: Floats) -> Floats:
    """Return the cosine [n, 1] between a query [d] and each of the rows [n, d]."""
    one = query.astype(np.float64)[None]
    many = rows.astype(np.float64)
    lengths = np.sqrt(_row_sums(one * one)) * np.sqrt(_row_sums(many * many))
    similarity: Floats = (_row_sums(many * one) / np.maximum(lengths, 1e-12)).astype(np.float32)
    return similarity


def activated(rows: Floats, activation: str) -> Floats:
    """Return the scores [n, 1] of labels' values [n, 1]: the values themselves, or their sigmoid."""
    if activation == "identity":
        return rows
    return np.array([[_sigmoid(value)] for value in rows[:, 0].tolist()], np.float32)


def probabilities(rows: Floats, info: EncoderInfo) -> Floats:
    """Return the probabilities [n, labels] of labels' values; a single label's is its score."""
    if len(info.labels) == 1:
        return activated(rows, info.score_activation)
    to_probabilities = _sigmoids if info.is_multi_label else _softmax
    return np.array([to_probabilities(row) for row in rows.tolist()], np.float32)


def _sigmoids(row: list[float]) -> list[float]:
    return list(map(_sigmoid, row))


def _sigmoid(value: float) -> float:
    """Return the sigmoid of a value, which is clamped to ±500 so that exp cannot overflow."""
    return 1 / (1 + math.exp(-min(max(value, -500), 500)))


def _softmax(row: list[float]) -> list[float]:
    largest = max(row)
    weights = [math.exp(value - largest) for value in row]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _row_sums(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sum [n, 1] of each row [n, d], added in order: numpy's `sum` depends on the processor."""
    return np.cumsum(values, axis=1)[:, -1:]
