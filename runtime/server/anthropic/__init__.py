"""Anthropic's messages API over the tenants, limits and live requests that all clients share."""

from .door import AnthropicDoor

__all__ = ["AnthropicDoor"]
