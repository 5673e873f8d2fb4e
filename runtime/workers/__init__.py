"""Engine processes: started, watched, replaced when they die, and what they had taken on replayed, bit for bit."""

from .fleet import Fleet
from .supervisor import Watch

__all__ = ["Fleet", "Watch"]
