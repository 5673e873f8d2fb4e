"""Vision towers: from the pixels of an image to rows that take the place of embeddings in the text model."""

from .packed import PackedTower, VisionMemoryPlan, pack_tower, plan_tower_memory
from .registry import READERS, read_vision
from .spec import VisionSpec

__all__ = [
    "READERS",
    "PackedTower",
    "VisionMemoryPlan",
    "VisionSpec",
    "pack_tower",
    "plan_tower_memory",
    "read_vision",
]
