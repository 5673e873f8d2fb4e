"""Load tests: send requests to a server, and report the latencies of its users."""

from .options import ClientBehavior, DatasetOptions, LoadOptions, Pacing, SamplingOptions, TargetOptions

__all__ = ["ClientBehavior", "DatasetOptions", "LoadOptions", "Pacing", "SamplingOptions", "TargetOptions"]
