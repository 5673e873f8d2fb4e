"""Encoders: models that make one vector of each text, or score it; BERT and its successors, and causal decoders."""

from .gguf import GGUF_ENCODERS
from .packed import EncoderMemoryPlan, PackedEncoder, pack_encoder, plan_encoder_memory
from .registry import ENCODERS, is_encoder, read_encoder
from .spec import BertSpec, EncoderSpec

__all__ = [
    "ENCODERS",
    "GGUF_ENCODERS",
    "BertSpec",
    "EncoderMemoryPlan",
    "EncoderSpec",
    "PackedEncoder",
    "is_encoder",
    "pack_encoder",
    "plan_encoder_memory",
    "read_encoder",
]
