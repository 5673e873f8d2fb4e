"""Models by name: `ORGANIZATION/NAME[:FILE-OR-QUANTIZATION_SUFFIX]`, downloaded into the cache of huggingface_hub."""

from .cache import CachedModel, cached, cached_models, remove
from .fetch import DownloadProgress, MemoryCheck, fetch, headers, pull
from .reference import ModelReference, parse_reference

__all__ = [
    "CachedModel",
    "DownloadProgress",
    "MemoryCheck",
    "ModelReference",
    "cached",
    "cached_models",
    "fetch",
    "headers",
    "parse_reference",
    "pull",
    "remove",
]
