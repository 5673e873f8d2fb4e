"""Quire's public face, installed as `quire/__init__.py`."""

from .runtime.client import AsyncClient, Client
from .runtime.errors import QuireError
from .runtime.generation import Choice, Completion, OutputChunk, RequestOutput, SamplingParams, TokenLogprobs, Usage
from .runtime.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "OutputChunk",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
]
