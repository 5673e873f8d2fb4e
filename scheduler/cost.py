"""What a step costs in seconds, as a linear function of its load, learned from the steps as they happen.

It must not know requests, pages or clocks: loads and seconds in, seconds out. The one invariant: no coefficient is ever
negative, so more work never looks cheaper.

The estimate is a Kalman filter over the coefficients, which wander slowly, with noise in proportion to what was
predicted. Its uncertainty is bounded by the prior's, so a direction that is not exercised (no prefill for an hour)
keeps its estimate and is quick to learn again. Steps that took far longer or shorter than expected count only in part:
on a shared machine most of them are somebody else's doing.
"""

from __future__ import annotations

from typing import NamedTuple

NOISE = 0.15  # of a step's duration, relative
PRIOR_SPREAD = 3.0  # standard deviation of a coefficient before anything is known, relative
DRIFT = 0.05  # by how much of itself a coefficient may wander per observation
LEAST_DRIFT = 1e-4  # and by how much of its prior at least
SURPRISE = 2.0  # a known load that took more than so many times what was predicted, or less than 1 / so many
WARM = 8  # observations


class StepLoad(NamedTuple):
    """What a step computes."""

    decode_rows: int = 0  # guesses to be verified included
    prefill_tokens: int = 0
    kv_tokens: int = 0  # keys and values that decode rows read: the sum of their contexts
    prefill_pairs: int = 0  # of a query and a key that it sees, in prefill chunks


class Coefficients(NamedTuple):
    """Seconds: per step, and per unit of each part of a load."""

    step: float
    decode_row: float
    prefill_token: float
    kv_token: float
    prefill_pair: float


GENERIC = Coefficients(2e-2, 2e-3, 2e-3, 2e-6, 1e-7)  # somewhere near a model of a billion weights


def chunk_pairs(context: int, num_tokens: int) -> int:
    """Pairs of a prefill chunk of `num_tokens` after `context` tokens: each query sees all before it and itself."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


class CostModel:
    """Learns from `prior` on. `predict` is a handful of multiplications, `observe` some 10 µs."""

    def __init__(self, prior: Coefficients = GENERIC) -> None:
        self._theta = list(prior)
        self._prior = prior
        self._most = [(PRIOR_SPREAD * value) ** 2 for value in prior]  # variances never exceed these
        size = len(prior)
        self._covariance = [[self._most[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._num_observed = 0

    @property
    def coefficients(self) -> Coefficients:
        return Coefficients(*self._theta)

    @property
    def is_warm(self) -> bool:
        """Whether predictions rest on measurements rather than on the prior."""
        return self._num_observed >= WARM

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step with this load should take."""
        base, row, token, kv, pair = self._theta
        return base + row * load[0] + token * load[1] + kv * load[2] + pair * load[3]

    def predict_prefill(self, num_tokens: int) -> float:
        """Seconds that computing the first `num_tokens` of a sequence adds to steps that are run anyway."""
        _, _, token, _, pair = self._theta
        return token * num_tokens + pair * chunk_pairs(0, num_tokens)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step with this load took so long."""
        x = (1, *load)
        predicted = self.predict(load)
        surprise = seconds - predicted
        if self.is_warm:
            surprise = min(max(surprise, predicted / SURPRISE - predicted), predicted * SURPRISE - predicted)
        self._wander()
        covariance = self._covariance
        spread = [sum([a * b for a, b in zip(row, x, strict=True)]) for row in covariance]
        variance = sum([a * b for a, b in zip(spread, x, strict=True)]) + (NOISE * max(predicted, seconds)) ** 2
        if variance <= 0:
            return
        gain = [value / variance for value in spread]
        self._theta = [max(0.0, theta + g * surprise) for theta, g in zip(self._theta, gain, strict=True)]
        self._covariance = [
            [value - g * s for value, s in zip(row, spread, strict=True)]
            for row, g in zip(covariance, gain, strict=True)
        ]
        self._num_observed += 1

    def _wander(self) -> None:
        """Uncertainty grows a little, up to the prior's."""
        covariance = self._covariance
        for i, most in enumerate(self._most):
            covariance[i][i] += (DRIFT * self._theta[i] + LEAST_DRIFT * self._prior[i]) ** 2
            if covariance[i][i] > most:
                shrink = (most / covariance[i][i]) ** 0.5
                for j in range(len(covariance)):
                    covariance[i][j] *= shrink
                    covariance[j][i] *= shrink
