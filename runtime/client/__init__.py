"""The clients of a Quire server: `AsyncClient` for asyncio, `Client` for everything else."""

from .aio import AsyncClient
from .sync import Client

__all__ = ["AsyncClient", "Client"]
