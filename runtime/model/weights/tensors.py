"""The tensors that a spec implies, by name and shape, and the check that a checkpoint has them.

A checkpoint that passed `check_tensors` can be packed without errors. Other tensors are ignored: old checkpoints have
rotary buffers, and tied ones may have a copy of the head.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...common.errors import WrongTensor
from ..spec import DecoderSpec
from . import READABLE, Checkpoint
from .packing import WeightPlanner, build_weights


def expected_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every (name, shape) that the spec implies. Matrices are [out_features, in_features], as in torch."""
    planner = WeightPlanner()
    build_weights(spec, "f32", planner)
    yield from planner.tensors.items()


def check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    """Check presence, shape and dtype of every tensor, reading none. Raises MissingTensor or WrongTensor."""
    for name, shape in expected_tensors(spec):
        found, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        where = f"tensor {name} in {checkpoint.path}"
        if found != shape:
            raise WrongTensor(f"{where} is {list(found)}; {checkpoint.config_name} implies {list(shape)}")
        allowed = checkpoint.matrix_dtypes if len(shape) == 2 else READABLE
        if dtype not in allowed:
            raise WrongTensor(f"{where} is {dtype}; it must be one of {', '.join(allowed)}")
