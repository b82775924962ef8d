"""Published laws of batch size and data size."""

from __future__ import annotations

import math
from collections.abc import Sequence


def global_batch_size(processes: int, micro_batch_size: int, accumulation_steps: int = 1) -> int:
    """Samples per optimizer step over all processes.

    Source:
        By definition; PyTorch's elastic training keeps it constant by giving fewer processes more samples (32 × 4 = 8 ×
        16).
    """
    return processes * micro_batch_size * accumulation_steps


def accumulation_steps(global_batch_size: int, micro_batch_size: int, processes: int = 1) -> int:
    """Micro-batches per process that make up an optimizer step.

    Raises:
        ValueError: If the batch does not divide evenly.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/main.py, ``--optimizer-batch-size``.
    """
    steps, remainder = divmod(global_batch_size, micro_batch_size * processes)
    if remainder or not steps:
        raise ValueError(f"{processes} × {micro_batch_size} samples do not divide {global_batch_size}")
    return steps


def steps_ratio(noise_scale: float, batch: float) -> float:
    """Steps to reach a loss relative to the minimum: 1 + B_noise / B.

    Source:
        McCandlish et al., An empirical model of large-batch training, arXiv:1812.06162, section 2.2 and appendix D.1.
    """
    return 1 + noise_scale / batch


def examples_ratio(noise_scale: float, batch: float) -> float:
    """Examples to reach a loss relative to the minimum: 1 + B / B_noise.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2 and appendix D.1.
    """
    return 1 + batch / noise_scale


def hyperbola(steps_ratio: float, examples_ratio: float) -> float:
    """(S / S_min - 1) (E / E_min - 1), which is 1 where the law holds.

    Source:
        McCandlish et al., arXiv:1812.06162, equation 2.11.
    """
    return (steps_ratio - 1) * (examples_ratio - 1)


def critical_batch(fewest_examples: float, fewest_steps: float) -> float:
    """Batch size at which both ratios are 2: E_min / S_min.

    Source:
        McCandlish et al., arXiv:1812.06162, equation 2.12.
    """
    return fewest_examples / fewest_steps


def critical_batch_of_loss(loss: float, at_one: float = 2e8, exponent: float = 0.21) -> float:
    """Critical batch of a language model in tokens, from its loss in nats: B* / L^(1 / α).

    Source:
        Kaplan et al., Scaling laws for neural language models, arXiv:2001.08361, equation 1.4.
    """
    return at_one / math.pow(loss, 1 / exponent)


def best_learning_rate(largest: float, noise_scale: float, batch: float) -> float:
    """Learning rate with the largest gain per step: ε_max / (1 + B_noise / B).

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2.
    """
    return largest / steps_ratio(noise_scale, batch)


def gradient_square(small_batch: float, small_square: float, large_batch: float, large_square: float) -> float:
    """Unbiased estimate of |G|² from the squared norms of the gradients of two batches.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    return (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)


def gradient_variance(small_batch: float, small_square: float, large_batch: float, large_square: float) -> float:
    """Unbiased estimate of tr(Σ), the variance of one sample's gradient, from two batches.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    return (small_square - large_square) / (1 / small_batch - 1 / large_batch)


def simple_noise_scale(variance: float, square: float) -> float:
    """B_simple = tr(Σ) / |G|².

    Source:
        McCandlish et al., arXiv:1812.06162, equation 2.9.
    """
    return variance / square


def adaptive_gain(noise_scales: Sequence[float]) -> float:
    """Value of (S / S_min - 1) (E / E_min - 1) if the batch follows a changing noise scale, in (0, 1].

    Args:
        noise_scales: Noise scales at equally spaced training steps.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix D.
    """
    count = len(noise_scales)
    return (sum(map(math.sqrt, noise_scales)) / count) ** 2 / (sum(noise_scales) / count)


def adaptive_gain_of_power(exponent: float) -> float:
    """The same if the noise scale grows as a power of the step; at exponent 1/2 it is 24/25.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix D (SVHN: 10 √s).
    """
    return (1 / (1 + exponent / 2)) ** 2 * (1 + exponent)


def adaptive_batch(noise_scale: float, ratio: float = 1) -> float:
    """Batch size that follows the noise scale: √(r · B_noise), where r is the value of a step in examples.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix D.
    """
    return math.sqrt(ratio * noise_scale)


def epochs_to_target(batch: float, fewest_epochs: float, critical_batch: float) -> float:
    """Epochs to a target by batch size: the examples ratio times the minimum.

    Source:
        McCandlish et al., arXiv:1812.06162, equation 2.11; 34.6 epochs and a critical batch of 46,900 match MLPerf's
        reference runs of ResNet-50 within 6 %.
    """
    return fewest_epochs * examples_ratio(critical_batch, batch)


def error_reduction(exponent: float, data_factor: float = 10) -> float:
    """Share of the error removed by ``data_factor`` times the data, by a power law with that exponent.

    Source:
        Hestness et al., Deep learning scaling is predictable, empirically, arXiv:1712.00409 (exponents -0.07 to -0.35).
    """
    return 1 - math.pow(data_factor, -abs(exponent))


def power_law_error(samples: float, scale: float, exponent: float, floor: float = 0) -> float:
    """Error predicted by a power law for a number of samples: scale · samples^exponent + floor.

    Source:
        Hestness et al., arXiv:1712.00409, equation 1.
    """
    return scale * math.pow(samples, -abs(exponent)) + floor


def data_factor_to_divide_error(exponent: float, by: float = 2) -> float:
    """Factor on the data that divides the error by ``by``.

    Source:
        Hestness et al., arXiv:1712.00409, solved for the data.
    """
    return math.pow(by, 1 / abs(exponent))


def generalization_gap(small_batch_accuracy: float, large_batch_accuracy: float) -> float:
    """Accuracy in % lost by training with large batches.

    Source:
        Keskar et al., On large-batch training for deep learning, arXiv:1609.04836, table 2.
    """
    return small_batch_accuracy - large_batch_accuracy


def sgd_noise_scale(learning_rate: float, samples: float, batch: float, momentum: float = 0) -> float:
    """Noise scale of SGD: ε N / (B (1 - m)).

    Source:
        Smith et al., Don't decay the learning rate, increase the batch size, arXiv:1711.00489, section 3.
    """
    return learning_rate * samples / (batch * (1 - momentum))
