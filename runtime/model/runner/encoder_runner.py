"""The encoder runner: loads an encoder, owns its memory, and computes batches of texts in stages.

It keeps one batch between calls. Its methods block; the engine calls them from one thread, the model runner's thread
if a decoder is served, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ....kernels import Pool
from ....scheduler import EncodedText
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from ..encoder import PackedEncoder, pack_encoder, read_encoder
from ..files import model_path
from .capacity import EncoderCapacity, decide_encoder_capacity, encoder_config
from .staged_program import StagedProgram
from .trials import text_trials
from .tuned import tune

MEASURED = ((1,), (16,) * 4, (256,))  # batches for measuring the cost of a stage: tokens of their texts

Floats = npt.NDArray[np.float32]


def load_encoder(
    config: EngineConfig,
    stop: threading.Event | None = None,
    pool: Pool | None = None,
    *,
    on_planned: Callable[[EncoderCapacity], None] | None = None,
) -> EncoderRunner:
    """Read, pack and bind the encoder: `config.embedding_model`, or `config.model` if it is served alone.

    `pool` has the threads of a decoder in the same process; without it the runner has its own threads. Raises
    ModelError or ConfigError, as `load_model` does.
    """
    if config.embedding_model is not None:
        config = encoder_config(config)
    path = model_path(config.model)
    capacity = decide_encoder_capacity(config, read_encoder(path))
    if on_planned is not None:
        on_planned(capacity)
    model = pack_encoder(path, config.weights, capacity.max_model_len, stop)
    return EncoderRunner(model, capacity, pool or Pool(capacity.cpus.threads))


class EncoderRunner:
    """A loaded encoder bound to memory and threads. The constructor takes all memory, as `capacity` plans."""

    def __init__(self, model: PackedEncoder, capacity: EncoderCapacity, pool: Pool) -> None:
        self.spec = model.spec
        self.path = model.path
        self.capacity = capacity
        self.cpus = capacity.cpus
        self.isa = capacity.isa
        self.max_rows = capacity.max_rows
        self.max_texts = capacity.max_texts
        plan = model.compile(max_rows=self.max_rows, max_texts=self.max_texts)
        self.arena_bytes = plan.arena_bytes
        try:
            self._program = StagedProgram(
                plan,
                pool,
                capacity.isa,
                max_rows=self.max_rows,
                max_texts=self.max_texts,
                vocab_size=self.spec.body.vocab_size,
            )
        except MemoryError as error:
            raise ConfigError(
                f"batches of {self.max_rows} tokens need {plan.arena_bytes:,} bytes, which the system does not give; "
                "lower max_num_batched_tokens and max_model_len"
            ) from error
        self.num_stages = self._program.num_stages
        trials = text_trials(self._program.program, max_rows=self.max_rows, max_tokens=self.spec.max_model_len)
        self.tuned = tune(self._program.program, plan.ops, self._program.kv_dtype, list(trials), capacity)
        self._values = self._program.view(plan.results[0])  # [max_texts, padded dimensions]
        self._num_texts = 0  # texts of the batch
        self._base_s, self._row_s, self._pair_s = self._measure()

    def begin(self, texts: Sequence[EncodedText]) -> None:
        """Take the texts of the next batch, and drop an unfinished batch.

        Raises ValueError for texts that do not fit: more than `max_rows` tokens or `max_texts` texts, a text without
        tokens or with more than `spec.max_model_len`, an unknown token or type.
        """
        self._program.give_up()
        token_ids = [token for text in texts for token in text.token_ids]
        lengths = [len(text.token_ids) for text in texts]
        if not 1 <= len(token_ids) <= self.max_rows or len(texts) > self.max_texts:
            raise ValueError(
                f"{len(token_ids)} tokens of {len(texts)} texts; a batch takes 1 to {self.max_rows} of at most "
                f"{self.max_texts}"
            )
        if not 1 <= min(lengths) <= max(lengths) <= self.spec.max_model_len:
            raise ValueError(f"a text has 1 to {self.spec.max_model_len} tokens")
        row_start = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(lengths, out=row_start[1:])
        self._program.begin(np.array(token_ids, np.int32), row_start, self._types_of(texts))
        self._num_texts = len(texts)

    def advance(self, num_stages: int) -> bool:
        """Compute the next stages of the batch; return whether it is done."""
        return self._program.advance(num_stages)

    def values(self) -> Floats:
        """Return a copy of the vectors, or of the labels' values before any activation, f32 [texts, dimensions]."""
        return self._values[: self._num_texts, : self.spec.dimensions].copy()

    def stage_seconds(self, tokens: int, pairs: int) -> float:
        """Return the predicted seconds of one stage of a batch: its tokens, and its pairs of a query and a key.

        The costs were measured in the first layer when the runner was built.
        """
        return self._base_s + self._row_s * tokens + self._pair_s * pairs

    def close(self) -> None:
        """Release weights, memory and threads now, not at the next garbage collection. Idempotent."""
        if hasattr(self, "_program"):
            del self._program, self._values

    def _types_of(self, texts: Sequence[EncodedText]) -> npt.NDArray[np.int32] | None:
        """Return the token types of a batch; None where all are 0, and for a model without types."""
        if not getattr(self.spec.body, "num_types", 0) or all(text.type_ids is None for text in texts):
            return None
        types = [text.type_ids or (0,) * len(text.token_ids) for text in texts]
        if any(len(of_text) != len(text.token_ids) for of_text, text in zip(types, texts, strict=True)):
            raise ValueError("a text has a type for each token, or none")
        return np.array([one for of_text in types for one in of_text], np.int32)

    def _measure(self) -> tuple[float, float, float]:
        """Return the seconds of a stage without rows, of a row, and of a pair of a query and a key."""
        batches = [self._clamped_lengths(lengths) for lengths in MEASURED]
        base_s, short_s, long_s = (min(self._first_stage_seconds(each) for _ in range(2)) for each in batches)
        _, short, long = batches
        row_s = max(short_s - base_s, 1e-9) / sum(short)
        pair_s = max(long_s - base_s - row_s * sum(long), 0.0) / sum(length * length for length in long)
        return base_s, row_s, pair_s

    def _clamped_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return `lengths` shortened to the length that one batch can hold."""
        longest = min(self.spec.max_model_len, max(1, self.max_rows // len(lengths)))
        return [min(length, longest) for length in lengths[: self.max_rows]]

    def _first_stage_seconds(self, lengths: Sequence[int]) -> float:
        self.begin([EncodedText((0,) * length) for length in lengths])
        start = time.perf_counter()
        self.advance(1)
        self._program.give_up()
        return time.perf_counter() - start
