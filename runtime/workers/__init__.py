"""Engine processes: started, watched, replaced when they die, and what they had taken on replayed, bit for bit."""

from .engine_pool import EnginePool
from .supervised_engine import HealthTimeouts

__all__ = ["EnginePool", "HealthTimeouts"]
