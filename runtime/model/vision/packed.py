"""Packed vision towers: their weights, their programs, and the memory that they take.

The first program turns each patch into a row, the others turn each square of patches into a row. They run one after
another, on one image at a time, so an image's rows have the same bits whatever else is computed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels import scratch_nbytes
from ....kernels.ops import KVDtype
from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.pack import PackedMatrix
from ...common.config import WeightDtype
from ..encoder.emit import emit_blocks, norm_for
from ..encoder.packed import KEYS_VALUES
from ..encoder.weights import BertLayerWeights, NormWeights, build_layer, build_norm
from ..program import ProgramBuilder, ProgramPlan, input_form
from ..weights.packing import GROUP, MatrixPlan, Part, Vector, WeightFactory, WeightPlanner, pack_built
from ..weights.safetensors import SafetensorsCheckpoint
from ..weights.tensors import check_built
from .dynamic import DynamicVisionSpec
from .dynamic_packed import DynamicVisionWeights, build_dynamic, emit_dynamic_patches, emit_merger
from .spec import TowerInput, VisionSpec

# In some files, names begin with `model.`, and those of SigLIP's tower have `vision_model.` in them.
_TOWER = re.compile(r"^(?:model\.)?(visual|vision_tower|multi_modal_projector)\.(?:(?<=vision_tower\.)vision_model\.)?")
TOWER_DTYPES: dict[WeightDtype, PackedDtype] = {"auto": "bf16", "q4": "q8", "bf16": "bf16", "q8": "q8", "f32": "f32"}
HEAP_BYTES = 4 << 20  # measured: heap memory left over by the arrays of images


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The weights of a tower and of the matrix after it."""

    positions: PackedMatrix  # [learned positions, hidden]
    patches: PackedMatrix  # [hidden, patch_columns]
    patch_bias: Vector
    first_norm: NormWeights
    layers: tuple[BertLayerWeights, ...]  # the last one has the norm after all layers
    mean_norm: Vector | None  # [hidden]
    connector: PackedMatrix  # [out_size, square_columns]


@dataclass(frozen=True, slots=True)
class TowerPrograms:
    """The programs of one image, with inputs that the caller writes.

    The rows of an image are the results of all `squares`, side by side.
    """

    # f32 [num_patches, patch_columns], learned positions if the caller adds them -> f32 [num_patches, hidden], and the
    # residual stream where mergers read it
    patches: ProgramPlan
    # each f32 [squares at a time * square_rows, square_columns] -> f32 [squares, columns]
    squares: tuple[ProgramPlan, ...]


@dataclass(frozen=True, slots=True)
class PackedTower:
    """A tower's spec and packed weights, which are read-only, and its programs."""

    spec: VisionSpec | DynamicVisionSpec
    weights: VisionWeights | DynamicVisionWeights
    programs: TowerPrograms

    def input(self, pixels: npt.NDArray[np.uint8]) -> TowerInput:
        """Return an image [height, width, 3] as the first program takes it."""
        if isinstance(self.spec, DynamicVisionSpec):
            assert isinstance(self.weights, DynamicVisionWeights), "a spec and its weights are of one kind"
            return self.spec.input(pixels, self.weights.positions)
        return self.spec.input(pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionMemoryPlan:
    """Bytes by purpose."""

    weights_bytes: int
    buffers_bytes: int  # arenas of all programs, the scratch of their ops, and arrays that become their input
    cache_bytes: int  # upper bound for the rows of images

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.buffers_bytes + self.cache_bytes


def pack_tower(
    path: Path, spec: VisionSpec | DynamicVisionSpec, dtype: WeightDtype, stop: threading.Event | None = None
) -> PackedTower:
    """Check the tower's tensors in a folder, then pack them. With q4 a tower is q8, with auto bf16.

    Raises the errors of `pack_model`.
    """
    tensors = _VisionTensors(path, spec)

    def build(factory: WeightFactory, dtype: WeightDtype) -> VisionWeights | DynamicVisionWeights:
        return _build(spec, TOWER_DTYPES[dtype], factory)

    check_built(lambda factory: build(factory, "f32"), tensors)
    weights = pack_built(build, tensors, dtype, stop)
    return PackedTower(spec, weights, _emit(spec, weights, KEYS_VALUES[dtype]))


def plan_tower_memory(
    spec: VisionSpec | DynamicVisionSpec, dtype: WeightDtype, max_cache_bytes: int, workers: int
) -> VisionMemoryPlan:
    """Plan the memory; the arguments are equal to those for packing and running."""
    planner = WeightPlanner()
    programs = _emit(spec, _build(spec, TOWER_DTYPES[dtype], planner), KEYS_VALUES[dtype])
    scratch = scratch_nbytes(workers, programs.patches.ops)
    scratch += sum(scratch_nbytes(workers, plan.ops) for plan in programs.squares)
    scratch += spec.input_bytes + spec.num_tokens * spec.out_size * 4  # scratch includes the rows of the current image
    scratch += HEAP_BYTES
    return VisionMemoryPlan(
        weights_bytes=planner.nbytes.total() + spec.position_bytes,
        buffers_bytes=programs.patches.arena_bytes + sum(plan.arena_bytes for plan in programs.squares) + scratch,
        cache_bytes=max(max_cache_bytes, spec.num_tokens * spec.out_size * 4),
    )


class _VisionTensors(SafetensorsCheckpoint):
    """The tensors of a folder, with the convolution over patches as a matrix: [hidden, patch_columns].

    The matrix after a mean is stored as [in_features, out_features].
    """

    def __init__(self, folder: Path, spec: VisionSpec | DynamicVisionSpec) -> None:
        super().__init__(folder)
        self._stored = {_TOWER.sub(r"\1.", name): stored for name, stored in self._stored.items()}
        self._transposed: str | None = None
        if isinstance(spec, VisionSpec) and spec.mean_norm is not None:
            self._transposed = f"{spec.connector}.weight"
        name = f"{spec.patch_embedding}.weight"
        if name in self:
            stored = self._stored[name]
            self._stored[name] = replace(stored, shape=(*stored.shape[:1], prod(stored.shape[1:])))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        shape = super().shape(name)
        return shape[::-1] if name == self._transposed else shape

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield each `num_rows` of the given rows of a tensor. See `weights.Checkpoint`."""
        if name != self._transposed:
            yield from super().chunks(name, rows, num_rows)
            return
        matrix = np.ascontiguousarray(self.tensor(name).T[rows])
        for row in range(0, len(matrix), num_rows):
            yield row, matrix[row : row + num_rows]


def _build(
    spec: VisionSpec | DynamicVisionSpec, dtype: PackedDtype, factory: WeightFactory
) -> VisionWeights | DynamicVisionWeights:
    if isinstance(spec, DynamicVisionSpec):
        return build_dynamic(spec, dtype, factory)
    body = spec.body
    hidden = spec.body.hidden_size

    def matrix(name: str, out_features: int, in_features: int, dtype: PackedDtype) -> PackedMatrix:
        part = Part(f"{name}.weight", (out_features, in_features))
        return factory.matrix(MatrixPlan(out_features, in_features, dtype, [part], group=GROUP if dtype == "q8" else 0))

    names = body.names
    mean_norm = None
    if spec.mean_norm is not None:  # stored less 1
        mean_norm = factory.vector(hidden, [Part(f"{spec.mean_norm}.weight", (hidden,))], offset=1.0)
    return VisionWeights(
        positions=matrix(names.words, body.vocab_size, hidden, "f32" if dtype == "f32" else "bf16"),
        patches=matrix(spec.patch_embedding, hidden, spec.patch_columns, dtype),
        patch_bias=factory.vector(hidden, [Part(f"{spec.patch_embedding}.bias", (hidden,))]),
        first_norm=build_norm(f"{names.layer.format(0)}{names.attention_norm}", hidden, True, factory),
        layers=tuple(build_layer(body, layer, dtype, factory) for layer in range(body.num_layers)),
        mean_norm=mean_norm,
        connector=matrix(spec.connector, spec.out_size, spec.square_columns, dtype),
    )


def _emit(
    spec: VisionSpec | DynamicVisionSpec, weights: VisionWeights | DynamicVisionWeights, keys_values: KVDtype
) -> TowerPrograms:
    if isinstance(spec, DynamicVisionSpec):
        assert isinstance(weights, DynamicVisionWeights), "a spec and its weights are of one kind"
        mergers = tuple(emit_merger(spec, merger) for merger in weights.mergers)
        return TowerPrograms(emit_dynamic_patches(spec, weights, keys_values), mergers)
    assert isinstance(weights, VisionWeights), "a spec and its weights are of one kind"
    return TowerPrograms(_emit_patches(spec, weights, keys_values), (_emit_squares(spec, weights),))


def _emit_patches(spec: VisionSpec, weights: VisionWeights, keys_values: KVDtype) -> ProgramPlan:
    """Emit layers(positions + patches); the token ids are the learned positions of the patches."""
    builder = ProgramBuilder(spec.num_patches, 1, keys_values)
    patches = builder.input("patches", spec.patch_columns)
    x = builder.embed(weights.positions)
    patches = builder.convert(patches, input_form(weights.patches))
    builder.linear_add(patches, weights.patches, weights.patch_bias, x)
    normed = norm_for(builder, x, "layer", weights.first_norm, spec.body.norm_eps, weights.layers[0].qkv)
    return builder.build(emit_blocks(builder, spec.body, weights.layers, x, normed, spec.body.num_layers * (None,)))


def _emit_squares(spec: VisionSpec, weights: VisionWeights) -> ProgramPlan:
    """Emit connector(squares); the texts are the squares."""
    builder = ProgramBuilder(spec.num_tokens * spec.square_rows, spec.num_tokens)
    squares = builder.input("squares", spec.square_columns)
    form = input_form(weights.connector)
    if weights.mean_norm is None:
        squares = builder.convert(squares, form)
    else:
        mean = builder.pool(squares, "mean")
        squares = builder.norm_rows(mean, "rms", weights.mean_norm, None, spec.body.norm_eps, form)
    return builder.build(builder.linear(squares, weights.connector, None, "image rows"))
