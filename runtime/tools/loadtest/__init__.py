"""Load tests: send requests to a server, and report the latencies that its users see."""

from .options import ClientBehavior, DatasetOptions, LoadOptions, Pacing, SamplingOptions, TargetOptions

__all__ = ["ClientBehavior", "DatasetOptions", "LoadOptions", "Pacing", "SamplingOptions", "TargetOptions"]
