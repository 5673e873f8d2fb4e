"""Models: from a Hugging Face folder or a GGUF file to packed weights and a program, and the memory that they take."""

from .families.registry import FAMILIES, open_tensors, read_head, read_spec
from .files import BUNDLED_MODEL, fingerprint, model_name, model_path, projectors
from .memory_plan import MemoryPlan, plan_memory
from .packed_model import PackedModel, kv_layout, pack_head, pack_model
from .spec import DecoderSpec
from .weights.decoder_weights import weights_text

__all__ = [
    "BUNDLED_MODEL",
    "FAMILIES",
    "DecoderSpec",
    "MemoryPlan",
    "PackedModel",
    "fingerprint",
    "kv_layout",
    "model_name",
    "model_path",
    "open_tensors",
    "pack_head",
    "pack_model",
    "plan_memory",
    "projectors",
    "read_head",
    "read_spec",
    "weights_text",
]
