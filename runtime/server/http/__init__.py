"""HTTP for all APIs: connections, routes, bodies, the requests of a call, and answers whole or as a stream."""

from .connection import HTTPConnection, plain_answer
from .json_body import BodyReader
from .router import HTTPRouter

__all__ = ["BodyReader", "HTTPConnection", "HTTPRouter", "plain_answer"]
