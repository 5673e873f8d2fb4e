"""The layout of a sequence's state: what the layers without keys and values keep of its earlier tokens.

Must not import the program. The pager hands out slots for states, whose content it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.ops import Ring, aligned, padded
from .spec import DecoderSpec

FORK_ROLLBACK = 2  # tokens that a fork goes back: its parent's last one, and one that the parent computes meanwhile


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A ring of inputs for each layer with a convolution, one after another; nothing for models without such layers.

    A sequence may return to any of its last `rollback` positions: rejected draft tokens leave nothing in its state.
    """

    layers: tuple[int, ...]  # layers with a ring, ascending
    columns: int
    rows: int
    rollback: int  # tokens

    @property
    def ring_bytes(self) -> int:
        return aligned(self.rows * padded(self.columns) * 4)

    @property
    def nbytes(self) -> int:
        """Bytes of the state of one sequence."""
        return len(self.layers) * self.ring_bytes

    def ring(self, layer: int) -> Ring:
        """Return the ring of a layer."""
        return Ring(self.layers.index(layer) * self.ring_bytes, self.rows)


def lay_out_states(spec: DecoderSpec, max_drafts: int = 0) -> StateLayout:
    """Return the layout of states for steps with at most `max_drafts` draft tokens per sequence."""
    rollback = max_drafts + FORK_ROLLBACK
    if spec.convolutions is None:
        return StateLayout((), 0, 0, rollback)
    layers = tuple(layer for layer, is_convolution in enumerate(spec.convolutions.layers) if is_convolution)
    return StateLayout(layers, spec.hidden_size, spec.convolutions.taps - 1 + rollback, rollback)
