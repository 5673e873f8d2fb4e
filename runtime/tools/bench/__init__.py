"""Measuring one engine: speed by shape beside the machine's roofs, where a step's time goes, what a cache is worth."""

from .cache_story import CacheStory, tell_cache_story
from .overhead import StepOverhead, measure_overhead
from .roofline import Roofline
from .speed import Phase, Shape, ShapeResult, measure_shapes, parse_shapes
from .work import Work

__all__ = [
    "CacheStory",
    "Phase",
    "Roofline",
    "Shape",
    "ShapeResult",
    "StepOverhead",
    "Work",
    "measure_overhead",
    "measure_shapes",
    "parse_shapes",
    "tell_cache_story",
]
