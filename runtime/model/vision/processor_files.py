"""The settings of an image processor's files about pixels: processor_config.json, or preprocessor_config.json."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Any

from ..config_json import ConfigTable, read_object
from .spec import CHANNELS

PROCESSOR_FILES = {"processor_config.json": "image_processor", "preprocessor_config.json": ""}  # file -> key in it
PROCESSOR_DEFAULTS: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}


def read_processor(folder: Path) -> ConfigTable:
    """Return the settings of a folder's image processor; an empty table without a file.

    The object in processor_config.json has precedence over preprocessor_config.json, as in transformers 5. Raises
    CorruptCheckpoint.
    """
    for name, key in PROCESSOR_FILES.items():
        if isfile(folder / name) and (values := read_object(folder / name, key)):
            return ConfigTable(values, f"{key}." if key else "", name)
    return ConfigTable({}, source="preprocessor_config.json")


def read_normalization(
    processor: ConfigTable, default_mean: tuple[float, ...], default_std: tuple[float, ...]
) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return the factor of pixels, the means to subtract after scaling, and the divisors of the result."""
    processor = processor.with_defaults(
        PROCESSOR_DEFAULTS | {"image_mean": [*default_mean], "image_std": [*default_std]}
    )
    rescale = processor.positive("rescale_factor") if processor.flag("do_rescale", True) else 1.0
    if not processor.flag("do_normalize", True):
        return rescale, (0.0,) * CHANNELS, (1.0,) * CHANNELS
    return rescale, _means(processor), processor.numbers("image_std", CHANNELS)


def _means(processor: ConfigTable) -> tuple[float, ...]:
    values = processor.values.get("image_mean")
    if not isinstance(values, list) or len(values) != CHANNELS:
        raise processor.refused("image_mean", f"a list of {CHANNELS} numbers")
    if any(isinstance(each, bool) or not isinstance(each, int | float) or not abs(each) <= 1e6 for each in values):
        raise processor.refused("image_mean", f"{CHANNELS} numbers from -1e6 to 1e6")
    return tuple(map(float, values))
