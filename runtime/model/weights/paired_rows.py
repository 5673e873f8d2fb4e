"""The tensors of a checkpoint whose rotated pairs are neighboring rows of Q and K, in the order that the packing reads.

RoPE turns pairs of rows. Interleaved RoPE pairs neighboring rows; this order of rows makes it the same as a rotation of
rows half a rotated part apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rope import rotary_dim
from ..spec import DecoderSpec, Latent
from . import Checkpoint
from .quantization import SORTED


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rows of a tensor in neighboring pairs: `rotated` from `first` on, of each head in the first `rows`.

    The elements of a vector are rows; a vector may have a dimension of heads.
    """

    head_dim: int
    rotated: int
    rows: int
    is_vector: bool = False
    first: int = 0

    def places(self, num_rows: int) -> npt.NDArray[np.intp]:
        """Return the place of each stored row."""
        places = np.arange(num_rows)
        heads = places[: self.rows].reshape(-1, self.head_dim)
        rotated = heads[:, self.first : self.first + self.rotated]
        rotated[:] = rotated.reshape(-1, 2, self.rotated // 2).swapaxes(1, 2).reshape(rotated.shape)
        return places


class PairedRows:
    """The tensors of `stored`, with the rows of `pairs` half a rotated part apart: name -> pairs. See `Checkpoint`."""

    def __init__(self, stored: Checkpoint, pairs: Mapping[str, Pairs]) -> None:
        self.path: Path = stored.path
        self.config_name: str = stored.config_name
        self.matrix_dtypes: Collection[str] = stored.matrix_dtypes
        self._stored = stored
        self.pairs = pairs

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises MissingTensor."""
        return self._stored.shape(name)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor's elements. Raises MissingTensor."""
        return self._stored.dtype(name)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the type and the bytes of every tensor in the files."""
        return self._stored.sizes()

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Return a copy of a tensor. See `weights.Checkpoint`. Raises MissingTensor."""
        array = self._stored.tensor(name)
        places = self._places(name)
        if places is None:
            return array
        rows = array.reshape(len(places), -1)
        ordered = np.empty_like(rows)
        ordered[places] = rows
        return ordered.reshape(array.shape)

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor, in whole heads and whole tiles of 32 rows."""
        places = self._places(name)
        if places is None:
            yield from self._stored.chunks(name, rows, num_rows)
            return
        wanted = range(prod(self.shape(name)[:-1]))[rows]
        unit = lcm(self.pairs[name.removesuffix(SORTED)].head_dim, 32)
        num_rows = max(num_rows // unit, 1) * unit
        for first in range(wanted.start, wanted.stop, num_rows):
            stop = min(first + num_rows, wanted.stop)
            pieces = self._stored.chunks(name, slice(first, stop), num_rows)
            yield first - wanted.start, _placed(pieces, places[first:stop] - first)

    def _places(self, name: str) -> npt.NDArray[np.intp] | None:
        """Return the place of each stored row; None if the order is the same."""
        pairs = self.pairs.get(name.removesuffix(SORTED))
        if pairs is None:
            return None
        shape = self.shape(name)
        return pairs.places(prod(shape) if pairs.is_vector else shape[0])


def neighboring_pairs(spec: DecoderSpec) -> dict[str, Pairs]:
    """Return the pairs of the weights and biases of Q and K, or of the tensor that also has V; and of their norms."""
    if spec.latent is not None:
        return _pairs_of_latent_attention(spec, spec.latent)
    rotated = next((rotary_dim(rope, spec.head_dim) for rope in spec.ropes if rope is not None), spec.head_dim)
    sizes = (spec.q_size, spec.kv_size) if len(spec.names.qkv) > 1 else (spec.q_size + spec.kv_size,)
    names = spec.names
    pairs = {
        f"{name}.{kind}": Pairs(spec.head_dim, rotated, rows, kind == "bias")
        for name, rows in zip(names.qkv, sizes, strict=False)
        for kind in ("weight", "bias")
    }
    own = spec.qk_norm_kind == "layer"
    for name, rows in ((names.q_norm, spec.q_size), (names.k_norm, spec.kv_size)):
        pairs[f"{name}.weight"] = Pairs(spec.head_dim, rotated, rows if own else spec.head_dim, is_vector=True)
    return {
        f"{names.layer.format(layer)}{name}": each for layer in range(spec.num_layers) for name, each in pairs.items()
    }


def _pairs_of_latent_attention(spec: DecoderSpec, latent: Latent) -> dict[str, Pairs]:
    """Return the pairs of the last rows of each query head, and of the key."""
    names = spec.names
    rows = spec.num_heads * latent.query_dim
    queries = Pairs(latent.query_dim, latent.rope_dim, rows, first=latent.nope_dim)
    key = Pairs(latent.key_dim, latent.rope_dim, latent.key_dim, first=latent.rank)
    pairs = {names.latent_q_b if latent.query_rank else names.latent_q: queries, names.latent_kv_a: key}
    return {
        f"{names.layer.format(layer)}{name}.weight": each
        for layer in range(spec.num_layers)
        for name, each in pairs.items()
        if latent.neighboring_pairs
    }


def _placed(pieces: Iterator[tuple[int, npt.NDArray[Any]]], places: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Return the rows of all pieces at their places."""
    first, piece = next(pieces)
    ordered = np.empty((len(places), *piece.shape[1:]), piece.dtype)
    ordered[places[first : first + len(piece)]] = piece
    for row, rows in pieces:
        ordered[places[row : row + len(rows)]] = rows
    return ordered
