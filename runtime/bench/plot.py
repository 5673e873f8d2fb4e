"""Pictures of measurements, with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, MissingDependency
from .cache_story import CacheStory


def plot_cache_story(story: CacheStory, path: Path) -> None:
    """Milliseconds per forward pass against the number of tokens before it. Raises MissingDependency or ConfigError."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, label, colour in (
        (story.uncached, "everything recomputed", "#b3452c"),
        (story.cached, "KV cache", "#2c6fb3"),
    ):
        tokens = range(story.prompt_tokens + 1, story.prompt_tokens + len(run.forward_s))
        axes.plot(tokens, [seconds * 1000 for seconds in run.forward_s[1:]], label=label, color=colour)
    axes.set(xlabel="tokens in the sequence", ylabel="milliseconds per generated token")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency("--plot needs matplotlib: pip install 'quire[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
