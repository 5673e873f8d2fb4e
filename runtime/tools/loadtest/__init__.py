"""Load on a server, and what its users saw of it: datasets, pacing, drivers, results, sweeps and reports."""

from .datasets import DatasetOptions
from .load import Behaviour, LoadOptions
from .schedule import Pacing
from .target import SamplingOptions, TargetOptions

__all__ = ["Behaviour", "DatasetOptions", "LoadOptions", "Pacing", "SamplingOptions", "TargetOptions"]
