"""Quicker imports for the processes that Quire starts. Must not import anything that takes time itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collections, and structlog without rich: a quarter of the start of an engine process.

    structlog imports rich for a form of tracebacks that the logs of Quire do not have. No later collection visits the
    imported objects, which live to the end. Only main programs call this function: a program that imports Quire gets
    structlog as it is.
    """
    gc.disable()
    try:
        if "structlog" not in sys.modules and "rich" not in sys.modules:
            sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it raises ImportError
            try:
                import structlog  # noqa: F401
            finally:
                del sys.modules["rich"]
        yield
    finally:
        gc.freeze()
        gc.enable()
