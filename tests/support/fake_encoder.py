"""A fake encoder: a text's vector is made from its token ids, so that tests know the expected vector."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from quire.kernels import CpuBudget
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import EncoderInfo, EngineCore
from quire.runtime.engine.core_parts import LoadedDecoder, NoDecoder
from quire.runtime.engine.embedding.encoder import LoadedEncoder
from quire.runtime.engine.text import Tokenizer
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.runner import ModelRunner
from quire.scheduler import EncodedText

DIMENSIONS = 4
MAX_MODEL_LEN = 32
NAN_TOKEN = 1999
FAILING_TOKEN = 1998
ENCODER_INFO = EncoderInfo(
    vocab_size=2000,
    max_model_len=MAX_MODEL_LEN,
    dimensions=DIMENSIONS,
    normalize=True,
    prompts={"query": "q: ", "document": "d: "},
)


def vector(token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the vector of a text."""
    values = np.array([len(token_ids), token_ids[0], token_ids[-1], 1 + sum(token_ids) % 7], np.float64)
    unit: npt.NDArray[np.float32] = (values / np.sqrt(np.cumsum(values * values)[-1])).astype(np.float32)
    return unit


class FakeTexts:
    """A tokenizer of one token per character."""

    tokenizer = Tokenizer(BUNDLED_MODEL)  # tokenizer for `/tokenize`

    def encode(self, text: str, prompt: str = "") -> EncodedText:
        return EncodedText(tuple(map(ord, prompt + text)))

    def encode_pair(self, query: str, document: str) -> EncodedText:
        return EncodedText(tuple(map(ord, query + document)), (0,) * len(query) + (1,) * len(document))

    def truncated(self, text: EncodedText, max_tokens: int) -> EncodedText:
        types = text.type_ids
        return EncodedText(text.token_ids[:max_tokens], None if types is None else types[:max_tokens])


class FakeEncoder:
    """Implements `engine.encoder.Encoder`. The batches that it began are in `batches`; `gate` holds it."""

    def __init__(self, info: EncoderInfo = ENCODER_INFO, max_rows: int = 64, stage_s: float = 0.0) -> None:
        self.info = info
        self.path = BUNDLED_MODEL
        self.isa = "scalar"
        self.cpus = CpuBudget(1, "a test")
        self.max_rows = max_rows
        self.max_texts = 16
        self.num_stages = 3
        self.batches: list[list[EncodedText]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False
        self._stage_s = stage_s
        self._num_left = 0

    def stage_seconds(self, tokens: int, pairs: int) -> float:
        return self._stage_s

    def begin(self, texts: Sequence[EncodedText]) -> None:
        self.batches.append(list(texts))
        self._num_left = self.num_stages

    def advance(self, num_stages: int) -> bool:
        assert self.gate.wait(60)
        if any(FAILING_TOKEN in text.token_ids for text in self.batches[-1]):
            raise ZeroDivisionError("a bug")
        self._num_left -= num_stages
        return self._num_left == 0

    def values(self) -> npt.NDArray[np.float32]:
        assert self._num_left == 0
        rows = np.stack([vector(text.token_ids) for text in self.batches[-1]])
        rows[[NAN_TOKEN in text.token_ids for text in self.batches[-1]]] = np.nan
        return rows[:, : self.info.num_labels] * 8 if self.info.num_labels else rows

    def close(self) -> None:
        self.is_closed = True


def fake_encoder_core(encoder: FakeEncoder, runner: ModelRunner | None = None, **settings: Any) -> EngineCore:
    """Return a core with a fake encoder, and a model that generates if there is a `runner`."""
    config = EngineConfig(**settings)
    part = LoadedEncoder(encoder, encoder.info, config.weights)
    return EngineCore(config, NoDecoder(part, config) if runner is None else LoadedDecoder(runner, config), part)
