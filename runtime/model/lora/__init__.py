"""Low-rank adapters (LoRA): which linear layers they may change, their files, and their matrices for the kernels."""

from .adapter import adapter_key, open_adapter
from .layout import LoraLayout, plan_lora
from .matrices import AdapterFiles
from .packing import PackedAdapter, pack_adapter

__all__ = [
    "AdapterFiles",
    "LoraLayout",
    "PackedAdapter",
    "adapter_key",
    "open_adapter",
    "pack_adapter",
    "plan_lora",
]
