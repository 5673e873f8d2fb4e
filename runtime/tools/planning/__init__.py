"""`quire plan`: the memory that serving a model takes, the effect of other data types, and the expected speed."""

from .alternatives import Alternative, alternatives
from .encoder_plan import EncoderPlan, plan_encoder
from .picture import plot_memory
from .serving_plan import PlanTarget, ServingPlan, plan_serving
from .text import comparison, kv_heads_text, plan_text

__all__ = [
    "Alternative",
    "EncoderPlan",
    "PlanTarget",
    "ServingPlan",
    "alternatives",
    "comparison",
    "kv_heads_text",
    "plan_encoder",
    "plan_serving",
    "plan_text",
    "plot_memory",
]
