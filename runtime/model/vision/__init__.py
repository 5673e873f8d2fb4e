"""Vision towers: from the pixels of an image to rows that take the place of embeddings in the text model."""

from .dynamic import MAX_ASPECT_RATIO, DynamicVisionSpec, read_sizes
from .packed import PackedTower, VisionMemoryPlan, pack_tower, plan_tower_memory
from .processor_files import read_processor
from .registry import READERS, read_vision
from .spec import VisionSpec

__all__ = [
    "MAX_ASPECT_RATIO",
    "READERS",
    "DynamicVisionSpec",
    "PackedTower",
    "VisionMemoryPlan",
    "VisionSpec",
    "pack_tower",
    "plan_tower_memory",
    "read_processor",
    "read_sizes",
    "read_vision",
]
