"""A fleet on Ray Serve: `serve run quire.runtime.ray:app`.

Serve places engine hosts and API servers on machines, probes, scales and replaces them, and reports the hosts. Tokens
flow on the link of `cluster/`, never through Serve. No other part of Quire may import Ray.
"""

from .app import app

__all__ = ["app"]
