"""One request of a client to embed or score texts: collects its values, and grants credit as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ..common.errors import Cancelled, InvalidRequest, ProtocolError, QuireError
from ..protocol.frames import Accepted, AskScores, AskVectors, Credit, Done, Scores, Vectors
from .connection import ConnectionLost
from .connection_pool import ConnectionPool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CREDIT_TEXTS = 1024  # most texts whose values are in transit or unread

OnEmbedded = Callable[[int, int], None]  # called with the number of finished texts, and of all texts


async def receive_values(
    pool: ConnectionPool, frame: AskVectors | AskScores, on_progress: OnEmbedded | None
) -> npt.NDArray[np.float32]:
    """Send the request and return its vectors [texts, dimensions], or its scores [texts, 1]."""
    import numpy as np  # imported here, because a program that only generates text does not need it

    num_texts = len(frame.inputs if isinstance(frame, AskVectors) else frame.documents)
    parts: list[npt.NDArray[np.float32]] = []
    received = 0
    request_id = frame.request_id
    connection = await pool.for_new_requests()
    if "embeddings" not in connection.features:
        raise InvalidRequest("this server is of an earlier release, which makes no embeddings")
    try:
        inbox = connection.ask(msgspec.structs.replace(frame, credit=CREDIT_TEXTS))
        await connection.flush()
        while not isinstance(answer := await inbox.get(), Done):
            match answer:
                case Vectors(_, _, dimensions, values):
                    part = np.frombuffer(values, "<f4").reshape(-1, dimensions)
                case Scores(_, _, scores):
                    part = np.array(scores, np.float32)[:, None]
                case Accepted():
                    continue
                case ConnectionLost(reason):
                    raise reason
                case QuireError():
                    raise answer
                case _:
                    raise ProtocolError(f"{type(answer).__name__} is no answer to {type(frame).__name__}")
            parts.append(part)
            received += len(part)
            connection.send(Credit(request_id, len(part)))
            if on_progress is not None:
                on_progress(received, num_texts)
    finally:
        connection.leave(request_id)
    if answer.finish_reason == "cancelled":
        raise Cancelled("the request was cancelled")
    if received != num_texts:
        raise ProtocolError(f"the server sent the values of {received} of {num_texts} texts")
    return np.concatenate(parts)
