"""matplotlib where it is installed: the optional extra `plot`."""

from __future__ import annotations

from typing import Any

from ..common.errors import MissingDependency


def load_pyplot(flag: str) -> Any:
    """pyplot, drawing into files only. Raises MissingDependency in the name of the flag that needs it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency(f"{flag} needs matplotlib: pip install 'quire[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
