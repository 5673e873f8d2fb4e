"""The cost model: predicts a step's seconds as a linear function of its load, and learns from finished steps.

Must not import requests, pages or clocks. No coefficient is ever negative, so more work never looks cheaper.

The estimate is a Kalman filter over the coefficients, which drift slowly, with noise in proportion to the predicted
time. Its uncertainty is bounded by the prior's, so a coefficient without new data (no prefill for an hour) keeps its
estimate and adapts quickly when data returns. Steps that took much longer or shorter than predicted count only in part:
on a shared machine most of them are caused by other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NOISE = 0.15  # relative noise of a step's duration
PRIOR_SPREAD = 3.0  # standard deviation of a coefficient before the first observation, relative
DRIFT = 0.05  # drift of a coefficient per observation, relative to itself
LEAST_DRIFT = 1e-4  # least drift, relative to the prior
MAX_RATIO = 2.0  # limit of measured to predicted time, and of the reverse; observations beyond it are clipped
WARM = 8  # observations until predictions are used


class StepLoad(NamedTuple):
    """The amount of work in a step."""

    decode_rows: int = 0  # rows of draft tokens included
    prefill_tokens: int = 0
    kv_tokens: int = 0  # keys and values that decode rows read: the sum of their contexts
    prefill_pairs: int = 0  # pairs of a query and a key it attends to, in prefill chunks


class Coefficients(NamedTuple):
    """Seconds per step, and per unit of each part of a load."""

    step: float
    decode_row: float
    prefill_token: float
    kv_token: float
    prefill_pair: float


GENERIC = Coefficients(2e-2, 2e-3, 2e-3, 2e-6, 1e-7)  # about right for a model of 1e9 weights


def chunk_pairs(context: int, num_tokens: int) -> int:
    """Return the query-key pairs of a prefill chunk: each query attends to all earlier tokens and itself."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


class CostModel:
    """Predicts step times, starting from `prior`. `predict` takes four multiplications, `observe` about 10 µs."""

    def __init__(self, prior: Coefficients = GENERIC) -> None:
        self._theta = list(prior)
        self._prior = prior
        self._max_variance = [(PRIOR_SPREAD * value) ** 2 for value in prior]
        size = len(prior)
        self._covariance = [[self._max_variance[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._num_observed = 0
        self.is_warm = False  # predictions are based on measurements, no longer on the prior

    @property
    def coefficients(self) -> Coefficients:
        """The current estimate."""
        return Coefficients(*self._theta)

    def predict(self, load: StepLoad) -> float:
        """Return the predicted seconds of a step with this load."""
        base, row, token, kv, pair = self._theta
        return base + row * load[0] + token * load[1] + kv * load[2] + pair * load[3]

    def predict_prefill(self, num_tokens: int) -> float:
        """Return the seconds that computing the first `num_tokens` of a sequence adds to steps that run anyway."""
        _, _, token, _, pair = self._theta
        return token * num_tokens + pair * chunk_pairs(0, num_tokens)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn that a step with this load took `seconds`."""
        x = (1, *load)
        predicted = self.predict(load)
        surprise = seconds - predicted
        if self.is_warm:
            surprise = min(max(surprise, predicted / MAX_RATIO - predicted), predicted * MAX_RATIO - predicted)
        self._drift()
        covariance = self._covariance
        spread = [sum([a * b for a, b in zip(row, x, strict=True)]) for row in covariance]
        variance = sum([a * b for a, b in zip(spread, x, strict=True)]) + (NOISE * max(predicted, seconds)) ** 2
        if variance <= 0:
            return
        gain = [value / variance for value in spread]
        self._covariance = [
            [value - g * s for value, s in zip(row, spread, strict=True)]
            for row, g in zip(covariance, gain, strict=True)
        ]
        theta = [theta + g * surprise for theta, g in zip(self._theta, gain, strict=True)]
        self._theta = _not_negative(theta, self._covariance)
        self._num_observed += 1
        self.is_warm = self._num_observed >= WARM

    def _drift(self) -> None:
        """Increase the uncertainty a little, up to the prior's."""
        covariance = self._covariance
        for i, limit in enumerate(self._max_variance):
            covariance[i][i] += (DRIFT * self._theta[i] + LEAST_DRIFT * self._prior[i]) ** 2
            if covariance[i][i] > limit:
                shrink = (limit / covariance[i][i]) ** 0.5
                for j in range(len(covariance)):
                    covariance[i][j] *= shrink
                    covariance[j][i] *= shrink


def _not_negative(theta: list[float], covariance: Sequence[Sequence[float]]) -> list[float]:
    """Return the estimate with its negative coefficients at 0, and the others at their likeliest values given that.

    Setting only the negative coefficients to 0 would leave the others wrong: they were corrected in the opposite
    direction.
    """
    while (k := next((k for k, value in enumerate(theta) if value < 0), None)) is not None:
        row = covariance[k]
        shares = [value / row[k] for value in row]
        theta = [value - share * theta[k] for value, share in zip(theta, shares, strict=True)]
        theta[k] = 0.0
        covariance = [
            [0.0 if k in (i, j) else value - shares[i] * row[j] for j, value in enumerate(values)]
            for i, values in enumerate(covariance)
        ]
    return theta
