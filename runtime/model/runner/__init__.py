"""Load a model (`load_model`) and execute steps on the kernels (`ModelRunner`)."""

from .capacity import Capacity, decide_capacity, least_kv_bytes, pick_cpus, pick_isa, pick_tune_mode
from .draft_runner import DraftRunner, load_draft
from .head_runner import HeadRunner, load_head
from .model_runner import ModelRunner, load_model
from .reasoning import ReasoningBudget, ReasoningMarkers, find_reasoning
from .sampling import AllowedTokens, Masks, SamplingSpec
from .tuned import cache_folder, describe_choices, kept_tunings

__all__ = [
    "AllowedTokens",
    "Capacity",
    "DraftRunner",
    "HeadRunner",
    "Masks",
    "ModelRunner",
    "ReasoningBudget",
    "ReasoningMarkers",
    "SamplingSpec",
    "cache_folder",
    "decide_capacity",
    "describe_choices",
    "find_reasoning",
    "kept_tunings",
    "least_kv_bytes",
    "load_draft",
    "load_head",
    "load_model",
    "pick_cpus",
    "pick_isa",
    "pick_tune_mode",
]
