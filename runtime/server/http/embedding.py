"""Answers with vectors, scores or labels of texts, in the form of an API."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...common.errors import QuireError
from ...engine.facade import EmbeddedTexts, EmbedRequest
from ..requests.live_embedding import LiveEmbedding
from .answer_writers import AnswerMemory
from .errors import HTTPAnswer
from .request_cycle import RequestCycle


class AnswerSource(NamedTuple):
    """The parts of an answer that do not follow from its request."""

    model: str
    labels: tuple[str, ...]  # labels of a classifier
    name: str  # name in the answer's id


class EmbeddingCall(NamedTuple):
    """The fields of one HTTP request."""

    request: EmbedRequest
    new_form: Callable[[AnswerSource], EmbeddingForm]  # form of the answer


class EmbeddingForm(Protocol):
    """The answer of a call, made of the values in the order of the texts."""

    advice: str  # advice for a shorter answer

    def add(self, chunk: EmbeddedTexts) -> int:
        """Keep the next values. Return their bytes."""

    def whole(self, prompt_tokens: int) -> bytes:
        """Return the answer."""


async def answer_embedding(cycle: RequestCycle, live: LiveEmbedding, form: EmbeddingForm) -> QuireError | None:
    """Answer a submitted call, or return the error that ended it."""
    memory = AnswerMemory(cycle, form.advice)
    cycle.cancels.append(live.cancel)
    try:
        async with contextlib.aclosing(live.chunks()) as chunks:
            async for chunk in chunks:
                memory.add(form.add(chunk))
        memory.release()  # the connection counts sent bytes
        cycle.respond(HTTPAnswer(200, form.whole(live.prompt_tokens)))
        return None
    except QuireError as error:
        return error.with_traceback(None)  # the traceback holds the texts
    finally:
        memory.release()
        cycle.cancels.clear()
