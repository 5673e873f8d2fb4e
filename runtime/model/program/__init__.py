"""Building of programs: from a model's layers to a list of ops, with every value placed in the arena."""

from .attention import HeadWeights
from .builder import ProgramBuilder
from .latent import LatentHeads
from .recurrence import Recurrence
from .values import (
    F32,
    Heads,
    Logits,
    LoraTarget,
    LoraTargets,
    NormedValue,
    PlacedValue,
    ProgramPlan,
    RowForm,
    Value,
    input_form,
)

__all__ = [
    "F32",
    "HeadWeights",
    "Heads",
    "LatentHeads",
    "Logits",
    "LoraTarget",
    "LoraTargets",
    "NormedValue",
    "PlacedValue",
    "ProgramBuilder",
    "ProgramPlan",
    "Recurrence",
    "RowForm",
    "Value",
    "input_form",
]
