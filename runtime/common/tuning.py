"""Settings of the interpreter in processes that serve streams, against pauses that would stall all streams at once."""

from __future__ import annotations

import gc
import sys

GC_OBJECTS = 20_000  # new objects before a collection: ended requests leave no cycles, and a step makes thousands
GIL_INTERVAL_S = 0.0005  # longest hold of the GIL by a rendering or tokenizing thread, while the event loop waits


def tune_collector() -> None:
    """Exclude objects that were loaded at start from collections: each visit would stall all streams."""
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)


def favor_event_loop() -> None:
    """Take the GIL from threads that render or tokenize after a short time."""
    sys.setswitchinterval(GIL_INTERVAL_S)
