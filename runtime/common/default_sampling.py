"""Default sampling parameters of requests, by the door through which a request arrives.

A recommendation of the model, in generation_config.json, has precedence over the values for HTTP and the chat page.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NATIVE_TEMPERATURE = 0.0  # temperature of `SamplingParams`: Quire's protocol, `LLM` and `quire generate`
HTTP_SAMPLING = MappingProxyType({"temperature": 1.0})  # OpenAI's default
# Without a filter, the many unlikely tokens spoil a small model's text of some hundred tokens at temperature 1.
PAGE_SAMPLING = MappingProxyType({"temperature": 0.8, "min_p": 0.05})
_DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p"})


def http_sampling(recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the defaults of an HTTP request, given the model's recommendation."""
    return {**HTTP_SAMPLING, **recommended}


def page_sampling(recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the parameters that the chat page sends unless its user sets others.

    They are empty if the model recommends how tokens are drawn. A recommended penalty does not count.
    """
    return {} if _DRAWING & recommended.keys() else dict(PAGE_SAMPLING)
