"""Engine processes: started, watched, restarted, and what they had taken on replayed, bit for bit."""

from .fleet import Fleet

__all__ = ["Fleet"]
