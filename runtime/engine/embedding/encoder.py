"""The encoder as an engine core uses it: what it is asked for, how it is described, and how a step runs its batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from ....kernels import CpuBudget
from ....scheduler import EncodedText, EncoderLimits, EncoderResult, EncoderStep
from ...model.files import model_name
from ...model.runner.encoder_runner import EncoderRunner
from ..facade import EncoderInfo

_log = structlog.get_logger("quire.engine")


class Encoder(EncoderLimits, Protocol):
    """A loaded encoder. Its methods block; the engine calls them from one thread."""

    path: Path
    isa: str
    cpus: CpuBudget

    def begin(self, texts: Sequence[EncodedText]) -> None:
        """Begin a batch, in place of one that has not ended."""

    def advance(self, num_stages: int) -> bool:
        """Run the next stages of the batch. Return whether it has ended."""

    def values(self) -> npt.NDArray[np.float32]:
        """Return the values [texts, dimensions or labels] of the batch, which has ended."""

    def close(self) -> None:
        """Free memory and threads. Idempotent."""


def describe_encoder(encoder: EncoderRunner) -> EncoderInfo:
    """Return what requests and their answers depend on."""
    spec = encoder.spec
    return EncoderInfo(
        vocab_size=spec.body.vocab_size,
        max_model_len=encoder.capacity.max_model_len,
        dimensions=spec.dimensions,
        num_labels=spec.num_labels,
        score_activation=spec.score_activation,
        normalize=spec.normalize,
        matryoshka=spec.matryoshka,
        prompts=dict(spec.prompts),
        default_prompt=spec.default_prompt,
        name=model_name(encoder.path),
        labels=spec.labels,
        is_multi_label=spec.is_multi_label,
    )


def run_encoder(encoder: Encoder, step: EncoderStep) -> EncoderResult:
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
