"""The tensors of folders with latent attention, whose expansion of latents is split into matrices of heads.

`kv_b_proj` [heads * (nope_dim + value_dim), rank] has the rows of a head's keys, then the rows of its values, for each
head in turn. Queries multiply the rows of keys from the other side, so these are transposed: [heads, rank, nope_dim].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import WrongTensor
from ..spec import DecoderSpec
from . import Checkpoint


class SplitLatents:
    """The tensors of `stored`, with the tensors of a head's keys and values that `spec` names. See `Checkpoint`."""

    def __init__(self, stored: Checkpoint, spec: DecoderSpec) -> None:
        assert spec.latent is not None, "only latent attention has an expansion of latents"
        self.path: Path = stored.path
        self.config_name: str = stored.config_name
        self.matrix_dtypes: Collection[str] = stored.matrix_dtypes
        self._stored = stored
        self._heads = spec.num_heads
        self._latent = spec.latent
        names = spec.names
        layers = [names.layer.format(layer) for layer in range(spec.num_layers)]
        self._keys = {f"{layer}{names.latent_k_b}.weight": f"{layer}{names.latent_kv_b}.weight" for layer in layers}
        self._values = {f"{layer}{names.latent_v_b}.weight": f"{layer}{names.latent_kv_b}.weight" for layer in layers}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor or WrongTensor."""
        latent = self._latent
        if name not in self._keys and name not in self._values:
            return self._stored.shape(name)
        source = self._source(name)
        wanted = self._heads * (latent.nope_dim + latent.value_dim), latent.rank
        if (found := self._stored.shape(source)) != wanted:
            raise WrongTensor(
                f"tensor {source} in {self.path} is {list(found)}; {self.config_name} implies {list(wanted)}"
            )
        if name in self._keys:
            return self._heads, latent.rank, latent.nope_dim
        return self._heads, latent.value_dim, latent.rank

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements. Raises MissingTensor."""
        return self._stored.dtype(self._source(name))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        return self._stored.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor. See `weights.Checkpoint`. Raises MissingTensor."""
        if name not in self._keys and name not in self._values:
            return self._stored.tensor(name)
        return np.stack([self._head(name, head) for head in range(self._heads)])

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the given rows of a tensor, of a matrix of heads the rows of each head. See `weights.Checkpoint`."""
        if name not in self._keys and name not in self._values:
            yield from self._stored.chunks(name, rows, num_rows)
            return
        latent = self._latent
        size = latent.rank if name in self._keys else latent.value_dim
        for head in range(rows.start // size, -(-rows.stop // size)):
            first, end = max(rows.start - head * size, 0), min(rows.stop - head * size, size)
            yield head * size + first - rows.start, self._head(name, head)[first:end]

    def _source(self, name: str) -> str:
        return self._keys.get(name) or self._values.get(name) or name

    def _head(self, name: str, head: int) -> npt.NDArray[Any]:
        """Return the rows of a head: [rank, nope_dim] of keys, [value_dim, rank] of values."""
        latent = self._latent
        first = head * (latent.nope_dim + latent.value_dim)
        is_key = name in self._keys
        rows = slice(first, first + latent.nope_dim)
        if not is_key:
            rows = slice(first + latent.nope_dim, first + latent.nope_dim + latent.value_dim)
        pieces = [piece.copy() for _, piece in self._stored.chunks(self._source(name), rows, rows.stop - rows.start)]
        stored = np.concatenate(pieces)
        return np.ascontiguousarray(stored.T) if is_key else stored
