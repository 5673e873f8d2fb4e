"""Models: from a Hugging Face folder to packed weights and a program, and the memory that they take."""

from .families.registry import read_spec
from .memory_plan import MemoryPlan, plan_memory
from .packed_model import BUNDLED_MODEL, PackedModel, fingerprint, kv_layout, model_folder, pack_model
from .sizes import describe_sizes
from .spec import DecoderSpec

__all__ = [
    "BUNDLED_MODEL",
    "DecoderSpec",
    "MemoryPlan",
    "PackedModel",
    "describe_sizes",
    "fingerprint",
    "kv_layout",
    "model_folder",
    "pack_model",
    "plan_memory",
    "read_spec",
]
