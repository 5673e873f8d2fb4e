"""Clients of a Quire server: `AsyncClient` for asyncio programs, `Client` for all others."""

from .async_client import AsyncClient
from .sync_client import Client

__all__ = ["AsyncClient", "Client"]
