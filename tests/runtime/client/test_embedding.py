"""Values of texts as the client collects them, of a connection whose frames the test gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quire.runtime.client.embedding import receive_values
from quire.runtime.common.errors import InvalidRequest, ProtocolError
from quire.runtime.common.types import Usage
from quire.runtime.protocol.frames import AskVectors, Credit, Done, Vectors

DONE = Done(3, "stop", Usage(prompt_tokens=3, completion_tokens=0))


class Connection:
    """A pool of one connection, and the inbox of its only request."""

    def __init__(self, *answers: Any, features: tuple[str, ...] = ("embeddings",)) -> None:
        self.features = features
        self.sent: list[Any] = []
        self.left: list[int] = []
        self._answers = iter(answers)

    async def for_new_requests(self) -> Connection:
        return self

    def ask(self, frame: Any) -> Connection:
        return self

    async def flush(self) -> None:
        """Do nothing."""

    async def get(self) -> Any:
        return next(self._answers)

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def leave(self, request_id: int) -> None:
        self.left.append(request_id)


def vectors(first_index: int, *rows: list[float]) -> Vectors:
    return Vectors(3, first_index, 2, np.float32(rows).tobytes())


async def values_of(connection: Connection) -> Any:
    return await receive_values(connection, AskVectors(3, ("a", "b", "c")), None)  # type: ignore[arg-type]


async def test_values_are_collected_and_credit_is_granted_for_them() -> None:
    connection = Connection(vectors(0, [1, 2], [3, 4]), vectors(2, [5, 6]), DONE)
    assert (await values_of(connection)).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert connection.sent == [Credit(3, 2), Credit(3, 1)]
    assert connection.left == [3]


async def test_an_answer_without_all_values_is_an_error() -> None:
    connection = Connection(vectors(0, [1, 2], [3, 4]), DONE)
    with pytest.raises(ProtocolError, match="the values of 2 of 3 texts"):
        await values_of(connection)
    assert connection.left == [3]


async def test_a_server_that_makes_no_embeddings_is_not_asked() -> None:
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        await values_of(Connection(features=()))
