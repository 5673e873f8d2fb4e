"""OpenAI's HTTP API, and vLLM's additions to it, over the tenants, limits and live requests that all clients share."""

from .api import OpenAIDoor

__all__ = ["OpenAIDoor"]
