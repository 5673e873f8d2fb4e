"""Building of programs: from a model's layers to a list of ops, with every value placed in the arena."""

from .attention import HeadWeights
from .builder import ProgramBuilder, input_dtype
from .values import Heads, Logits, NormedValue, PlacedValue, ProgramPlan, Value

__all__ = [
    "HeadWeights",
    "Heads",
    "Logits",
    "NormedValue",
    "PlacedValue",
    "ProgramBuilder",
    "ProgramPlan",
    "Value",
    "input_dtype",
]
