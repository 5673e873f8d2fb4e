"""Programs: a builder a model's description speaks to, and the planner that gives its values their places."""

from .builder import Heads, Logits, PlacedValue, ProgramBuilder, ProgramPlan, Value

__all__ = ["Heads", "Logits", "PlacedValue", "ProgramBuilder", "ProgramPlan", "Value"]
