"""Gradient noise scale with its confidence interval: the batch size up to which larger batches pay off.

A step's gradient is an average over its samples. The squared gradient norms of a part and of the whole batch give
unbiased estimates of |G|² and tr(Σ); their ratio is the simple noise scale. A ratio of averages is not the average of
ratios, so numerator and denominator are averaged separately over many steps (McCandlish et al. 2018, appendix A.1). The
interval is that of a ratio of two dependent means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from paceline.metrics.critical_batch import gradient_square, gradient_variance, steps_ratio
from paceline.metrics.intervals import Interval

CRITICAL_SHARES = (0.125, 0.75)
"""Smallest and largest ratio of the critical batch to the simple noise scale in table 1 of McCandlish et al., for its
five supervised tasks at the start of training and on average. Autoencoders and reinforcement learning reach 20."""
DECADE = 10.0
"""Ratio of the ends of the critical batch's range from which it is too wide to choose a batch."""
# Half the width of a 95 % interval in standard errors, with room for the noise of what it is computed from.
_QUANTILE = 2.6
_FEWEST_ESTIMATES = 10


@dataclass(frozen=True)
class NoiseEstimate:
    """The estimates from one step: unbiased, but so noisy that either may be negative.

    Attributes:
        variance: Estimate of tr(Σ), the variance of one sample's gradient.
        square: Estimate of |G|², the squared norm of the true gradient.
    """

    variance: float
    square: float


def estimate(small_batch: float, small_square: float, large_batch: float, large_square: float) -> NoiseEstimate | None:
    """Compute both estimates from the gradients of a small and a large batch; None if they carry no information.

    Args:
        small_batch: Samples in the small batch; for several batches, their mean size.
        small_square: Squared norm of its gradient; for several batches, the mean weighted by batch size.
        large_batch: Samples in the large batch; must be larger.
        large_square: Squared norm of its gradient.
    """
    if not (0 < small_batch < large_batch and math.isfinite(small_square) and math.isfinite(large_square)):
        return None
    batches = (small_batch, small_square, large_batch, large_square)
    return NoiseEstimate(gradient_variance(*batches), gradient_square(*batches))


@dataclass
class NoiseAverages:
    """Averages over the estimates of many steps, with exponentially decaying weights.

    Attributes:
        half_life: Number of further estimates after which a weight halves; ``inf`` for equal weights.
        weight: Sum of the weights; ``weight_square`` is the sum of their squares.
        variance: Weighted sum of the estimates of tr(Σ); the other fields are weighted sums of |G|² and of products.
    """

    half_life: float = math.inf
    weight: float = 0.0
    weight_square: float = 0.0
    variance: float = 0.0
    square: float = 0.0
    variance_variance: float = 0.0
    square_square: float = 0.0
    variance_square: float = 0.0

    @classmethod
    def of(cls, estimates: Iterable[NoiseEstimate]) -> NoiseAverages:
        """Return the equally weighted averages of all estimates."""
        averages = cls()
        for each in estimates:
            averages.add(each)
        return averages

    def add(self, estimated: NoiseEstimate) -> None:
        """Add one estimate."""
        decay = 0.5 ** (1 / self.half_life)
        v, s = estimated.variance, estimated.square
        self.weight = decay * self.weight + 1
        self.weight_square = decay**2 * self.weight_square + 1
        self.variance = decay * self.variance + v
        self.square = decay * self.square + s
        self.variance_variance = decay * self.variance_variance + v * v
        self.square_square = decay * self.square_square + s * s
        self.variance_square = decay * self.variance_square + v * s

    @property
    def count(self) -> float:
        """Effective number of equally weighted estimates; 0 before the first."""
        return self.weight**2 / self.weight_square if self.weight else 0.0

    @property
    def mean_variance(self) -> float | None:
        """Average estimate of tr(Σ); None before the first."""
        return self.variance / self.weight if self.weight else None

    @property
    def mean_square(self) -> float | None:
        """Average estimate of |G|²; None before the first."""
        return self.square / self.weight if self.weight else None

    def noise_scale(self) -> Interval | None:
        """Return B_simple with its 95 % interval, in samples; None unless both averages are positive.

        Assumes that steps are independent, as their samples are. This is Fieller's interval: ``high`` is ``inf`` if the
        true gradient cannot be distinguished from zero.

        Source: Fieller (1954), Some problems in interval estimation; McCandlish et al., arXiv:1812.06162, A.1.
        """
        from scipy.special import stdtrit

        v, s = self.mean_variance, self.mean_square
        if v is None or s is None or v <= 0 or s <= 0:
            return None
        count = self.count
        if count < 2:
            return Interval(v / s, 0.0, math.inf, round(self.count))
        wide = float(stdtrit(count - 1, 0.975)) ** 2
        vv, ss, vs = (each * wide for each in self._spreads(v, s))
        low, high = _fieller(v, s, (vv, ss, vs))
        return Interval(v / s, low, high, round(count))

    def _spreads(self, v: float, s: float) -> tuple[float, float, float]:
        """Return the unbiased variances of both means, and their covariance."""
        scale = 1 / (self.count - 1)
        vv = (self.variance_variance / self.weight - v * v) * scale
        ss = (self.square_square / self.weight - s * s) * scale
        return max(vv, 0.0), max(ss, 0.0), (self.variance_square / self.weight - v * s) * scale

    def needed_for_a_decade(self) -> int | None:
        """Return how many equally weighted estimates make the critical batch's range narrower than a decade.

        None if that cannot be told: with fewer than two estimates, or an average that is not positive. The standard
        error of the ratio's logarithm falls with the square root of their number (the delta method).
        """
        v, s = self.mean_variance, self.mean_square
        if v is None or s is None or v <= 0 or s <= 0 or self.count < 2:
            return None
        vv, ss, vs = self._spreads(v, s)
        error = math.sqrt(max(vv / v**2 + ss / s**2 - 2 * vs / (v * s), 0.0))
        low, high = CRITICAL_SHARES
        allowed = math.log(DECADE * low / high)
        return max(math.ceil(self.count * (2 * _QUANTILE * error / allowed) ** 2), _FEWEST_ESTIMATES)

    def to_json(self) -> dict[str, float]:
        """Return the averages as one JSON object."""
        return {key: value for key, value in asdict(self).items() if key != "half_life"}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore averages from :meth:`to_json`."""
        for key, value in state.items():
            setattr(self, key, float(value))


def _fieller(top: float, bottom: float, spread: tuple[float, float, float]) -> tuple[float, float]:
    """Return the positive ratios that are consistent with two positive means.

    Args:
        top: Mean of the numerator.
        bottom: Mean of the denominator.
        spread: Variances of both means and their covariance, times the squared quantile.
    """
    tops, bottoms, both = spread
    a, half_b, c = bottom * bottom - bottoms, top * bottom - both, top * top - tops
    discriminant = half_b * half_b - a * c
    root = math.sqrt(max(discriminant, 0.0))
    if a > 0:
        return max((half_b - root) / a, 0.0), (half_b + root) / a
    # The denominator may be zero, so the ratio has no upper bound.
    return (max((half_b - root) / a, 0.0) if c > 0 and a < 0 else 0.0), math.inf


def critical_range(noise_scale: Interval) -> tuple[float, float]:
    """Range of the critical batch of a supervised task: the ends of its noise scale's interval by published ratios.

    B_simple assumes that the loss has the same curvature in all directions, which is false; see
    :data:`CRITICAL_SHARES`.
    """
    low, high = CRITICAL_SHARES
    return noise_scale.low * low, noise_scale.high * high


def linear_rate_excess(noise_scale: float, batch: float) -> float:
    """Factor by which a learning rate proportional to the batch exceeds the best one: 1 + B / B_noise.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2: ε_max / (1 + B_noise / B) compared with its tangent at 0.
    """
    return steps_ratio(batch, noise_scale)


def rate_ratio(noise_scale: float, batch: float, reference_batch: float) -> float:
    """Ratio of the best learning rates of two batch sizes: (1 + B_noise / B₀) / (1 + B_noise / B), below B / B₀.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2.
    """
    return steps_ratio(noise_scale, reference_batch) / steps_ratio(noise_scale, batch)
