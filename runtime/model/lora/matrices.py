"""The matrices of an adapter as its files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...common.errors import WrongTensor

MAX_RANK = 256


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one linear layer: its weight changes by scale * b @ a."""

    a: npt.NDArray[np.float32]  # [rank, in_features]
    b: npt.NDArray[np.float32]  # [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter: its matrices by the name of the tensor that they change, and a digest of its files."""

    path: Path
    matrices: Mapping[str, LowRank]
    digest: bytes  # sha256

    @property
    def max_rank(self) -> int:
        return max(each.rank for each in self.matrices.values())


def check_finite(values: npt.NDArray[np.float32], name: str, path: Path) -> npt.NDArray[np.float32]:
    """Return the values of a tensor. Raises WrongTensor if they are not all finite."""
    if not np.isfinite(values).all():
        raise WrongTensor(f"tensor {name} in {path} has numbers that are not finite")
    return values
