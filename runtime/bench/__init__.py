"""Measuring one engine: tokens per second by shape, where a step's time goes, and what the KV cache is worth."""

from .cache_story import CacheStory, tell_cache_story
from .speed import Shape, ShapeResult, measure_shapes, parse_shapes

__all__ = ["CacheStory", "Shape", "ShapeResult", "measure_shapes", "parse_shapes", "tell_cache_story"]
