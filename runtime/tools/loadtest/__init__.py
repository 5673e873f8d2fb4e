"""Load tests: send requests to a server, and report the latencies that its users see."""

from .options import ClientBehaviour, DatasetOptions, LoadOptions, Pacing, SamplingOptions, TargetOptions

__all__ = ["ClientBehaviour", "DatasetOptions", "LoadOptions", "Pacing", "SamplingOptions", "TargetOptions"]
