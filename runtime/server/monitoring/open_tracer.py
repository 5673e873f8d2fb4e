"""`open_tracer`: the tracer that the options of a server ask for."""

from __future__ import annotations

from urllib.parse import urlsplit

from ...common.errors import ConfigError
from .traces import SilentTracer, Tracer

TRACES_PATH = "/v1/traces"  # path of OTLP's traces at a collector


def open_tracer(endpoint: str | None, model: str, version: str) -> Tracer:
    """Return the tracer that sends to a collector, a silent one without `endpoint`. Raises ConfigError."""
    if endpoint is None:
        return SilentTracer()
    url = _checked_url(endpoint)
    try:
        from .otlp import OTLPTracer
    except ImportError as error:
        text = f"otlp_traces_endpoint needs OpenTelemetry ({error}); pip install 'quire[traces]'"
        raise ConfigError(text) from error
    return OTLPTracer(url, model, version)


def _checked_url(endpoint: str) -> str:
    """Return the URL of a collector's traces; a URL without a path gets OTLP's. Raises ConfigError."""
    try:
        url = urlsplit(endpoint)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # the port is no number
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"otlp_traces_endpoint must be a URL such as http://127.0.0.1:4318{TRACES_PATH}, not {endpoint!r}"
        )
    return url._replace(path=TRACES_PATH).geturl() if url.path in ("", "/") else endpoint
