"""Building of programs: from a model's layers to a list of ops, with every value placed in the arena."""

from .builder import ProgramBuilder, input_dtype
from .values import Heads, Logits, NormedValue, PlacedValue, ProgramPlan, Value

__all__ = ["Heads", "Logits", "NormedValue", "PlacedValue", "ProgramBuilder", "ProgramPlan", "Value", "input_dtype"]
