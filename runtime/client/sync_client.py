"""`Client`: `AsyncClient` for programs without asyncio.

Runs an event loop on its own thread, so several threads may use one client at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..common.errors import NotOpen, Unavailable
from ..common.loop_thread import LoopThread
from ..common.types import OutputChunk, RequestOutput, SamplingParams
from ..protocol.frames import ServedModel
from .async_client import AsyncClient, EmbedOptions, RequestOptions
from .embedding import OnEmbedded
from .tls import TLSOption

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


class Client:
    """Synchronous client of a Quire server, with the arguments and errors of `AsyncClient`.

    `with Client("127.0.0.1:7070") as client: for chunk in client.generate(…): …`
    """

    def __init__(self, address: str | Sequence[str], token: str | None = None, tls: TLSOption = False) -> None:
        self._client = AsyncClient(address, token, tls)
        self._thread: LoopThread | None = None

    def __enter__(self) -> Client:
        self._thread = LoopThread("this client")
        self._thread.on_close = self._client.close
        try:
            self._await(self._client.__aenter__())
        except BaseException:
            self.close()
            self._thread = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread; streams still open raise NotOpen or Unavailable. Idempotent."""
        if self._thread is not None:
            self._thread.close()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[OutputChunk]:
        """Stream the continuation of a prompt, as `AsyncClient.generate` does.

        Leaving the loop early or closing the generator cancels the request. Callbacks run on the client's thread.
        """
        self._entered()
        return self._read(self._client.generate(prompt, sampling_params, **options))

    def _read(self, chunks: AsyncGenerator[OutputChunk, None]) -> Iterator[OutputChunk]:
        try:
            while (chunk := self._await(_next(chunks))) is not None:
                yield chunk
        finally:
            with contextlib.suppress(NotOpen, Unavailable):  # the client was closed, which ended the stream
                self._await(_close(chunks))

    def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the whole continuation at once. Raises as `generate` does."""
        return self._await(self._client.complete(prompt, sampling_params, **options))

    def embed(
        self,
        inputs: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        on_progress: OnEmbedded | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Return one vector per input, as `AsyncClient.embed` does. `on_progress` runs on the client's thread."""
        return self._await(
            self._client.embed(
                inputs, dimensions=dimensions, prompt_name=prompt_name, on_progress=on_progress, **options
            )
        )

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        on_progress: OnEmbedded | None = None,
        **options: Unpack[EmbedOptions],
    ) -> npt.NDArray[np.float32]:
        """Return a score of each document for the query, as `AsyncClient.score` does."""
        return self._await(self._client.score(query, documents, on_progress=on_progress, **options))

    def tokenize(self, text: str, add_special_tokens: bool = True, *, model: str = "") -> tuple[int, ...]:
        """Return the token ids of `text`, as `AsyncClient.tokenize` does."""
        return self._await(self._client.tokenize(text, add_special_tokens, model=model))

    def models(self) -> tuple[ServedModel, ...]:
        """Return the names and limits of the served models."""
        return self._await(self._client.models())

    def stats(self) -> dict[str, int]:
        """Return counters and gauges by name: the engine's, or this tenant's own if the server has several tenants."""
        return self._await(self._client.stats())

    def ping(self) -> float:
        """Return the seconds of a round trip to the server's event loop."""
        return self._await(self._client.ping())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's event loop and return its result; interrupting the wait cancels `work`."""
        if self._thread is None:
            work.close()
        return self._entered().run(work)

    def _entered(self) -> LoopThread:
        if self._thread is None:
            raise NotOpen("this client is not connected; use `with Client(…) as client:`")
        return self._thread


async def _next(chunks: AsyncGenerator[OutputChunk, None]) -> OutputChunk | None:
    return await anext(chunks, None)


async def _close(chunks: AsyncGenerator[OutputChunk, None]) -> None:
    await chunks.aclose()
