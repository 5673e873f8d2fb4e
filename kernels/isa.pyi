from collections.abc import Mapping

DTYPE_CODES: dict[str, int]  # dtypes of activations, as in simd/tiles.h
KV_CODES: dict[str, int]  # dtypes of the KV cache
WEIGHT_CODES: dict[str, int]  # dtypes of weights
NAMES: tuple[str, ...]  # the levels of this build, lowest first
ROW_CLASSES: tuple[str, ...]  # classes of row counts, for each of which a program may have other functions
EQUAL_FUNCTIONS: tuple[str, ...]  # names of functions for which every level computes the same bits

def row_class(rows: int) -> str:
    """Return the class of a number of rows, one of ROW_CLASSES."""

def supported_levels() -> tuple[str, ...]:
    """Return the levels that this machine can run, lowest first."""

def unsupported_levels() -> dict[str, str]:
    """Return the other levels of this build, each with the reason why this machine cannot run it."""

def pick_level(requested: str | None = None) -> str:
    """Return `requested`, else QUIRE_ISA, else the best level of this machine. Raises ValueError naming the levels."""

def best_level(obstacles: Mapping[str, str | None]) -> str:
    """Return the last level without an obstacle; the first is plain C. Raises ValueError if others were built."""
