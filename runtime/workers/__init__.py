"""Engine processes: started, watched, replaced when they die, and what they had taken on replayed, bit for bit."""

from .engine_pool import Fleet
from .supervised_engine import Watch

__all__ = ["Fleet", "Watch"]
