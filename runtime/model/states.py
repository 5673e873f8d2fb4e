"""The layout of a sequence's state: what the layers without keys and values keep of its earlier tokens.

Must not import the program. The pager hands out slots for states, whose content it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...kernels.ops import MatrixState, Ring, StateDtype
from .spec import DecoderSpec

FORK_ROLLBACK = 2  # tokens that a fork goes back: its parent's last one, and one that the parent computes meanwhile


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts of a state, one layer after another: rings of convolutions' inputs, and matrices of recurrences.

    A sequence may return to any of its last `rollback` positions: rejected draft tokens leave nothing in its state.
    """

    rings: Mapping[int, Ring]  # layer -> its ring
    matrices: Mapping[int, MatrixState]  # layer -> its matrices
    nbytes: int  # bytes of the state of one sequence; 0 for a model without such layers
    rollback: int  # tokens


def lay_out_states(spec: DecoderSpec, max_drafts: int = 0, dtype: StateDtype = "f32") -> StateLayout:
    """Return the layout of states for steps with at most `max_drafts` draft tokens per sequence.

    Matrices have this dtype.
    """
    rollback = max_drafts + FORK_ROLLBACK
    rings: dict[int, Ring] = {}
    matrices: dict[int, MatrixState] = {}
    end = 0
    for layer in range(spec.num_layers):
        if spec.convolutions is not None and spec.convolutions.layers[layer]:
            rings[layer] = Ring(end, spec.convolutions.taps - 1 + rollback)
            end += rings[layer].nbytes(spec.hidden_size)
        elif spec.delta is not None and spec.delta.layers[layer]:
            delta = spec.delta
            rings[layer] = Ring(end, delta.taps - 1 + rollback)
            end += rings[layer].nbytes(delta.conv_size)
            matrices[layer] = MatrixState(end, delta.num_value_heads, delta.key_dim, delta.value_dim, rollback, dtype)
            end += matrices[layer].nbytes
        elif spec.mamba is not None and spec.mamba.layers[layer]:
            mamba = spec.mamba
            rings[layer] = Ring(end, mamba.taps - 1 + rollback)
            end += rings[layer].nbytes(mamba.conv_size)
            matrices[layer] = MatrixState(end, mamba.num_heads, mamba.state_size, mamba.head_dim, rollback, dtype)
            end += matrices[layer].nbytes
    return StateLayout(rings, matrices, end, rollback)
