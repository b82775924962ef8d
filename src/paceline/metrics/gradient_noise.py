"""Gradient noise scale with its confidence interval: up to which batch size a larger one pays off.

A step's gradient is an average over its samples. From the squared norm of a part's gradient beside the whole batch's
follow two unbiased estimates, of |G|² and of tr(Σ); their ratio is the simple noise scale. A ratio of averages is not
the average of ratios: numerator and denominator are averaged over many steps, each for itself (McCandlish et al. 2018,
appendix A.1), and the interval is that of a ratio of two means which are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from paceline.metrics.critical_batch import gradient_square, gradient_variance, steps_ratio
from paceline.metrics.intervals import Interval

# In table 1 of McCandlish et al. the critical batch and the simple noise scale differ by up to so much, but for the two
# autoencoders (20 times).
ORDER_OF_MAGNITUDE = 10.0


@dataclass(frozen=True)
class Estimate:
    """The estimates from one step: unbiased, and so noisy that either may be negative.

    Attributes:
        variance: Of tr(Σ), the variance of one sample's gradient.
        square: Of |G|², the squared norm of the true gradient.
    """

    variance: float
    square: float


def estimate(small_batch: float, small_square: float, large_batch: float, large_square: float) -> Estimate | None:
    """Both estimates from the gradients of a small and a large batch; None if they carry no information.

    Args:
        small_batch: Samples of the small one; of several of various sizes, all their samples over their number.
        small_square: Its gradient's squared norm; of several, their mean weighted by their samples.
        large_batch: Samples of the large one; more.
        large_square: Its gradient's squared norm.
    """
    if not (0 < small_batch < large_batch and math.isfinite(small_square) and math.isfinite(large_square)):
        return None
    batches = (small_batch, small_square, large_batch, large_square)
    return Estimate(gradient_variance(*batches), gradient_square(*batches))


@dataclass
class NoiseAverages:
    """Averages over many steps' estimates, in which old ones count for less and less.

    Attributes:
        half_life: After so many more estimates, one counts half; ``inf`` where all count alike.
        weight: Sum of the weights, and ``weight_square`` that of their squares.
        variance: Weighted sum of the estimates of tr(Σ); likewise the others, of products of both.
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
    def of(cls, estimates: Iterable[Estimate]) -> NoiseAverages:
        """All of them, alike."""
        averages = cls()
        for each in estimates:
            averages.add(each)
        return averages

    def add(self, found: Estimate) -> None:
        """Add one estimate."""
        keeps = 0.5 ** (1 / self.half_life)
        v, s = found.variance, found.square
        self.weight = keeps * self.weight + 1
        self.weight_square = keeps**2 * self.weight_square + 1
        self.variance = keeps * self.variance + v
        self.square = keeps * self.square + s
        self.variance_variance = keeps * self.variance_variance + v * v
        self.square_square = keeps * self.square_square + s * s
        self.variance_square = keeps * self.variance_square + v * s

    @property
    def count(self) -> float:
        """As many estimates that count alike would say as much; 0 before the first."""
        return self.weight**2 / self.weight_square if self.weight else 0.0

    @property
    def mean_variance(self) -> float | None:
        """The average estimate of tr(Σ); None before the first."""
        return self.variance / self.weight if self.weight else None

    @property
    def mean_square(self) -> float | None:
        """The average estimate of |G|²; None before the first."""
        return self.square / self.weight if self.weight else None

    def noise_scale(self, *, confidence: float = 0.95) -> Interval | None:
        """B_simple with its interval, in samples; None where the averages are not both positive.

        Steps are taken for independent, as their samples are. The interval is Fieller's: ``high`` is ``inf`` where the
        true gradient cannot be told from zero.

        Args:
            confidence: In (0, 1).

        Source: Fieller (1954), Some problems in interval estimation; McCandlish et al., arXiv:1812.06162, A.1.
        """
        from scipy.special import stdtrit

        v, s = self.mean_variance, self.mean_square
        if v is None or s is None or v <= 0 or s <= 0:
            return None
        count = self.count
        if count < 2:
            return Interval(v / s, 0.0, math.inf, round(self.count), confidence)
        # Of the means: the estimates' unbiased (co)variances, over their number.
        scale = 1 / (count - 1)
        vv = (self.variance_variance / self.weight - v * v) * scale
        ss = (self.square_square / self.weight - s * s) * scale
        vs = (self.variance_square / self.weight - v * s) * scale
        wide = float(stdtrit(count - 1, (1 + confidence) / 2)) ** 2
        low, high = _fieller(v, s, (max(vv, 0.0) * wide, max(ss, 0.0) * wide, vs * wide))
        return Interval(v / s, low, high, round(count), confidence)

    def to_json(self) -> dict[str, float]:
        """The averages as one JSON object."""
        return {key: value for key, value in asdict(self).items() if key != "half_life"}

    def load(self, state: Mapping[str, float]) -> None:
        """Take averages that :meth:`to_json` gave."""
        for key, value in state.items():
            setattr(self, key, float(value))


def _fieller(top: float, bottom: float, spread: tuple[float, float, float]) -> tuple[float, float]:
    """The positive ratios that two positive means do not rule out.

    Args:
        top: The numerator's mean.
        bottom: The denominator's.
        spread: Variances of both means and their covariance, times the squared quantile.
    """
    tops, bottoms, both = spread
    a, half_b, c = bottom * bottom - bottoms, top * bottom - both, top * top - tops
    discriminant = half_b * half_b - a * c
    root = math.sqrt(max(discriminant, 0.0))
    if a > 0:
        return max((half_b - root) / a, 0.0), (half_b + root) / a
    # The denominator may be zero: nothing bounds the ratio above.
    return (max((half_b - root) / a, 0.0) if c > 0 and a < 0 else 0.0), math.inf


def critical_range(noise_scale: Interval) -> tuple[float, float]:
    """Where the critical batch lies, by a measured noise scale: an order of magnitude beyond its interval.

    B_simple takes the curvature of the loss for the same in all directions, which it is not. In the paper's table 1 the
    critical batch is between a tenth and ten times of it for eight of the ten tasks, and for supervised ones below it.
    """
    return noise_scale.low / ORDER_OF_MAGNITUDE, noise_scale.high * ORDER_OF_MAGNITUDE


def linear_rate_excess(noise_scale: float, batch: float) -> float:
    """By how much a rate that grew in proportion to the batch exceeds the best one: 1 + B / B_noise.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2: ε_max / (1 + B_noise / B) beside its tangent at 0.
    """
    return steps_ratio(batch, noise_scale)


def rate_ratio(noise_scale: float, batch: float, reference_batch: float) -> float:
    """The best rate of a batch over that of another: (1 + B_noise / B₀) / (1 + B_noise / B), below B / B₀.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2.
    """
    return steps_ratio(noise_scale, reference_batch) / steps_ratio(noise_scale, batch)
