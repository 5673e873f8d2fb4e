NAMES: tuple[str, ...]
DEFAULT_LEVEL: str

def supported_levels() -> tuple[str, ...]:
    """Levels this machine can run, lowest first."""

def pick_level(requested: str | None = None) -> str:
    """`requested` if this machine has it, else the best. ValueError names what is allowed."""
