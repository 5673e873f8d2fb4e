"""Perplexity of a model on a text, and the distance of its predictions from another model's.

Windows, scored tokens and error bars follow llama.cpp's llama-perplexity, so that figures can be compared. Only a few
rows of logits exist at a time, and each row is reduced to a few numbers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..common.config import EngineConfig
from ..common.errors import ConfigError, GenerationFailed
from ..model import DecoderSpec, kv_layout
from ..model.runner import ModelRunner
from ..model.states import lay_out_states
from .bench.cache_comparison import Tables, page_tables

LOGITS_BYTES = 32 << 20  # bytes of the rows that are scored in one step
MAX_SCORED_ROWS = 128
SHOWN_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Windows:
    """The parts of a text that are computed, each from an empty cache.

    In a window the logits of the rows `first_scored` to `length - 2` are scored, each against the token after it.
    """

    starts: range
    length: int  # tokens
    first_scored: int
    begins_with_bos: bool  # a begin token replaces the first token of each window, if the tokenizer has one

    @property
    def scored_tokens(self) -> int:
        """Number of scored tokens of all windows together."""
        return len(self.starts) * (self.length - 1 - self.first_scored)


def plan_windows(num_tokens: int, context: int, stride: int | None = None, max_windows: int | None = None) -> Windows:
    """Return the windows of a text of `num_tokens` tokens, at most `max_windows` of them.

    Without `stride`, windows of `context` tokens follow each other and the second half of each is scored. With
    `stride`, windows of `context + stride // 2` tokens begin every `stride` tokens, and the last `stride` tokens of
    each are scored. Raises ConfigError if the text is too short, or a size does not fit.
    """
    if context < 4:
        raise ConfigError(f"context must be at least 4 tokens, not {context}")
    if stride is not None and not 1 <= stride <= context:
        raise ConfigError(f"stride must be between 1 and `context` {context}, not {stride}")
    if max_windows is not None and max_windows < 1:
        raise ConfigError(f"windows must be at least 1, not {max_windows}")
    length = context if stride is None else context + stride // 2
    step = stride or context
    count = num_tokens // context if stride is None else -(-(num_tokens - length) // step)
    if count < 1:
        needed = length if stride is None else length + 1
        raise ConfigError(f"the text has {num_tokens} tokens; these windows need at least {needed}, lower `context`")
    count = min(count, max_windows or count)
    first = context // 2 if stride is None else length - stride - 1
    return Windows(range(0, count * step, step), length, first, begins_with_bos=stride is None)


def scoring_config(config: EngineConfig, spec: DecoderSpec, windows: Windows) -> EngineConfig:
    """Return `config` with the sizes that scoring `windows` needs: one sequence, and logits of some rows at a time.

    Raises ConfigError if a window is longer than the model's context.
    """
    if windows.length > spec.max_position_embeddings:
        raise ConfigError(f"windows of {windows.length} tokens do not fit the {spec.max_position_embeddings} positions")
    layout = kv_layout(spec, config.kv_cache_dtype, config.page_size)
    states = lay_out_states(spec, 0, config.state_dtype)
    pages = len(layout.groups) * -(-windows.length // config.page_size)
    rows = max(1, min(MAX_SCORED_ROWS, config.max_num_batched_tokens, LOGITS_BYTES // (4 * spec.vocab_size)))
    return msgspec.structs.replace(
        config,
        max_model_len=windows.length,
        max_num_seqs=rows,
        kv_cache_memory=pages * layout.page_bytes + rows * states.nbytes,
        state_cache_memory=0,
        num_speculative_tokens=0,
        draft_model=None,
    )


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Negative log-likelihoods of the scored tokens, in nats."""

    nlls: Floats  # [scored tokens]

    @property
    def value(self) -> float:
        return float(np.exp(self.nlls.mean()))

    @property
    def error(self) -> float:
        """The standard error of `value`."""
        return self.value * standard_error(self.nlls)

    def as_dict(self) -> dict[str, float]:
        return {"perplexity": self.value, "perplexity_error": self.error, "mean_nll": float(self.nlls.mean())}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The difference of a model's predictions from a base model's, per scored token."""

    model: Perplexity
    base: Perplexity
    kl: Floats  # [scored tokens] Kullback-Leibler divergence of the model from the base, in nats
    same_top: npt.NDArray[np.bool_]  # [scored tokens] whether both models find the same token most likely

    @property
    def log_ratio(self) -> tuple[float, float]:
        """The mean of ln(PPL of the model / PPL of the base), and its standard error."""
        difference = self.model.nlls - self.base.nlls
        return float(difference.mean()), standard_error(difference)

    @property
    def delta_p(self) -> Floats:
        """The change of the probability of each scored token."""
        return np.exp(-self.model.nlls) - np.exp(-self.base.nlls)

    def as_dict(self) -> dict[str, Any]:
        ratio, ratio_error = self.log_ratio
        return {
            **self.model.as_dict(),
            "base_perplexity": self.base.value,
            "base_perplexity_error": self.base.error,
            "log_perplexity_ratio": ratio,
            "log_perplexity_ratio_error": ratio_error,
            "mean_kl": float(self.kl.mean()),
            "mean_kl_error": standard_error(self.kl),
            "max_kl": float(self.kl.max()),
            "min_kl": float(self.kl.min()),
            "kl_percentiles": {f"{p:g}": float(np.percentile(self.kl, p)) for p in SHOWN_PERCENTILES},
            "rms_delta_p": float(np.sqrt((self.delta_p**2).mean())),
            "same_top": float(self.same_top.mean()),
            "same_top_error": standard_error(self.same_top.astype(np.float64)),
        }


def standard_error(values: Floats) -> float:
    """Return the standard error of the mean of `values`; 0 for a single one."""
    return float(np.sqrt(values.var() / (len(values) - 1))) if len(values) > 1 else 0.0


def measure_perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    windows: Windows,
    bos: int | None,
    on_window: Callable[[float], None],
) -> Perplexity:
    """Score all windows, and call `on_window` with the perplexity so far after each. The runner must be idle.

    Raises ConfigError for a token id that the model does not have, GenerationFailed if logits are not finite numbers.
    """
    _check_ids(runner, token_ids, bos)
    tables = page_tables(runner, windows.length)
    nlls: list[float] = []
    for window in _token_ids(token_ids, windows, bos):
        for first, logits in _scored_logits(runner, tables, window, windows.first_scored):
            nlls += [_nll(row, window[first + i + 1]) for i, row in enumerate(logits)]
        on_window(float(np.exp(np.mean(nlls))))
    return Perplexity(np.array(nlls))


def measure_divergence(
    runner: ModelRunner,
    base: ModelRunner,
    token_ids: Sequence[int],
    windows: Windows,
    bos: int | None,
    on_window: Callable[[float], None],
) -> Divergence:
    """Score all windows with both models, and call `on_window` with the mean KL divergence so far after each.

    The vocabularies are of the same size. Raises ConfigError if they lack a token id, GenerationFailed if logits are
    not finite numbers.
    """
    _check_ids(runner, token_ids, bos)
    tables = page_tables(runner, windows.length)
    base_tables = page_tables(base, windows.length)
    rows: list[tuple[float, float, float, bool]] = []
    for window in _token_ids(token_ids, windows, bos):
        pairs = zip(
            _scored_logits(runner, tables, window, windows.first_scored),
            _scored_logits(base, base_tables, window, windows.first_scored),
            strict=True,
        )
        for (first, logits), (_, base_logits) in pairs:
            targets = window[first + 1 : first + 1 + len(logits)]
            rows += map(_compare, logits, base_logits, targets)
        on_window(float(np.mean([row[2] for row in rows])))
    nlls, base_nlls, kl, same_top = (np.array(column) for column in zip(*rows, strict=True))
    return Divergence(Perplexity(nlls), Perplexity(base_nlls), kl, same_top)


def _check_ids(runner: ModelRunner, token_ids: Sequence[int], bos: int | None) -> None:
    largest = max(max(token_ids), -1 if bos is None else bos)
    if largest >= runner.spec.vocab_size:
        raise ConfigError(f"the tokenizer gives id {largest}, the model's vocabulary has {runner.spec.vocab_size} ids")


def _token_ids(token_ids: Sequence[int], windows: Windows, bos: int | None) -> Iterator[Sequence[int]]:
    for start in windows.starts:
        window = token_ids[start : start + windows.length]
        yield [bos, *window[1:]] if windows.begins_with_bos and bos is not None else window


def _scored_logits(
    runner: ModelRunner, tables: Tables, token_ids: Sequence[int], first_scored: int
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield the logits [rows, vocab] of the scored rows, and the first of these rows.

    The next iteration overwrites them. The last token's logits have no token to predict and are not computed.
    """
    position = 0
    end = len(token_ids) - 1
    while position < end:
        if position < first_scored:
            rows = min(runner.max_rows, first_scored - position)
            samples = 0
        else:
            rows = samples = min(runner.capacity.max_num_samples, end - position)
        logits = runner.score(token_ids[position : position + rows], position, tables, samples)
        if samples:
            yield position, logits
        position += rows


def _nll(logits: npt.NDArray[np.float32], token_id: int) -> float:
    """Return the negative log-likelihood of a token. Raises GenerationFailed."""
    return _log_normalizer(logits) - float(logits[token_id])


def _log_normalizer(logits: npt.NDArray[np.float32]) -> float:
    top = logits.max()
    if not np.isfinite(top):
        raise GenerationFailed("the model's logits are not finite numbers")
    return float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))


def _compare(
    logits: npt.NDArray[np.float32], base: npt.NDArray[np.float32], token_id: int
) -> tuple[float, float, float, bool]:
    """Return both negative log-likelihoods, the KL divergence, and whether both have the same most likely token."""
    normalizer = _log_normalizer(logits)
    base_normalizer = _log_normalizer(base)
    log_p = base.astype(np.float64) - base_normalizer
    kl = float(np.exp(log_p) @ (log_p - (logits.astype(np.float64) - normalizer)))
    nlls = normalizer - float(logits[token_id]), base_normalizer - float(base[token_id])
    return *nlls, kl, bool(logits.argmax() == base.argmax())
