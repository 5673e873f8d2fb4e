"""The goldens of all families. Tests run over all of them, so that none leaves out a family that the registry has."""

from __future__ import annotations

from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = tuple(sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz")))
