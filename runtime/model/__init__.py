"""Models: from a Hugging Face folder to a program, and what it will take."""

from .families.registry import ARCHITECTURES, read_spec
from .fingerprint import fingerprint
from .footprint import MemoryPlan, plan_memory
from .packed_model import BUNDLED_MODEL, PackedModel, kv_layout, model_folder, pack_model
from .sizes import KNOWN_SHAPES, KnownShape, describe_sizes
from .spec import DecoderSpec

__all__ = [
    "ARCHITECTURES",
    "BUNDLED_MODEL",
    "KNOWN_SHAPES",
    "DecoderSpec",
    "KnownShape",
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
