"""The encoder of an engine core: a model that makes vectors or scores, or a null object without work.

Like the core, this file must not import text, frames or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from ....kernels import CpuBudget
from ....scheduler import NO_ENCODER, EncodedText, EncoderLimits, EncoderResult, EncoderStep
from ...common.config import WeightDtype
from ...model.encoder import EncoderSpec
from ...model.files import model_name, sampled_fingerprint
from ...model.runner.encoder_runner import EncoderRunner
from ..bits import encoder_bits_id
from ..facade import EncoderInfo

_log = structlog.get_logger("quire.engine")


class Encoder(EncoderLimits, Protocol):
    """A loaded encoder. Its methods block; the engine calls them from one thread."""

    path: Path
    isa: str
    cpus: CpuBudget

    def begin(self, texts: Sequence[EncodedText]) -> None:
        """Begin a batch, and drop an unfinished one."""

    def advance(self, num_stages: int) -> bool:
        """Run the next stages of the batch. Return whether it has ended."""

    def values(self) -> npt.NDArray[np.float32]:
        """Return the values [texts, dimensions or labels] of the batch, which has ended."""

    def close(self) -> None:
        """Free memory and threads. Idempotent."""


class EncoderPart(Protocol):
    """The core's interface to the encoder."""

    @property
    def limits(self) -> EncoderLimits:
        """The encoder's limits, for the scheduler."""

    @property
    def info(self) -> EncoderInfo | None:
        """The description of the encoder; None: there is none."""

    def bits_id(self) -> bytes:
        """Return the bits id of the loaded encoder."""

    def run(self, steps: Sequence[EncoderStep]) -> tuple[EncoderResult, ...]:
        """Run the encoder's part of a step. Blocks."""

    def close(self) -> None:
        """Free memory and threads. Idempotent."""


class LoadedEncoder:
    """An `EncoderPart` that computes. It owns the encoder."""

    def __init__(self, encoder: Encoder, info: EncoderInfo, weights: WeightDtype) -> None:
        self.limits = self.encoder = encoder
        self.info = info
        self._weights = weights

    def bits_id(self) -> bytes:
        """See `EncoderPart.bits_id`."""
        return encoder_bits_id(self.encoder.isa, self._weights, sampled_fingerprint(self.encoder.path))

    def run(self, steps: Sequence[EncoderStep]) -> tuple[EncoderResult, ...]:
        """See `EncoderPart.run`."""
        return tuple([_run_stages(self.encoder, step) for step in steps])

    def close(self) -> None:
        """See `EncoderPart.close`."""
        self.encoder.close()


class NoEncoder:
    """The `EncoderPart` of a core without an encoder."""

    limits = NO_ENCODER
    info = None

    def bits_id(self) -> bytes:
        """Return nothing: the bits of outputs do not depend on an encoder."""
        return b""

    def run(self, steps: Sequence[EncoderStep]) -> tuple[EncoderResult, ...]:
        """Return the results of a step without texts."""
        return ()

    def close(self) -> None:
        """See `EncoderPart.close`."""


def describe_encoder(encoder: EncoderRunner) -> EncoderInfo:
    """Return the description of a loaded encoder."""
    return encoder_info(encoder.spec, encoder.capacity.max_model_len, encoder.path)


def encoder_info(spec: EncoderSpec, max_model_len: int, path: Path) -> EncoderInfo:
    """Return the facts that requests and their answers depend on."""
    return EncoderInfo(
        vocab_size=spec.body.vocab_size,
        max_model_len=max_model_len,
        dimensions=spec.dimensions,
        num_labels=spec.num_labels,
        score_activation=spec.score_activation,
        normalize=spec.normalize,
        matryoshka=spec.matryoshka,
        prompts=dict(spec.prompts),
        default_prompt=spec.default_prompt,
        name=model_name(path),
        labels=spec.labels,
        is_multi_label=spec.is_multi_label,
    )


def _run_stages(encoder: Encoder, step: EncoderStep) -> EncoderResult:
    """Run stages of a batch. An exception ends this batch only."""
    started = time.perf_counter()
    values: tuple[bytes | None, ...] = ()
    try:
        if step.texts:
            encoder.begin(step.texts)
        encoder.advance(step.num_stages)
        if step.is_last:
            rows = encoder.values()
            finite = np.logical_and.reduce(np.isfinite(rows), axis=1)
            values = tuple([row.tobytes() if is_finite else None for row, is_finite in zip(rows, finite, strict=True)])
    except Exception as error:
        _log.exception("encoder batch failed", requests=len(step.request_ids))
        return EncoderResult(time.perf_counter() - started, error=f"encoding failed: {error!r}")
    return EncoderResult(time.perf_counter() - started, values)
