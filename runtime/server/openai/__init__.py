"""OpenAI's HTTP API, and vLLM's additions to it, over the tenants, limits and live requests that all clients share."""

from .api import Api
from .connection import HTTPConnection, plain_answer

__all__ = ["Api", "HTTPConnection", "plain_answer"]
