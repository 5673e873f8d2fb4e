"""Measurements of one engine: speed by shape and its share of the roofline, step overhead, the gain of a KV cache."""

from .cache_comparison import CacheComparison, compare_cache
from .embedding import EmbeddingResult, measure_embedding
from .overhead import StepOverhead, measure_overhead
from .profile import MachineProfile, measure_profile, read_profile, write_profile
from .roofline import Roofline
from .speed import Phase, Shape, ShapeResult, measure_shapes, parse_shapes
from .work import Work

__all__ = [
    "CacheComparison",
    "EmbeddingResult",
    "MachineProfile",
    "Phase",
    "Roofline",
    "Shape",
    "ShapeResult",
    "StepOverhead",
    "Work",
    "compare_cache",
    "measure_embedding",
    "measure_overhead",
    "measure_profile",
    "measure_shapes",
    "parse_shapes",
    "read_profile",
    "write_profile",
]
