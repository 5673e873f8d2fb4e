"""Load a model (`load_model`) and execute steps on the kernels (`ModelRunner`)."""

from .capacity import Capacity, decide_capacity, pick_cpus, pick_isa
from .model_runner import ModelRunner, load_model
from .sampling import AllowedTokens, Masks, SamplingSpec

__all__ = [
    "AllowedTokens",
    "Capacity",
    "Masks",
    "ModelRunner",
    "SamplingSpec",
    "decide_capacity",
    "load_model",
    "pick_cpus",
    "pick_isa",
]
