"""The speed of an encoder: texts of one length per second, in requests of several texts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...common.errors import ConfigError
from ...llm import LLM
from .speed import Shape

SEED = 1


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """The result of one shape: texts per request x tokens per text."""

    num_texts: int
    text_tokens: int
    texts_per_s: float  # speed of the fastest run
    tokens_per_s: float
    request_ms: float  # time of the fastest run

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_embedding(
    llm: LLM, shapes: Sequence[Shape], repeats: int, report: Callable[[str], None]
) -> Iterator[EmbeddingResult]:
    """Yield one result per shape. Calls `report` with the name of each run. Raises ConfigError."""
    info = llm.engine.info.encoder
    if info is None or info.num_labels:
        raise ConfigError("task embed needs a model that makes vectors, not a reranker or a model that generates")
    generator = random.Random(SEED)
    for shape in shapes:
        if shape.prompt_tokens > info.max_model_len:
            raise ConfigError(f"shapes: {shape} has texts of more than {info.max_model_len} tokens, the model's limit")
        texts = [tuple(generator.choices(range(info.vocab_size), k=shape.prompt_tokens)) for _ in range(shape.batch)]
        llm.embed(texts)  # the first run touches memory
        fastest = min(_seconds(llm, texts, report, f"{shape}: run {each + 1} of {repeats}") for each in range(repeats))
        per_s = shape.batch / fastest
        yield EmbeddingResult(shape.batch, shape.prompt_tokens, per_s, per_s * shape.prompt_tokens, 1000 * fastest)


def _seconds(llm: LLM, texts: Sequence[tuple[int, ...]], report: Callable[[str], None], name: str) -> float:
    report(name)
    start = time.perf_counter()
    llm.embed(texts)
    return time.perf_counter() - start
