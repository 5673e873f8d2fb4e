"""The tensors that a spec implies, by name and shape, and the check that a checkpoint has them.

A checkpoint that passed `check_tensors` can be packed without errors. Other tensors are ignored: old checkpoints have
rotary buffers, and checkpoints with tied embeddings may have a copy of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set

from ....kernels.pack import PackedMatrix
from ...common.errors import WrongTensor
from ..spec import DecoderSpec
from . import READABLE, Checkpoint
from .decoder_weights import build_weights
from .packing import MatrixPlan, Part, Vector, WeightFactory, WeightPlanner


def expected_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every (name, shape) that the spec implies. Matrices are [out_features, in_features], as in torch."""
    planner = WeightPlanner()
    build_weights(spec, "f32", planner)
    yield from planner.tensors.items()


def check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> Set[str]:
    """Check presence, shape and dtype of every tensor, reading none; return their names.

    Raises MissingTensor or WrongTensor.
    """
    return check_built(lambda factory: build_weights(spec, "f32", factory), checkpoint)


def check_built(build: Callable[[WeightFactory], object], checkpoint: Checkpoint) -> Set[str]:
    """Check the tensors of all weights that `build` makes, as `check_tensors` does for a decoder."""
    checker = _Checker(checkpoint)
    build(checker)
    return checker.tensors.keys()


class _Checker(WeightPlanner):
    """A factory that checks the tensors of each matrix before the next one: a config.json may imply millions."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        self._check(plan.parts, self._checkpoint.matrix_dtypes)
        return super().matrix(plan)

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        self._check(parts, READABLE)
        return super().vector(size, parts, offset)

    def _check(self, parts: Sequence[Part], allowed: Collection[str]) -> None:
        for name, shape in ((part.tensor, part.shape) for part in parts):
            where = f"tensor {name} in {self._checkpoint.path}"
            if _without_ones(found := self._checkpoint.shape(name)) != _without_ones(shape):
                raise WrongTensor(f"{where} is {list(found)}; {self._checkpoint.config_name} implies {list(shape)}")
            if (dtype := self._checkpoint.dtype(name)) not in allowed:
                raise WrongTensor(f"{where} is {dtype}; it must be one of {', '.join(allowed)}")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without leading dimensions of one, which llama.cpp's tools drop when they write a file again."""
    first = next((index for index, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]
