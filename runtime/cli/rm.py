"""`quire rm`: remove models from the cache of huggingface_hub."""

from __future__ import annotations

from ..hub import remove
from .pull import ModelName, model_reference


def rm(model: ModelName, /, *models: ModelName) -> None:
    """Remove each model and print the bytes that are free now. Raises ModelNotFound or ConfigError."""
    for reference in [model_reference(each) for each in (model, *models)]:
        print(f"removed {reference}, {remove(reference):,} B", flush=True)
