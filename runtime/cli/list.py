"""`quire list`: the models in the cache of huggingface_hub."""

from __future__ import annotations

import time
from json import dumps

from ..hub import cached_models
from .flags import Json


def list(*, json: Json = False) -> None:
    """Print a table of the models that are in the cache, with their sizes and dates."""
    models = cached_models()
    if json:
        fields = ("name", "nbytes", "modified", "is_complete")
        print(dumps([{field: getattr(model, field) for field in fields} for model in models], indent=1), flush=True)
        return
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified))
        state = "" if model.is_complete else "  incomplete: `quire pull` continues"
        print(f"{model.name:<{width}}  {model.nbytes:>15,} B  {date}{state}", flush=True)
