"""Engine processes: started, watched and replaced, with their requests replayed bit for bit."""

from .engine_pool import EnginePool, engine_processes
from .health import HealthTimeouts
from .placement import place

__all__ = ["EnginePool", "HealthTimeouts", "engine_processes", "place"]
