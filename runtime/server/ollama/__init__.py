"""Ollama's API over the tenants, limits and live requests that all clients share."""

from .door import OllamaDoor

__all__ = ["OllamaDoor"]
